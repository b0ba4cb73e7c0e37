"""The verdicts follow the numbers: turn the numbers round and the verdict turns."""

import statistics

import polars as pl
import pytest

from analysis import findings, records
from analysis.tables import flatten, summarise
from tests.recorded import write_run


@pytest.fixture
def runs(tmp_path):
    return records.read_runs(
        [write_run(tmp_path / f"{p}-{s}", p, s, probe=True) for p in ("pre", "post") for s in (1, 2)]
    )


def verdicts(runs, **options):
    return {one.statement: one.agrees for one in findings.findings(runs, **options)}


def swapped(runs):
    """The same records with the placements' names exchanged."""
    other = {"pre": "post", "post": "pre"}
    for run in runs:
        run.config["model"]["placement"] = other[run.placement]
    return sorted(runs, key=lambda run: run.placement != "pre")


def test_verdicts_turn_with_the_numbers(runs):
    directed = (
        "pre-LN ends below post-LN for every matched seed",
        "some post-LN seeds stay on a plateau from early on",
        "pre-LN's attention sharpens",
        "post-LN's gradient fades towards the input, pre-LN's does not",
    )
    before = verdicts(runs, unigram_entropy=3.1)
    assert all(before[statement] is True for statement in directed)
    after = verdicts(swapped(runs), unigram_entropy=3.1)
    assert all(after[statement] is False for statement in directed)


def test_comparisons_by_hand(runs):
    pre, post = ([summarise(run) for run in runs if run.placement == placement] for placement in ("pre", "post"))
    found = verdicts(runs)
    assert found["post-LN has more spike updates"] == (sum(o.spikes for o in post) > sum(o.spikes for o in pre))
    largest = [max(one.largest_norm for one in group) for group in (pre, post)]
    assert found["post-LN reaches the larger gradient norm before clipping"] == (largest[1] > largest[0])
    spreads = [statistics.stdev(one.final_loss for one in group) for group in (pre, post)]
    assert found["the final loss varies more over seeds in post-LN"] == (spreads[1] > spreads[0])


def test_numbers_stand_in_the_text(runs):
    found = {one.statement: one for one in findings.findings(runs, unigram_entropy=3.1)}
    least = min(
        run.attention.filter(pl.col("head").is_null() & (pl.col("quantity") == "prefix"))["median"].min()
        for run in runs
        if run.placement == "pre"
    )
    median = found["pre-LN's median certificate stays at 0.995 or more at every sampled layer and checkpoint"]
    assert median.ours == f"least {least:.4f}"
    assert median.agrees == (least >= 0.995)
    assert "20, 41" in found["some updates are spikes in every run"].ours


def test_what_cannot_be_judged_says_why(runs):
    pre = findings.findings([run for run in runs if run.placement == "pre"])
    found = {one.statement: one for one in pre}
    matched = found["pre-LN ends below post-LN for every matched seed"]
    assert (matched.agrees, matched.ours) == (None, "no post-LN run")
    plateau = found["some post-LN seeds stay on a plateau from early on"]
    assert (plateau.agrees, plateau.ours) == (None, "the unigram entropy of the text is not given")
    assert found["pre-LN's attention sharpens"].agrees is True
    single = {one.statement: one for one in findings.findings(runs[:1])}
    assert single["some updates are spikes in every run"].ours == "a single run"
    assert len(single) == len(found)


def test_nothing_recorded_is_not_a_verdict(tmp_path):
    path = write_run(tmp_path / "run", updates=2, planned=60)
    for table in ("attention", "layers"):
        (path / f"{table}.jsonl").unlink()
    found = {one.statement: one for one in findings.findings([records.read_run(path)])}
    assert found["pre-LN's attention sharpens"].ours == "attention not recorded"
    assert not any(one.agrees for one in found.values())


def test_verdicts_in_words(runs):
    table = findings.findings_table(findings.findings(runs))
    assert {row[3] for row in table.rows} <= {"as in the paper", "differs", "not measured"}
    assert len(table.rows) == 10


def test_setting_names_only_what_differs(runs):
    rows = {row[0]: row[1:] for row in findings.setting_table(runs).rows}
    assert rows["model.n_layer"] == ("36", "4")
    assert "model.tau" not in rows
    assert "train.lr" not in rows
    assert "train.seed" not in rows


def test_paper_setting_names_real_fields(runs):
    assert findings.PAPER_SETTING.keys() <= flatten(runs[0].config).keys()


def test_row_table_by_hand():
    table = pl.DataFrame(
        {
            "update": [7, 7, 7, 7],
            "p_max": [0.1, 0.2, 0.7, 0.9],
            "prefix": [0.95, 1.0, 0.84, 0.36],
            "lower": [1.0, 1.0, 0.84, 0.36],
            "upper": [1.0, 1.0, 0.84, 0.46],
        }
    )
    (row,) = findings.row_table({"run": table}).rows
    assert row == ("run", "7", "4", "75.00%", "1.0e-01", "0.050", "25.00%", "50.00%", f"{0.36 + 0.15 * 0.48:.4f}")


def test_depth_table_multiplies_a_for_post_alone(runs):
    depth = pl.DataFrame(
        {
            "sublayer": [0, 1],
            "kind": ["attention", "ffn"],
            "identity_share": [0.5, None],
            "a_max": [2.0, 0.25],
            "a_mean": 0.1,
        }
    )
    pre, post = findings.depth_table([runs[0], runs[-1]], [depth, depth]).rows
    assert post[1:] == ("2", "0.5 to 0.5", "1 of 2 sublayers", "5.00e-01")
    assert pre[3:] == ("about post-LN only",) * 2
