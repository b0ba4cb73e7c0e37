"""What the figures of the products draw, and what is said of Corollary A.3."""

import numpy as np
import polars as pl
import pytest

from analysis import depth_figures, probes, records, report
from tests.recorded import depth_line, write_pairs, write_run

LAYERS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One probed run of each placement, with products between pairs of depths and at two updates of training."""
    out = tmp_path_factory.mktemp("runs")
    for placement in ("pre", "post"):
        path = write_run(out / placement, placement, 1, probe=True)
        write_pairs(path, 60, LAYERS)
        for update in (1, 60):
            records.append(path, "depth", [depth_line(update, k, 2 * LAYERS, update / 60) for k in range(2 * LAYERS)])
    return records.read_runs([out / "pre", out / "post"])


def tables(runs):
    found = [probes.read_depth(run) for run in runs]
    assert all(table is not None and table.height == 2 * LAYERS for table in found)
    return [table for table in found if table is not None]


def lines(axes):
    """Data of the drawn lines by label, the unlabelled ones left out."""
    return {line.get_label(): np.asarray(line.get_ydata(), float) for line in axes.get_lines()}


def test_profiles_draw_every_term_and_the_corollarys_bound(runs):
    depths = tables(runs)
    pre, post, gradient, share = depth_figures.profiles(runs, depths).axes
    for panel, placement, depth in ((pre, "pre", depths[0]), (post, "post", depths[1])):
        drawn = lines(panel)
        names = depth_figures.TERM_NAMES[placement]
        np.testing.assert_allclose(drawn[names["total"]], depth["gain"])
        np.testing.assert_allclose(drawn[names["bare"]], depth["bare"])
        np.testing.assert_allclose(drawn[names["rest"]], depth["rest"][:-1])  # rounding alone at the top
        assert ("Corollary A.3: bound of its norm" in drawn) == (placement == "post")
    np.testing.assert_allclose(np.asarray(gradient.get_lines()[0].get_ydata()), depths[0]["gradient"])
    np.testing.assert_allclose(np.asarray(share.get_lines()[1].get_ydata()), depths[1]["gradient_share_bare"])


def test_profiles_of_one_placement_say_what_is_missing(runs):
    depths = tables(runs)
    panels = depth_figures.profiles(runs[:1], depths[:1]).axes
    assert [text.get_text() for text in panels[1].texts] == ["no post-LN run probed"]


def test_the_map_has_every_pair_in_its_place(runs):
    pairs = {run.label: table for run in runs if (table := probes.read_pairs(run)) is not None}
    figure = depth_figures.depth_map(pairs)
    assert len(figure.axes) == 2 * 4  # each panel has its colour bar
    whole = figure.axes[0].collections[0].get_array()
    assert whole is not None
    table = pairs["pre-LN, seed 1"]
    stops = sorted(set(table["stop"]))
    grid = np.ma.filled(np.ma.asarray(whole), np.nan).reshape(len(stops), -1)
    for row in table.iter_rows(named=True):
        expected = np.log10(row["gain"])
        np.testing.assert_allclose(grid[stops.index(row["stop"]), row["start"]], expected, atol=1e-12)
    assert np.isnan(grid[0, stops[0] :]).all()  # nothing is measured from a depth above the stop


def test_training_is_followed_from_above_block_0(runs):
    gain, share = depth_figures.over_training(runs).axes
    for axes in (gain, share):
        assert [np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()[:2]] == [[1, 60], [1, 60]]
    np.testing.assert_allclose(np.asarray(gain.get_lines()[0].get_ydata()), 1.02 ** (2 * LAYERS - depth_figures.START))


def test_the_table_quotes_the_product_from_above_block_0(runs):
    rows = depth_figures.products_table({run.label: table for run, table in zip(runs, tables(runs), strict=True)}).rows
    assert [row[0] for row in rows] == ["pre-LN, seed 1", "post-LN, seed 1"]
    gain = 1.02 ** (2 * LAYERS - depth_figures.START)
    assert rows[0][1] == f"{gain:.3g}"
    assert rows[0][3] == f"{1 / gain:.3g}"
    vanished = tables(runs)[0].with_columns(gradient=0.0, gradient_share_bare=pl.lit(None, pl.Float64))
    assert depth_figures.products_table({runs[0].label: vanished}).rows[0][-2:] == ("none", "none")


def verdict(a, bound):
    return depth_figures.verdict(pl.DataFrame({"a_max": a, "bound": bound}))


def test_the_verdict_names_where_the_condition_holds_and_with_which_eta():
    everywhere = verdict([0.9, 0.8, 0.5], [0.36, 0.4, 0.5])
    assert "at all 3 sublayers with eta = 0.1" in everywhere
    nowhere = verdict([3.0, 1.5], [4.5, 1.5])
    assert "holds at 0 of 2 sublayers; a is greatest, 3, at sublayer 0" in nowhere
    assert "fails at the last sublayer" in nowhere
    assert "below one" not in nowhere
    somewhere = verdict([5.0, 0.9, 0.8, 1.1, 0.7], [2.8, 0.55, 0.62, 0.77, 0.7])
    assert "at 3 of 5 sublayers (1-2, 4), with eta from 0.1 to 0.3" in somewhere
    assert "From sublayer 4 to the output it holds throughout, with eta = 0.3." in somewhere
    assert "below one from 1-4: least, 0.55, from sublayer 1" in somewhere


def test_the_report_shows_the_map_training_and_verdict(runs, tmp_path):
    page = report.write_report(tmp_path, runs).read_text(encoding="utf-8")
    for name in ("figure_5b_products", "figure_5b_map", "figure_5b_training"):
        assert (tmp_path / "figures" / f"{name}.png").is_file()
    assert "Corollary A.3, asked of each post-LN run" in page
    assert "post-LN, seed 1: The condition max a" in page
