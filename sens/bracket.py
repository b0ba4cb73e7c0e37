"""theta between two ends that are both proved: `theta_bracket` (theory: "Two-sided certificates").

theta = 1 - D², D = min over signs s of |sum_i s_i p_i| / sum_i p_i: a number partitioning problem. An error in D enters
squared, so cheap partitions and cheap bounds close practically every row.

**Rounding.** A row is put on the grid g = 2^-30 (float64: 2^-62) by q_i = floor(p_i / g); what is left over,
r_i = p_i - g q_i, lies in [0, g). Both steps are exact in floating point: q_i keeps the leading bits of p_i, r_i the
others. On the grid every certificate is exact integer arithmetic (`sens.discrepancy`). With Q = sum q_i and R = sum r_i
the row's sum is Q g + R, and

- a partition whose difference on the grid is `hi` has a lighter side of mass at least (Q - hi) g / 2: adding the r_i
  makes neither side lighter;
- if every partition differs by at least `lo` on the grid, the lighter side of any has mass at most (Q - lo) g / 2 + R;
- if the difference d > 2n + 2k is that of a head of k numbers against all others, the lighter side is the others
  (R < n g cannot turn that round), and its mass at least (Q - d) g / 2 + R - k g: the head holds less than k g of R.

So y = 2 (lighter mass) / sum is bracketed, and theta = y (2 - y) increases with y on [0, 1]. In floating point, with
unit roundoff u: a difference of integers made a float, its sum with R, the sum Q g + R and the quotient are all of
non-negative numbers, so their relative errors add up: 2u + 2u + 4u (two units in the last place are allowed for a GPU's
quotient). 9u covers y, 3u the two operations of y (2 - y). The sum R of n terms is off by less than n u relative in
whatever order it was added; it is widened by twice that. The hardware may read denormal entries as zero: `_TINY` is added.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sens import checks, discrepancy

_TINY = 1e-20  # grid units: far more than any n denormal entries come to
_LANES = 16
_BLOCK = 2**18  # numbers a block of the first pass: what stays in a core's cache


class Bracket(NamedTuple):
    """Two ends of a number that lies between them: proved, not estimated."""

    lower: Float[Array, "*rows"]
    upper: Float[Array, "*rows"]


class _Bounds(NamedTuple):
    """Bounds on D in grid units. `opposite`: a head's difference from the rest, or the row's sum if none is known."""

    lo: Int[Array, " R"]
    hi: Int[Array, " R"]
    opposite: Int[Array, " R"]


class _Rows(NamedTuple):
    """What is known of each row."""

    valid: Bool[Array, " R"]
    total: Int[Array, " R"]
    left: Float[Array, " R"]
    bounds: _Bounds


def theta_bracket(
    p: Float[Array, "*rows n"], where: Bool[Array, "*rows n"] | None = None, tol: float = 1e-6
) -> Bracket:
    """Bracket(lower, upper) with lower ≤ theta(p / sum p) ≤ upper, true of the row as stored.

    Work stops at a row once upper - lower ≤ tol: most rows are closed by the first pass, which does not sort. Rows that
    the last step leaves wider than `tol` are returned as they are: the two ends are always true. In float32 a width
    below about 1e-6 cannot be asked for on every row (rounding is accounted for outwardly); use float64 for less.

    Not for differentiation: the derivative is zero by definition. For a differentiable theta use `theta_prefix`, or
    ``theta_of_subset(p, bisect(p))``. An invalid row is a `ValueError`, inside jit NaN at both ends.

    >>> import jax.numpy as jnp
    >>> lower, upper = theta_bracket(jnp.array([0.4, 0.3, 0.2, 0.1]))
    >>> print(f"{lower:.5f} {upper:.5f}")
    1.00000 1.00000
    """
    rows = lax.stop_gradient(checks.as_rows(p, where))
    flat = rows.reshape(-1, rows.shape[-1])
    bracket = _bracket(flat, tol)
    bracket = Bracket(*(end.reshape(rows.shape[:-1]) for end in bracket))
    checks.raise_on_invalid(bracket.lower, p, where)
    return bracket


def _bracket(p: Float[Array, "R n"], tol: float) -> Bracket:
    rows = _by_blocks(_first_pass, p)
    for step, chunk in ((_second_pass, 256), (_sorted_pass, 64), (_deep_pass, 16)):
        rows = _refine(p, rows, tol, step, chunk)
    lower, upper = _ends(rows, p.shape[-1])
    return Bracket(jnp.where(rows.valid, lower, math.nan), jnp.where(rows.valid, upper, math.nan))


def _by_blocks(f, p: Float[Array, "R n"]):
    """f(p) for an f that works row by row, a block of rows at a time: nothing as large as p is made on the way.

    The last block overlaps the one before where the rows do not divide: no second copy of f to compile.
    """
    R, n = p.shape
    size = max(1, _BLOCK // n)
    if size >= R:
        return f(p)

    def body(i, out):
        start = jnp.minimum(i * size, R - size)
        part = f(lax.dynamic_slice_in_dim(p, start, size))
        return jax.tree.map(lambda whole, x: lax.dynamic_update_slice_in_dim(whole, x, start, 0), out, part)

    shapes = jax.eval_shape(f, p)
    return lax.fori_loop(0, -(-R // size), body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def _unit(dtype) -> tuple[type, float]:
    """The integer dtype and the number of grid units in one."""
    return (jnp.int32, 2.0**30) if dtype == jnp.float32 else (jnp.int64, 2.0**62)


def _on_grid(p: Float[Array, "R n"]) -> Int[Array, "R n"]:
    integer, units = _unit(p.dtype)
    return (p * units).astype(integer)


def _first_pass(p: Float[Array, "R n"]) -> _Rows:
    """Lanes folded, sorted and folded; the largest entry against the rest (exact where it is half the mass or more)."""
    q = _on_grid(p)
    scaled = p * _unit(p.dtype)[1]
    left = jnp.sum(scaled - jnp.floor(scaled), axis=-1)
    total = jnp.sum(q, axis=-1, dtype=q.dtype)
    kept, folded, _ = discrepancy.lanes(q, _LANES, keep=2)
    hi = discrepancy.greedy(jnp.concatenate([kept, folded]))
    largest = jnp.max(kept, axis=0)
    excess = jnp.maximum(largest - (total - largest), 0)
    return _Rows(checks.row_is_valid(p), total, left, _Bounds(excess, hi, _opposite(excess, total, 1, p.shape[-1])))


def _second_pass(p: Float[Array, "C n"], total: Int[Array, " C"]) -> _Bounds:
    """Mixed lanes (some summed, some folded), then all signs of the eight largest kept numbers."""
    q = _on_grid(p)
    kept, folded, summed = discrepancy.lanes(q, _LANES, keep=2)
    mixed = [jnp.concatenate([kept, summed[:k], folded[k:]]) for k in (4, 8, 12, 16)]
    hi = jnp.min(discrepancy.greedy(jnp.concatenate(mixed, axis=1)).reshape(4, -1), axis=0)
    kept = discrepancy.sort_descending(kept)
    rest = discrepancy.sort_descending(jnp.concatenate([kept[8:], folded]))
    head = _head_bounds(kept[:8], rest, total, p.shape[-1])
    return head._replace(hi=jnp.minimum(hi, head.hi))


def _sorted_pass(p: Float[Array, "C n"], total: Int[Array, " C"]) -> _Bounds:
    """The whole row sorted: the greedy partition, the best prefix, and the cardinality bound."""
    ordered = discrepancy.sort_descending(_on_grid(p).T)
    hi = jnp.minimum(discrepancy.prefix_upper(ordered, total), discrepancy.fold(ordered, jnp.zeros_like(total)))
    return _Bounds(discrepancy.cardinality_lower(ordered, total), hi, total)


def _deep_pass(p: Float[Array, "C n"], total: Int[Array, " C"]) -> _Bounds:
    """All signs of the thirteen largest numbers, the rest folded in descending order."""
    ordered = discrepancy.sort_descending(_on_grid(p).T)
    return _head_bounds(ordered[:13], ordered[13:], total, p.shape[-1])


def _head_bounds(head: Int[Array, "k C"], rest: Int[Array, "m C"], total: Int[Array, " C"], n: int) -> _Bounds:
    """Bounds from all sign patterns of a head: each folded on with the rest, and each against the whole rest."""
    sums = discrepancy.head_sums(head)
    tail = total - jnp.sum(head, axis=0, dtype=head.dtype)
    ends = discrepancy.fold(rest[:, None], sums)
    lo = jnp.maximum(jnp.min(sums, axis=0) - tail, 0)
    return _Bounds(lo, jnp.min(ends, axis=0), _opposite(lo, total, head.shape[0], n))


def _opposite(difference: Int[Array, " C"], total: Int[Array, " C"], k: int, n: int) -> Int[Array, " C"]:
    """A difference of a head of k against the rest, with its allowance of 2k units, where the third rule applies."""
    return jnp.where(difference > 2 * n + 2 * k, jnp.minimum(difference + 2 * k, total), total)


def _ends(rows: _Rows, n: int) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """theta's two ends from the bounds on the grid, rounded outward as the module's docstring derives."""
    dtype = rows.left.dtype
    u = float(jnp.finfo(dtype).eps) / 2
    left_lo, left_hi = rows.left * (1 - 2 * n * u), rows.left * (1 + 2 * n * u) + _TINY
    whole = rows.total.astype(dtype) + rows.left
    lo, hi, opposite = ((rows.total - jnp.minimum(d, rows.total)).astype(dtype) for d in rows.bounds)
    light = jnp.maximum(hi, jnp.where(rows.bounds.opposite < rows.total, opposite + 2 * left_lo, 0))
    y_lower = light / whole * (1 - 9 * u)
    y_upper = jnp.minimum((lo + 2 * left_hi) / whole * (1 + 9 * u), 1)
    return y_lower * (2 - y_lower) * (1 - 3 * u), jnp.minimum(y_upper * (2 - y_upper) * (1 + 3 * u), 1)


def _refine(p: Float[Array, "R n"], rows: _Rows, tol: float, step, chunk: int) -> _Rows:
    """Apply `step` to the rows still open, `chunk` at a time, and to no others."""
    R, n = p.shape
    chunk = min(chunk, R)
    lower, upper = _ends(rows, n)
    is_open = rows.valid & (upper - lower > tol)
    count = jnp.sum(is_open)
    order = jnp.nonzero(is_open, size=R + chunk, fill_value=R)[0]

    def body(state):
        start, bounds = state
        at = lax.dynamic_slice_in_dim(order, start, chunk)
        part, total = jax.tree.map(lambda x: x.at[at].get(mode="clip"), (p, rows.total))
        lo, hi, opposite = step(part, total)
        return start + chunk, _Bounds(
            bounds.lo.at[at].max(lo, mode="drop"),
            bounds.hi.at[at].min(hi, mode="drop"),
            bounds.opposite.at[at].min(opposite, mode="drop"),
        )

    bounds = lax.while_loop(lambda state: state[0] < count, body, (jnp.zeros_like(count), rows.bounds))[1]
    return rows._replace(bounds=bounds)
