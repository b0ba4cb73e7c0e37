"""Shards: the same files whoever writes them, killed at any moment or not."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_data import files, write
from train import data
from train.data import TokenDataset, prepare
from train.files import DataError

# Prepares a data set, prints its progress, and kills itself just before the n-th "document" or "rename" (0: never).
CHILD = """
import os, signal, sys
from pathlib import Path
from train.data import prepare
source, spec, out, event, moment, workers = sys.argv[1:]
seen = {"document": 0, "rename": 0}
def count(name):
    seen[name] += 1
    if name == event and seen[name] == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
def progress(done, total):
    count("document")
    print(done, flush=True)
replace = Path.replace
def counted(self, target):
    count("rename")
    return replace(self, target)
Path.replace = counted
prepare(source, spec, Path(out), shard_bytes=1000, workers=int(workers), progress=progress)
"""


def start(
    source: str, spec: str, out: Path, event: str = "rename", moment: int = 0, workers: int = 1
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, source, spec, str(out), event, str(moment), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_at_any_moment_and_called_again_gives_the_same_files(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [f"document {i} of many " * (i % 5 + 1) for i in range(150)])
    whole = prepare(source, "bpe:270", tmp_path / "whole", shard_bytes=1000)
    assert len(whole.shards) > 3
    out = tmp_path / "killed"
    # Every file is renamed to its name: killed before each rename in turn, and in the middle of a shard.
    # A shard's rename and its entry in the index alternate: dying before the second one loses that shard.
    moments = [("rename", 1), ("rename", 2), ("document", 1), ("rename", 1), ("document", 40)]
    moments += [("rename", 2), ("rename", 3)] * len(whole.shards)
    kills = 0
    for event, moment in moments:
        with start(source, "bpe:270", out, event, moment) as child:
            child.communicate()
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        kills += 1
        with pytest.raises(DataError, match="killed: not a data set"):
            TokenDataset(out, 8)
    assert kills > 2 * len(whole.shards)
    prepare(source, "bpe:270", out, shard_bytes=1000)
    assert files(out) == files(tmp_path / "whole")


def test_processes_that_start_together_make_one_data_set(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [f"document {i}" for i in range(300)])
    children = [start(source, "bytes", tmp_path / "together") for _ in range(2)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sum(bool(output) for output in outputs) == 1  # only one had work to do
    prepare(source, "bytes", tmp_path / "alone", shard_bytes=1000)
    assert files(tmp_path / "together") == files(tmp_path / "alone")


def test_any_number_of_workers_writes_the_same_files_and_one_that_dies_costs_a_line(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [f"document {i} of many " * (i % 5 + 1) for i in range(300)])
    whole = prepare(source, "bpe:270", tmp_path / "whole", shard_bytes=1000)
    assert len(whole.shards) > 6
    done: list[int] = []

    def kill_one(now: int, total: int) -> None:
        done.append(now)
        if len(done) == 3:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    out = tmp_path / "two"
    with pytest.raises(DataError, match=r"a process that tokenises died after \d+ finished shards, which stay"):
        prepare(source, "bpe:270", out, shard_bytes=1000, workers=2, progress=kill_one)
    assert (out / data.UNFINISHED).is_file()
    done.clear()
    prepare(source, "bpe:270", out, shard_bytes=1000, workers=3, progress=lambda now, _total: done.append(now))
    assert files(out) == files(tmp_path / "whole")
    assert done == sorted(done)
    assert done[-1] == sum(shard.text_bytes for shard in whole.shards)
    assert multiprocessing.active_children() == []
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        prepare(source, "bpe:270", out, workers=0)


def test_workers_end_with_the_process_that_started_them(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [f"document {i} of many " * (i % 5 + 1) for i in range(300)])
    with start(source, "bytes", tmp_path / "killed", "document", 4, workers=2) as child:
        workers = []
        for _ in range(3):  # a shard is done: the workers are at work
            assert child.stdout is not None
            child.stdout.readline()
            workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split() or workers
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert len(workers) > 1
    deadline = time.monotonic() + 20
    while any(alive(int(pid)) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)
    prepare(source, "bytes", tmp_path / "killed", shard_bytes=1000)
    prepare(source, "bytes", tmp_path / "whole", shard_bytes=1000)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
