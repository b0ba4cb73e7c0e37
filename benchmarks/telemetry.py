"""Tokens a second of `mini` as it is trained, and what of the time goes into telemetry, checkpoints and compilation.

Runs of the whole loop in one process, with telemetry at the protocol's cadence and with next to none, in pairs of
changing order; all write their record and checkpoints to a temporary directory. Run it on an idle machine:

    python benchmarks/telemetry.py [updates] [pairs]

Found (2 idle cores with AVX-512, 5 pairs of 100 updates): -2.3 % of the time of an update (-4.2 to 0.3), less than what
two runs differ by; at most 2 % is aimed at. By its parts, each timed alone, it is 1.8 % of the 195 ms of an update:
statistics of the rows of four sequences 26 ms every tenth (16 the forward pass in evaluation mode, 10 bracket and
prefix certificate), their lines 2, figures of layers 39 every fiftieth. All 16 sequences of `mini` would take 88 and 90
ms: 5.4 %. Spectral norms of the 144 projections took 109 ms until their bracket was searched 32 points at a time
instead of 512; now 20.
"""

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

from train.loop import train
from train.presets import PRESETS, RunConfig


def measure(run: Path, config: RunConfig, data: Path) -> tuple[float, pl.DataFrame]:
    """Wall seconds of the whole call, and the timing table without the first updates, which compile."""
    began = time.perf_counter()
    train(run, config, data)
    timing = pl.read_ndjson(run / "timing.jsonl")
    return time.perf_counter() - began, timing


def main() -> None:
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    preset = PRESETS["mini"]
    settings = dataclasses.replace(preset.train, updates=updates, warmup=updates // 4)
    never = dataclasses.replace(settings, attention_every=updates, layers_every=updates)
    runs = {"with telemetry": settings, "without": never}
    tokens = settings.micro_batch * settings.accumulation * preset.model.context
    shares = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for turn in range(rounds):
            mean = {}
            for name in runs if turn % 2 == 0 else reversed(runs):
                run = root / f"{name.replace(' ', '-')}-{turn}"
                wall, timing = measure(run, RunConfig(preset.model, runs[name]), root / "data")
                # Also due at the first and the last update: those two hold its compilation, and are left out.
                seconds = timing["seconds"].to_numpy()
                mean[name] = seconds[2:-1].mean()
                print(
                    f"{name:>15}: {wall:6.1f} s for {updates} updates in all, first update {seconds[0]:.1f} s; then "
                    f"{1000 * mean[name]:.1f} ms an update (median {1000 * np.median(seconds[2:-1]):.1f}), "
                    f"{tokens / mean[name]:,.0f} tokens/s",
                    flush=True,
                )
            shares.append(1 - mean["without"] / mean["with telemetry"])
    low, middle, high = (100 * value for value in (min(shares), np.median(shares), max(shares)))
    print(
        f"telemetry takes {middle:.1f} % of the time of an update (median of {rounds} pairs, {low:.1f} to {high:.1f})"
    )
    assert middle < 50, "telemetry takes more than training itself"


if __name__ == "__main__":
    main()
