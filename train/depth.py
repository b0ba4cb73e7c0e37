"""Products through depth measured on a run: their lines of the record during training, and pairs of depths offline."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from analysis import depth
from models import ModelConfig, gpt

SEQUENCES = 4
"""Of the micro-batch, at most: sequences do not act on each other, so that a few are a sample of them all."""
KEY = 0
"""Seed of the probes: the same for every update and run, so that differences are not theirs."""


def depth_rows(model: ModelConfig, params: gpt.Params, update: int, sequences: np.ndarray) -> list[dict[str, Any]]:
    """The lines of the depth table, measured on the first of some sequences (inputs and, shifted by one, targets)."""
    figures = _jitted(depth.measure_depth, model)(params, sequences[:SEQUENCES], jax.random.key(KEY))
    return list(depth.record_depth(update, jax.device_get(figures)))


def pair_rows(
    model: ModelConfig,
    params: gpt.Params,
    update: int,
    sequences: np.ndarray,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[dict[str, Any]]:
    """The lines of the pairs table: terms between all depths and a grid of them, singular values within the grid.

    `progress(done, total)` counts products.
    """
    inputs = sequences[:SEQUENCES, :-1]
    key = jax.random.key(KEY)
    grid = depth.boundaries(2 * model.n_layer)
    done, total = 0, len(grid) * (len(grid) - 1) // 2
    for stop in grid[1:]:
        column = _jitted(depth.measure_column, model)(params, inputs, key, stop)
        single = {}
        for start in (start for start in grid if start < stop):
            single[start] = jax.device_get(_jitted(depth.measure_pair, model)(params, inputs[0], key, start, stop))
            if stop == grid[-1]:
                block = _jitted(depth.measure_block_norm, model)(params, inputs[0], key, start, stop)
                single[start] |= jax.device_get(block)
            done += 1
            progress(done, total)
        yield from depth.record_pairs(update, stop, jax.device_get(column), single)


@functools.cache
def _jitted(measure: Callable[..., depth.Figures], model: ModelConfig) -> Callable[..., depth.Figures]:
    """One program for all updates and runs of a model, and for all pairs of depths."""
    return jax.jit(functools.partial(measure, model))
