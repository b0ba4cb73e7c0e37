"""Number partitioning on integers: the network sorts, folds are partitions, bounds bound (exhaustive oracle)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sens import discrepancy, partition


def exhaustive(q: np.ndarray) -> int:
    """min over all signs of |sum|, one column at a time."""
    return min(abs(int(np.dot(signs, q))) for signs in itertools.product([1, -1], repeat=len(q)))


@pytest.mark.float32
@pytest.mark.parametrize("n", [1, 2, 3, 16, 33, 100])
def test_network_sorts(rng, n):
    q = rng.integers(0, 50, (n, 20)).astype(np.int32)
    np.testing.assert_array_equal(discrepancy.sort_descending(jnp.asarray(q)), -np.sort(-q, axis=0))


@pytest.mark.float32
def test_upper_and_lower_bounds_hold_and_meet(rng):
    n, columns = 9, 60
    q = rng.integers(0, 40, (n, columns)).astype(np.int32)
    q[:, :20] = 7  # uniform, odd: the cardinality bound is exact, and so is the best prefix
    total = jnp.asarray(q.sum(0, dtype=np.int32))
    exact = np.array([exhaustive(column) for column in q.T], np.int32)
    ordered = discrepancy.sort_descending(jnp.asarray(q))
    for upper in (
        discrepancy.greedy(jnp.asarray(q)),
        discrepancy.fold(jnp.asarray(q), jnp.zeros_like(total)),
        discrepancy.prefix_upper(ordered, total),
        discrepancy.pairs_upper(ordered),
    ):
        assert np.all(upper >= exact)
        assert np.all((upper - exact) % 2 == 0)  # a partition's difference has the sum's parity
    lower = discrepancy.cardinality_lower(ordered, total)
    assert np.all(lower <= exact)
    np.testing.assert_array_equal(lower[:20], exact[:20])
    np.testing.assert_array_equal(jnp.min(discrepancy.head_sums(ordered), axis=0), exact)


@pytest.mark.float32
@pytest.mark.parametrize("n", [1, 2, 5, 9, 12])
def test_bounds_by_clusters_hold_and_are_exact_for_few_values(rng, n):
    columns = 200
    q = rng.choice([1000, 730, 51], (columns, n)).astype(np.int32)
    q[::2] += rng.integers(0, 9, (columns // 2, n)).astype(np.int32)
    q[1::8] = rng.integers(0, 50, q[1::8].shape)
    q[3::8, n // 2 :] = 0
    q = -np.sort(-q, axis=1)
    lower, upper = jax.vmap(discrepancy.clusters_bounds)(jnp.asarray(q), jnp.asarray(q.sum(1, dtype=np.int32)))
    exact = np.array([exhaustive(row) for row in q], np.int32)
    assert np.all(lower <= exact)
    assert np.all(upper >= exact)
    few = (np.arange(columns) % 8 == 5) | (np.arange(columns) % 8 == 7)
    np.testing.assert_array_equal(lower[few], exact[few])
    np.testing.assert_array_equal(upper[few], exact[few])
    assert np.all((upper - lower)[::2] <= 2 * 9 * n)


@pytest.mark.float32
@pytest.mark.parametrize("n", [5, 32, 100, 64 * 16 + 3])
def test_lanes_partition_the_row(rng, n):
    q = rng.integers(0, 1000, (7, n)).astype(np.int32)
    kept, folded, summed = discrepancy.lanes(jnp.asarray(q), 16, keep=2)
    np.testing.assert_array_equal(kept.sum(1) + summed.sum(1), q.sum(1))
    assert np.all(np.asarray(folded) <= np.asarray(summed))
    np.testing.assert_array_equal((folded - summed) % 2, 0)
    padded = np.pad(q, ((0, 0), (0, -n % 16))).reshape(7, -1, 16)
    np.testing.assert_array_equal(kept[:, :16], padded.max(1))


def test_host_solver_is_exhaustive(rng):
    for n in (1, 2, 3, 8, 11):
        for _ in range(20):
            q = rng.integers(0, 10 ** rng.integers(1, 17), n)
            exact = exhaustive(q)
            assert partition.least_difference(q) == exact
            assert partition.difference_bounds(q) == (exact, exact)
            lower, upper = partition.difference_bounds(q, head=3)
            assert lower <= exact <= upper


def test_host_solver_refuses():
    with pytest.raises(ValueError, match="41 numbers"):
        partition.least_difference(np.ones(41, np.int64))
