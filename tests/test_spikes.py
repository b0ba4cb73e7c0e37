"""The spike rule against a slow literal reading of protocol.md, and by hand."""

import statistics

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import records
from analysis.records import RecordError
from analysis.spikes import shared_spikes, spikes
from tests.recorded import write_run


def table(norms: list[float]) -> pl.DataFrame:
    return pl.DataFrame(
        {"update": list(range(1, len(norms) + 1)), "grad_norm": norms},
        schema={"update": pl.Int64, "grad_norm": pl.Float64},
    )


def literal(norms: list[float]) -> list[int]:
    """The protocol word for word, one update at a time."""
    found = []
    for update in range(1, len(norms) + 1):
        if update <= 10:
            continue
        preceding = norms[max(0, update - 1 - 50) : update - 1]
        if norms[update - 1] > 2 * statistics.median(preceding):
            found.append(update)
    return found


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0]) | st.floats(0, 1e6), max_size=130))
@settings(deadline=None, max_examples=60)
def test_literal_reading(norms):
    assert spikes(table(norms))["update"].to_list() == literal(norms)


def test_threshold_is_strict():
    assert spikes(table([1.0] * 10 + [2.0]))["update"].to_list() == []
    assert spikes(table([1.0] * 10 + [2.0000001]))["update"].to_list() == [11]


def test_first_ten_are_left_out_but_count_as_preceding():
    assert spikes(table([1.0] * 9 + [100.0]))["update"].to_list() == []
    assert spikes(table([10.0] * 10 + [15.0]))["update"].to_list() == []  # above twice nothing else


def test_window_forgets():
    """60 updates at 10, then at 1: update 86 onwards sees a median of 1 (26 of the last 50)."""
    norms = [10.0] * 60 + [1.0] * 26 + [3.0]
    assert spikes(table(norms))["update"].to_list() == [87]
    assert spikes(table([*norms[:84], 3.0]))["update"].to_list() == []


@pytest.mark.parametrize(("norm", "found"), [(8.0, []), (12.0, [52])])
def test_window_is_fifty(norm, found):
    """25 tens and 25 ones before: median 5.5. One update more would make it 10, one fewer 1."""
    assert spikes(table([10.0] * 26 + [1.0] * 25 + [norm]))["update"].to_list() == found


def test_spike_is_not_in_its_own_median():
    assert spikes(table([1.0] * 10 + [9.0, 9.0]))["update"].to_list() == [11, 12]


def test_empty_record_has_no_spikes():
    assert spikes(table([])).is_empty()


def test_gap_is_refused():
    with pytest.raises(RecordError, match="updates must count"):
        spikes(table([1.0] * 20).filter(pl.col("update") != 5))


def with_norm(value: float | None) -> pl.DataFrame:
    norms = table([1.0] * 12 + [5.0] * 8)
    return norms.with_columns(grad_norm=pl.when(pl.col("update") == 13).then(value).otherwise("grad_norm"))


def test_a_norm_that_is_no_number_is_refused():
    with pytest.raises(RecordError, match="update 13"):
        spikes(with_norm(float("nan")))


def test_a_skipped_update_is_no_spike_and_no_part_of_the_median():
    assert spikes(with_norm(None))["update"].to_list() == list(range(14, 21))


def test_shared_spikes(tmp_path):
    runs = [records.read_run(write_run(tmp_path / str(seed), seed=seed)) for seed in (1, 2, 3)]
    everywhere = [set(spikes(run.updates)["update"]) for run in runs]
    assert shared_spikes(runs) == sorted(everywhere[0] & everywhere[1] & everywhere[2])
    assert {20, 41} <= set(shared_spikes(runs))
    assert shared_spikes([]) == []
