"""Statistics of attention rows from any framework: what telemetry and `sens inspect` record of every row."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sens import checks
from sens.bracket import theta_bracket
from sens.softmax import normalised_entropy
from sens.theta import theta_prefix

HALF_SUM_TOLERANCE = 1e-2
"""How far the sum of a row of 16-bit numbers may be from one: each of them is rounded by up to 1/500 of itself."""


class AttentionStats(NamedTuple):
    """What is known of each row; every field has the rows' leading shape."""

    entropy: Float[Array, "*rows"]
    """-sum p log p / log n, n the size of the support; NaN where that is one."""
    p_max: Float[Array, "*rows"]
    """The largest entry."""
    prefix: Float[Array, "*rows"]
    """The paper's prefix certificate, a lower bound on theta (`sens.theta_prefix`)."""
    lower: Float[Array, "*rows"]
    """lower <= theta <= upper, proved (`sens.theta_bracket`)."""
    upper: Float[Array, "*rows"]
    width: Float[Array, "*rows"]
    """upper - lower."""

    @property
    def discrepancy(self) -> Float[Array, "*rows"]:
        """D = sqrt(1 - theta), the largest that the bracket allows: what tells rows near theta = 1 apart."""
        return jnp.sqrt(1 - self.lower)


def attention_stats(p: Any, where: Any = None) -> AttentionStats:
    """The `AttentionStats` of every attention row p = softmax(u / tau) along the last axis.

    Theta is ‖J_1(u)‖_{inf→1}, dimensionless, at temperature one; divide by tau for the norm at tau.

    Args:
      p: rows of probabilities, (*rows, n), as one array that speaks the array interface or DLPack: NumPy, JAX (also
        inside `jit` and `vmap`), PyTorch without a gradient. A model's weights (batch, head, query, key) are such
        rows. float16 and bfloat16 are taken as float32 and divided by their sum.
      where: booleans that broadcast to `p`, False where a key is masked. Without it the support of a row is its whole
        axis: theta and p_max are the same, but the entropy of a causal row is divided by the log of too many.

    Returns:
      JAX arrays of shape (*rows,), float64 for float64 rows, otherwise float32.

    Raises:
      TypeError: not such an array, or one of another dtype; float64 rows where JAX's x64 is off.
      ValueError: no axis or an empty one, a mask that does not broadcast, a row that is not one of probabilities (the
        first offending entry is named; inside `jit` the row's figures are NaN).

    >>> stats = attention_stats(np.array([[0.5, 0.25, 0.25], [0.9, 0.1, 0.0]], np.float32))
    >>> print([f"{theta:.3f}" for theta in stats.lower], stats.p_max)
    ['1.000', '0.360'] [0.5 0.9]
    """
    where = None if where is None else _taken(where, "where")
    rows = checks.as_rows(_widened(_taken(p, "p"), where), where)
    stats = _measure(rows, _support(where, rows.shape))
    checks.raise_on_invalid(stats.lower, rows, where)
    return stats


def _support(where: Any, shape: tuple[int, ...]) -> Int[Array, "*rows"]:
    """Size of each row's support, counted before the mask is broadcast over heads: many times less work."""
    if where is None:
        return jnp.full(shape[:-1], shape[-1])
    own = jnp.broadcast_to(where, (*jnp.shape(where)[:-1], shape[-1]))
    return jnp.broadcast_to(jnp.sum(own, axis=-1), shape[:-1])


@jax.jit  # no masks inside: what they leave out is zero already, and each function would apply them again
def _measure(rows: Float[Array, "*rows n"], support: Int[Array, "*rows"]) -> AttentionStats:
    lower, upper = theta_bracket(rows)
    of_all = math.log(max(rows.shape[-1], 2))
    relative = of_all / jnp.log(jnp.maximum(support, 2).astype(rows.dtype))
    return AttentionStats(
        entropy=jnp.where(support > 1, normalised_entropy(rows) * relative, jnp.nan),
        p_max=jnp.where(jnp.isnan(lower), jnp.nan, jnp.max(rows, axis=-1)),
        prefix=theta_prefix(rows),
        lower=lower,
        upper=upper,
        width=upper - lower,
    )


class Sinks(NamedTuple):
    """The key that collects the most mass over a sequence's rows, and each row's mass on it."""

    position: Int[Array, "*heads"]
    mass: Float[Array, "*heads query"]


def attention_sinks(weights: Any, where: Any = None) -> Sinks:
    """The sink of each attention matrix (query, key): argmax over keys j of sum_i p_ij, the first of equals.

    Arguments as for `attention_stats`, with a query axis before the last; queries that are padding can be masked
    along their whole row. Rows are not checked to be probabilities.

    >>> sinks = attention_sinks(np.array([[1.0, 0.0], [0.75, 0.25]], np.float32))
    >>> print(sinks.position, sinks.mass)
    0 [1.   0.75]
    """
    p = checks.as_float(_taken(weights, "weights"), "weights")
    if p.ndim < 2 or 0 in p.shape[-2:]:
        raise ValueError(f"weights have shape {p.shape}; (..., query, key) with at least one of each is wanted")
    mask = checks.as_mask(None if where is None else _taken(where, "where"), p.shape)
    inside = p if mask is None else jnp.where(mask, p, jnp.zeros((), p.dtype))
    position = jnp.argmax(jnp.sum(inside, axis=-2), axis=-1)
    return Sinks(position, jnp.take_along_axis(p, position[..., None, None], axis=-1)[..., 0])


def _taken(x: Any, name: str) -> Any:
    """An array of JAX or NumPy from one of any framework, without a copy where both sides know how.

    NumPy first: it keeps float64, which JAX would round here; DLPack for what NumPy has no dtype or no memory for.
    """
    if isinstance(x, jax.Array | np.ndarray):
        return x
    if not any(hasattr(x, protocol) for protocol in ("__array__", "__array_interface__", "__dlpack__")):
        kind = type(x).__name__
        raise TypeError(f"{name} is a {kind}; an array of NumPy, PyTorch, JAX (array interface or DLPack) is wanted")
    try:
        return np.from_dlpack(x) if not hasattr(x, "__array__") and hasattr(x, "__dlpack__") else np.asarray(x)
    except Exception as error:  # each framework raises its own
        if not hasattr(x, "__dlpack__"):
            raise TypeError(f"{name}, a {type(x).__name__}, cannot be taken as an array: {error}") from error
    try:
        return jnp.from_dlpack(x)
    except Exception as error:
        raise TypeError(f"{name}, a {type(x).__name__}, cannot be taken through DLPack: {error}") from error


def _widened(p: Any, where: Any) -> Any:
    """16-bit rows as float32 rows of sum one; a sum that rounding does not explain stays as it is."""
    if p.dtype not in (jnp.float16, jnp.bfloat16):
        return p
    rows = jnp.asarray(p).astype(jnp.float32)
    total = jnp.sum(rows, axis=-1, keepdims=True, where=checks.as_mask(where, rows.shape))
    return jnp.where(jnp.abs(total - 1) <= HALF_SUM_TOLERANCE, rows / total, rows)
