"""Real faults: processes killed and stopped, disks that fill up, files that rot, numbers that are none."""

import contextlib
import dataclasses
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sens.__main__ as cli
from analysis import records
from tests.test_data import file_size_limit
from tests.trained import contents, final_state, finish, recorded, start, tiny
from train import checkpoint, loop
from train.checkpoint import DAMAGED, UNFINISHED
from train.files import DataError, RunWarning
from train.loop import TrainingError, train
from train.presets import RunConfig

SETTINGS: dict[str, Any] = {"updates": 300, "checkpoint_every": 10, "attention_every": 150, "layers_every": 300}
KILLS = 20


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
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    status, _, err = finish(start(*command(corpus, run)))
    assert status == 0, err
    return run


def kill_at(corpus: Path, run: Path, update: int, delay: float, *, in_a_save: bool) -> bool:
    """Kill -9 a process `delay` seconds after its record reaches an update, or after a save then begins.

    Returns whether a save was under way: what it left on the disk shows it.
    """
    process = start(*command(corpus, run))
    until(process, lambda: lines(run) >= update and (saving(run) or not in_a_save))
    time.sleep(delay)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    return saving(run)


def test_killed_at_twenty_moments_and_stopped_twice_a_run_ends_with_the_same_bits(tmp_path, corpus, undisturbed):
    run, rng = tmp_path / "run", np.random.default_rng(9)
    updates = np.sort(rng.integers(0, SETTINGS["updates"] - 60, KILLS))
    updates[0] = 0  # while it starts: nothing is recorded yet
    delays = rng.uniform(0, 0.02, KILLS)  # a few updates' time, or half a save's
    saves = rng.permutation(KILLS) < KILLS // 2
    inside = [
        kill_at(corpus, run, int(update), float(delay), in_a_save=bool(save))
        for update, delay, save in zip(updates, delays, saves, strict=True)
    ]
    assert sum(inside) > 2, "hardly a save was hit"

    # Ctrl-C: the update under way is finished and saved; meanwhile no other process gets in
    process = start(*command(corpus, run))
    begun = max(saved(run))
    until(process, lambda: max(saved(run)) > begun)
    with pytest.raises(records.RecordError, match="another process is training here"):
        train(run, tiny(corpus, **SETTINGS), tmp_path / "data")
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
    assert saved(run) == saved(undisturbed) == [290, 300]
    config = tiny(corpus, **SETTINGS)
    jax.tree.map(np.testing.assert_array_equal, final_state(run, config), final_state(undisturbed, config))


