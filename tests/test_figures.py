"""The figures: what is drawn is what was recorded; same figure, same bytes; no pyplot state."""

import subprocess
import sys

import matplotlib
import numpy as np
import polars as pl
import pytest

from analysis import figures, plotting, probes, records
from analysis.spikes import spikes
from analysis.trajectories import centre, envelope
from tests.recorded import write_run, write_verification


@pytest.fixture
def runs(tmp_path):
    paths = [write_run(tmp_path / f"{p}-{s}", p, s, probe=True) for p in ("pre", "post") for s in (1, 2)]
    return records.read_runs(paths)


def drawn(axes, colour=None):
    """(x, y) of every line of an axes, of one colour if asked."""
    lines = [line for line in axes.lines if colour is None or line.get_color() == colour]
    return [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in lines]


def holds(curves, x, y):
    return any(len(a) == len(x) and np.array_equal(a, x) and np.allclose(b, y, rtol=1e-12) for a, b in curves)


def test_trajectories_draw_the_record(runs):
    loss, norm, certificate, profile = figures.trajectories(runs).axes
    for run in runs:
        shade = plotting.PLACEMENT_COLOURS[run.placement]
        update = run.updates["update"].to_numpy()
        marked = spikes(run.updates)
        median = centre(run, "prefix", "median")
        blocks = run.layers.filter(pl.col("update") == 60)["grad_norm"]
        assert holds(drawn(loss, shade), update, run.updates["loss"])
        assert holds(drawn(norm, shade), update, run.updates["grad_norm"])
        assert holds(drawn(norm, shade), marked["update"].to_numpy(), marked["grad_norm"])
        assert holds(drawn(certificate, shade), median["update"].to_numpy(), median["value"])
        assert holds(drawn(profile, shade), np.arange(4), blocks)
    assert norm.get_yscale() == profile.get_yscale() == "log"
    assert len(certificate.collections) == 2  # one envelope a placement


def test_unigram_entropy_is_drawn_only_if_given(runs):
    with_it, without = (figures.trajectories(runs, unigram_entropy=value).axes[0] for value in (3.04, None))
    assert len(with_it.lines) == len(without.lines) + 1
    assert with_it.get_legend() is not None
    assert without.get_legend() is None


def test_envelope_is_over_layers_and_runs(runs):
    group = [run for run in runs if run.placement == "pre"]
    low = min(run.attention.filter(head_pooled("prefix"))["p5"].min() for run in group)
    high = max(run.attention.filter(head_pooled("upper"))["p95"].max() for run in group)
    edges = envelope(group, "prefix", "upper")
    assert edges["update"].is_sorted()
    assert edges["update"].is_unique().all()
    assert (edges["low"][-1], edges["high"][-1]) == (low, high)


def head_pooled(quantity):
    return pl.col("head").is_null() & (pl.col("quantity") == quantity) & (pl.col("update") == 60)


def test_identity_check_draws_both_sides(tmp_path):
    verification = probes.read_verification(write_verification(tmp_path / "verify.json"))
    assert verification is not None
    sides, errors = figures.identity_check(verification).axes
    legend = errors.get_legend()
    assert legend is not None
    for check in verification.checks:
        assert holds(drawn(sides), np.asarray(check.theta_over_tau), check.norm)
        assert any(f"{check.worst:.1e}" in text.get_text() for text in legend.get_texts())
    assert any(np.all(x == verification.tolerance) for x, _ in drawn(errors))


def test_sharpening_draws_certificate_and_bracket_on_d(runs):
    entropy, p_max, pre, _ = figures.sharpening(runs).axes
    run = runs[0]
    for axes, quantity in ((entropy, "entropy"), (p_max, "p_max")):
        mean = centre(run, quantity, "mean")
        assert holds(drawn(axes), mean["update"].to_numpy(), mean["value"])
    for quantity, shade in (
        ("prefix", plotting.PREFIX_COLOUR),
        ("lower", plotting.BRACKET_COLOUR),
        ("upper", plotting.BRACKET_COLOUR),
    ):
        median = centre(run, quantity, "median")
        assert holds(drawn(pre, shade), median["update"].to_numpy(), plotting.to_d(median["value"]))
    low, high = pre.get_ylim()
    assert low > high  # D points down, theta up
    assert pre.get_yscale() == "log"


def test_sharpening_says_which_placement_is_missing(runs):
    axes = figures.sharpening([run for run in runs if run.placement == "pre"]).axes
    assert [text.get_text() for text in axes[3].texts] == ["no post-LN run"]


