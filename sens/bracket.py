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
unit roundoff u: the sum is 1 + delta with |delta| ≤ 1e-3 and known to a small part of u, so dividing by it as
x - x delta/(1 + delta) costs one rounding; the difference of integers made a float, its sum with R and the widening
itself one each, all of non-negative numbers, so relative errors add up: 4u and a bit. 5u covers y, 3u the three
roundings of y (2 - y) widened. The sum R of n terms is off by less than n u relative in whatever order it was added; it
is widened by twice that. The hardware may read denormal entries as zero: `_TINY` is added to R.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from sens import checks, discrepancy, rowwise

_HEAD, _DEEP_HEAD = 8, 13  # entries of which all signs are tried
_SHORT = 128  # entries of a row of which lanes would hold few
_TINY = 1e-20  # grid units: far more than any n denormal entries come to
_BLOCK = 2**14  # entries worked on at a time: they stay in the cache, and XLA splits no loop over them between threads


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
    p: Float[ArrayLike, "*rows n"], where: Bool[ArrayLike, "*rows n"] | None = None, tol: float = 1e-6
) -> Bracket:
    """Bracket(lower, upper) with lower ≤ theta(p / sum p) ≤ upper, true of the row as stored.

    Work on a row stops once upper - lower ≤ tol; the first pass, which does not sort, closes most rows. A row that the
    last pass leaves wider is returned as it is: its two ends are true all the same. In float32 outward rounding alone
    takes up to 8e-7; ask for less than 1e-6 in float64.

    Not for differentiation: the derivative is zero by definition. Differentiate `theta_prefix`, or
    ``theta_of_subset(p, bisect(p))``. An invalid row is a `ValueError`, inside jit NaN at both ends.

    >>> import jax.numpy as jnp
    >>> lower, upper = theta_bracket(jnp.array([0.4, 0.3, 0.2, 0.1]))
    >>> print(f"{lower:.5f} {upper:.5f}")
    1.00000 1.00000
    """
    if not checks.is_traced(tol) and not (np.ndim(tol) == 0 and tol >= 0):
        raise ValueError(f"tol = {tol}: a number, at least zero, is wanted")
    rows = lax.stop_gradient(checks.as_rows(p, where))
    flat = rows.reshape(-1, rows.shape[-1])
    tols = jnp.broadcast_to(jnp.asarray(tol, rows.dtype), flat.shape[:1])
    bracket = Bracket(*(end.reshape(rows.shape[:-1]) for end in _bracket(flat, tols)))
    checks.raise_on_invalid(bracket.lower, p, where)
    return bracket


@jax.custom_batching.custom_vmap
def _bracket_rows(p: Float[Array, "R n"], tol: Float[Array, " R"]) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    R, n = p.shape
    if R == 0:
        return jnp.zeros(0, p.dtype), jnp.zeros(0, p.dtype)
    rows = _first_pass(p)
    for step, chunk in _later_passes(n):
        rows = _refine(p, rows, tol, step, max(1, min(chunk, R, 1024)))
    lower, upper = _ends(rows, n)
    return jnp.where(rows.valid, lower, math.nan), jnp.where(rows.valid, upper, math.nan)


