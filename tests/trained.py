"""A small text, the `tiny` preset on it, and what tests do with run directories and `sens` processes."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train import checkpoint, loop
from train.presets import PRESETS, RunConfig

ROOT = Path(__file__).resolve().parent.parent


def write_corpus(path: Path, words: int = 12_000) -> Path:
    """Lines of made-up words with Zipf's frequencies: enough structure to learn from, the same bytes every time."""
    rng = np.random.default_rng(7)
    letters = np.array(list("etaoinshrdlu"))
    vocabulary = ["".join(rng.choice(letters, rng.integers(1, 8))) for _ in range(400)]
    share = 1 / np.arange(1, 401)
    chosen = rng.choice(400, words, p=share / share.sum())
    text = [vocabulary[i] + ("\n" if place % 12 == 11 else " ") for place, i in enumerate(chosen)]
    path.write_text("".join(text), encoding="utf-8")
    return path


def tiny(corpus: Path, *, placement: str = "pre", **train: Any) -> RunConfig:
    """The `tiny` preset on a text, with fields of its training changed."""
    preset = PRESETS["tiny"]
    return RunConfig(
        dataclasses.replace(preset.model, placement=placement),
        dataclasses.replace(preset.train, source=str(corpus), **train),
    )


def final_state(run: Path, config: RunConfig) -> Any:
    """The newest checkpoint's whole state as NumPy arrays, keys as their words."""
    with checkpoint.reading(run / "checkpoints") as checkpointer:
        restored = checkpoint.restore(checkpointer, loop.init_state(config))
    assert restored is not None
    state, position = restored
    arrays = jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), state)
    return {**arrays, "data": position}


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def recorded(run: Path) -> dict[str, bytes]:
    """Every table but the wall clock, as bytes."""
    return {path.name: path.read_bytes() for path in sorted(run.glob("*.jsonl")) if path.name != "timing.jsonl"}


def contents(directory: Path) -> dict[str, str]:
    """A digest of every file, to see that nothing changed (a lock holds nothing)."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(
    *arguments: object, cwd: Path | None = None, module: str = "sens", more: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`python -m sens ...` as a process of its own: float32 as users have it, compiled programs shared."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_X64"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        env={**environment, **cache, "JAX_PLATFORMS": "cpu", "COLUMNS": "200", **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, output and error output."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def readers() -> int:
    """Threads that read batches ahead."""
    return sum("prefetch" in thread.name for thread in threading.enumerate())
