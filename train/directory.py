"""A run's directory: whose it is, who may write in it, and whether there is room."""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from analysis import records
from train import checkpoint, step
from train.data import TokenDataset
from train.presets import RunConfig, difference, from_json

_LOCK = ".lock"
_BEGUN = {_LOCK, "versions.json", "versions.json.tmp", "config.json.tmp"}  # what a kill before config.json leaves


def check_directory(run: Path) -> None:
    """Refuse a directory that holds anything but a run, before anything is written into it."""
    strangers = sorted({entry.name for entry in run.iterdir()} - _BEGUN)
    if strangers and not (run / "config.json").is_file():
        raise records.RecordError(f"{run}: not a run directory and not empty ({strangers[0]}); choose another")


def check_space(run: Path, config: RunConfig) -> None:
    """Refuse to start where the disk cannot hold the checkpoints: those to be kept, and one that is being written."""
    state = jax.eval_shape(functools.partial(step.init_state, config.model, config.train), 0)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    needed = (config.train.keep + 1 - len(checkpoint.saved(run / "checkpoints"))) * size
    place = next(path for path in (run.absolute(), *run.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise records.RecordError(
            f"{run}: no space: about {needed / 1e6:.1f} MB are needed for checkpoints of {size / 1e6:.1f} MB, "
            f"{free / 1e6:.1f} MB are free; remedy: make room, --keep {max(config.train.keep - 1, 1)}, or another disk"
        )


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Only one process in a run directory; the system lifts the lock of a killed one."""
    with (run / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise records.RecordError(f"{run}: another process is training here") from error
        yield


def claim(run: Path, config: RunConfig, dataset: TokenDataset) -> None:
    """Write the configuration of a new run, or refuse a run of another one."""
    identity = {"source": dataset.index.source_digest, "tokenizer": dataset.index.tokenizer_digest}
    path = run / "config.json"
    if not path.exists():
        records.write_json(run / "versions.json", versions())
        about = {"directory": str(dataset.directory.absolute()), "unigram_entropy": unigram_entropy(dataset)}
        records.write_json(path, {**config.as_json(), "data": {**identity, **about}})
        return
    recorded = records.read_config(run)
    try:
        before = from_json(recorded)
        # How many checkpoints are kept changes no number: it may be lowered where the disk is full.
        same_keep = dataclasses.replace(config, train=dataclasses.replace(config.train, keep=before.train.keep))
        changes = difference(before, same_keep)
    except ValueError as error:
        raise records.RecordError(f"{path}: {error}") from error
    if {name: recorded.get("data", {}).get(name) for name in identity} != identity:
        changes.append("the text or the tokenizer")
    if changes:
        raise records.RecordError(
            f"{run}: made with another configuration ({'; '.join(changes)}); choose another directory"
        )


def rewind(run: Path, update: int) -> None:
    """Cut the record back to a checkpoint's update; `RecordError` if it does not reach so far."""
    records.truncate(run, update)
    recorded = records.read_table(run, "updates").height
    if recorded != update:
        raise records.RecordError(
            f"{run}: the newest checkpoint is of update {update}, but updates.jsonl holds {recorded} updates; "
            "something was lost: start a new run"
        )


def kept(run: Path) -> str:
    """What there is to go on from, in words."""
    saved = checkpoint.saved(run / "checkpoints")
    return f"the checkpoint of update {saved[-1]} is kept" if saved else "no checkpoint was made yet"


def unigram_entropy(dataset: TokenDataset) -> float:
    """Entropy of the text's token frequencies, nats a token: what a model reaches that knows frequencies alone."""
    counts = np.zeros(dataset.index.vocab_size, np.int64)
    for start in range(0, dataset.index.tokens, 2**22):
        part = dataset.read(start, min(2**22, dataset.index.tokens - start))
        counts += np.bincount(part, minlength=counts.size)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def versions() -> dict[str, Any]:
    """What a run ran on; informative only."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "sens")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": [device.device_kind for device in jax.devices()],
        **{name: importlib.metadata.version(name) for name in packages},
    }
