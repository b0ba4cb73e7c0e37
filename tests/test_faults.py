"""Real processes, killed and stopped at real moments: what is on disk continues to the same bits."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from analysis import records
from tests.trained import final_state, finish, recorded, start, tiny
from train.checkpoint import UNFINISHED
from train.loop import train

SETTINGS: dict[str, Any] = {"updates": 400, "checkpoint_every": 20, "attention_every": 50, "layers_every": 100}


def command(corpus: Path, run: Path) -> list[object]:
    options = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ["train", "--preset", "tiny", "--source", corpus, "--out", run, *options]


def lines(run: Path) -> int:
    path = run / "updates.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved(run: Path) -> list[int]:
    """Updates of the whole checkpoints."""
    return sorted(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit())


def saving(run: Path) -> bool:
    return any(UNFINISHED in path.name for path in (run / "checkpoints").glob("*"))


def until(process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
    """Watch the disk until the moment comes; the process must not end before."""
    while not moment():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} before its moment: {process.communicate()}")
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    status, _, err = finish(start(*command(corpus, run)))
    assert status == 0, err
    return run


def test_killed_and_stopped_again_and_again_a_run_ends_with_the_same_bits(tmp_path, corpus, undisturbed):
    run = tmp_path / "run"
    config = tiny(corpus, **SETTINGS)
    data = tmp_path / "data"

    # kill -9 before there is any checkpoint
    process = start(*command(corpus, run))
    until(process, lambda: lines(run) >= 3)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert saved(run) == []

    # kill -9 while a checkpoint is being written: what it left shows that it was
    for _ in range(8):
        process = start(*command(corpus, run))
        until(process, lambda: saving(run))
        process.kill()
        finish(process)
        if saving(run):
            break
    assert saving(run)
    torn = saved(run)

    # kill -9 between two checkpoints
    process = start(*command(corpus, run))
    begun = max(torn, default=0)
    until(process, lambda: len(saved(run)) > 1 and max(saved(run)) > begun and lines(run) >= max(saved(run)) + 5)
    process.kill()
    finish(process)
    assert lines(run) < SETTINGS["updates"]

    # Ctrl-C: the update under way is finished and saved; meanwhile no other process gets in
    process = start(*command(corpus, run))
    begun = max(saved(run))
    until(process, lambda: max(saved(run)) > begun)
    with pytest.raises(records.RecordError, match="another process is training here"):
        train(run, config, data)
    process.send_signal(signal.SIGINT)
    stopped(process, run, "SIGINT", 130)

    process = start(*command(corpus, run))
    begun = lines(run)
    until(process, lambda: lines(run) > begun + 3)
    process.send_signal(signal.SIGTERM)
    stopped(process, run, "SIGTERM", 75)

    status, _, err = finish(start(*command(corpus, run)))
    assert (status, err) == (0, "")
    assert recorded(run) == recorded(undisturbed)
    assert lines(run) == SETTINGS["updates"]
    assert saved(run) == saved(undisturbed) == [380, 400]
    jax.tree.map(np.testing.assert_array_equal, final_state(run, config), final_state(undisturbed, config))


def stopped(process: subprocess.Popen[str], run: Path, name: str, wanted: int) -> None:
    """One line, the status, and a checkpoint of the last update that is recorded."""
    status, _, err = finish(process)
    assert status == wanted, err
    update = lines(run)
    assert update < SETTINGS["updates"], "it was finished before the signal came"
    assert err == f"sens: stopped by {name} after update {update}; the same command continues\n"
    assert max(saved(run)) == update
    assert not saving(run)
