"""Block norms: against a naive oracle, and what a norm must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sens import norm_inf_rms, norm_inf_two


@pytest.mark.float32
def test_naive_oracle(rng, dtype):
    Z = rng.standard_normal((3, 5, 7)).astype(dtype)
    expected = np.array([max(np.sqrt((token.astype(np.float64) ** 2).sum()) for token in z) for z in Z])
    result = norm_inf_two(jnp.asarray(Z))
    assert result.dtype == dtype
    np.testing.assert_allclose(result, expected, rtol=4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(norm_inf_rms(jnp.asarray(Z)), expected / np.sqrt(7), rtol=4 * np.finfo(dtype).eps)


@pytest.mark.float32
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_neither_vanish_nor_overflow(scale):
    np.testing.assert_allclose(norm_inf_two(jnp.full((2, 4), scale, jnp.float32)), 2 * scale, rtol=1e-6)


@pytest.mark.float32
def test_derivative_at_zero_is_zero(dtype):
    grad = jax.grad(norm_inf_two)(jnp.zeros((2, 3), dtype))
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.float32
def test_derivative_is_the_unit_vector_of_the_longest_token(dtype):
    Z = jnp.asarray([[3.0, 4.0], [1.0, 0.0]], dtype)
    np.testing.assert_allclose(jax.grad(norm_inf_two)(Z), [[0.6, 0.8], [0, 0]], rtol=1e-6)


@pytest.mark.float32
def test_triangle_inequality_and_mixing_is_nonexpansive(rng, dtype):
    X, Y = jnp.asarray(rng.standard_normal((2, 40, 6, 5)), dtype)
    assert jnp.all(norm_inf_rms(X + Y) <= (norm_inf_rms(X) + norm_inf_rms(Y)) * (1 + 1e-5))
    A = jax.nn.softmax(jnp.asarray(rng.standard_normal((40, 6, 6)), dtype))
    assert jnp.all(norm_inf_rms(A @ X) <= norm_inf_rms(X) * (1 + 1e-5))


@pytest.mark.float32
def test_nan_and_infinity_show():
    assert jnp.isnan(norm_inf_two(jnp.asarray([[jnp.nan, 1.0]], jnp.float32)))
    assert jnp.isinf(norm_inf_two(jnp.asarray([[jnp.inf, 1.0]], jnp.float32)))


@pytest.mark.parametrize("bad", [np.ones(3), np.ones((0, 3))])
def test_wrong_shape(bad):
    with pytest.raises(ValueError, match="shape"):
        norm_inf_two(bad)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="int"):
        norm_inf_two(np.ones((2, 2), int))
