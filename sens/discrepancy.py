"""Number partitioning on integers, many rows at once: certificates for D = min over signs of |sum_i s_i q_i|.

All numbers are non-negative integers whose row sum fits the dtype, so everything here is exact. One row a *column*
(axes "n C"): folds and the sorting network run down the first axis, elementwise over rows, which is what a CPU's
vector units and a GPU's threads both want.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

UNROLLED = 64  # a fold over at most this many numbers is written out, a longer one is a loop


def sort_descending(q: Int[Array, "n C"]) -> Int[Array, "n C"]:
    """Every column sorted, largest first, by a bitonic network.

    log²n compare-exchange steps over all columns at once: on a CPU ten times faster than XLA's own sort, which compares
    one pair at a time. Step by step in a loop, because written out the network takes seconds to compile.
    """
    n = q.shape[0]
    size = 1 << (n - 1).bit_length()
    index = np.arange(size)
    steps = [(1 << level, 1 << step) for level in range(1, size.bit_length()) for step in reversed(range(level))]
    partner = np.array([index ^ distance for _, distance in steps], np.int32).reshape(-1, size)
    larger = np.array([((index & run) == 0) == ((index & distance) == 0) for run, distance in steps], bool)

    def exchange(x, step):
        other, keeps_larger = x[step[0]], step[1][:, None]
        return jnp.where(keeps_larger, jnp.maximum(x, other), jnp.minimum(x, other)), None

    x = jnp.pad(q, ((0, size - n), (0, 0)))
    return lax.scan(exchange, x, (jnp.asarray(partner), jnp.asarray(larger.reshape(-1, size))))[0][:n]


def fold(q: Int[Array, "n ..."], start: Int[Array, "..."]) -> Int[Array, "..."]:
    """d ← |d - q_i| down the first axis, from d = `start`.

    Whatever the order, the end is |sum| for some choice of signs: an upper bound on D. In descending order it is the
    greedy partition, where each number goes to the lighter side.
    """
    if q.shape[0] <= UNROLLED:
        return functools.reduce(lambda d, i: jnp.abs(d - q[i]), range(q.shape[0]), start)
    return lax.scan(lambda d, x: (jnp.abs(d - x), None), start, q, unroll=16)[0]


def greedy(q: Int[Array, "n C"]) -> Int[Array, " C"]:
    """Upper bound on D: sort, then fold."""
    return fold(sort_descending(q), jnp.zeros_like(q[0]))


def head_sums(head: Int[Array, "k C"]) -> Int[Array, "patterns C"]:
    """|sum of ± head| for all 2^(k-1) sign patterns (up to a common sign)."""
    sums = head[:1]
    for i in range(1, head.shape[0]):
        sums = jnp.concatenate([sums + head[i : i + 1], sums - head[i : i + 1]])
    return jnp.abs(sums)


def lanes(
    q: Int[Array, "C n"], count: int, keep: int
) -> tuple[Int[Array, "C kept"], Int[Array, "C count"], Int[Array, "C count"]]:
    """Deal each row to `count` lanes; keep the `keep` largest numbers of a lane, fold the others into one.

    Returns (kept, folded, summed): folded holds each lane's others as the end of a fold (a small number), summed as
    their sum (all on one side). Partitions of kept and, lane by lane, either of the two are partitions of the row. One
    pass in the order of memory, no sort.
    """

    def deal(state, x):
        *kept, folded, summed = state
        for i in range(keep):
            kept[i], x = jnp.maximum(kept[i], x), jnp.minimum(kept[i], x)
        return (*kept, jnp.abs(folded - x), summed + x)

    *kept, folded, summed = along_lanes(deal, q, count, (jnp.zeros((q.shape[0], count), q.dtype),) * (keep + 2))
    return jnp.concatenate(kept, axis=1), folded, summed


def along_lanes(step, x: Shaped[Array, "C n"], count: int, state):
    """state ← step(state, the next `count` entries of every row), zeros filling up the last ones."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % count)))
    depth = x.shape[1] // count
    if depth <= UNROLLED:
        return functools.reduce(lambda s, i: step(s, x[:, i * count : (i + 1) * count]), range(depth), state)
    return lax.fori_loop(0, depth, lambda i, s: step(s, lax.dynamic_slice_in_dim(x, i * count, count, axis=1)), state)


def cardinality_lower(q: Int[Array, "n C"], total: Int[Array, " C"]) -> Int[Array, " C"]:
    """Lower bound on D from the sorted row: max over j of 2 (q_(j+1) + ... + q_(2j+1)) - total.

    Of S and its complement one holds at most j of the 2j+1 largest numbers, so its mass is at most that of the j
    largest plus everything below the 2j+1 largest. It proves uniform and top-k-uniform rows of odd size.
    """
    prefix = jnp.cumsum(q, axis=0)
    odd = prefix[::2]  # the sum of the 2j+1 largest
    top = jnp.pad(prefix, ((1, 0), (0, 0)))[: odd.shape[0]]  # the sum of the j largest
    inside = odd - top
    return jnp.maximum(jnp.max(inside - (total[None] - inside), axis=0), 0)


def prefix_upper(q: Int[Array, "n C"], total: Int[Array, " C"]) -> Int[Array, " C"]:
    """Upper bound on D from the sorted row: the best prefix against the rest."""
    prefix = jnp.cumsum(q, axis=0)
    return jnp.min(jnp.abs(prefix - (total[None] - prefix)), axis=0)


def pairs_upper(q: Int[Array, "n C"]) -> Int[Array, " C"]:
    """Upper bound on D from the sorted row: the largest number against the smallest, and so on inwards.

    The differences of the pairs, largest first, are folded onto the number in the middle (if there is one). It closes
    nearly uniform rows of odd support, whose odd number every fold of neighbours leaves over.
    """
    n = q.shape[0]
    support = jnp.sum(q > 0, axis=0)[None]
    i = jnp.arange(n // 2)[:, None]
    smallest = jnp.take_along_axis(q, jnp.clip(support - 1 - i, 0, n - 1), axis=0)
    differences = jnp.where(i < support // 2, q[: n // 2] - smallest, 0)
    middle = jnp.where(support % 2 == 1, jnp.take_along_axis(q, support // 2, axis=0), 0)
    return fold(differences, middle[0])