def test_sigterm_before_the_first_update_means_continue_too(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{number} {number**3} {number**5}"}}\n' for number in range(200_000)))
    run = tmp_path / "run"
    process = start("train", "--preset", "tiny", "--source", text, "--out", run, "--set", "tokenizer=bpe:400")
    until(process, lambda: (tmp_path / "data").is_dir())  # the vocabulary is being counted
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (75, "", "sens: stopped; the same command continues\n")
    assert not run.exists()


def stopped(process: subprocess.Popen[str], run: Path, name: str, wanted: int) -> None:
    """One line, the status, and a checkpoint of the last update that is recorded."""
    status, _, err = finish(process)
    assert status == wanted, err
    update = lines(run)
    assert update < SETTINGS["updates"], "it was finished before the signal came"
    assert err == f"sens: stopped by {name} after update {update}; the same command continues\n"
    assert max(saved(run)) == update
    assert not saving(run)


# Checkpoints that rot.


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16  # Orbax would load it as other numbers
    path.write_bytes(content)


def largest(step: Path) -> Path:
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda step: cut(largest(step)),
    "flipped": lambda step: flip(largest(step)),
    "missing": lambda step: largest(step).unlink(),
    "metadata": lambda step: cut(step / "_CHECKPOINT_METADATA"),
    "half written": lambda step: (step / checkpoint.SUMS).unlink(),
    "sums": lambda step: cut(step / checkpoint.SUMS),
    "empty": empty,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_continues_to_the_same_bits(
    tmp_path, finished, corpus, damage
):
    run, config = tmp_path / "run", tiny(corpus)
    shutil.copytree(finished, run)
    DAMAGES[damage](run / "checkpoints" / "20")
    before = contents(run / "checkpoints" / "20")
    with pytest.warns(RunWarning, match=rf"checkpoints/20: damaged \(.*\); moved to .*{DAMAGED}/20"):
        train(run, config, finished.parent / "data")
    assert contents(run / DAMAGED / "20") == before
    assert saved(run) == saved(finished)
    assert recorded(run) == recorded(finished)
    jax.tree.map(np.testing.assert_array_equal, final_state(run, config), final_state(finished, config))


def test_the_command_says_so_in_one_line(tmp_path, finished, corpus, capfd):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for _ in range(2):  # a second one of the same number is kept beside the first
        cut(largest(run / "checkpoints" / "20"))
        assert cli.main(["train", "--preset", "tiny", "--source", str(corpus), "--out", str(run)]) == 0
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith(f"sens: warning: {run / 'checkpoints' / '20'}: damaged (state/")
        assert err.count("\n") == 1
    assert sorted(path.name for path in (run / DAMAGED).iterdir()) == ["20", "20-1"]


def test_with_no_whole_checkpoint_left_a_run_is_refused_and_nothing_moved(tmp_path, finished, corpus):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for update in saved(run):
        cut(largest(run / "checkpoints" / str(update)))
    before = contents(run)
    with pytest.raises(checkpoint.CheckpointError, match=r"20: damaged .*no checkpoint before it is whole.* Remedy"):
        train(run, tiny(corpus), finished.parent / "data")
    assert cli.main(["probe", str(run)]) == 2
    assert contents(run) == before


def test_a_shard_that_changed_on_the_disk_is_refused_before_a_run_starts(tmp_path, finished, corpus):
    shutil.copytree(finished.parent / "data", tmp_path / "data")
    flip(tmp_path / "data" / "shard-00000.bin")
    with pytest.raises(DataError, match=r"shard-00000\.bin: changed since it was written"):
        train(tmp_path / "run", tiny(corpus), tmp_path / "data")
    assert not (tmp_path / "run").exists()


# Disks that fill up.


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many kilobytes; called again it is made larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = False

    def sized(kilobytes: int) -> Path:
        nonlocal mounted
        options = f"{'remount,' if mounted else ''}size={kilobytes}k"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")
        mounted = True
        return disk

    if shutil.which("mount") is None:
        pytest.skip("there is no mount command here")
    yield sized
    if mounted:
        subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_up_in_a_save_leaves_the_checkpoint_before_it_whole(small_disk, finished, corpus, capfd):
    arguments = ["train", "--preset", "tiny", "--source", str(corpus), "--data", str(finished.parent / "data")]
    run = small_disk(300) / "run"
    arguments += ["--out", str(run)]
    assert cli.main(arguments) == 2
    err = capfd.readouterr().err
    assert err.startswith(
        f"sens: error: {run}: no space: about 0.4 MB are needed for checkpoints of 0.1 MB, 0.3 MB are"
    )
    assert list(run.parent.iterdir()) == []

    small_disk(400)  # room for the checkpoints by that estimate, but not for the record as well
    assert cli.main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("sens: ")
    assert "No space left on device" in err
    assert err.endswith("the checkpoint of update 5 is kept. Remedy: make room; the same command continues\n")
    assert err.count("\n") == 1
    assert saved(run) == [5]
    assert checkpoint.damage(run / "checkpoints" / "5") is None

    small_disk(4000)
    assert cli.main(arguments) == 0
    assert recorded(run) == recorded(finished)
    config = tiny(corpus)
    jax.tree.map(np.testing.assert_array_equal, final_state(run, config), final_state(finished, config))


def test_a_disk_that_is_full_when_an_update_is_recorded(small_disk, finished, corpus):
    run = small_disk(2000) / "run"

    def fill(now: loop.Progress) -> None:
        if now.update == 7:
            while saved(run) != [5]:  # its save is still under way
                time.sleep(0.001)
            with contextlib.suppress(OSError), (run.parent / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))

    with pytest.raises(TrainingError, match="No space left on device; the checkpoint of update 5 is kept"):
        train(run, tiny(corpus), finished.parent / "data", on_update=fill)
    (run.parent / "filler").unlink()
    train(run, tiny(corpus), finished.parent / "data")
    assert recorded(run) == recorded(finished)


