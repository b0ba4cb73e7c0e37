"""Several runs of one configuration, a seed and a placement each: one after the other, left alone when finished."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis import records
from train import progress
from train.loop import TrainingError, train
from train.presets import RunConfig, from_json


def variants(out: Path, config: RunConfig, placements: Sequence[str], seeds: Sequence[int]) -> dict[Path, RunConfig]:
    """The runs' directories, `out/pre-42` and so on, with their configurations."""
    return {
        out / f"{placement}-{seed}": RunConfig(
            dataclasses.replace(config.model, placement=placement), dataclasses.replace(config.train, seed=seed)
        )
        for placement in placements
        for seed in seeds
    }


def finished(run: Path, config: RunConfig) -> bool:
    """Whether the run is this one with its last checkpoint whole (anything else is left to `train`)."""
    if not (run / "checkpoints" / str(config.train.updates)).is_dir():
        return False
    try:
        return from_json(records.read_config(run)) == config
    except ValueError:  # of another version: `train` says which fields
        return False


def sweep(
    runs: dict[Path, RunConfig],
    data: Path,
    *,
    say: Callable[[str], None],
    after: Callable[[Path], None] = lambda _: None,
    **options: Any,
) -> None:
    """Train what is not finished, with `options` of `train.loop.train`, and call `after` with every finished run.

    A run that cannot go on does not keep the others from being trained; `TrainingError` then names it at the end.
    """
    stopped = []
    for run, config in runs.items():
        if not finished(run, config):
            say(f"{config.model.placement}-LN, seed {config.train.seed}: {config.train.updates} updates, into {run}")
            try:
                with progress.training(run.name) as on_update:
                    train(run, config, data, on_update=on_update, **options)
            except TrainingError as error:
                stopped.append(str(error))
                continue
        after(run)
    if stopped:
        raise TrainingError(f"{len(stopped)} of {len(runs)} runs stopped: {'; '.join(stopped)}")
