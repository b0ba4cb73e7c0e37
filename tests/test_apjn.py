"""The recursion against simulated random blocks, its closed forms, and its growth with depth."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sens import products
from sens.apjn import apjn_recursion, derf, layer_norm
from sens.products import Sublayer

TOKENS, WIDTH, BLOCKS, NETWORKS = 8, 128, 8, 60
CORRELATION = 0.2


def simulated_norm(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=1)
def simulate(key, norm):
    """One random network's squared gain from before every block to the end, by one pass of a random cotangent."""
    keys = jax.random.split(key, 7)
    drawn = [jax.random.normal(k, (BLOCKS, WIDTH, WIDTH)) / math.sqrt(WIDTH) for k in keys[:4]]

    def add(_, x, b):
        return x + b

    def mix(w, x):
        return jnp.broadcast_to(jnp.mean(norm(x), axis=0, keepdims=True) @ w[0] @ w[1], x.shape)

    sublayers = (Sublayer(mix, add), Sublayer(lambda w, x: jax.nn.relu(norm(x) @ w[2]) @ w[3], add))
    own, shared = jax.random.normal(keys[4], (TOKENS, WIDTH)), jax.random.normal(keys[5], (1, WIDTH))
    x = math.sqrt(1 - CORRELATION) * own + math.sqrt(CORRELATION) * shared
    linked = products.chain(sublayers, drawn, x)
    u = jax.random.rademacher(keys[6], x.shape, x.dtype)
    squares = products.pull_terms(linked, u, 0, linked.depth, lambda _, terms: jnp.sum(terms.total**2))[1]
    return squares[::2] / x.size


@pytest.mark.parametrize(
    ("norm", "moments"), [(simulated_norm, layer_norm), (jax.scipy.special.erf, derf(1.0))], ids=["layer", "erf"]
)
def test_random_networks_agree_with_the_recursion_within_sampling_error(norm, moments):
    gains = np.asarray([simulate(jax.random.key(seed), norm) for seed in range(NETWORKS)])
    mean, error = gains.mean(axis=0), gains.std(axis=0, ddof=1) / math.sqrt(NETWORKS)
    expected = np.asarray(apjn_recursion(1.0, CORRELATION, BLOCKS, TOKENS, norm=moments))
    assert (error < 0.06 * expected[:-1]).all()
    # Width is finite: its correction is of order one over the width for each block.
    np.testing.assert_array_less(np.abs(mean - expected[:-1]), 3.5 * error + expected[:-1] * BLOCKS / (2 * WIDTH))
    across = apjn_recursion(1.0, CORRELATION, BLOCKS, 1, norm=moments)[0]  # a token that sees itself alone
    assert abs(mean[0] - across) > 10 * error[0]


def test_moments_of_erf_are_those_of_correlated_gaussians():
    rng = np.random.default_rng(0)
    q, p, alpha = 0.7, 0.3, 1.3
    x = rng.multivariate_normal([0, 0], [[q, p], [p, q]], size=400_000)
    value = np.vectorize(math.erf)(alpha * x[:, :])
    slope = 2 * alpha / math.sqrt(math.pi) * np.exp(-((alpha * x) ** 2))
    moments = derf(alpha)(q, p)
    assert abs(np.mean(value**2) - moments.q) < 3e-3
    assert abs(np.mean(value[:, 0] * value[:, 1]) - moments.p) < 3e-3
    assert abs(np.mean(slope**2) - moments.q_slope) < 6e-3
    assert abs(np.mean(slope[:, 0] * slope[:, 1]) - moments.p_slope) < 6e-3


def test_without_branches_the_gain_is_one():
    assert apjn_recursion(1.0, 0.2, 5, 8, attention=0.0, mlp=0.0) == [1.0] * 6


def test_growth_is_a_power_of_depth_with_layer_norm_and_faster_without():
    def exponents(norm):
        gains = [apjn_recursion(1.0, 0.2, blocks, 16, norm=norm)[0] for blocks in (64, 128, 256, 512)]
        return [math.log2(b / a) for a, b in itertools.pairwise(gains)]

    layer, erf = exponents(layer_norm), exponents(derf(1.0))
    assert max(layer) - min(layer) < 0.1  # doubling the depth multiplies the gain by the same factor
    assert erf[1] > 1.2 * erf[0]
    assert erf[2] > 1.2 * erf[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.2, 0, 8), "got 0 and 8"),
        ((1.0, 0.2, 3, 0), "got 3 and 0"),
        ((1.0, 1.2, 3, 8), r"\|p\| at most q"),
        ((1.0, -0.9, 3, 16), r"p must be at least -q/\(tokens - 1\) = -0\.0666667 for 16 tokens, got -0\.9"),
        ((1.0, 0.2, 3, 2.5), "got 3 and 2.5"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        apjn_recursion(*arguments)


def test_gains_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"got attention = 1.0 and mlp = -1.0"):
        apjn_recursion(1.0, 0.2, 2, 3, mlp=-1.0)
    with pytest.raises(ValueError, match="alpha must be positive, got 0"):
        derf(0)
