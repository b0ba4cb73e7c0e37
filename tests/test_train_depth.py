"""Depth on a run: what is recorded at a cadence is what a probe of the same checkpoint finds."""

import json

import pytest

from analysis import probes, records
from analysis.depth import boundaries
from sens.__main__ import main
from tests.trained import tiny
from train.config import TrainConfig
from train.loop import train


@pytest.fixture(scope="module")
def followed(tmp_path_factory, corpus):
    """Four updates of the `tiny` post-LN preset, probed every two, and then probed between pairs of depths."""
    run = tmp_path_factory.mktemp("followed") / "run"
    train(run, tiny(corpus, placement="post", updates=4, warmup=1, probe_every=2), run.parent / "data")
    assert main(["probe", str(run), "--depth"]) == 0
    return records.read_run(run)


def test_depth_is_recorded_at_its_cadence_and_a_probe_finds_the_same(followed):
    assert followed.depth["update"].to_list() == [update for update in (1, 2, 4) for _ in range(4)]
    assert followed.depth["sublayer"].to_list() == [0, 1, 2, 3] * 3
    recorded = [json.loads(line) for line in (followed.path / "depth.jsonl").read_text().splitlines()]
    probed = [json.loads(line) for line in (followed.path / "probe" / "depth.jsonl").read_text().splitlines()]
    assert probed == recorded[-4:]
    depth = probes.read_depth(followed)
    assert depth is not None
    assert (depth["gradient"] > 0).all()
    assert (depth["bare"] <= depth["bound"] * (1 + 1e-5)).all()


def test_pairs_are_measured_between_all_depths_and_a_grid(followed):
    pairs = probes.read_pairs(followed)
    assert pairs is not None
    grid = boundaries(4)
    wanted = [(start, stop) for stop in grid[1:] for start in range(stop)]
    assert [(row["start"], row["stop"]) for row in pairs.iter_rows(named=True)] == wanted
    within = pairs.filter(pairs["start"].is_in(grid))
    assert within["sigma_1"].is_not_null().all()
    assert pairs["sigma_1"].null_count() == pairs.height - within.height
    assert (within["sigma_1"] >= within["sigma_2"]).all()
    assert (within["bare_norm"] <= within["bound"] * (1 + 1e-5)).all()
    to_the_output = within.filter(within["stop"] == 4)
    assert (to_the_output["block_lower"] <= to_the_output["block_upper"]).all()
    assert pairs["block_lower"].null_count() == pairs.height - to_the_output.height


def test_a_run_that_was_not_asked_records_no_depth(finished):
    assert records.read_run(finished).depth.is_empty()
    assert not (finished / "depth.jsonl").exists()


def test_a_cadence_below_zero_is_refused():
    with pytest.raises(ValueError, match="probe_every must not be negative, got -1"):
        TrainConfig(probe_every=-1)
