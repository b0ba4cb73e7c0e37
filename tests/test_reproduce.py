"""The whole experiment at `tiny` size through the command: complete, restartable, and idle when it is done."""

import json
import re
import signal
import time
from pathlib import Path

import polars as pl
import pytest

import sens.__main__ as cli
from analysis import records
from tests.trained import contents, finish, recorded, start

RUNS = ("pre-1", "post-1")


def command(corpus: Path, out: Path) -> list[object]:
    return ["reproduce", "--preset", "tiny", "--seeds", 1, "--source", corpus, "--out", out]


@pytest.fixture(scope="module")
def done(tmp_path_factory, corpus) -> tuple[Path, str]:
    """The directory and what was printed."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    status, said, err = finish(start(*command(corpus, out)))
    assert (status, err) == (0, "")
    return out, said


def test_everything_is_there(done):
    out, said = done
    assert len(json.loads((out / "verify.json").read_text())["checks"]) == 2
    for name in RUNS:
        run = records.read_run(out / name)
        assert run.updates.height == 20
        assert (run.placement, run.seed) == (name.split("-")[0], 1)
        rows = pl.read_parquet(out / name / "probe" / "rows.parquet")
        assert len(rows) == 2 * 4 * 2 * 32  # layers, sequences, heads, positions
        assert (rows["lower"] <= rows["upper"]).all()
        assert pl.read_ndjson(out / name / "probe" / "depth.jsonl").height == 4
    drawn = {path.name for path in (out / "figures").iterdir()}
    assert {Path(name).stem + suffix for name in drawn for suffix in (".png", ".svg")} == drawn
    assert len(drawn) >= 8
    for words in ("pre-LN", "post-LN", "worst relative error", str(out / "report.html")):
        assert words in said


def test_the_report_needs_nothing_but_itself(done):
    page = (done[0] / "report.html").read_text(encoding="utf-8")
    assert len(page) > 50_000  # the figures are in it
    loaded = re.findall(r'(?:\bsrc|\bsrcset|<link[^>]*\bhref|<image[^>]*\bhref)\s*=\s*"([^"]*)"|\burl\(([^)]*)\)', page)
    assert loaded
    assert all(address.startswith(("data:", "#")) for pair in loaded for address in pair if address)
    assert "<script" not in page
    assert "@import" not in page


def test_a_second_call_touches_nothing(done, corpus, capsys):
    out, _ = done
    before = contents(out), {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
    assert cli.main([str(part) for part in command(corpus, out)]) == 0
    after = contents(out), {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
    assert after == before
    assert str(out / "report.html") in capsys.readouterr().out


def test_interrupted_in_the_middle_it_ends_the_same(done, tmp_path, corpus):
    out = tmp_path / "out"
    process = start(*command(corpus, out))
    second = out / RUNS[1] / "updates.jsonl"  # the first run is trained and probed, the second under way
    while not second.exists():
        assert process.poll() is None
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert not (out / "report.html").exists()
    assert not (out / RUNS[1] / "probe").exists()
    status, _, err = finish(start(*command(corpus, out)))
    assert (status, err) == (0, "")
    for name in RUNS:
        assert recorded(out / name) == recorded(done[0] / name)
        assert (out / name / "probe" / "depth.jsonl").read_bytes() == (
            done[0] / name / "probe" / "depth.jsonl"
        ).read_bytes()
        rows = [pl.read_parquet(root / name / "probe" / "rows.parquet") for root in (out, done[0])]
        assert rows[0].equals(rows[1])
    assert (out / "report.html").is_file()


def test_a_run_whose_last_checkpoint_was_lost_to_a_kill_is_trained_to_its_end_again(
    done, tmp_path, corpus, monkeypatch
):
    """All updates are recorded but the last save did not come to its end: probing it would measure another update."""
    from train.presets import from_json
    from train.sweep import finished

    out, _ = done
    config = from_json(records.read_config(out / RUNS[0]))
    assert finished(out / RUNS[0], config)
    (out / RUNS[0] / "checkpoints" / "20").rename(tmp_path / "20")
    try:
        assert not finished(out / RUNS[0], config)
    finally:
        (tmp_path / "20").rename(out / RUNS[0] / "checkpoints" / "20")


def test_other_settings_in_the_same_place_are_refused(done, tmp_path, corpus, capsys):
    out, _ = done
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text()[::-1])
    before = contents(out)
    status = cli.main(["reproduce", "--preset", "tiny", "--seeds", "1", "--source", str(other), "--out", str(out)])
    assert status == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"{out / 'data'}: already holds" in line
    assert contents(out) == before
