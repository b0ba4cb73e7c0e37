"""The prefix of a row nearest to half its mass, without a sort: what `sens.theta_prefix` is made of.

The row's entries in descending order have prefix sums; the *edge* is the entry that brings the sum to half the mass or
beyond. It is bracketed by bisection on the bits of a float (ordered as the floats are) until a few entries are left in
the bracket, and then found by walking down from its upper end, one distinct value a step; bisection goes on meanwhile,
so that many values close together end too. Entries equal to the edge are counted, not walked.

On a CPU the rows are worked on by blocks that stay in the cache, and each sum over a row runs in lanes, which makes one
loop over the block of what XLA would otherwise make two (the masked row, then its sum): three times as fast.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sens import checks, discrepancy, rowwise

_BISECTIONS = 13  # before the walk: 1024 entries over a few octaves leave about one in the bracket
_BLOCK = 2**15  # entries: more, and XLA splits a block's loops between threads, which then take several times as long


class _Search(NamedTuple):
    """The edge lies in [low, high), as bits; `above`: the mass of entries ≥ high; `found`: low is the edge."""

    low: Int[Array, " R"]
    high: Int[Array, " R"]
    above: Float[Array, " R"]
    found: Bool[Array, " R"]


class _Prefix(NamedTuple):
    """`taken` of the `tied` entries equal to `edge`, and all entries above it, whose mass is `above`."""

    edge: Float[Array, " R"]
    above: Float[Array, " R"]
    taken: Float[Array, " R"]
    tied: Float[Array, " R"]


@jax.custom_jvp
def prefix_mass(p: Float[Array, "R n"]) -> Float[Array, " R"]:
    """c, the prefix sum nearest to half the row's sum, over that sum; the paper's prefixes have at least one entry.

    Derivative: that of sum(share * p) / sum(p), the prefix held fixed; tied entries at its edge share alike.
    """
    prefix, total = _find(p)
    return (prefix.above + prefix.taken * prefix.edge) / total


@prefix_mass.defjvp
def _(primals, tangents):
    (p,) = primals
    prefix, _ = _find(lax.stop_gradient(p))
    edge = prefix.edge[:, None]
    fraction = (prefix.taken / jnp.maximum(prefix.tied, 1))[:, None]
    share = jnp.where(p > edge, jnp.ones_like(p), jnp.where(p == edge, fraction, 0))
    return jax.jvp(lambda p: jnp.sum(share * p, axis=-1) / jnp.sum(p, axis=-1), primals, tangents)


def _find(p: Float[Array, "R n"]) -> tuple[_Prefix, Float[Array, " R"]]:
    block = max(1, _BLOCK // p.shape[-1])
    return lax.platform_dependent(p, cpu=lambda p: rowwise.by_blocks(_prefix, block, p), default=_prefix)


def _prefix(p: Float[Array, "R n"]) -> tuple[_Prefix, Float[Array, " R"]]:
    """The prefix of each row, and the row's sum."""
    R, n = p.shape
    lanes = max(32, -(-n // 512) * 16)
    integer = jnp.int32 if p.dtype == jnp.float32 else jnp.int64

    def along(step):
        return discrepancy.along_lanes(step, p, lanes, jnp.zeros((R, lanes), p.dtype))

    def mass_from(least):
        return jnp.sum(along(lambda mass, x: mass + jnp.where(x >= least[:, None], x, 0)), axis=-1)

    total = jnp.sum(along(jnp.add), axis=-1)
    half = total / 2

    def narrow(search: _Search, at: Int[Array, " R"]) -> _Search:
        mass = mass_from(lax.bitcast_convert_type(at, p.dtype))
        enough = mass >= half
        low, high = jnp.where(enough, at, search.low), jnp.where(enough, search.high, at)
        moved = _Search(low, high, jnp.where(enough, search.above, mass), enough)
        return jax.tree.map(lambda new, old: jnp.where(search.found, old, new), moved, search)

    def bisect(search: _Search) -> _Search:
        return narrow(search, search.low + (search.high - search.low) // 2)._replace(found=search.found)

    def walk(search: _Search) -> _Search:
        search = bisect(search)
        high = lax.bitcast_convert_type(search.high, p.dtype)[:, None]
        next_below = jnp.max(along(lambda most, x: jnp.maximum(most, jnp.where(x < high, x, 0))), axis=-1)
        return narrow(search, jnp.maximum(lax.bitcast_convert_type(next_below, integer), search.low))

    # Entries below 1/(2n) of the mass hold less than half of it, so the edge lies in [1/(2n), 1], with some slack.
    ends = np.array([0.49 / n, 1 + 2 * checks.SUM_TOLERANCE], p.dtype).view(integer)
    start = _Search(jnp.full(R, ends[0]), jnp.full(R, ends[1]), jnp.zeros(R, p.dtype), jnp.zeros(R, bool))
    search = lax.fori_loop(0, _BISECTIONS, lambda _, search: bisect(search), start)
    search = lax.while_loop(lambda s: jnp.any(~s.found & (s.high - s.low > 1)), walk, search)

    edge = lax.bitcast_convert_type(search.low, p.dtype)
    tied = jnp.round((mass_from(edge) - search.above) / edge)
    at_least = jnp.where(search.above > 0, 0, 1).astype(p.dtype)
    taken = jnp.minimum(jnp.maximum(jnp.round((half - search.above) / edge), at_least), jnp.maximum(tied, 1))
    return _Prefix(edge, search.above, taken, tied), total
