"""Number partitioning on integers, many rows at once: certificates for D = min over signs of |sum_i s_i q_i|.

All numbers are non-negative integers whose row sum fits the dtype, so everything here is exact. One row a *column*
(axes "n C"): folds and the sorting network run down the first axis, elementwise over rows, which is what a CPU's
vector units and a GPU's threads both want.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

CLUSTERS = 4  # that a row is cut into
CHOICES = 2**9  # of numbers of plus signs in all clusters but one
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
    distances = np.array([distance for _, distance in steps], np.int32)
    first = np.array([(index & distance) == 0 for _, distance in steps], bool).reshape(-1, size)
    descends = np.array([(index & run) == 0 for run, _ in steps], bool).reshape(-1, size)

    def exchange(x, step):
        distance, is_first, keeps_larger = step
        twice = jnp.concatenate([x, x])  # partners are `distance` away: slices, several times faster than a gather
        later = lax.dynamic_slice_in_dim(twice, distance, size)
        earlier = lax.dynamic_slice_in_dim(twice, size - distance, size)
        other = jnp.where(is_first[:, None], later, earlier)
        return jnp.where(keeps_larger[:, None], jnp.maximum(x, other), jnp.minimum(x, other)), None

    x = jnp.pad(q, ((0, size - n), (0, 0)))
    return lax.scan(exchange, x, (jnp.asarray(distances), jnp.asarray(first), jnp.asarray(descends == first)))[0][:n]


def fold(q: Int[Array, "n ..."], start: Int[Array, "..."]) -> Int[Array, "..."]:
    """d ← |d - q_i| down the first axis, from d = `start`.

    Whatever the order, the end is |sum| for some choice of signs: an upper bound on D. In descending order it is the
    greedy partition, where each number goes to the lighter side.
    """
    if q.shape[0] <= UNROLLED:
        return functools.reduce(lambda d, i: jnp.abs(d - q[i]), range(q.shape[0]), start)
    step = 16
    blocks = jnp.pad(q, ((0, -q.shape[0] % step), *[(0, 0)] * (q.ndim - 1))).reshape(-1, step, *q.shape[1:])
    used = jnp.any(blocks != 0, axis=tuple(range(1, blocks.ndim)))
    last = jnp.max(jnp.where(used, jnp.arange(1, used.size + 1), 0))  # masked rows end in zeros, which change nothing
    return lax.fori_loop(0, last, lambda b, d: fold(lax.dynamic_index_in_dim(blocks, b, keepdims=False), d), start)


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
    depth = -(-x.shape[1] // count)
    step_depth = depth if depth <= UNROLLED else 16
    width = step_depth * count
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % width)))

    def unrolled(state, x):
        return functools.reduce(lambda s, i: step(s, x[:, i * count : (i + 1) * count]), range(step_depth), state)

    if x.shape[1] == width:
        return unrolled(state, x)
    blocks = x.shape[1] // width
    return lax.fori_loop(0, blocks, lambda i, s: unrolled(s, lax.dynamic_slice_in_dim(x, i * width, width, 1)), state)


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


def clusters_bounds(q: Int[Array, " n"], total: Int[Array, ""]) -> tuple[Int[Array, ""], ...]:
    """Bounds (lower, upper) on D of one sorted row whose numbers are few values, up to a small spread about each.

    The row is cut at its widest gaps into at most four clusters. Of a cluster of m numbers some k get a plus sign;
    between the k smallest and the k largest of them its signed sum lies in an interval whose two ends are attained, and
    grow with k. Over all k of the smaller clusters, and the two k of the largest that bring the sum next to zero on
    either side (by bisection), D is at least the least distance of the sum of intervals from zero and at most the least
    absolute value of its ends. Where numbers are equal in each cluster the two agree. Fewer cuts are made where the
    choices of k would be more than `CHOICES`.
    """
    _, _, low, high, allowed = _cluster_sums(q)
    away, nearest = jnp.maximum(jnp.maximum(low, -high), 0), jnp.minimum(jnp.abs(low), jnp.abs(high))
    return tuple(jnp.min(jnp.where(allowed, end, total)) for end in (away, nearest))


def clusters_signs(q: Int[Array, " n"], total: Int[Array, ""]) -> Int[Array, " n"]:
    """The signs of a sorted row that attain the upper bound of `clusters_bounds`."""
    (starts, sizes), counts, low, high, allowed = _cluster_sums(q)
    ends = jnp.where(allowed, jnp.abs(jnp.stack([low, high])), total)
    is_high, side, choice = jnp.unravel_index(jnp.argmin(ends), ends.shape)
    k = counts[:, side, choice][:, None]
    place = jnp.arange(q.shape[0], dtype=starts.dtype)[None] - starts[:, None]
    inside = (place >= 0) & (place < sizes[:, None])
    plus = inside & jnp.where(is_high == 1, place < k, place >= sizes[:, None] - k)
    return jnp.where(jnp.any(plus, axis=0), 1, -1).astype(q.dtype)


def _cluster_sums(q: Int[Array, " n"]) -> tuple[Any, ...]:
    """For every choice of numbers of plus signs: starts and sizes of clusters, the numbers (cluster, side, choice), the
    least and the most that the signed sum can be (side, choice), and whether it is a choice."""
    starts, sizes, choices = _clusters(q)
    sums = jnp.pad(jnp.cumsum(q, dtype=q.dtype), (1, 0))
    start, stop = starts[:, None], (starts + sizes)[:, None]
    k = jnp.minimum(jnp.arange(q.shape[0] + 1, dtype=jnp.int32)[None], sizes[:, None])
    least = (sums[stop] - sums[stop - k]) - (sums[stop - k] - sums[start])
    most = (sums[start + k] - sums[start]) - (sums[stop] - sums[start + k])

    low = high = jnp.zeros(choices, q.dtype)
    rest, digits = jnp.arange(choices, dtype=jnp.int32), []
    for cluster in range(CLUSTERS - 1):
        digit, rest = rest % (sizes[cluster] + 1), rest // (sizes[cluster] + 1)
        low, high = low + least[cluster, digit], high + most[cluster, digit]
        digits.append(jnp.stack([digit, digit]))
    above = jnp.searchsorted(most[-1], -high).astype(jnp.int32)
    sides = jnp.clip(jnp.stack([above - 1, above]), 0, sizes[-1])  # (2, choices)
    low, high = low[None] + least[-1, sides], high[None] + most[-1, sides]
    return (starts, sizes), jnp.stack([*digits, sides]), low, high, (rest == 0)[None]


def _clusters(q: Int[Array, " n"]) -> tuple[Int[Array, " k"], Int[Array, " k"], int]:
    """Starts and sizes of a sorted row's clusters, the largest last, and how many choices of k suffice for any row."""
    n = q.shape[0]
    choices = max(n // 2 + 1, min((n // CLUSTERS + 1) ** (CLUSTERS - 1), CHOICES))
    support = jnp.sum(q > 0, dtype=jnp.int32)
    gaps = jnp.pad(jnp.where(q[1:] > 0, q[:-1] - q[1:], -1), (0, max(0, CLUSTERS - n)), constant_values=-1)
    widest, place = lax.top_k(gaps, CLUSTERS - 1)
    cuts = jnp.where(widest > 0, place + 1, support)

    def cut(count):
        edges = jnp.sort(jnp.where(jnp.arange(CLUSTERS - 1) < count, cuts, support))
        starts = jnp.pad(edges, (1, 0))
        sizes = jnp.append(edges, support) - starts
        order = jnp.argsort(sizes)
        needed = jnp.prod((sizes[order[:-1]] + 1).astype(float))
        return starts[order], sizes[order], needed <= choices

    starts, sizes, fits = jax.vmap(cut)(jnp.arange(CLUSTERS))
    finest = CLUSTERS - 1 - jnp.argmax(fits[::-1])
    return starts[finest], sizes[finest], choices
