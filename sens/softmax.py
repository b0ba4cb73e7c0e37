"""The tempered softmax, its Jacobian and the norms of that Jacobian (theory: "Exact softmax sensitivity").

With p = softmax(u / tau) the Jacobian is J = (Diag(p) - p pᵀ) / tau. Its inf→1 norm is theta(p) / tau (`sens.theta`);
the other norms here are those of a row divided by its sum and, multiplied by tau, ordered as

    lambda_max(J) ≤ g_1(p) ≤ 2 max p(1-p) = ‖J‖_{1→1} = ‖J‖_{inf→inf} ≤ theta/2 ≤ 1/2.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from sens import checks


def softmax(
    u: Float[ArrayLike, "*rows n"],
    tau: float | Float[ArrayLike, ""] = 1.0,
    where: Bool[ArrayLike, "*rows n"] | None = None,
) -> Float[Array, "*rows n"]:
    """Tempered softmax s_tau(u) = exp(u/tau) / sum exp(u/tau) over the last axis.

    Entries outside `where` (and entries of -inf) get probability zero and derivative zero. An empty support is a
    `ValueError`, inside jit a row of NaN.

    >>> import jax.numpy as jnp
    >>> print(softmax(jnp.array([0.0, 0.0, 5.0]), where=jnp.array([True, True, False])))
    [0.5 0.5 0. ]
    """
    u = checks.as_float(u, "u")
    tau = _temperature(tau, u.dtype)
    mask = checks.as_mask(where, u.shape)
    support = u != -jnp.inf if mask is None else mask & (u != -jnp.inf)
    _refuse_empty(support, mask)
    # Twice-where: an entry outside the support never meets an infinity, so no 0 * inf in the derivative.
    top = lax.stop_gradient(jnp.max(u, axis=-1, keepdims=True, where=support, initial=-jnp.inf))
    weights = jnp.where(support, jnp.exp(jnp.where(support, u - top, 0) / tau), 0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _refuse_empty(support: Bool[Array, "*rows n"], mask: Bool[Array, "*rows n"] | None) -> None:
    """Name the first row without support; inside a transformation, where it is not known, nothing."""
    for seen, why in ((mask, "`where` is False along the whole row"), (support, "no entry in it is above -inf")):
        if seen is not None and not checks.is_traced(seen) and (empty := ~np.asarray(jnp.any(seen, axis=-1))).any():
            row = tuple(int(i) for i in np.argwhere(empty)[0])
            raise ValueError(f"row {row}: empty support ({why})")


def softmax_jacobian(
    u: Float[ArrayLike, "*rows n"],
    tau: float | Float[ArrayLike, ""] = 1.0,
    where: Bool[ArrayLike, "*rows n"] | None = None,
) -> Float[Array, "*rows n n"]:
    """J_tau(u) = (Diag(p) - p pᵀ) / tau with p = s_tau(u): symmetric, positive semidefinite, rows summing to zero.

    >>> import jax.numpy as jnp
    >>> print(softmax_jacobian(jnp.zeros(2)))
    [[ 0.25 -0.25]
     [-0.25  0.25]]
    """
    p = softmax(u, tau, where)
    identity = jnp.eye(p.shape[-1], dtype=p.dtype).reshape((1,) * (p.ndim - 1) + (p.shape[-1],) * 2)
    return p[..., :, None] * (identity - p[..., None, :]) / _temperature(tau, p.dtype)


def _temperature(tau: float | Float[ArrayLike, ""], dtype: jnp.dtype) -> Float[Array, ""]:
    if not checks.is_traced(tau) and not np.all(np.asarray(tau) > 0):
        raise ValueError(f"tau = {tau}: a positive temperature is wanted")
    return jnp.asarray(tau, dtype)


def norm_inf_to_one(J: Float[ArrayLike, "*rows m n"]) -> Float[Array, "*rows"]:
    """Exact inf→1 norm, max over sign vectors x of ‖J x‖_1, by enumeration: 2^(n-1) products, n ≤ 24.

    A convex function takes its maximum over the cube at a corner, and x and -x give the same value. The signs of the
    first 12 coordinates are one matrix product; the rest is a loop, so memory stays at 4096 × m numbers whatever n is.
    Differentiable (the derivative is the one at the maximiser).

    >>> import jax.numpy as jnp
    >>> print(f"{norm_inf_to_one(softmax_jacobian(jnp.zeros(3))):.4f}")  # theta of a uniform row of three: 1 - 1/9
    0.8889
    """
    J = checks.as_float(J, "J")
    if J.ndim < 2 or not 1 <= J.shape[-1] <= 24:
        raise ValueError(
            f"J has shape {J.shape}; (..., m, n) with 1 ≤ n ≤ 24 is wanted (2^(n-1) sign vectors are tried)"
        )
    matrices = lax.stop_gradient(J).reshape(-1, *J.shape[-2:])
    x = _best_signs(matrices).reshape(*J.shape[:-2], J.shape[-1])
    return jnp.sum(jnp.abs(jnp.einsum("...mn,...n->...m", J, x, precision="highest")), axis=-1)


@jax.jit  # called eagerly, the loops inside would be compiled again at every call
def _best_signs(J: Float[Array, "rows m n"]) -> Float[Array, "rows n"]:
    return lax.map(_best_signs_of_one, J)


def _best_signs_of_one(J: Float[Array, "m n"]) -> Float[Array, " n"]:
    """The sign vector x, with x_n = +1, of the largest ‖J x‖_1."""
    n = J.shape[-1]
    inner = min(n - 1, 12)
    outer = n - 1 - inner
    inner_signs = jnp.asarray(1 - 2 * (np.arange(2**inner)[:, None] >> np.arange(inner) & 1), J.dtype)
    products = jnp.matmul(inner_signs, J[:, :inner].T, precision="highest")

    def visit(code, best):
        outer_signs = jnp.append(1 - 2 * (code >> jnp.arange(outer) & 1), 1).astype(J.dtype)
        values = jnp.sum(jnp.abs(products + jnp.matmul(J[:, inner:], outer_signs, precision="highest")[None]), axis=-1)
        top = jnp.argmax(values)
        signs = jnp.concatenate([inner_signs[top], outer_signs])
        return jax.tree.map(lambda new, old: jnp.where(values[top] > best[0], new, old), (values[top], signs), best)

    start = (jnp.asarray(-1, J.dtype), jnp.ones(n, J.dtype))
    return lax.fori_loop(0, 2**outer, visit, start)[1]


def norm_one_to_one(
    p: Float[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None
) -> Float[Array, "*rows"]:
    """2 max_i p_i (1 - p_i): the 1→1 and the inf→inf norm of Diag(p) - p pᵀ (divide by tau for J).

    Like the other norms of a row, that of the row divided by its sum.

    >>> import jax.numpy as jnp
    >>> print(norm_one_to_one(jnp.array([0.5, 0.25, 0.25])))
    0.5
    """
    rows = checks.as_rows(p, where)
    first, _, rest = _by_size(_normalised(rows))
    return _row_result(2 * first * rest, rows, p, where)  # the largest entry is always the one: p(1-p) ≤ first * rest


def g_1(p: Float[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None) -> Float[Array, "*rows"]:
    """Yudin's bound on lambda_max: p_(1) (1 - p_(1) + p_(2)), of the two largest entries (arXiv 2507.07814).

    >>> import jax.numpy as jnp
    >>> print(g_1(jnp.array([0.5, 0.25, 0.25])))
    0.375
    """
    rows = checks.as_rows(p, where)
    first, second, rest = _by_size(_normalised(rows))
    return _row_result(first * (rest + second), rows, p, where)


def lambda_max(
    p: Float[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None
) -> Float[Array, "*rows"]:
    """The largest eigenvalue of Diag(p) - p pᵀ, its spectral norm (divide by tau for J).

    It is the root of sum_i p_i / (lambda - p_i) = 0 in [p_(2), p_(1)], found by bisection; its eigenvector is
    v_i = p_i / (lambda - p_i), and the variance of v under p, with v held fixed, gives the value and its derivative.
    Accurate relative to itself, for nearly tied and nearly one-hot rows too.

    >>> import jax.numpy as jnp
    >>> print(f"{lambda_max(jnp.array([0.5, 0.5])):.6f}")
    0.500000
    """
    rows = checks.as_rows(p, where)
    q = _normalised(rows)
    v = _top_eigenvector(lax.stop_gradient(q))
    mean = jnp.sum(q * v, axis=-1, keepdims=True)
    return _row_result(jnp.sum(q * jnp.square(v - mean), axis=-1), rows, p, where)


@jax.jit  # called eagerly, the loop inside would be compiled again at every call
def _top_eigenvector(p: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    """Unit v with v_i = p_i / (lambda - p_i).

    The unknown is s = lambda - p_(2), so that no lambda - p_i = (p_(2) - p_i) + s, nor p_(1) - lambda =
    (p_(1) - p_(2)) - s, is a difference of rounded numbers; it is bisected on the bits of a float, which keeps its
    relative accuracy however small it is.
    """
    integer = jnp.int32 if p.dtype == jnp.float32 else jnp.int64
    is_top = _is_largest(p)
    first, second, _ = (x[..., None] for x in _by_size(p))
    # Compiled code may compute an entry twice, and not to the same last bit: no difference is let below zero.
    gap, below = jnp.maximum(first - second, 0), jnp.maximum(second - p, 0)
    tied = gap == 0

    def direction(s: Float[Array, "*rows 1"]) -> Float[Array, "*rows n"]:
        return jnp.where(is_top, -first / (gap - s), p / (below + s))

    def halve(_, interval):
        low, high = interval
        middle = low + (high - low) // 2
        too_small = jnp.sum(direction(lax.bitcast_convert_type(middle, p.dtype)), axis=-1, keepdims=True) > 0
        return jnp.where(too_small, middle, low), jnp.where(too_small, high, middle)

    least = lax.bitcast_convert_type(jnp.full_like(gap, jnp.finfo(p.dtype).tiny), integer)
    most = jnp.maximum(least, lax.bitcast_convert_type(gap, integer))
    low, _ = lax.fori_loop(0, jnp.finfo(p.dtype).bits, halve, (least, most))
    # Two equal largest entries: the eigenvector is their difference.
    is_other = _is_largest(jnp.where(is_top, -1, p))
    pair = jnp.where(is_top, 1, jnp.where(is_other, -1, 0)).astype(p.dtype)
    v = jnp.where(tied, pair, direction(lax.bitcast_convert_type(low, p.dtype)))
    v = v / jnp.max(jnp.abs(v), axis=-1, keepdims=True)
    return v / jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True))


def _normalised(rows: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    """Each row divided by its sum; one without a sum as it is (it is no row of probabilities, and gives NaN)."""
    total = jnp.sum(rows, axis=-1, keepdims=True)
    return rows / jnp.where(total > 0, total, 1)


def _is_largest(p: Float[Array, "*rows n"]) -> Bool[Array, "*rows n"]:
    """True at the largest entry of each row, the first of equals."""
    place = jnp.arange(p.shape[-1]).reshape((1,) * (p.ndim - 1) + (-1,))
    return place == jnp.argmax(p, axis=-1, keepdims=True)


def _by_size(p: Float[Array, "*rows n"]) -> tuple[Float[Array, "*rows"], ...]:
    """The two largest entries, and the sum of all but the largest: 1 - p_(1), without the cancellation."""
    is_top = _is_largest(p)
    others = jnp.where(is_top, 0, p)
    return jnp.sum(p, axis=-1, where=is_top), jnp.max(others, axis=-1), jnp.sum(others, axis=-1)


def _row_result(
    value: Float[Array, "*rows"], rows: Array, p: ArrayLike, where: ArrayLike | None
) -> Float[Array, "*rows"]:
    """`value` where the row is one of probabilities, else NaN (eagerly an error)."""
    result = jnp.where(checks.row_is_valid(rows), value, math.nan)
    checks.raise_on_invalid(result, p, where)
    return result


def normalised_entropy(
    p: Float[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None
) -> Float[Array, "*rows"]:
    """H_norm(p) = -sum p log p / log |support| of the row divided by its sum; the support is `where`, or the whole row.

    A row of support 1 has no normalised entropy: it gives 0, and statistics should leave it out. An entry of zero
    contributes zero, with derivative zero (the one-sided derivative there is infinite).

    >>> import jax.numpy as jnp
    >>> print(normalised_entropy(jnp.array([0.5, 0.5, 0.0]), where=jnp.array([True, True, False])))
    1.0
    """
    rows = checks.as_rows(p, where)
    mask = checks.as_mask(where, rows.shape)
    size = jnp.full(rows.shape[:-1], rows.shape[-1]) if mask is None else jnp.sum(mask, axis=-1)
    surprise = -jnp.log(jnp.where(rows > 0, rows, 1))
    scale = jnp.log(jnp.maximum(size, 2).astype(rows.dtype))
    total = jnp.sum(rows, axis=-1)
    total = jnp.where(total > 0, total, 1)
    entropy = (jnp.sum(rows * surprise, axis=-1) / total + jnp.log(total)) / scale
    return _row_result(jnp.where(size > 1, entropy, 0), rows, p, where)