def test_a_save_that_the_system_refuses_leaves_the_checkpoint_before_it_whole(tmp_path, finished, corpus):
    """A limit on the size of files, which needs no rights: smaller than a checkpoint, larger than the record."""
    run, config, data = tmp_path / "run", tiny(corpus), finished.parent / "data"

    def crash(now: loop.Progress) -> None:
        if now.update == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, config, data, on_update=crash)
    with (
        file_size_limit(100_000),
        pytest.raises(TrainingError, match=r"\(File too large\); the checkpoint of update 5 is"),
    ):
        train(run, config, data)
    assert saved(run) == [5]
    train(run, config, data)
    assert recorded(run) == recorded(finished)


# Updates that are no numbers.


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> tuple[Path, RunConfig]:
    """A run up to update 4 or 5 whose embedding of Z is NaN from then on; only updates 8, 12, 13 and 14 read Z."""
    root = tmp_path_factory.mktemp("poisoned")
    text = list("the cat sat on the mat. " * 220)[: 20 * 256]
    for update in (8, 12, 13, 14):
        text[(update - 1) * 256 + 40] = "Z"
    (root / "text.txt").write_text("".join(text))
    preset = tiny(root / "text.txt", checkpoint_every=1, keep=20)
    # A head of its own: the embedding of a token that is not read has no part in the loss.
    config = RunConfig(dataclasses.replace(preset.model, head="untied"), preset.train)

    def poison(now: loop.Progress) -> None:
        if now.update == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(root / "run", config, root / "data", on_update=poison)
    with checkpoint.open_checkpoints(root / "run" / "checkpoints", 20) as checkpointer:
        restored = checkpoint.restore(checkpointer, loop.init_state(config))
        assert restored is not None
        state, position = restored
        rows = state["params"]["ends"]["tokens"]["embedding"]
        state["params"]["ends"]["tokens"]["embedding"] = rows.at[ord("Z")].set(np.float32(np.nan))
        newest = int(position["next_index"])
        shutil.rmtree(root / "run" / "checkpoints" / str(newest))
    with checkpoint.open_checkpoints(root / "run" / "checkpoints", 20) as checkpointer:
        checkpoint.save(checkpointer, state, newest, position)
    return root, config


def test_an_update_that_is_not_finite_is_passed_over_and_counted_and_too_many_in_a_row_stop(tmp_path, poisoned):
    root, config = poisoned
    run, data = tmp_path / "run", root / "data"
    shutil.copytree(root / "run", run)
    with pytest.raises(TrainingError, match=r"loss is nan at update 8 .*update 7 is kept.*--skip-nonfinite"):
        train(run, config, data)
    assert records.read_table(run, "updates")["skipped"].to_list() == [0] * 7

    for _ in range(2):  # how many there were in a row is known to a run that is continued
        with pytest.raises(TrainingError, match=r"loss is nan at update 14 .*the checkpoint of update 13 is kept"):
            train(run, config, data, skip_nonfinite=2)
    table = records.read_table(run, "updates")
    assert table["skipped"].to_list() == [0] * 7 + [1] * 4 + [2, 3]
    assert table["loss"].is_null().to_list() == [update in (8, 12, 13) for update in range(1, 14)]

    train(run, config, data, skip_nonfinite=3)
    table = records.read_table(run, "updates")
    assert table["skipped"].to_list() == [0] * 7 + [1] * 4 + [2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert table["loss"].drop_nulls().is_finite().all()
    layers = records.read_table(run, "layers")  # at update 10 and 20, none of which was skipped
    assert layers["grad_norm"].is_finite().all()
    states = {update: at(run, config, update) for update in (7, 8, 11, 14, 15)}
    for after, before in ((8, 7), (14, 11)):
        for part in ("params", "opt"):
            assert same(moments(states[after][part]), moments(states[before][part]))
    assert not same(states[15]["params"], states[14]["params"])
    rate = loop.step.learning_rate(config.train)
    np.testing.assert_allclose(table["learning_rate"], [np.asarray(rate(count)) for count in range(20)], rtol=1e-6)
    assert {int(states[15]["update"]), int(states[15]["opt"][1][2].count)} == {15}


def at(run: Path, config: RunConfig, update: int) -> Any:
    with checkpoint.reading(run / "checkpoints") as checkpointer:
        restored = checkpoint.restore(checkpointer, loop.init_state(config), update)
    assert restored is not None
    return restored[0]


def moments(tree: Any) -> Any:
    """Without the schedule's count, which goes on."""
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
