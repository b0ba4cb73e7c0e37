"""Spectral norms against dense SVD, and the probability that the upper end claims."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sens.spectral import SpectralNorm, spectral_norm

KEY = jax.random.key(11)
on_matrix = jax.jit(lambda J, key: spectral_norm(lambda v: J @ v, jnp.zeros(J.shape[1], J.dtype), key=key))


def tanh_layer(x):
    return jnp.tanh(x @ x.T) @ x


@pytest.mark.float32
@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
@pytest.mark.parametrize("spectrum", ["random", "separated", "tied", "flat"])
def test_dense_svd_lies_in_the_bracket(rng, dtype, shape, spectrum):
    J = rng.normal(size=shape)
    left, s, right = np.linalg.svd(J, full_matrices=False)
    s = {"random": s, "separated": s + 50 * (s == s[0]), "tied": np.minimum(s, s[3]), "flat": np.ones_like(s)}[spectrum]
    norm = on_matrix(jnp.asarray(left * s @ right, dtype), KEY)
    assert float(norm.lower) <= s[0] <= float(norm.upper)
    assert norm.converged
    assert norm.upper <= 1.01 * norm.lower
    assert norm.lower.dtype == dtype


@pytest.mark.float32
def test_a_nonlinear_map_of_any_shape(rng, dtype):
    x = jnp.asarray(rng.normal(size=(6, 5)), dtype)
    norm = jax.jit(lambda x: spectral_norm(tanh_layer, x, key=KEY))(x)
    exact = np.linalg.norm(np.asarray(jax.jacfwd(tanh_layer)(x), np.float64).reshape(30, 30), 2)
    assert float(norm.lower) <= exact <= float(norm.upper)
    assert norm.converged


@pytest.mark.float32
def test_exhausted_spaces_close_the_bracket(rng, dtype):
    """Rank one, rank zero and a single input end the iteration early; nothing divides by zero."""
    rank_one = np.outer(rng.normal(size=9), rng.normal(size=7))
    norm = on_matrix(jnp.asarray(rank_one, dtype), KEY)
    np.testing.assert_allclose([norm.lower, norm.upper], np.linalg.norm(rank_one, 2), rtol=1e-3)
    zero = on_matrix(jnp.zeros((3, 4), dtype), KEY)
    assert zero.lower == zero.upper == 0
    assert zero.converged
    scalar = on_matrix(jnp.asarray([[-3.0]], dtype), KEY)
    np.testing.assert_allclose([scalar.lower, scalar.upper], 3.0, rtol=1e-4)


@pytest.mark.float32
@pytest.mark.parametrize("rtol", [5e-4, 1e-3, 2e-3])
def test_whatever_stops_before_the_last_step_has_converged(rtol):
    """On 16384 coordinates of float32 the allowance for rounding is 1.2e-4 on either end, a part of the width."""
    diagonal = jnp.cos(jnp.arange(16384, dtype=jnp.float32) * 1e-4)
    norm = jax.jit(lambda x: spectral_norm(lambda v: diagonal * v, x, key=KEY, rtol=rtol, steps=400))(0 * diagonal)
    assert norm.steps < 400
    assert norm.converged
    assert norm.lower <= 1 <= norm.upper <= (1 + rtol) * norm.lower


def test_the_upper_end_fails_no_more_often_than_it_says(rng):
    """Two steps are far too few, and one start in five may deceive: of 400 starts about 80, never 110 (4 sigma)."""
    J = jnp.asarray(np.diag(np.r_[2.0, np.linspace(0, 1, 99)]))
    few = jax.vmap(lambda key: spectral_norm(lambda v: J @ v, jnp.zeros(100), key=key, steps=2, failure=0.2))
    norm = jax.jit(few)(jax.random.split(KEY, 400))
    assert (norm.lower <= 2).all()
    assert 1 <= (norm.upper < 2).sum() <= 110


def test_a_smaller_failure_is_a_wider_bracket(rng):
    J = jnp.asarray(rng.normal(size=(50, 50)))

    def upper(failure):
        return spectral_norm(lambda v: J @ v, jnp.zeros(50), key=KEY, steps=8, rtol=1e-6, failure=failure).upper

    often, seldom, never = jax.jit(lambda: (upper(1e-2), upper(1e-6), upper(1e-12)))()
    assert often < seldom < never


def test_without_convergence_the_bracket_is_wide_and_says_so(rng):
    J = rng.normal(size=(200, 200))
    norm = jax.jit(lambda x: spectral_norm(lambda v: J @ v, x, key=KEY, steps=3))(jnp.zeros(200))
    assert not norm.converged
    assert norm.steps == 3
    assert float(norm.lower) <= np.linalg.norm(J, 2) <= float(norm.upper)
    assert norm.upper > 1.5 * norm.lower


def test_values_are_checked():
    J = jnp.eye(2)
    with pytest.raises(ValueError, match="x is not finite"):
        spectral_norm(jnp.tanh, jnp.array([jnp.nan]), key=KEY)
    with pytest.raises(ValueError, match="failure must be in"):
        spectral_norm(lambda v: J @ v, jnp.zeros(2), key=KEY, failure=0.0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        spectral_norm(lambda v: J @ v, jnp.zeros(2), key=KEY, steps=0)
    with pytest.raises(ValueError, match=r"entries is wanted, got \(0,\)"):
        spectral_norm(jnp.tanh, jnp.zeros(0), key=KEY)
    with pytest.raises(ValueError, match="rtol must be positive, got inf"):
        spectral_norm(lambda v: J @ v, jnp.zeros(2), key=KEY, rtol=jnp.inf)
    with pytest.raises(ValueError, match="rtol must be positive"):
        spectral_norm(lambda v: J @ v, jnp.zeros(2), key=KEY, rtol=-1.0)
    bad = on_matrix(jnp.full((2, 2), jnp.nan), KEY)
    assert isinstance(bad, SpectralNorm)
    assert jnp.isnan(bad.lower)
    assert jnp.isnan(bad.upper)
    assert not bad.converged
