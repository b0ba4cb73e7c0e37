"""Number partitioning on the host: the least |sum of ± q_i| exactly for 40 integers, between two bounds for more."""

import numpy as np

EXACT_SIZE = 40
"""Meet in the middle on this many numbers takes 2^19 sums a side: tens of milliseconds and megabytes."""


def least_difference(q: np.ndarray) -> int:
    """min over signs of |sum_i s_i q_i| for at most `EXACT_SIZE` non-negative int64 of sum under 2^61.

    Meet in the middle: every total is a sum a of one half plus a sum b of the other. Both sets of sums are symmetric,
    so the least |a + b| is the least distance between the two sets of |sums|; in the merged sorted sequence that is the
    distance of two neighbours of different origin (kept in the lowest bit).
    """
    if q.size > EXACT_SIZE:
        raise ValueError(f"{q.size} numbers; at most {EXACT_SIZE} can be partitioned exactly")
    q = np.sort(q)[::-1]
    merged = np.sort(np.concatenate([2 * _absolute_sums(q[::2]), 2 * _absolute_sums(q[1::2]) + 1]))
    neighbours = (merged[:-1] ^ merged[1:]) & 1 == 1
    return int(((merged[1:] >> 1) - (merged[:-1] >> 1))[neighbours].min())


def _absolute_sums(q: np.ndarray) -> np.ndarray:
    """|sum of ± q| for all sign patterns up to a common sign."""
    sums = q[:1] if q.size else np.zeros(1, np.int64)
    for x in q[1:]:
        sums = np.concatenate([sums + x, sums - x])
    return np.abs(sums)


def difference_bounds(q: np.ndarray, head: int = EXACT_SIZE) -> tuple[int, int]:
    """lower ≤ min over signs of |sum_i s_i q_i| ≤ upper for any number of int64; equal for at most `head` of them.

    The `head` largest are partitioned exactly. The rest can take away at most its sum (lower), and dealt greedily is
    one partition of the whole (upper).
    """
    q = np.sort(q)[::-1]
    difference = least_difference(q[:head])
    lower = max(difference - int(q[head:].sum()), 0)
    upper = difference
    for x in q[head:].tolist():
        upper = abs(upper - x)
    return lower, upper
