"""Bounds that need no attention, on norms, activations, the FFN and an entropy: they hold, and are attained."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sens
from sens import bounds
from tests.norms import layer_norm, rms_norm

D = 12


def jacobian_norms(f, x):
    """Spectral norm of each token's own Jacobian."""
    return jnp.linalg.norm(jax.vmap(jax.jacfwd(f))(x), 2, axis=(-2, -1))


@pytest.mark.float32
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_normaliser_bounds_hold_and_are_attained(rng, dtype, norm):
    x = jnp.asarray(rng.normal(size=(20, D)) * 10.0 ** rng.uniform(-3, 1, size=(20, 1)), dtype)
    eps = 1e-2
    spread = x.var(axis=1) if norm is layer_norm else jnp.mean(x**2, axis=1)
    for gamma, attained in ((jnp.asarray(rng.normal(size=D), dtype), False), (jnp.full(D, -2.0, dtype), True)):
        true = jacobian_norms(functools.partial(norm, gamma=gamma), x)
        local = bounds.norm_local(gamma, jnp.sqrt(spread + eps))
        assert local.dtype == dtype
        assert (true <= local * (1 + 1e-5)).all()
        assert (local <= bounds.norm_lipschitz(gamma, eps) * (1 + 1e-5)).all()
        if attained:  # equal gammas leave a direction that the projections spare
            np.testing.assert_allclose(true, local, rtol=1e-4)
        magnitude = jnp.sqrt(jnp.mean((norm(x, gamma) + 0.5) ** 2, axis=1))
        assert (magnitude <= bounds.norm_magnitude(gamma, jnp.full(D, 0.5, dtype)) * (1 + 1e-5)).all()


@pytest.mark.float32
def test_pointwise_normalisers_attain_their_constants_at_zero(rng, dtype):
    gamma = jnp.asarray(rng.normal(size=D), dtype)
    for slope, f in (
        (bounds.dyt_lipschitz(-0.7, gamma), lambda x: gamma * jnp.tanh(-0.7 * x)),
        (bounds.derf_lipschitz(-0.7, gamma), lambda x: gamma * jax.lax.erf(-0.7 * x)),
    ):
        np.testing.assert_allclose(jacobian_norms(f, jnp.zeros((1, D), dtype))[0], slope, rtol=1e-5)
        assert (jacobian_norms(f, jnp.asarray(rng.normal(size=(9, D)), dtype)) <= slope * (1 + 1e-5)).all()


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_slopes_are_the_largest(name):
    grid = jnp.linspace(-20, 20, 400_001)
    slopes = jnp.abs(jax.vmap(jax.grad(ACTIVATIONS[name]))(grid))
    constant = bounds.activation_lipschitz(name)
    assert slopes.max() <= constant * (1 + 1e-14)
    np.testing.assert_allclose(slopes.max(), constant, rtol=1e-8)


def test_the_exact_gelu_is_steepest_at_the_root_of_two():
    exact = (1 + math.erf(1)) / 2 + math.sqrt(2) * math.exp(-1) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(bounds.activation_lipschitz("gelu"), exact, rtol=1e-15)


@pytest.mark.float32
def test_ffn_bounds_hold_and_are_attained(rng, dtype):
    W_in, W_gate = (jnp.asarray(rng.normal(size=(D, 3 * D)), dtype) for _ in range(2))
    W_out = jnp.asarray(rng.normal(size=(3 * D, D)), dtype)
    x = jnp.asarray(rng.normal(size=(10, D)), dtype)
    for name, act in ACTIVATIONS.items():
        slope = bounds.activation_lipschitz(name)
        plain = bounds.ffn(W_in, W_out, slope)
        assert plain.dtype == dtype
        assert (jacobian_norms(lambda x, act=act: act(x @ W_in) @ W_out, x) <= plain).all()
        gated = bounds.ffn_gated(W_gate, W_in, W_out, slope=slope, magnitude=sens.norm_inf_rms(x))
        swiglu = lambda x, act=act: (act(x @ W_gate) * (x @ W_in)) @ W_out  # noqa: E731
        assert (jacobian_norms(swiglu, x) <= gated).all()
    # Orthogonal weights and one unit on the steepest point of its activation attain the product.
    Q = jnp.asarray(np.linalg.qr(rng.normal(size=(D, D)))[0], dtype)
    steepest = math.sqrt(2) * Q[:, :1].T
    true = jacobian_norms(lambda x: ACTIVATIONS["gelu"](x @ Q) @ (3 * Q), steepest)
    np.testing.assert_allclose(true[0], bounds.ffn(Q, 3 * Q, bounds.activation_lipschitz("gelu")), rtol=1e-5)


@pytest.mark.float32
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 50), scale=st.floats(0, 10))
def test_zhai_entropy_is_the_least_of_its_budget(seed, n, scale):
    u = np.random.default_rng(seed).normal(size=n) * scale
    u -= u.mean()
    spread = np.linalg.norm(u)

    def entropy(u):
        p = np.exp(u - u.max()) / np.exp(u - u.max()).sum()
        return -np.sum(p * np.log(np.maximum(p, 1e-300)))

    bound = float(bounds.zhai_entropy(jnp.asarray(spread), n))
    assert bound <= entropy(u) + 1e-5
    one_above = np.full(n, -1.0 / n)
    one_above[0] += 1
    np.testing.assert_allclose(entropy(one_above * spread / np.linalg.norm(one_above)), bound, rtol=1e-3, atol=1e-5)


def test_a_row_of_one_has_no_entropy():
    assert bounds.zhai_entropy(jnp.array([0.0, 3.0]), 1).tolist() == [0, 0]
