"""The Jacobian profile of a published model through depth, a block at a time (`analysis.depth` of one in memory).

Cotangents go from the output down, so each block is read again, from the last to the first; in memory are one block,
one stream a layer, the probes and the inside of one sublayer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Array, Float, Int

from analysis import depth
from analysis.records import DEPTH_COLUMNS
from models import ModelConfig, gpt
from models.pretrained import Pretrained
from sens import products

PROBES = 8
KEY = 0


def profile(
    model: Pretrained,
    config: ModelConfig,
    tokens: Int[np.ndarray, " t"],
    streams: Sequence[Float[Array, "t d"]],
    step: Callable[[], None] = lambda: None,
) -> pl.DataFrame:
    """The columns of `records.DEPTH_COLUMNS` by sublayer, on one sequence without padding.

    Args:
      model: read from its last block to its first.
      config: its configuration, or the same at another temperature.
      tokens: the sequence.
      streams: what enters each block, and what leaves the last.
      step: called after each block.

    The loss is that of the next token; a model without it (bidirectional, or without a head) has no gradient columns.
    """
    key_product, key_sublayer = jax.random.split(jax.random.key(KEY))
    end = streams[-1]
    cotangents, length = depth.probe_signs(key_product, PROBES, end.shape, end.dtype), None
    if config.causal and config.head in ("tied", "untied"):
        unit, length = _gradient(config, model.ends(), end, jnp.asarray(tokens))
        cotangents = jnp.concatenate([cotangents, unit[None]])
    terms = products.Terms(cotangents, cotangents, jnp.zeros_like(cotangents))
    found = []
    for layer in reversed(range(config.n_layer)):
        block = model.block(layer)
        terms, figures = _pull_block(config, block, streams[layer], cotangents, terms, key_sublayer)
        found.append(jax.device_get(figures))
        del block  # before the next one is read
        step()
    # The last axis of each figure but `a` is that of a block's two sublayers.
    measured, alone, a = jax.tree.map(lambda *parts: np.concatenate(parts, axis=-1), *reversed(found))
    figures = {
        **alone,
        **depth.gain_figures(config, jnp.asarray(a.T)),
        **depth.to_output(jax.tree.map(lambda figure: figure[:PROBES], measured), end.size),
    }
    if length is not None:
        figures |= depth.to_output_of_gradient(jax.tree.map(lambda figure: figure[-1], measured), length)
    lines = [{"layer": line["sublayer"] // 2, **line} for line in depth.record_depth(0, figures)]
    columns = {"layer": pl.Int64, **DEPTH_COLUMNS}
    return pl.DataFrame(lines, schema=columns).drop("update")


@functools.partial(jax.jit, static_argnums=0)
def _gradient(config: ModelConfig, ends: gpt.Params, end: Float[Array, "t d"], tokens: Int[Array, " t"]) -> Any:
    """Direction and length of the loss's gradient with respect to the stream that leaves the last block."""
    loss = lambda end: depth.loss(config, {"ends": ends}, end[:-1], tokens[1:])  # noqa: E731
    return depth.unit_and_length(jax.grad(loss)(end))


@functools.partial(jax.jit, static_argnums=0)
def _pull_block(
    config: ModelConfig,
    block: gpt.Params,
    x: Float[Array, "t d"],
    cotangents: Float[Array, "vectors t d"],
    terms: products.Terms,
    key: Array,
) -> tuple[products.Terms, Any]:
    """Terms through one block, and its figures: inner products (vector, sublayer), of each sublayer alone, its `a`."""
    linked = depth.link_blocks(config, jax.tree.map(lambda leaf: leaf[None], block), x)

    def one(u: Array, terms: products.Terms) -> Any:
        return products.pull_terms(linked, terms, 0, 2, lambda _, terms: depth.inner_products(u, terms))

    terms, measured = jax.vmap(one)(cotangents, terms)
    alone = depth.near_identity(linked.sublayers, block, linked.points, key, PROBES)
    return terms, (measured, alone, jnp.stack(gpt.norm_gains(config, block, x), axis=-1))
