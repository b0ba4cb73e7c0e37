"""Attention statistics of theory.md, section 5: quantities of every row on the device, their summaries for the record.

Everything is measured in evaluation mode: with dropout on the attention weights a row is no longer a distribution.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

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


def summarise(values: np.ndarray) -> dict[str, Any]:
    """`count` and the `STATISTICS` of the values that are not NaN."""
    values = values[~np.isnan(values)].astype(np.float64)
    if not values.size:
        return {"count": 0, **dict.fromkeys(STATISTICS)}
    low, p5, p25, median, p75, p95, high = np.percentile(values, [0, 5, 25, 50, 75, 95, 100])
    numbers = (values.mean(), low, p5, p25, median, p75, p95, high)
    return {"count": values.size, **{name: float(value) for name, value in zip(STATISTICS, numbers, strict=True)}}


def record_rows(update: int, layers: Sequence[int], rows: Rows) -> Iterator[dict[str, Any]]:
    """The lines of the attention table: per layer and quantity, pooled over heads (head null) and for each head."""
    for quantity in QUANTITIES:
        for layer, values in zip(layers, np.asarray(rows[quantity]), strict=True):
            heads = [None, *range(values.shape[1])]
            for head in heads:
                chosen = values if head is None else values[:, head]
                yield {
                    "update": update,
                    "layer": layer,
                    "head": head,
                    "quantity": quantity,
                    **summarise(chosen.ravel()),
                }