def _later_passes(n: int) -> tuple[tuple[Callable[..., _Bounds], int], ...]:
    """Passes with the rows that each takes at a time, the cheapest first; none after one that tries all signs."""
    by_order = _sorted_pass, _BLOCK // ((4 if n <= _SHORT else 16) * n)
    if n <= _HEAD:
        return (by_order,)
    if n <= _DEEP_HEAD:
        return by_order, (_deep_pass, 4)
    closing = by_order, (_deep_pass, 4), (_clustered_pass, 2)
    # To sort a short row costs a third of the mixtures of its lanes, and closes more.
    return closing if n <= _SHORT else ((_mixed_pass, 2 * _BLOCK // n), *closing)


@_bracket_rows.def_vmap
def _(axis_size, in_batched, *arguments):
    """More rows, not a loop inside a loop: open rows are gathered from the whole batch."""
    p, tol = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip(arguments, in_batched, strict=True)
    )
    ends = _bracket_rows(p.reshape(-1, p.shape[-1]), tol.reshape(-1))
    return tuple(end.reshape(tol.shape) for end in ends), (True, True)


_bracket = jax.jit(_bracket_rows)  # called eagerly, the loops inside would be compiled again at every call


def _units(dtype) -> float:
    """1 / g: the number of grid units in one."""
    return 2.0**30 if dtype == jnp.float32 else 2.0**62


def on_grid(p: Float[Array, "*rows n"]) -> Int[Array, "*rows n"]:
    """q_i = floor(p_i / g): the row in whole grid units, int32 for float32 and int64 for float64."""
    return (p * _units(p.dtype)).astype(jnp.int32 if p.dtype == jnp.float32 else jnp.int64)


def _first_pass(p: Float[Array, "R n"]) -> _Rows:
    """Lanes folded, sorted and folded; the largest entry against the rest (exact where it is half the mass or more)."""
    total, left, bounds = rowwise.by_blocks(functools.partial(_join, n=p.shape[-1]), 64, _lanes(p))
    return _Rows(checks.row_is_valid(p), total, left, bounds)


def _join(lanes: tuple, n: int) -> tuple:
    """What the lanes tell of their rows: sum on the grid, what the grid leaves of it, bounds."""
    kept, folded, summed, left = lanes
    hi = discrepancy.greedy(jnp.concatenate([kept, folded], axis=1).T)
    total = jnp.sum(kept, axis=-1, dtype=kept.dtype) + jnp.sum(summed, axis=-1, dtype=kept.dtype)
    largest = jnp.max(kept, axis=-1)
    excess = jnp.maximum(largest - (total - largest), 0)
    return total, jnp.sum(left, axis=-1), _Bounds(excess, hi, _opposite(excess, total, 1, n))


def _lanes(p: Float[Array, "R n"]) -> tuple:
    """`_deal`, by blocks and at least two: what follows a loop is not fused with what is in it, and without that XLA
    computes a lane again for each reader (and compiles for seconds). Short rows all at once: the block's slice would be
    fused into every one of their few steps, which makes them ten times slower."""
    R, n = p.shape
    return _deal(p) if n <= 256 else rowwise.by_blocks(_deal, max(1, min(_BLOCK // n, -(-R // 2))), p)


def _deal(p: Float[Array, "R n"]) -> tuple:
    """The row's lanes on the grid, and what each lane leaves of R, in grid units.

    Short rows keep more of each lane: dealt to many lanes they would be sorted whole, with few folds to choose from.
    """
    count, keep = (16, 2) if p.shape[-1] <= _SHORT else (32, 1)
    units = p * _units(p.dtype)
    zero = jnp.zeros((p.shape[0], count), p.dtype)
    lanes = discrepancy.lanes(on_grid(p), count, keep)
    return (*lanes, discrepancy.along_lanes(jnp.add, units - jnp.floor(units), count, zero))


def _mixed_pass(p: Float[Array, "C n"], total: Int[Array, " C"]) -> _Bounds:
    """Some lanes summed and some folded, in four mixtures; all signs of the eight largest of the lanes' largest."""
    kept, folded, summed, _ = (x.T for x in _lanes(p))
    lanes = folded.shape[0]
    mixtures = [jnp.concatenate([kept, summed[:k], folded[k:]]) for k in range(lanes // 4, lanes + 1, lanes // 4)]
    hi = jnp.min(discrepancy.greedy(jnp.concatenate(mixtures, axis=1)).reshape(4, -1), axis=0)
    kept = discrepancy.sort_descending(kept)
    rest = discrepancy.sort_descending(jnp.concatenate([kept[_HEAD:], folded]))
    head = _head_bounds(kept[:_HEAD], rest, total, p.shape[-1])
    return head._replace(hi=jnp.minimum(hi, head.hi))


def _sorted_pass(p: Float[Array, "C n"], total: Int[Array, " C"]) -> _Bounds:
    """The whole row sorted: all signs of the eight largest entries with the rest folded in descending order, the best
    prefix, opposite pairs, and the cardinality bound."""
    ordered = discrepancy.sort_descending(on_grid(p).T)
    head = _head_bounds(ordered[:_HEAD], ordered[_HEAD:], total, p.shape[-1])
    hi = jnp.minimum(discrepancy.prefix_upper(ordered, total), discrepancy.pairs_upper(ordered))
    lo = discrepancy.cardinality_lower(ordered, total)
    return head._replace(lo=jnp.maximum(lo, head.lo), hi=jnp.minimum(hi, head.hi))


def _deep_pass(p: Float[Array, "C n"], total: Int[Array, " C"]) -> _Bounds:
    """All signs of the thirteen largest entries, the rest folded in descending order."""
    ordered = discrepancy.sort_descending(on_grid(p).T)
    return _head_bounds(ordered[:_DEEP_HEAD], ordered[_DEEP_HEAD:], total, p.shape[-1])


def _clustered_pass(p: Float[Array, "C n"], total: Int[Array, " C"]) -> _Bounds:
    """Rows of a few values shared by many entries, as saturated or untrained attention has them."""
    ordered = discrepancy.sort_descending(on_grid(p).T)
    lo, hi = jax.vmap(discrepancy.clusters_bounds)(ordered.T, total)
    return _Bounds(lo, hi, total)


def _head_bounds(head: Int[Array, "k C"], rest: Int[Array, "m C"], total: Int[Array, " C"], n: int) -> _Bounds:
    """From all sign patterns of a head of entries: each folded on with the rest, and each against the whole rest."""
    sums = discrepancy.head_sums(head).T  # patterns next to each other in memory: they are more than the rows
    tail = total - jnp.sum(head, axis=0, dtype=head.dtype)
    ends = discrepancy.fold(rest[..., None], sums)
    lo = jnp.maximum(jnp.min(sums, axis=-1) - tail, 0)
    return _Bounds(lo, jnp.min(ends, axis=-1), _opposite(lo, total, head.shape[0], n))


def _opposite(difference: Int[Array, " C"], total: Int[Array, " C"], k: int, n: int) -> Int[Array, " C"]:
    """A difference of a head of k from the rest, with its allowance of 2k units, where the third rule applies."""
    return jnp.where(difference > 2 * n + 2 * k, jnp.minimum(difference + 2 * k, total), total)


def _refine(p: Float[Array, "R n"], rows: _Rows, tol: Float[Array, " R"], step, chunk: int) -> _Rows:
    """Apply `step` to the rows still open, `chunk` at a time, and to no others."""
    R, n = p.shape
    lower, upper = _ends(rows, n)
    is_open = rows.valid & (upper - lower > tol)
    count = jnp.sum(is_open)

    def refined():
        place = jnp.where(is_open, jnp.cumsum(is_open) - 1, R + chunk)  # among the open rows
        order = jnp.full(R + chunk, R).at[place].set(jnp.arange(R), mode="drop")

        def body(state):
            start, bounds = state
            at = lax.dynamic_slice_in_dim(order, start, chunk)
            lo, hi, opposite = step(p.at[at].get(mode="clip"), rows.total.at[at].get(mode="clip"))
            return start + chunk, _Bounds(
                bounds.lo.at[at].max(lo, mode="drop"),
                bounds.hi.at[at].min(hi, mode="drop"),
                bounds.opposite.at[at].min(opposite, mode="drop"),
            )

        return lax.while_loop(lambda state: state[0] < count, body, (jnp.zeros_like(count), rows.bounds))[1]

    bounds = lax.cond(count > 0, refined, lambda: rows.bounds)
    return rows._replace(bounds=bounds)


def _ends(rows: _Rows, n: int) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """theta's two ends from the bounds on the grid, rounded outward as the module's docstring derives."""
    dtype = rows.left.dtype
    u, units = float(jnp.finfo(dtype).eps) / 2, _units(dtype)
    left_lower, left_upper = rows.left * (1 - 2 * n * u), rows.left * (1 + 2 * n * u) + _TINY
    delta = ((rows.total - int(units)).astype(dtype) + rows.left) / units
    lo, hi, opposite = ((rows.total - jnp.minimum(d, rows.total)).astype(dtype) for d in rows.bounds)

    def over_sum(units_of_mass):
        y = units_of_mass / units
        return y - y * (delta / (1 + delta))

    light = jnp.maximum(hi, jnp.where(rows.bounds.opposite < rows.total, opposite + 2 * left_lower, 0))
    lower = over_sum(light) * (1 - 5 * u)
    upper = jnp.minimum(over_sum(lo + 2 * left_upper) * (1 + 5 * u), 1)
    return lower * (2 - lower) * (1 - 3 * u), jnp.minimum(upper * (2 - upper) * (1 + 3 * u), 1)
