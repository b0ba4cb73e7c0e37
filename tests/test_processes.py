"""Two real processes that train one run: one is killed, one is asked to stop, and the run ends with the same bits."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sens.__main__ as cli
from analysis import records
from tests.trained import final_state, finish, recorded, start, tiny
from train import processes
from train.loop import train

SETTINGS: dict[str, Any] = {"updates": 60, "checkpoint_every": 20, "attention_every": 60, "layers_every": 30}

Pair = list[subprocess.Popen[str]]


def start_two(corpus: Path, run: Path, *, slurm: bool = False) -> Pair:
    """Found by our variables, or by those that Slurm sets, whose job number decides JAX's port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", value)]
    command = ["train", "--preset", "tiny", "--source", corpus, "--out", run, *options]
    step = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    ours = [(f"localhost:{port}", "2", str(index)) for index in range(2)]
    slurms = [{**step, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} for index in range(2)]
    variables = slurms if slurm else [dict(zip(processes.VARIABLES, one, strict=True)) for one in ours]
    return [start(*command, more=one) for one in variables]


def lines(run: Path) -> int:
    path = run / "updates.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(pair: Pair, moment: Callable[[], bool]) -> None:
    """Watch the disk until the moment comes; no process must end before."""
    while not moment():
        for process in pair:
            if process.poll() is not None:
                raise AssertionError(f"ended with {process.returncode} before its moment: {process.communicate()}")
        time.sleep(0.0005)


def said(err: str) -> str:
    """What we said: JAX logs a line when it catches SIGTERM."""
    return "".join(line for line in err.splitlines(keepends=True) if line.startswith("sens: "))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    for status, _, err in map(finish, start_two(corpus, run)):
        assert status == 0, err
    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory, corpus) -> Path:
    """A run of which one process was killed between two checkpoints: the other ended by itself, and said why."""
    run = tmp_path_factory.mktemp("killed") / "run"
    pair = start_two(corpus, run)
    until(pair, lambda: lines(run) >= 25)
    pair[1].kill()
    began = time.monotonic()
    status, _, err = finish(pair[0])
    assert time.monotonic() - began < processes.HEARTBEAT_SECONDS
    assert status == 1, err
    assert "sens: process 0 of 2 lost another one (" in err
    assert said(err).endswith("; start all of them again: the run goes on from its newest checkpoint\n")
    assert finish(pair[1])[0] == -signal.SIGKILL
    assert 25 <= lines(run) < 60
    return run


def test_killed_and_stopped_a_run_of_two_processes_ends_with_the_same_bits(tmp_path, corpus, undisturbed, killed):
    run, config = tmp_path / "run", tiny(corpus, **SETTINGS)
    shutil.copytree(killed.parent / "data", tmp_path / "data")
    shutil.copytree(killed, run)

    # SIGTERM or Ctrl-C to either: both stop after the same update, saved.
    for index, signum in ((1, signal.SIGTERM), (0, signal.SIGINT)):
        pair = start_two(corpus, run)
        begun = lines(run)
        until(pair, lambda begun=begun: begun < lines(run) or (lines(run) < begun and lines(run) > 22))
        pair[index].send_signal(signum)
        ends = [finish(process) for process in pair]
        update = lines(run)
        if update < 60:  # else it was finished before the word went round
            assert [status for status, _, _ in ends] == [75, 75], ends
            wanted = f"sens: stopped by SIGTERM after update {update}; the same command continues\n"
            assert [said(err) for _, _, err in ends] == [wanted, wanted]
            assert str(update) in {path.name for path in (run / "checkpoints").iterdir()}

    for status, _, err in map(finish, start_two(corpus, run, slurm=True)):
        assert status == 0, err
    assert recorded(run) == recorded(undisturbed)
    assert lines(run) == 60
    jax.tree.map(np.testing.assert_array_equal, final_state(run, config), final_state(undisturbed, config))


def test_one_process_goes_on_where_two_were_in_the_same_order_of_examples(tmp_path, corpus, undisturbed, killed):
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    train(run, tiny(corpus, **SETTINGS), killed.parent / "data")
    found, wanted = (records.read_table(path, "updates")["loss"].to_numpy() for path in (run, undisturbed))
    assert (found[:20] == wanted[:20]).all()
    # Sums in another order; one example in another place would change a loss by a hundredth.
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is set, so JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID must be"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "JAX_NUM_PROCESSES must be a number, got 'two'",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID must be below JAX_NUM_PROCESSES, got 2 of 2",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "JAX_COORDINATOR_ADDRESS must be host:port, got 'a'",
        ),
    ],
)
def test_an_environment_that_describes_no_processes_is_refused(tmp_path, corpus, monkeypatch, capsys, values, message):
    for name in processes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    status = cli.main(["train", "--preset", "tiny", "--source", str(corpus), "--out", str(tmp_path / "run")])
    assert status == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_process_of_its_own_joins_nobody(monkeypatch):
    for name, value in zip(processes.VARIABLES, ("localhost:1", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    processes.join()
    assert not processes.several()
    assert processes.first()