def test_d_axis_scale():
    np.testing.assert_allclose(plotting.to_d([0.0, 0.75, 0.99, 1.0, 1.0 + 1e-7]), [1, 0.5, 0.1, 1e-4, 1e-4], rtol=1e-12)


def test_theta_curves_and_points(runs):
    table = probes.read_rows(runs[0])
    assert table is not None
    theta, d = figures.theta_against_p_max({"pre": table}).axes
    for axes, scale in ((theta, np.asarray), (d, plotting.to_d)):
        limit, dominant = drawn(axes)[:2]
        np.testing.assert_allclose(limit[1], scale(1 - limit[0] ** 2), rtol=1e-12)
        np.testing.assert_allclose(dominant[1], scale(4 * dominant[0] * (1 - dominant[0])), rtol=1e-12)
        assert dominant[0].min() >= 0.5
        for column, shade in (("prefix", plotting.PREFIX_COLOUR), ("lower", plotting.BRACKET_COLOUR)):
            assert holds(drawn(axes, shade), table["p_max"].to_numpy(), scale(table[column].to_numpy()))
    open_rows = table.filter(pl.col("upper") - pl.col("lower") > probes.CLOSED)
    segments = theta.collections[0].get_segments()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(segments) == open_rows.height > 0


def test_many_rows_stay_light(tmp_path, rng):
    n = 100_000
    p_max = rng.uniform(size=n)
    columns = {"update": 1, "layer": 0, "head": 0, "position": np.arange(n) % 128, "p_max": p_max}
    table = pl.DataFrame(columns | {"prefix": 1 - p_max**2, "lower": 1 - p_max**2, "upper": 1.0})
    figure = figures.theta_against_p_max({"many": table})
    _, svg = plotting.save(figure, tmp_path / "many")
    assert svg.stat().st_size < 1_500_000
    x, _ = drawn(figure.axes[0], plotting.PREFIX_COLOUR)[0]
    assert len(x) == figures.DRAWN_ROWS
    assert f"{figures.DRAWN_ROWS} of {n}" in figure.axes[0].get_title("left")
    (again, _), *_ = drawn(figures.theta_against_p_max({"many": table}).axes[0], plotting.PREFIX_COLOUR)
    np.testing.assert_array_equal(x, again)


def test_depth_draws_shares_and_a(runs):
    depths = [probes.read_depth(run) for run in runs]
    assert all(depth is not None for depth in depths)
    tables = [depth for depth in depths if depth is not None]
    share, contraction = figures.through_depth(runs, tables).axes
    for run, table in zip(runs, tables, strict=True):
        shade = plotting.PLACEMENT_COLOURS[run.placement]
        sublayer = table["sublayer"].to_numpy()
        assert holds(drawn(share, shade), sublayer, table["identity_share"])
        assert holds(drawn(contraction, shade), sublayer, table["a_max"]) == (run.placement == "post")
    assert any(np.all(y == 1.0) for _, y in drawn(contraction))


def test_depth_without_post_says_so(runs):
    pre = [run for run in runs if run.placement == "pre"]
    tables = [table for run in pre if (table := probes.read_depth(run)) is not None]
    assert [text.get_text() for text in figures.through_depth(pre, tables).axes[1].texts] == ["no post-LN run probed"]


def test_one_unfinished_run_draws(tmp_path):
    run = records.read_run(write_run(tmp_path / "run", updates=1, planned=60))
    for draw in (figures.trajectories, figures.sharpening):
        figure = draw([run])
        png, svg = plotting.save(figure, tmp_path / "figure")
        assert png.read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in svg.read_bytes()


def test_same_figure_same_bytes(runs, tmp_path):
    files = [plotting.save(figures.sharpening(runs), tmp_path / name / "figure") for name in ("a", "b")]
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_a_dot_in_the_stem_is_kept(runs, tmp_path):
    png, svg = plotting.save(figures.trajectories(runs[:1]), tmp_path / "tau_0.5")
    assert (png.name, svg.name) == ("tau_0.5.png", "tau_0.5.svg")


def test_settings_of_matplotlib_are_left_alone(runs):
    before = dict(matplotlib.rcParams)
    figures.trajectories(runs)
    assert dict(matplotlib.rcParams) == before


def test_pyplot_is_not_imported():
    program = "import sys, analysis.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
