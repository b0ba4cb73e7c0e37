"""Tokens a second of `mini` as it is trained, and what of the time goes into telemetry, checkpoints and compilation.

Two runs of the whole loop in one process, one with telemetry at the protocol's cadence and one with next to none; both
write their record and checkpoints to a temporary directory. Run it on an idle machine:

    python benchmarks/telemetry.py [updates]

Found (2 idle cores with AVX-512, 100 updates): 266 ms an update with telemetry, 258 without: 3.0 % of the time, where
2 % is aimed at. It was 5 to 7 % before the prefix certificate took a quarter of its time, and 4.0 % before the bracket
of short rows took half of its. Statistics of rows take 115 ms every tenth update: 55 the forward pass in evaluation
mode, 40 the bracket, 16 the prefix certificate; their lines took 15 more with a percentile call each, and take 6 since.
Figures of layers take 140 ms every fiftieth.
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
    preset = PRESETS["mini"]
    settings = dataclasses.replace(preset.train, updates=updates, warmup=updates // 4)
    never = dataclasses.replace(settings, attention_every=updates, layers_every=updates)
    tokens = settings.micro_batch * settings.accumulation * preset.model.context
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        # Telemetry is also due at the first and the last update: those two hold its compilation, and are left out.
        rows = {}
        for name, one in (("with telemetry", settings), ("without", never)):
            wall, timing = measure(root / name.replace(" ", "-"), RunConfig(preset.model, one), root / "data")
            seconds = timing["seconds"].to_numpy()
            mean, median = seconds[2:-1].mean(), np.median(seconds[2:-1])
            rows[name] = mean
            print(
                f"{name:>15}: {wall:6.1f} s for {updates} updates in all, first update {seconds[0]:.1f} s; "
                f"then {1000 * mean:.1f} ms an update (median {1000 * median:.1f}), {tokens / mean:,.0f} tokens/s",
                flush=True,
            )
    share = 1 - rows["without"] / rows["with telemetry"]
    print(f"telemetry takes {100 * share:.1f} % of the time of an update")
    assert share < 0.5, "telemetry takes more than training itself"


if __name__ == "__main__":
    main()
