"""Lambda of a published model's attention and the bounds on it, a block at a time.

Measured is one sequence, shorter than the one that the rows are of: the cost of a certificate grows with the square of
its length (`sens.block_operator_norm`), and with the square of the model's width.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import polars as pl
from jaxtyping import Array, Float, Int

import sens
from analysis.bounds import measure_attention, norm_reach
from analysis.probes import HEAD_COLUMNS
from analysis.records import BOUND_COLUMNS
from models import ModelConfig, gpt

KEY = 0
"""Seed of the searches: the same for every model, so that differences are not theirs."""


class At(NamedTuple):
    """Where a sequence is: between two blocks."""

    x: Float[Array, "t d"]
    reach: Float[Array, ""]
    """What no token of it exceeds in RMS norm, by the norm that it left last; as measured where there was none."""


class Measured(NamedTuple):
    """One layer."""

    layer: dict[str, Any]
    heads: list[dict[str, Any]]


@functools.partial(jax.jit, static_argnums=0)
def start(config: ModelConfig, ends: gpt.Params, tokens: Int[Array, " t"]) -> At:
    """Before the first block."""
    x = gpt.embed(config, {"ends": ends}, tokens)
    return At(x, norm_reach(ends["norm_embedding"]) if config.embedding_norm else sens.norm_inf_rms(x))


@functools.partial(jax.jit, static_argnums=0)
def advance(config: ModelConfig, block: gpt.Params, at: At) -> At:
    """After a block."""
    return At(gpt.block(config, block, at.x), norm_reach(block["norm_ffn"]))


def measure(config: ModelConfig, block: gpt.Params, at: At, layer: int) -> Measured:
    """`bounds.measure_attention` before a block."""
    key = jax.random.fold_in(jax.random.key(KEY), layer)
    with jax.default_matmul_precision("highest"):  # an accelerator's default would not keep the digits of a bound
        figures, heads = jax.device_get(_measure(config, block, *at, key))
    of_heads = [{name: values[head] for name, values in heads.items()} for head in range(config.n_head)]
    plain = lambda line: {name: _plain(value) for name, value in line.items()}  # noqa: E731
    return Measured(
        {"layer": layer, **plain(figures)},
        [{"layer": layer, "head": head, **plain(line)} for head, line in enumerate(of_heads)],
    )


@functools.partial(jax.jit, static_argnums=0)
def _measure(config: ModelConfig, block: gpt.Params, x: Array, reach: Array, key: Array) -> Any:
    return measure_attention(config, block, x, reach, key)


def _plain(value: np.ndarray) -> Any:
    """A Python number; None for one that does not apply or of which nothing was proved."""
    number = value.item()
    return None if isinstance(number, float) and not np.isfinite(number) else number


def table(measured: Sequence[Measured]) -> pl.DataFrame | None:
    """A line a layer, in columns of `records.BOUND_COLUMNS`; None where nothing was measured."""
    return _frame([one.layer for one in measured], BOUND_COLUMNS)


def pathways_table(measured: Sequence[Measured]) -> pl.DataFrame | None:
    """A line a head, in columns of `probes.HEAD_COLUMNS`; None where nothing was measured."""
    return _frame([line for one in measured for line in one.heads], HEAD_COLUMNS)


def _frame(lines: Sequence[dict[str, Any]], columns: Any) -> pl.DataFrame | None:
    if not lines:
        return None
    return pl.DataFrame(lines, schema={name: kind for name, kind in columns.items() if name in lines[0]})
