"""Block norms between a found perturbation and a proof; spectral norms against dense SVD."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sens import operators
from sens.operators import BlockNorm, block_operator_norm, linearise

KEY = jax.random.key(7)


def bracket(f, x, rows=None, **options):
    """One compilation in place of one for every operation."""
    return jax.jit(lambda x: block_operator_norm(f, x, rows, key=KEY, **options))(x)


def visible(L, causal):
    return jnp.tril(jnp.ones((L, L), bool)) if causal else jnp.ones((L, L), bool)


def attention(u, W, mask):
    """Plain multi-head attention; W = query, key, value (H, d, e) and out (H, e, d)."""
    query, key, value, out = W
    q, k, v = (jnp.einsum("ld,hde->hle", u, w) for w in (query, key, value))
    logits = jnp.einsum("hie,hje->hij", q, k) / math.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(mask[None], logits, -jnp.inf), axis=-1)
    return jnp.einsum("hij,hje,hed->id", p, v, out)


def layer_norm(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def layer(x, W):
    """A pre-LN layer; W = attention's four and the FFN's two."""
    x = x + attention(layer_norm(x), W[:4], visible(len(x), True))
    return x + jax.nn.gelu(layer_norm(x) @ W[4]) @ W[5]


def random_weights(rng, d, heads, dtype, scale=1.0):
    def weight(*shape):
        return jnp.asarray(scale * rng.normal(size=shape) / np.sqrt(shape[-2]), dtype)

    e = d // heads
    return (*(weight(heads, d, e) for _ in range(3)), weight(heads, e, d), weight(d, 4 * d), weight(4 * d, d))


def dense(f, x):
    """The Jacobian as (m, e, L, d)."""
    return np.asarray(jax.jacfwd(f)(x), np.float64)


def climb(B, rng, starts=20, steps=200):
    """Dense oracle of one row's norm from below: B is (e, L, d)."""
    reached = []
    for _ in range(starts):
        y = rng.normal(size=B.shape[0])
        for _ in range(steps):
            tokens = np.einsum("a,ajd->jd", y / np.linalg.norm(y), B)
            h = tokens / np.maximum(np.linalg.norm(tokens, axis=1, keepdims=True), 1e-300)
            y = np.einsum("ajd,jd->a", B, h)
        reached.append(np.linalg.norm(y))
    return max(reached)


def attained(J, h):
    """Block norm of the image of a perturbation."""
    return np.linalg.norm(np.einsum("iajd,jd->ia", J, np.asarray(h, np.float64)), axis=1).max()


@pytest.mark.float32
@pytest.mark.parametrize("L", [1, 3, 8])
def test_scalar_tokens_agree_with_enumeration_of_signs(rng, dtype, L):
    """d = 1: the ball is [-1, 1] and the maximum of a convex function is at a sign vector."""
    J = rng.normal(size=(3, 2, L))
    f = lambda x: jnp.einsum("iaj,jd->ia", jnp.asarray(J, dtype), x)  # noqa: E731
    signs = np.array(list(itertools.product([-1, 1], repeat=L)))
    exact = np.linalg.norm(np.einsum("iaj,sj->sia", J, signs), axis=2).max(axis=0)
    norm = bracket(f, jnp.ones((L, 1), dtype), range(3), restarts=8)
    assert (np.asarray(norm.row_lower) <= exact).all()
    assert (exact <= np.asarray(norm.row_upper)).all()
    np.testing.assert_allclose(norm.row_lower, exact, rtol=1e-3)
    # One token or the maximiser's sign alone leave no gap; in general a relaxation of signs has one.
    assert (norm.row_upper / norm.row_lower < (1.001 if L == 1 else 1.1)).all()


