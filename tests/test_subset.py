"""bisect halves as well as the bracket says a row can be halved; theta_of_subset is differentiable theta there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sens import bisect, softmax, theta_bracket, theta_of_subset
from tests.test_bracket import KINDS, rows_of


@pytest.mark.float32
def test_subset_attains_the_bracket(rng, dtype):
    scale = rng.choice([0.01, 1, 3, 6, 10], (250, 1))
    p = softmax(jnp.asarray(scale * rng.standard_normal((250, 60)), dtype))
    where = rng.random((250, 60)) < 0.8
    p = jnp.where(where, p, 0) / jnp.sum(jnp.where(where, p, 0), axis=-1, keepdims=True)
    subset = bisect(p, where)
    assert subset.dtype == bool
    assert not jnp.any(subset & ~where)
    lower, upper = theta_bracket(p, where)
    attained = theta_of_subset(p, subset, where)
    assert jnp.all(attained >= lower - 1e-6)
    assert jnp.all(attained <= upper + 1e-6)


@pytest.mark.parametrize("n", [20, 65])
def test_rows_of_every_kind_that_the_bracket_closes_are_bisected(rng, n):
    """Nearly uniform rows of odd length want opposite pairs, rows of a few values the numbers of each."""
    nearly_uniform = rng.dirichlet(np.full(n, 100.0), 100)
    p = jnp.asarray(np.concatenate([nearly_uniform, *(rows_of(kind, 40, n, rng) for kind in KINDS)]))
    lower, upper = theta_bracket(p)
    closed = upper - lower <= 1e-6
    assert jnp.mean(closed) > 0.98
    short = jnp.where(closed, lower - theta_of_subset(p, bisect(p)), 0)
    assert jnp.max(short) <= 1e-6


@pytest.mark.float32
@pytest.mark.parametrize("row", [[1.0], [1.0, 0.0], [0.5, 0.5], [0.2] * 5, [0.7, 0.1, 0.1, 0.1]])
def test_short_rows(row):
    p = jnp.asarray(row, jnp.float32)
    upper = theta_bracket(p).upper
    np.testing.assert_allclose(theta_of_subset(p, bisect(p)), upper, atol=1e-6)


def test_derivative_is_thetas(rng):
    u = jnp.asarray(2 * rng.standard_normal(7))
    subset = bisect(softmax(u))
    gradient = jax.grad(lambda u: theta_of_subset(softmax(u), subset))(u)
    theta = jax.jit(lambda u: theta_bracket(softmax(u), tol=0.0).lower)
    steps = [(theta(u + 1e-6 * e) - theta(u - 1e-6 * e)) / 2e-6 for e in jnp.eye(7)]
    np.testing.assert_allclose(gradient, jnp.stack(steps), atol=1e-7)


@pytest.mark.float32
def test_bad_rows():
    p = np.array([[0.5, 0.5], [0.5, 0.7]], np.float32)
    with pytest.raises(ValueError, match=r"row \(1,\) sums to 1.2"):
        bisect(p)
    subset = jax.jit(bisect)(p)
    assert not subset[1].any()
    assert jnp.isnan(jax.jit(theta_of_subset)(p, subset)[1])
