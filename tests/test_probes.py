"""Reading what is measured beside a run: nothing there is None, something wrong there is an error that names it."""

import json

import polars as pl
import pytest

from analysis import probes, records
from analysis.records import RecordError
from tests.recorded import write_run, write_verification


def test_absent_is_none(tmp_path):
    run = records.read_run(write_run(tmp_path / "run", updates=1))
    assert probes.read_rows(run) is None
    assert probes.read_depth(run) is None
    assert probes.read_verification(tmp_path / "verify.json") is None


def test_reads_back(tmp_path):
    run = records.read_run(write_run(tmp_path / "run", probe=True))
    rows, depth = probes.read_rows(run), probes.read_depth(run)
    assert rows is not None
    assert depth is not None
    assert dict(rows.schema) == dict(probes.ROW_COLUMNS)
    assert dict(depth.schema) == dict(probes.DEPTH_COLUMNS)
    assert depth["kind"].to_list() == ["attention", "ffn"] * 4


def test_float32_columns_and_others_beside_are_fine(tmp_path):
    run = records.read_run(write_run(tmp_path / "run", probe=True))
    path = run.path / "probe" / "rows.parquet"
    pl.read_parquet(path).with_columns(pl.col("lower").cast(pl.Float32), more=pl.lit(1)).write_parquet(path)
    rows = probes.read_rows(run)
    assert rows is not None
    assert dict(rows.schema) == dict(probes.ROW_COLUMNS)


@pytest.mark.parametrize("name", ["rows.parquet", "depth.jsonl"])
def test_garbage_is_named(tmp_path, name):
    run = records.read_run(write_run(tmp_path / "run", probe=True))
    (run.path / "probe" / name).write_bytes(b"not a table\n")
    read = {"rows.parquet": probes.read_rows, "depth.jsonl": probes.read_depth}[name]
    with pytest.raises(RecordError, match=name) as caught:
        read(run)
    assert "\n" not in str(caught.value)


def test_missing_column_is_named(tmp_path):
    run = records.read_run(write_run(tmp_path / "run", probe=True))
    path = run.path / "probe" / "rows.parquet"
    pl.read_parquet(path).drop("upper").write_parquet(path)
    with pytest.raises(RecordError, match=r"rows\.parquet: lacks the columns \['upper'\]"):
        probes.read_rows(run)


def test_verification_knows_its_worst(tmp_path):
    path = write_verification(tmp_path / "verify.json")
    verification = probes.read_verification(path)
    assert verification is not None
    assert [check.length for check in verification.checks] == [8, 16]
    assert [check.worst for check in verification.checks] == [
        c["worst"] for c in json.loads(path.read_text())["checks"]
    ]
    assert verification.passed
    assert not probes.Verification(1e-17, verification.checks).passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.pop("tolerance"), "not the result of `sens verify`"),
        (lambda value: value["checks"][0].pop("norm"), "not the result of `sens verify`"),
        (lambda value: value["checks"][1]["norm"].pop(), "length 16 has columns of different lengths"),
        (lambda value: value["checks"][1]["norm"].__setitem__(0, None), "length 16 holds entries"),
        (lambda value: value["checks"][1]["norm"].__setitem__(0, float("nan")), "length 16 holds entries"),
    ],
)
def test_damaged_verification_is_named(tmp_path, change, message):
    path = write_verification(tmp_path / "verify.json")
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(RecordError, match=message):
        probes.read_verification(path)


def test_torn_verification_is_named(tmp_path):
    path = write_verification(tmp_path / "verify.json")
    path.write_text(path.read_text()[:100])
    with pytest.raises(RecordError, match=r"verify\.json"):
        probes.read_verification(path)
