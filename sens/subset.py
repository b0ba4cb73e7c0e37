"""The subset behind theta: `bisect` finds one that halves a row, `theta_of_subset` is its share in closed form."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from sens import checks, discrepancy
from sens.bracket import on_grid

_HEAD = 10


def theta_of_subset(
    p: Float[ArrayLike, "*rows n"], subset: Bool[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None
) -> Float[Array, "*rows"]:
    """4 p(S)(1 - p(S)): a lower bound on theta for every S, differentiable in p.

    At a best S it is theta, and its derivative theta's: where the best S is unique the maximum's derivative is that of
    the maximised expression (Danskin). An invalid row is a `ValueError`, inside jit NaN.

    >>> import jax.numpy as jnp
    >>> print(theta_of_subset(jnp.array([0.5, 0.25, 0.25]), jnp.array([False, True, False])))
    0.75
    """
    rows = checks.as_rows(p, where)
    c = jnp.sum(checks.as_rows(rows, subset), axis=-1) / jnp.sum(rows, axis=-1)
    result = jnp.where(checks.row_is_valid(rows), 4 * c * (1 - c), math.nan)
    checks.raise_on_invalid(result, p, where)
    return result


def bisect(p: Float[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None) -> Bool[Array, "*rows n"]:
    """A subset S with p(S) as near to one half as found: x = +1 on S, -1 elsewhere is the theorem's maximiser.

    The best of: the sorted prefixes; all signs of the ten largest entries with the rest dealt greedily; each of those
    against the whole rest; the largest entry opposite the smallest, and so on inwards; and, for rows of a few values,
    the best numbers of each (`sens.discrepancy.clusters_bounds`). On a row that `theta_bracket` closes to `tol`,
    `theta_of_subset(p, S)` is within `tol` of theta in all our tests; the bracket is the proof. No derivative (S is
    discrete). An invalid row is a `ValueError`, inside jit the empty set.

    >>> import jax.numpy as jnp
    >>> print(bisect(jnp.array([0.4, 0.3, 0.2, 0.1])))
    [ True False False  True]
    """
    rows = lax.stop_gradient(checks.as_rows(p, where))
    valid = checks.row_is_valid(rows)
    checks.raise_on_invalid(jnp.where(valid, 0, jnp.full((), math.nan, rows.dtype)), p, where)
    flat = rows.reshape(-1, rows.shape[-1])
    return _bisect(flat).reshape(rows.shape) & (rows > 0) & valid[..., None]


@jax.jit  # called eagerly, the loop inside would be compiled again at every call
def _bisect(p: Float[Array, "R n"]) -> Bool[Array, "R n"]:
    return lax.map(_bisect_row, p, batch_size=64)


def _bisect_row(p: Float[Array, " n"]) -> Bool[Array, " n"]:
    n = p.shape[0]
    order = jnp.argsort(p, descending=True)
    q = on_grid(p)[order]
    total = jnp.sum(q, dtype=q.dtype)
    k = min(n, _HEAD)
    signs = jnp.asarray(1 - 2 * (np.arange(2 ** (k - 1))[:, None] >> np.arange(k) & 1), q.dtype)
    sums = jnp.sum(signs * q[None, :k], axis=1, dtype=q.dtype)
    tail = total - jnp.sum(q[:k], dtype=q.dtype)

    ends = discrepancy.fold(q[k:, None], jnp.abs(sums))
    pattern = jnp.argmin(ends)
    greedy = jnp.concatenate([signs[pattern], _greedy_signs(q[k:], sums[pattern])]) > 0

    apart = jnp.abs(jnp.abs(sums) - tail)
    pattern = jnp.argmin(apart)
    against = jnp.concatenate([signs[pattern], jnp.broadcast_to(-jnp.sign(sums[pattern]), n - k)]) > 0

    prefix = jnp.cumsum(q)
    differences = jnp.abs(prefix - (total - prefix))
    first = jnp.arange(n) <= jnp.argmin(differences)

    paired, clustered = _pair_signs(q), discrepancy.clusters_signs(q, total)
    left = [jnp.abs(jnp.sum(x * q, dtype=q.dtype)) for x in (paired, clustered)]

    best = jnp.argmin(jnp.stack([jnp.min(ends), jnp.min(apart), jnp.min(differences), *left]))
    chosen = jnp.stack([greedy, against, first, paired > 0, clustered > 0])[best]
    return jnp.zeros(n, bool).at[order].set(chosen)


def _pair_signs(q: Int[Array, " n"]) -> Int[Array, " n"]:
    """Signs of `discrepancy.pairs_upper`: the two of a pair differ, so that a fold is over the pairs' differences."""
    n = q.shape[0]
    support = jnp.sum(q > 0)
    half, j = support // 2, jnp.arange(n)
    partner = jnp.clip(support - 1 - j, 0, n - 1)
    middle = jnp.where(support % 2 == 1, q[half], 0)
    signs = _greedy_signs(jnp.where(j < half, q - q[partner], 0), middle)
    return jnp.where(j < half, signs, jnp.where(j < support - half, jnp.ones_like(signs), -signs[partner]))


def _greedy_signs(q: Int[Array, " m"], start: Int[Array, ""]) -> Int[Array, " m"]:
    """Signs that a fold from |start| gives: each number against the running sum."""

    def step(running, x):
        sign = jnp.where(running > 0, -1, 1).astype(q.dtype)
        return running + sign * x, sign

    return lax.scan(step, start, q)[1]
