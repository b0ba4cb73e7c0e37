"""Checkpoints through Orbax: parameters, optimizer state, data position and update number, whole or not at all.

A save goes to a temporary directory that Orbax renames when it is complete: a kill at any moment leaves the checkpoints
before it untouched, and what remains of it is removed at the next start. The hashes of a checkpoint's files go in with
them: what a disk, a copy or a crash of the machine damages afterwards is known by them before it is read.
"""

import contextlib
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from analysis.records import write_json

FORMAT = "sens checkpoint 1"
ITEM = "state"
SUMS = "sha256.json"
"""In a checkpoint: the SHA-256 of its files by name."""
UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a directory that a save is writing, or was when it was killed."""
DAMAGED = "damaged-checkpoints"
"""Where a run keeps checkpoints that were set aside."""

_METADATA = "_CHECKPOINT_METADATA"
_UNHASHED = (_METADATA, "commit_success.txt", SUMS)  # Orbax goes on writing the first two; what we put there is checked


class CheckpointError(ValueError):
    """A checkpoint that is missing, not ours, damaged, or of another model."""


class SaveError(RuntimeError):
    """A checkpoint that could not be written; those before it are whole."""


@contextlib.contextmanager
def open_checkpoints(directory: Path, keep: int) -> Iterator[ocp.training.Checkpointer]:
    """The checkpoints of a run, of which the newest `keep` stay; leaving the context waits for a save under way."""
    policies = ocp.training.preservation_policies
    directory.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        for path in directory.glob(f"*{UNFINISHED}*"):  # of a killed save: at once, for a save is known by being alone
            shutil.rmtree(path)
    latest: Any = policies.LatestN(keep)  # the class does not match the protocol that Orbax declares for it
    context = ocp.Context()
    # Called when all of a checkpoint is on the disk, before it gets its name.
    context.async_options.post_finalization_callback = functools.partial(_write_sums, directory)
    checkpointer = ocp.training.Checkpointer(str(directory.absolute()), context=context, preservation_policy=latest)
    try:
        yield checkpointer
    finally:
        with _write_errors(directory):
            checkpointer.close()


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[ocp.training.Checkpointer]:
    """The checkpoints of a run that may be going on in another process: nothing is removed, a save goes on."""
    with ocp.training.Checkpointer(str(directory.absolute())) as checkpointer:
        yield checkpointer


def save(checkpointer: ocp.training.Checkpointer, state: dict[str, Any], update: int, data: dict[str, Any]) -> None:
    """Start saving the state after `update` updates and the data position; the state may be donated at once.

    Waits for the save before; `SaveError` if that one failed.
    """
    with _write_errors(Path(checkpointer.directory)):
        checkpointer.save_checkpointables_async(
            update, {ITEM: state}, force=True, custom_metadata={"format": FORMAT, "data": data}
        )


def saved(directory: Path) -> list[int]:
    """Updates of the checkpoints in a directory, in order; what a save is writing is not among them."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None if they are those that were saved. Reads all of them."""
    try:
        about = json.loads((checkpoint / _METADATA).read_text(encoding="utf-8"))["custom_metadata"]
        if about["format"] != FORMAT or about["data"] != {"next_index": int(checkpoint.name)}:
            return f"{_METADATA} changed"
        for name, wanted in json.loads((checkpoint / SUMS).read_text(encoding="utf-8")).items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if _sha256(checkpoint / name) != wanted:
                return f"{name} changed"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its description is damaged"
    return None


def set_damaged_aside(run: Path) -> list[str]:
    """Move the damaged checkpoints that are newer than the newest whole one out of the way of a run that continues.

    Returns a line for each; `CheckpointError`, with nothing moved, if there are checkpoints and none is whole. Only the
    process that has the run to itself may call it.
    """
    directory, found = run / "checkpoints", []
    for update in reversed(saved(directory)):
        what = damage(directory / str(update))
        if what is None:
            break
        found.append((directory / str(update), what))
    else:
        if found:
            newest, what = found[0]
            raise CheckpointError(
                f"{newest}: damaged ({what}), and no checkpoint before it is whole; nothing was changed. "
                f"Remedy: a copy of it from elsewhere, or move {directory} away to begin anew"
            )
    return [_set_aside(path, run / DAMAGED, what) for path, what in found]


def _set_aside(checkpoint: Path, into: Path, what: str) -> str:
    into.mkdir(exist_ok=True)
    taken = sum(path.name.split("-")[0] == checkpoint.name for path in into.iterdir())
    target = into / (f"{checkpoint.name}-{taken}" if taken else checkpoint.name)
    checkpoint.rename(target)
    return f"{checkpoint}: damaged ({what}); moved to {target}, the checkpoint before it is used"


def _write_sums(directory: Path) -> None:
    """Into the one checkpoint that is being saved."""
    (checkpoint,) = directory.glob(f"*{UNFINISHED}")
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name not in _UNHASHED)
    write_json(checkpoint / SUMS, {path.relative_to(checkpoint).as_posix(): _sha256(path) for path in files})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """What the system says when a write fails reaches us as one of two exceptions, TensorStore's with a long text."""
    try:
        yield
    except (OSError, ValueError) as error:
        words = re.search(r"(?:: |^)([^:]*) \[os_error_code=", str(error))
        reason = error.strerror if isinstance(error, OSError) else words and words[1]
        if reason is None:
            raise
        raise SaveError(f"{directory}: a checkpoint could not be written ({reason})") from error


def restore(
    checkpointer: ocp.training.Checkpointer, like: dict[str, Any], update: int | None = None
) -> tuple[Any, dict[str, Any]] | None:
    """State and data position of a checkpoint (the newest without `update`); None if the directory has none at all.

    `like` is the state as arrays or `jax.ShapeDtypeStruct`, or only `{"params": ...}` of it: what it lacks is not read.
    Raises `CheckpointError` when the checkpoint is not one of ours or holds other shapes.
    """
    saved = [checkpoint.step for checkpoint in checkpointer.checkpoints]
    directory = Path(checkpointer.directory)
    if not saved:
        # Orbax removes what a killed save left in the background: some of it may still be there.
        strangers = sorted(path.name for path in directory.iterdir() if UNFINISHED not in path.name)
        if strangers:
            raise CheckpointError(f"{directory}: not a directory of sens checkpoints (it holds {strangers[0]!r})")
        if update is not None:
            raise CheckpointError(f"{directory}: no checkpoint yet")
        return None
    step = max(saved) if update is None else update
    if step not in saved:
        raise CheckpointError(f"{directory}: no checkpoint of update {step}; there are {sorted(saved)}")
    metadata = checkpointer.checkpointables_metadata(step)
    custom: Any = metadata.custom_metadata
    if not isinstance(custom, dict) or custom.get("format") != FORMAT or ITEM not in metadata.metadata:
        raise CheckpointError(f"{directory / str(step)}: not a checkpoint written by sens")
    _check_params(directory / str(step), like["params"], metadata.metadata[ITEM].get("params"))
    context = ocp.Context()
    context.pytree_options.loading.partial_load = True
    with context:
        loaded = checkpointer.load_checkpointables(step, {ITEM: jax.tree.map(_abstract, like)})
    return loaded[ITEM], custom["data"]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and present sharding: loading reshards onto the devices at hand."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_params(path: Path, like: Any, saved: Any) -> None:
    """Name the first parameter that differs: Orbax's own error does not."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}

    wanted, there = shapes(like), shapes(saved)
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise CheckpointError(
                f"{path}: made by another model: parameter {name} is {there.get(name, 'absent')} there, "
                f"{wanted.get(name, 'absent')} in this configuration"
            )
