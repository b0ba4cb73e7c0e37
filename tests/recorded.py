"""Small synthetic run directories, written through `analysis.records`, for tests of what reads them.

The numbers are made up but of the right shape: pre-LN learns and sharpens, post-LN stays on a plateau.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from analysis import records
from analysis.probes import PAIR_COLUMNS
from models.config import ModelConfig
from train.config import TrainConfig

HEADS = 2


def write_run(
    path: Path,
    placement: str = "pre",
    seed: int = 42,
    *,
    updates: int = 60,
    planned: int | None = None,
    n_layer: int = 4,
    probe: bool = False,
) -> Path:
    """Write RUN/ with `updates` updates of `planned`, and what `sens probe` writes if `probe`."""
    path.mkdir(parents=True)
    model = ModelConfig(
        vocab_size=256, n_layer=n_layer, n_head=HEADS, d_model=8, d_ff=32, context=16,
        placement="pre" if placement == "pre" else "post",
    )  # fmt: skip
    train = TrainConfig(seed=seed, updates=planned or updates, warmup=0)
    config = {"model": dataclasses.asdict(model), "train": dataclasses.asdict(train), "data": {"directory": str(path)}}
    records.write_json(path / "config.json", config)
    records.write_json(
        path / "versions.json", {"python": "3.11.2", "packages": {"jax": "0.10.2"}, "devices": ["cpu <0>"]}
    )
    rng = np.random.default_rng(seed + 1000 * (placement == "post"))
    learnt = placement == "pre"
    for update in range(1, updates + 1):
        done = update / (planned or updates)
        loss = (2.5 + 3.0 * np.exp(-8 * done) if learnt else 3.1 + 2.4 * np.exp(-20 * done)) + 0.03 * rng.normal()
        norm = np.exp(0.25 * rng.normal()) * (4.0 if update in (20, 41) else 1.0)
        row = {
            "update": update,
            "loss": float(loss),
            "grad_norm": float(norm),
            "learning_rate": 1e-3,
            "tokens": 128 * update,
            "skipped": 0,
        }
        records.append(path, "updates", [row])
        records.append(path, "timing", [{"update": update, "seconds": 0.5, "tokens_per_second": 256.0, "mfu": None}])
        if update == 1 or update % 10 == 0 or update == planned:
            records.append(path, "attention", _attention(rng, update, n_layer, done if learnt else 0.0))
        if update == 1 or update % 20 == 0 or update == planned:
            records.append(path, "layers", _layers(rng, update, n_layer, learnt))
    if probe:
        write_probe(path, rng, updates, n_layer, done=1.0 if learnt else 0.0)
    return path


def _attention(rng: np.random.Generator, update: int, n_layer: int, done: float) -> list[dict]:
    rows = []
    for layer in sorted({0, n_layer // 2, n_layer - 1}):
        for head in (None, *range(HEADS)):
            p_max = np.clip(0.05 + 0.5 * done * rng.beta(1 + layer, 2, 200), 0, 1)
            lower = 1 - np.maximum(1e-7, np.maximum(0, 2 * p_max - 1) ** 2)
            values = {
                "entropy": 1 - 0.6 * p_max,
                "p_max": p_max,
                "prefix": np.minimum(lower, 1 - (rng.uniform(size=200) * p_max) ** 2),
                "lower": lower,
                "upper": np.minimum(lower + 1e-7, 1.0),
                "width": np.full(200, 1e-7),
            }
            for quantity, value in values.items():
                points = np.quantile(value, (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)).tolist()
                names = ("min", "p5", "p25", "median", "p75", "p95", "max")
                statistics = {"mean": float(value.mean()), **dict(zip(names, points, strict=True))}
                rows.append(
                    {"update": update, "layer": layer, "head": head, "quantity": quantity, "count": 200, **statistics}
                )
    return rows


def _layers(rng: np.random.Generator, update: int, n_layer: int, learnt: bool) -> list[dict]:
    rows = []
    for layer in range(n_layer):
        norm = 0.05 if learnt else 10.0 ** (8 * (layer + 1) / n_layer - 9)
        row = dict.fromkeys(records.LAYER_COLUMNS, 1.0) | {"update": update, "layer": layer}
        rows.append(row | {"grad_norm": float(norm * np.exp(0.2 * rng.normal()))})
    return rows


def write_probe(
    path: Path, rng: np.random.Generator, update: int, n_layer: int, *, done: float, rows: int = 400
) -> None:
    """RUN/probe/: attention rows of softmaxes of growing sharpness, and one line a sublayer."""
    (path / "probe").mkdir()
    p_max = np.clip(0.05 + 0.9 * done * rng.beta(1, 2, rows), 0.02, 1)
    lower = 1 - np.maximum(1e-8, np.maximum(0, 2 * p_max - 1) ** 2)
    table = {
        "update": update,
        "layer": rng.integers(0, n_layer, rows),
        "head": rng.integers(0, HEADS, rows),
        "position": rng.integers(1, 16, rows),
        "p_max": p_max,
        "prefix": np.where(p_max > 0.5, lower, np.minimum(lower, 1 - (rng.uniform(size=rows) * p_max) ** 2)),
        "lower": lower,
        "upper": np.minimum(lower + np.where(rng.uniform(size=rows) < 0.1, 1e-3, 1e-9), 1.0),
    }
    pl.DataFrame(table).write_parquet(path / "probe" / "rows.parquet")
    depth = 2 * n_layer
    _write_lines(path / "probe" / "depth.jsonl", (depth_line(update, k, depth, done) for k in range(depth)))


def depth_line(update: int, sublayer: int, depth: int, done: float) -> dict[str, Any]:
    """A sublayer of a chain whose product gains 2 % a sublayer, the bare term steady."""
    a, above = (1.2 if done else 0.9) * 0.99**sublayer, depth - sublayer
    line = {
        "update": update,
        "sublayer": sublayer,
        "kind": ("attention", "ffn")[sublayer % 2],
        "identity_share": 0.9**sublayer,
        "a_max": a,
        "a_mean": 0.7 * a,
        "bound": 0.9 * a**above,
        "bound_loose": a**above,
        "gain": 1.02**above,
        "gradient": 0.1 * 1.02**above,
    }
    terms = {"bare": 1.0, "first": 0.02 * above, "rest": 1.02**above - 1 - 0.02 * above}
    for prefix, scale in (("", 1.0), ("gradient_", 0.1)):
        line |= {f"{prefix}{name}": scale * size for name, size in terms.items()}
        line |= {f"{prefix}share_{name}": size / 1.02**above for name, size in terms.items()}
    return {name: line.get(name, 1.0) for name in records.DEPTH_COLUMNS}


def write_pairs(path: Path, update: int, n_layer: int) -> None:
    """RUN/probe/pairs.jsonl: all pairs below four depths, singular values between those."""
    depth, lines = 2 * n_layer, []
    grid = [0, depth // 2, depth]
    for stop in grid[1:]:
        for start in range(stop):
            line = {"update": update, "start": start, "stop": stop, "gain": 1.02 ** (stop - start), "bare": 1.0}
            if start in grid:
                line |= {"sigma_1": 1.1 * 1.02 ** (stop - start), "bare_norm": 1.0, "bound": 1.5, "bound_loose": 2.0}
            lines.append({name: line.get(name) for name in PAIR_COLUMNS})
    _write_lines(path / "probe" / "pairs.jsonl", lines)


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    records.write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def write_verification(path: Path, *, lengths: tuple[int, ...] = (8, 16), rows: int = 50) -> Path:
    """verify.json with errors of rounding size, some of them zero."""
    rng = np.random.default_rng(0)
    checks = []
    for length in lengths:
        theta = 1 - rng.uniform(size=rows) ** 2
        error = np.where(rng.uniform(size=rows) < 0.2, 0.0, 2e-16 * rng.uniform(0.5, 3, rows))
        checks.append(
            {
                "length": length,
                "rows": rows,
                "norm": (theta * (1 + error)).tolist(),
                "theta_over_tau": theta.tolist(),
                "relative_error": error.tolist(),
                "worst": float(error.max()),
            }
        )
    records.write_json(path, {"tolerance": 1e-13, "checks": checks})
    return path
