"""Singular values by Golub and Kahan's bidiagonalisation against dense matrices, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sens import products


@functools.partial(jax.jit, static_argnames=("steps",))
def largest(A, start, steps):
    return products.singular_values(lambda v: A @ v, lambda u: A.T @ u, start, count=2, steps=steps)


@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(7, 11), (11, 7)]), decay=st.floats(0.3, 0.99))
@settings(deadline=None, max_examples=30)
def test_singular_values_are_those_of_the_matrix(seed, shape, decay):
    rng = np.random.default_rng(seed)
    U, _, Vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    exact = decay ** np.arange(7)
    A, start = jnp.asarray(U * exact @ Vt), jnp.asarray(rng.normal(size=shape[1]))
    whole = largest(A, start, steps=11)
    np.testing.assert_allclose(whole.values[0], 1, rtol=1e-9)
    np.testing.assert_allclose(whole.values[1], decay, rtol=1e-9)
    few = largest(A, start, steps=3)
    spectrum = np.append(exact, 0)  # zero: of a domain or range larger than the rank
    for value, residual in zip(few.values, few.residuals, strict=True):
        assert np.abs(spectrum - value).min() <= residual + 1e-12
        assert value <= 1 + 1e-12


@pytest.mark.float32
def test_singular_values_survive_a_low_rank_and_repeated_values(dtype, rng):
    Q = np.linalg.qr(rng.normal(size=(11, 11)))[0]
    A = jnp.asarray(Q[:, :4] * np.array([5.0, 2.0, 2.0, 1.0]) @ Q[:4], dtype)
    start = jnp.asarray(rng.normal(size=11), dtype)
    found = largest(A, start, steps=11)
    np.testing.assert_allclose(found.values, [5.0, 2.0], atol=1e-4)
    assert found.values.dtype == dtype
    np.testing.assert_array_equal(largest(0 * A, start, steps=11).values, 0)


def test_singular_values_refuse_counts_that_cannot_be():
    start = jnp.ones(3)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"got {count}"):
            products.singular_values(lambda v: v, lambda u: u, start, count=count)


def test_a_start_without_direction_or_a_tolerance_without_width_is_refused():
    def largest(start, **options):
        return products.singular_values(lambda v: 2 * v, lambda u: 2 * u, start, count=1, steps=1, **options)

    with pytest.raises(ValueError, match=r"one of length 0\.0"):
        largest(jnp.zeros(3))
    with pytest.raises(ValueError, match="one of length nan"):
        largest(jnp.full(3, jnp.nan))
    with pytest.raises(ValueError, match="rtol must be positive, got 0"):
        largest(jnp.ones(3), rtol=0)
    found = jax.jit(largest)(jnp.zeros(3))
    assert jnp.isnan(found.values).all()
    assert not found.converged.any()
