"""Attention statistics of theory.md, section 5: quantities of every row on the device, their summaries for the record.

Everything is measured in evaluation mode: with dropout on the attention weights a row is no longer a distribution.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

import sens
from analysis.records import QUANTITIES, STATISTICS
from models import ModelConfig, gpt

Rows = dict[str, Any]
"""One array a quantity of `QUANTITIES`, axes (sampled layer, sequence, head, position)."""


def sampled_layers(n_layer: int) -> tuple[int, ...]:
    """Layers whose attention is recorded during training: 0, N/4, N/2, 3N/4, N-1, each once."""
    return tuple(sorted({0, n_layer // 4, n_layer // 2, 3 * n_layer // 4, n_layer - 1}))


def measure_rows(model: ModelConfig, params: gpt.Params, tokens: Int[Array, "b t"], layers: Sequence[int]) -> Rows:
    """Quantities of all rows of some layers, holding one layer's attention at a time. Call it under `jax.jit`."""
    seen = gpt.support(model, tokens.shape[-1])
    _, entering = gpt.scan_blocks(model, params, gpt.embed(model, params, tokens), collect=lambda _, x: x)
    index = jnp.asarray(layers)

    def measure(layer_and_x):
        layer, x = layer_and_x
        return sens.attention_stats(gpt.attention_weights(model, gpt.layer(params, layer), x), seen)._asdict()

    return jax.lax.map(measure, (index, entering[index]))


def summaries(values: Shaped[np.ndarray, "k n"]) -> list[dict[str, Any]]:
    """Of each row of values `count` and the `STATISTICS` of those that are not NaN (none: null).

    Quantiles between two values are interpolated, as `np.percentile` does.
    """
    ordered = np.sort(values.astype(np.float64), axis=-1)  # NaN at the end
    count = np.count_nonzero(~np.isnan(ordered), axis=-1)
    last = np.maximum(count - 1, 0)[:, None]
    place = last * np.array([0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
    below = np.floor(place).astype(int)
    low, high = (np.take_along_axis(ordered, at, axis=-1) for at in (below, np.minimum(below + 1, last)))
    between = np.subtract(high, low, out=np.zeros_like(low), where=(high > low) & (place > below)) * (place - below)
    means = np.nansum(ordered, axis=-1) / np.maximum(count, 1)
    numbers = np.column_stack([means, low + between]).tolist()
    return [
        {"count": int(n), **(dict(zip(STATISTICS, row, strict=True)) if n else dict.fromkeys(STATISTICS))}
        for n, row in zip(count, numbers, strict=True)
    ]


def summarise(values: np.ndarray) -> dict[str, Any]:
    """`summaries` of one array of values."""
    return summaries(values.reshape(1, -1))[0]


def by_head(values: Shaped[np.ndarray, "k s h t"]) -> list[list[tuple[int | None, dict[str, Any]]]]:
    """Of each of k arrays, summaries pooled over heads (None), and of each head: two sorts in all."""
    k, _, h, _ = values.shape
    pooled = summaries(values.reshape(k, -1))
    heads = summaries(np.moveaxis(values, 2, 1).reshape(k * h, -1))
    return [[(None, pooled[i]), *enumerate(heads[i * h : (i + 1) * h])] for i in range(k)]


def record_rows(update: int, layers: Sequence[int], rows: Rows) -> Iterator[dict[str, Any]]:
    """The lines of the attention table: per layer and quantity, pooled over heads (head null) and for each head."""
    values = np.concatenate([rows[quantity] for quantity in QUANTITIES])
    for (quantity, layer), heads in zip(itertools.product(QUANTITIES, layers), by_head(values), strict=True):
        for head, summary in heads:
            yield {"update": update, "layer": layer, "head": head, "quantity": quantity, **summary}
