"""Checkpoints through Orbax: parameters, optimizer state, data position and update number, whole or not at all.

A save goes to a temporary directory that Orbax renames when it is complete: a kill at any moment leaves the checkpoints
before it untouched, and what remains of it is removed at the next start.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

FORMAT = "sens checkpoint 1"
ITEM = "state"
UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a directory that a save is writing, or was when it was killed."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, not ours, or of another model."""


@contextlib.contextmanager
def open_checkpoints(directory: Path, keep: int) -> Iterator[ocp.training.Checkpointer]:
    """The checkpoints of a run, of which the newest `keep` stay; leaving the context waits for a save under way."""
    policies = ocp.training.preservation_policies
    directory.mkdir(parents=True, exist_ok=True)
    latest: Any = policies.LatestN(keep)  # the class does not match the protocol that Orbax declares for it
    with ocp.training.Checkpointer(
        str(directory.absolute()), preservation_policy=latest, cleanup_tmp_directories=True
    ) as checkpointer:
        yield checkpointer


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[ocp.training.Checkpointer]:
    """The checkpoints of a run that may be going on in another process: nothing is removed, a save goes on."""
    with ocp.training.Checkpointer(str(directory.absolute())) as checkpointer:
        yield checkpointer


def save(checkpointer: ocp.training.Checkpointer, state: dict[str, Any], update: int, data: dict[str, Any]) -> None:
    """Start saving the state after `update` updates and the data position; the state may be donated at once."""
    checkpointer.save_checkpointables_async(
        update, {ITEM: state}, force=True, custom_metadata={"format": FORMAT, "data": data}
    )


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
