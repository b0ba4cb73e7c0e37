"""Lambda and its bounds measured on a run: their lines of the record during training, and on a checkpoint offline."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from analysis.bounds import measure_layer, record_heads, record_layer
from models import ModelConfig, gpt

KEY = 0
"""Seed of the searches: the same for every update and run, so that differences are not theirs."""

Lines = list[dict[str, Any]]


def bound_lines(
    model: ModelConfig,
    params: gpt.Params,
    update: int,
    sequences: np.ndarray,
    layers: Sequence[int],
    *,
    float64: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[Lines, Lines]:
    """The lines of the bounds table and of the heads table, measured on the first of some sequences.

    One forward pass, then layer by layer. `progress(done, total)` counts layers.
    """
    of_layers, of_heads = [], []
    # Bounds want the digits of their dtype, which an accelerator's default product of matrices does not keep.
    with jax.enable_x64(True) if float64 else contextlib.nullcontext(), jax.default_matmul_precision("highest"):
        # Through NumPy: inside the context a float32 array could not become float64 otherwise.
        exact = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64 if float64 else leaf.dtype), params)
        entering = _jitted_streams(model)(exact, jnp.asarray(sequences[0], jnp.int32))
        for done, layer in enumerate(layers, 1):
            key = jax.random.fold_in(jax.random.key(KEY), layer)
            figures, heads = jax.device_get(_jitted_layer(model)(exact, entering, jnp.int32(layer), key))
            of_layers.append(record_layer(update, layer, figures))
            of_heads.extend(record_heads(update, layer, heads))
            progress(done, len(layers))
    return of_layers, of_heads


@functools.cache
def _jitted_streams(model: ModelConfig) -> Callable[..., jax.Array]:
    return jax.jit(lambda params, tokens: gpt.hidden_states(model, params, tokens)[:-1])


@functools.cache
def _jitted_layer(model: ModelConfig) -> Callable[..., Any]:
    return jax.jit(functools.partial(measure_layer, model))