def test_planar_tokens_agree_with_a_grid_of_angles(rng):
    """L = d = 2: every pair of unit vectors, on a grid of 0.2 degrees."""
    J = rng.normal(size=(1, 3, 2, 2))
    angles = np.linspace(0, 2 * np.pi, 1800, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    first, second = J[0, :, 0] @ circle, J[0, :, 1] @ circle
    exact = np.sqrt(
        ((first**2).sum(0)[:, None] + (second**2).sum(0)[None] + 2 * first.T @ second).max()
    )  # at most 1 - 1e-5 of the truth
    norm = bracket(lambda x: jnp.einsum("iajd,jd->ia", J, x), jnp.zeros((2, 2)))
    assert float(norm.lower) <= exact * 1.0001
    assert exact <= float(norm.upper)
    assert norm.converged


@pytest.fixture(scope="module")
def norm_of_attention():
    return jax.jit(lambda x, W, mask: block_operator_norm(lambda u: attention(u, W, mask), x, key=KEY))


@pytest.mark.float32
@pytest.mark.parametrize(("L", "d", "heads"), [(8, 8, 2), (64, 16, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_certified_to_a_hundredth(norm_of_attention, rng, dtype, L, d, heads, causal):
    for scale in (0.5, 1.0, 2.0):
        W = random_weights(rng, d, heads, dtype, scale)[:4]
        x = jnp.asarray(rng.normal(size=(L, d)), dtype)
        mask = visible(L, causal)
        norm = norm_of_attention(x, W, mask)
        assert norm.converged
        assert norm.lower <= norm.upper <= 1.01 * norm.lower
        J = dense(lambda u, W=W, mask=mask: attention(u, W, mask), x)
        assert float(norm.lower) <= attained(J, norm.witness) * (1 + 1e-6)
        np.testing.assert_allclose(np.linalg.norm(norm.witness, axis=1).max(), 1, rtol=1e-5)
        top = int(jnp.argmax(norm.row_lower))
        assert climb(J[top], rng) <= float(norm.upper)
        for i in range(0, L, 5):  # rows that were dropped are bounded too
            assert climb(J[i], rng, starts=2, steps=30) <= float(norm.row_upper[i])


@pytest.mark.float32
def test_asked_rows_come_in_order_each_to_its_tolerance(rng, dtype):
    W = random_weights(rng, 8, 2, dtype)[:4]
    x = jnp.asarray(rng.normal(size=(8, 8)), dtype)
    f = lambda u: attention(u, W, visible(8, True))  # noqa: E731
    norm = bracket(f, x, [5, 0, 3], rtol=0.02)
    assert norm.rows.tolist() == [5, 0, 3]
    assert norm.row_converged.all()
    J = dense(f, x)
    for row, lower, upper in zip((5, 0, 3), norm.row_lower.tolist(), norm.row_upper.tolist(), strict=True):
        assert lower <= climb(J[row], rng) * (1 + 1e-5) <= upper * (1 + 1e-5)
    assert norm.upper == norm.row_upper.max()
    assert norm.lower == norm.row_lower.max()
    assert norm.row_lower.dtype == norm.witness.dtype == dtype


@pytest.mark.float32
def test_token_by_token_maps_have_their_largest_token_norm(rng, dtype):
    """An FFN's row touches one token: Lambda is the largest spectral norm of the tokens' Jacobians."""
    W = random_weights(rng, 8, 2, dtype)[4:]
    f = lambda x: jax.nn.gelu(x @ W[0]) @ W[1]  # noqa: E731
    x = jnp.asarray(rng.normal(size=(6, 8)), dtype)
    norm = bracket(f, x)
    J = dense(f, x)
    exact = max(np.linalg.norm(J[i, :, i], 2) for i in range(6))
    assert float(norm.lower) <= exact <= float(norm.upper)
    assert norm.converged
    assert norm.upper <= 1.01 * norm.lower


@pytest.mark.parametrize("depth", [1, 2])
def test_whole_layers_are_bracketed(rng, depth):
    W = [random_weights(rng, 16, 2, jnp.float64) for _ in range(depth)]
    f = lambda x: layer(x, W[0]) if depth == 1 else layer(layer(x, W[0]), W[1])  # noqa: E731
    x = jnp.asarray(rng.normal(size=(8, 16)))
    norm = bracket(f, x)
    J = dense(f, x)
    found = max(climb(B, rng, starts=5) for B in J)
    assert float(norm.lower) <= attained(J, norm.witness) * (1 + 1e-9)
    assert found <= float(norm.upper)
    assert norm.converged
    assert norm.upper <= 1.01 * norm.lower


@pytest.mark.float32
def test_rms_geometry_scales_by_the_widths(rng, dtype):
    B = jnp.asarray(rng.normal(size=(8, 2)), dtype)
    f = lambda x: x @ B  # noqa: E731
    x = jnp.ones((3, 8), dtype)
    two = bracket(f, x)
    rms = bracket(f, x, geometry="rms")
    np.testing.assert_allclose(rms.lower, 2 * two.lower, rtol=1e-5)
    np.testing.assert_allclose(rms.upper, 2 * two.upper, rtol=1e-5)
    image = np.linalg.norm(np.asarray(f(rms.witness)), axis=1).max() / np.sqrt(2)
    np.testing.assert_allclose(image, rms.lower, rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(rms.witness, axis=1).max() / np.sqrt(8), 1, rtol=1e-5)


def test_known_bounds_spare_rows_their_certificate(rng):
    """Row i is scaled by 1/(i+1): given bounds twice the truth, only rows 0 and 1 can be the maximum."""
    B = rng.normal(size=(4, 4))
    shrink = 1 / jnp.arange(1, 7, dtype=jnp.float64)[:, None]
    exact = np.linalg.norm(B, 2) * np.asarray(shrink[:, 0])
    norm = bracket(lambda x: shrink * (x @ B), jnp.ones((6, 4)), row_upper=1.99 * exact)
    assert norm.converged
    assert float(norm.lower) <= exact[0] <= float(norm.upper)
    np.testing.assert_allclose(norm.row_upper[1:], 1.99 * exact[1:], rtol=1e-9)


@pytest.mark.float32
def test_a_row_whose_blocks_are_too_many_to_keep_has_the_same_bracket(rng, dtype, monkeypatch):
    W = random_weights(rng, 8, 2, dtype)
    f, x = (lambda x: layer(x, W)), jnp.asarray(rng.normal(size=(6, 8)), dtype)
    kept = bracket(f, x, rtol=1e-3)
    monkeypatch.setattr(operators, "_HELD", 6 * 8 * 8 - 1)
    probed = bracket(f, x, rtol=1e-3)
    assert kept.converged
    assert probed.converged
    np.testing.assert_allclose(probed.lower, kept.lower, rtol=1e-3)
    np.testing.assert_allclose(probed.upper, kept.upper, rtol=1e-3)


def test_a_pull_that_disagrees_with_the_push_leaves_the_bracket_wide(rng, monkeypatch):
    """As rounding would make it, only more: a pull that is a tenth too short."""
    B = jnp.asarray(rng.normal(size=(4, 4)))
    exact = operators.linearise

    def skewed(f, x):
        df = exact(f, x)
        return df._replace(pull=lambda cotangent: df.pull(cotangent) * 0.9)

    assert bracket(lambda x: x @ B, jnp.ones((3, 4))).converged
    monkeypatch.setattr(operators, "linearise", skewed)
    norm = bracket(lambda x: x @ B, jnp.ones((3, 4)))
    assert not norm.converged
    assert norm.upper > 1.05 * norm.lower


def test_without_convergence_the_bracket_is_wide_and_says_so(rng):
    J = rng.normal(size=(2, 6, 8, 1))
    f = lambda x: jnp.einsum("iajd,jd->ia", J, x)  # noqa: E731
    norm = bracket(f, jnp.zeros((8, 1)), rtol=1e-9, steps=1, rounds=1, restarts=1)
    assert not norm.converged
    assert not norm.row_converged.any()
    signs = np.array(list(itertools.product([-1, 1], repeat=8)))
    exact = np.linalg.norm(np.einsum("iajd,sj->sia", J, signs), axis=2).max()
    assert float(norm.lower) <= exact <= float(norm.upper)
    assert norm.upper > 1.01 * norm.lower


@pytest.mark.float32
def test_the_zero_map_has_norm_zero(dtype):
    norm = bracket(lambda x: 0 * x, jnp.ones((3, 2), dtype))
    assert norm.lower == norm.upper == 0
    assert norm.converged


@pytest.mark.float32
def test_memory_is_that_of_the_probes():
    """A dense Jacobian of this map has (256 * 32)^2 entries, 256 MiB in float32; thirty-two probes have 1 MiB."""
    W = jnp.eye(32, dtype=jnp.float32)
    norm = jax.jit(lambda x: block_operator_norm(lambda u: jnp.tanh(u @ W), x, [0, 9], key=KEY, batch=32))
    compiled = norm.lower(jnp.ones((256, 32), jnp.float32)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 20 * 2**20


def test_brackets_compose_with_vmap(rng):
    x = jnp.asarray(rng.normal(size=(3, 4, 2)))
    many = jax.vmap(lambda point: block_operator_norm(jnp.tanh, point, key=KEY))(x)
    assert isinstance(many, BlockNorm)
    np.testing.assert_allclose(many.lower, (1 - np.tanh(x) ** 2).max(axis=(1, 2)), rtol=1e-2)
    assert many.converged.all()


def test_inside_jit_bad_values_give_nan():
    norm = jax.jit(lambda x: block_operator_norm(jnp.tanh, x, key=KEY))
    bad = norm(jnp.full((2, 2), jnp.nan))
    assert jnp.isnan(bad.lower)
    assert jnp.isnan(bad.upper)
    assert not bad.converged
    outside = jax.jit(lambda rows: block_operator_norm(jnp.tanh, jnp.zeros((2, 2)), rows, key=KEY))(jnp.array([0, 5]))
    assert jnp.isnan(outside.row_lower).tolist() == [False, True]
    assert not outside.converged


def test_inside_jit_a_bound_below_what_is_attained_gives_nan():
    norm = bracket(jnp.sinh, jnp.ones((2, 2)), row_upper=jnp.array([9.0, 0.5]))
    assert jnp.isnan(norm.row_upper).tolist() == [False, True]
    assert not norm.converged


def test_an_infinite_slope_gives_nan():
    norm = bracket(jnp.cbrt, jnp.zeros((2, 2)))
    assert not norm.converged
    assert jnp.isnan(norm.upper)


@pytest.mark.parametrize(
    ("f", "x", "options", "message"),
    [
        (jnp.tanh, np.ones(3), {}, r"x of shape \(L, d\) is wanted, got \(3,\)"),
        (jnp.sum, np.ones((2, 2)), {}, r"got \(2, 2\) to \(\)"),
        (jnp.tanh, np.full((2, 2), np.inf), {}, "x is not finite"),
        (jnp.log, np.zeros((2, 2)), {}, r"f\(x\) is not finite"),
        (jnp.tanh, np.ones((2, 2)), {"rows": [2]}, r"rows must be in \[0, 2\), got \[2\]"),
        (jnp.tanh, np.ones((2, 2)), {"rows": [-1]}, r"rows must be in \[0, 2\), got \[-1\]"),
        (jnp.tanh, np.ones((2, 2)), {"rows": []}, "non-empty"),
        (jnp.tanh, np.ones((2, 2)), {"rows": [0.5]}, "row numbers"),
        (jnp.tanh, np.ones((2, 2)), {"rtol": 0.0}, "rtol must be positive"),
        (jnp.tanh, np.ones((2, 2)), {"rounds": 0}, "rounds must be at least 1"),
        (jnp.tanh, np.ones((2, 2)), {"geometry": "max"}, "geometry"),
        (jnp.tanh, np.ones((0, 2)), {}, r"entries is wanted, got \(0, 2\) to \(0, 2\)"),
        (lambda x: x[:0], np.ones((2, 2)), {}, r"entries is wanted, got \(2, 2\) to \(0, 2\)"),
        (jnp.tanh, np.ones((2, 2)), {"rtol": np.inf}, "rtol must be positive"),
        (jnp.sinh, np.ones((2, 2)), {"row_upper": np.array([9, 0.5])}, r"row_upper\[1\] = 0.5 is no bound: 1.5"),
        (jnp.tanh, np.ones((2, 2)), {"row_upper": np.ones(3)}, r"row_upper must have one bound a row, shape \(2,\)"),
    ],
)
def test_bad_arguments_are_named(f, x, options, message):
    with pytest.raises(ValueError, match=message):
        block_operator_norm(f, jnp.asarray(x), key=KEY, **options)


def test_bad_types_are_named():
    with pytest.raises(TypeError, match="int32"):
        linearise(jnp.tanh, jnp.ones((2, 2), jnp.int32))
    with pytest.raises(TypeError, match="one float64 array is wanted"):
        linearise(lambda x: x.astype(jnp.float32), jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="one float64 array is wanted"):
        linearise(lambda x: (x, x), jnp.ones((2, 2)))  # pyright: ignore[reportArgumentType]
