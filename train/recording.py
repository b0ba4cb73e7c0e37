"""From the numbers of an update to the record, one update late: they are fetched while the next one is computed."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from analysis import records
from train import directory, processes, telemetry
from train.flops import model_flops
from train.presets import RunConfig


class TrainingError(RuntimeError):
    """A run that cannot go on: what happened, where, and what is kept."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a live line shows after an update."""

    update: int
    updates: int
    loss: float
    tokens_per_second: float
    mfu: float | None
    """Share of the devices' peak that the model's own operations take (`train.flops`); None: the peak is not known."""


@dataclasses.dataclass(frozen=True)
class UnderWay:
    """An update that was sent to the devices: its numbers are there when they are asked for."""

    update: int
    metrics: dict[str, Any]
    begun: dict[str, Any]
    """Telemetry that was begun with it."""


class Recorder:
    """Takes updates in as they end: checks their numbers and, in the first process, writes them down."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        checkpointer: Any,
        events: Any,
        on_update: Callable[[Progress], None],
        *,
        skip_nonfinite: int,
        peak_tflops: float | None,
    ) -> None:
        self._run, self._config, self._checkpointer, self._events = run, config, checkpointer, events
        self._on_update, self._skip_nonfinite = on_update, skip_nonfinite
        self._peak = None if peak_tflops is None else peak_tflops * 1e12 * jax.device_count()
        self._skips = _skips(run)
        self._ended = time.perf_counter()

    def take(self, ended: UnderWay, more: Callable[[], dict[str, telemetry.Lines]] = dict) -> None:
        """Wait for an update's numbers and record them, with what `more()` measures once they are known to be finite.

        Raises `TrainingError` before anything of the update is recorded if they are not.
        """
        update, metrics = ended.update, jax.device_get(ended.metrics)
        figures = self._checked(update, metrics)
        tokens = self._config.train.micro_batch * self._config.train.accumulation * self._config.model.context
        row = {
            "update": update,
            **{name: value if np.isfinite(value) else None for name, value in figures.items()},
            "tokens": update * tokens,
            "skipped": self._skips[0],
        }
        tables = {
            "updates": [row],
            **telemetry.finish(self._config, update, ended.begun, metrics, self._check),
            **more(),
        }
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        mfu = None if self._peak is None else model_flops(self._config.model, tokens) / seconds / self._peak
        tables["timing"] = [
            {"update": update, "seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": mfu},
        ]
        if processes.first():
            for table, rows in tables.items():
                records.append(self._run, table, rows)
                if table != "timing":
                    self._events.write(table, rows)
            self._on_update(Progress(update, self._config.train.updates, figures["loss"], tokens / seconds, mfu))

    def _checked(self, update: int, metrics: dict[str, Any]) -> dict[str, float]:
        """The update's figures; too many that are not finite, one after another, stop the run."""
        skipped, in_a_row = self._skips
        finite = np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
        self._skips = (skipped, 0) if finite else (skipped + 1, in_a_row + 1)
        if in_a_row >= self._skip_nonfinite:
            self._check(update, metrics, ("loss", "grad_norm"))
        return {name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")}

    def _check(self, update: int, values: dict[str, Any], names: Sequence[str]) -> None:
        """Stop before anything of an update is recorded or saved whose named values are not all finite."""
        for name in names:
            array = np.asarray(values[name])
            if not np.isfinite(array).all():
                self._checkpointer.wait()  # a save under way is that of an update that was finite
                helps = "loss" in names and not self._skip_nonfinite
                skip = ", or --skip-nonfinite to pass over a few such updates" if helps else ""
                raise TrainingError(
                    f"{self._run}: {name} is {array[~np.isfinite(array)].flat[0]} at update {update} (learning rate "
                    f"{float(values['learning_rate']):.3g}); {directory.kept(self._run)}. Remedy: a new run with a "
                    f"lower lr, a longer warmup or a smaller clip{skip}"
                )


def _skips(run: Path) -> tuple[int, int]:
    """Updates that were skipped so far, and how many of them in a row up to now."""
    counts = records.read_table(run, "updates")["skipped"].to_list()
    steps = [after - before for before, after in itertools.pairwise([0, *counts])]
    return sum(steps), sum(1 for _ in itertools.takewhile(bool, reversed(steps)))
