"""The bracket: sound against exact rational arithmetic, tight on softmax rows, and honest about bad input.

The soundness test takes SENS_SOUNDNESS_ROWS rows (default a few thousand; a million take less than ten minutes).
"""

import os
from fractions import Fraction

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sens
from sens import theta_bracket

ROWS = int(os.environ.get("SENS_SOUNDNESS_ROWS", "4000"))
SUPPORT = 20
bracket = jax.jit(theta_bracket)


def rows_of(kind: str, count: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Rows that are hard in different ways, in float64, summing to one up to rounding."""
    if kind == "softmax":
        u = rng.choice([0.3, 1, 3, 6, 10], (count, 1)) * rng.standard_normal((count, n))
        p = np.exp(u - u.max(-1, keepdims=True))
    elif kind == "dirichlet":
        p = rng.standard_gamma(10.0 ** rng.uniform(-2, 2, (count, 1)), (count, n))
    elif kind == "tied":
        p = rng.integers(1, 4, (count, n)).astype(float)
    elif kind == "lattice":
        p = rng.multinomial(rng.integers(3, 60), np.full(n, 1 / n), count).astype(float)
    elif kind == "clusters":
        p = rng.uniform(0.1, 1, (count, 3))[np.arange(count)[:, None], rng.integers(0, 3, (count, n))]
        p *= 1 + rng.choice([0, 1e-7, 1e-3], (count, 1)) * rng.random((count, n))
    elif kind == "near half":
        p = rng.dirichlet(np.ones(n), count) / 2
        p[:, 0] = 0.5 + rng.standard_normal(count) * 10.0 ** rng.uniform(-9, -2, count)
    elif kind == "one-hot":
        p = 10.0 ** rng.uniform(-12, -4, (count, n)) * (rng.random((count, n)) < 0.5)
        p[:, 0] = 1
    elif kind == "denormal":
        p = np.full((count, n), rng.choice([1e-42, 1e-310]))
        p[:, : 1 + n // 2] = rng.random((count, 1 + n // 2))
    else:  # uniform over the first few
        p = (np.arange(n) < rng.integers(1, n + 1, (count, 1))).astype(float)
    p[p.sum(-1) == 0, 0] = 1
    return p / p.sum(-1, keepdims=True)


KINDS = ("softmax", "dirichlet", "tied", "lattice", "clusters", "near half", "one-hot", "denormal", "uniform")


def exact_difference(row: np.ndarray) -> tuple[int, int]:
    """(D, S): the least difference over all subsets and the sum, as integers of one common unit."""
    scaled = row.astype(np.float64) * 2.0**61
    if np.array_equal(scaled, np.floor(scaled)):
        q, masses = scaled.astype(np.int64), np.zeros(1, np.int64)
    else:
        fractions = [Fraction(float(x)) for x in row]
        unit = max(f.denominator for f in fractions)
        q, masses = np.array([int(f * unit) for f in fractions], object), np.zeros(1, object)
    for x in q[1:]:
        masses = np.concatenate([masses, masses + x])
    total = sum(int(x) for x in q)
    return int(np.abs((q.sum() - masses) - masses).min()), total


def assert_sound(lower: float, upper: float, row: np.ndarray):
    difference, total = exact_difference(row[row > 0])
    theta = 1 - Fraction(difference, total) ** 2
    assert Fraction(lower) <= theta <= Fraction(upper), (lower, float(theta), upper, row)


@pytest.mark.float32
def test_sound(rng, dtype):
    batch, done, kind = 500, 0, 0
    while done < ROWS // 2:
        n = int(rng.choice([rng.integers(1, 11), rng.integers(11, SUPPORT + 1)], p=[0.97, 0.03]))
        p = np.zeros((batch, SUPPORT), dtype)
        p[:, :n] = rows_of(KINDS[kind % len(KINDS)], batch, n, rng).astype(rng.choice([dtype, np.float32]))
        p = rng.permuted(p, axis=-1)
        where = p > 0
        given = np.where(where, p, rng.choice([0, -1, np.nan, 5], p.shape)).astype(dtype)  # a mask hides anything
        lower, upper = bracket(given, where)
        assert lower.dtype == upper.dtype == dtype
        few = batch if n <= 10 else 10
        for row, a, b in zip(p[:few], np.asarray(lower), np.asarray(upper), strict=False):
            assert_sound(float(a), float(b), row)
        done, kind = done + few, kind + 1


@pytest.mark.float32
def test_sound_at_length(rng):
    """Long rows of few distinct numbers in which the exact value is known: k copies of 1/k, the rest nothing."""
    p = np.zeros((64, 700), np.float32)
    for i, row in enumerate(p):
        row[rng.permutation(700)[: 600 + i]] = np.float32(1 / (600 + i))
    lower, upper = bracket(p)
    exact = np.array([sens.theta_uniform(600 + i) for i in range(64)])
    assert np.all(np.asarray(lower, np.float64) <= exact)
    assert np.all(exact <= np.asarray(upper, np.float64))


@pytest.mark.float32
@pytest.mark.parametrize("length", [32, 128, 1024])
def test_tight_on_softmax_rows(rng, length):
    for scale in (0.3, 1, 3, 6, 10):
        u = jnp.asarray(scale * rng.standard_normal((300, length)), jnp.float32)
        lower, upper = bracket(jax.nn.softmax(u))
        assert jnp.mean(upper - lower <= 1e-6) >= 0.996, scale  # all of 300, or all but one


@pytest.mark.float32
def test_near_uniform_rows_close(rng, dtype):
    """What a plateaued post-LN model's causal rows look like: an odd half of them needs the cardinality bound."""
    lengths = np.arange(1, 129)
    u = np.where(np.arange(128) < lengths[:, None], 1e-3 * rng.standard_normal((128, 128)), -np.inf)
    lower, upper = bracket(jax.nn.softmax(jnp.asarray(u, dtype)))
    assert jnp.max(upper - lower) <= 1e-6
    odd = lengths[2:60:2]
    np.testing.assert_allclose(upper[odd - 1], [sens.theta_uniform(int(k)) for k in odd], atol=2e-3)


@pytest.mark.float32
def test_less_uniform_rows_of_odd_support_close(rng):
    """Causal rows of a pre-LN model: differences of pairs, largest with smallest, make the odd entry good."""
    lengths = np.arange(31, 129, 2)
    u = np.where(np.arange(128) < lengths[:, None], 0.1 * rng.standard_normal((lengths.size, 128)), -np.inf)
    lower, upper = bracket(jax.nn.softmax(jnp.asarray(u, np.float32)))
    assert jnp.max(upper - lower) <= 1e-6


@pytest.mark.float32
def test_rows_of_a_few_values_close(rng, dtype):
    """Last layers of a plateaued post-LN model: one key stands out, the others share two values up to rounding."""
    rows = []
    for n in range(4, 65):
        u = np.full(64, -np.inf)
        u[:n] = rng.choice([0.0, 0.06], n) + 1e-7 * rng.integers(0, 3, n)
        u[rng.integers(n)] = rng.uniform(0, 4)
        rows.append(u)
    lower, upper = bracket(jax.nn.softmax(jnp.asarray(np.array(rows), dtype)))
    assert jnp.max(upper - lower) <= 1e-6
    assert jnp.sum(upper < 1 - 1e-5) > 10  # D of a lattice, not a difference that happens to vanish


@pytest.mark.float32
def test_uniform_and_top_k_uniform_rows_close_to_rounding(dtype):
    rows = []
    for k in (1, 2, 3, 5, 17, 33, 63, 99, 101):
        tail = 10.0 ** -(k % 5 + 7)
        rows.append(np.where(np.arange(101) < k, 1 / k, 0))
        rows.append(np.where(np.arange(101) < k, (1 - tail) / k, tail / max(101 - k, 1)))
    p = jnp.asarray(np.array(rows), dtype)
    lower, upper = bracket(p / jnp.sum(p, axis=-1, keepdims=True), None, 0.0)
    assert jnp.max(upper - lower) <= 1e-6 if dtype == np.float32 else 5e-7
    exact = np.asarray(upper - lower)[::2]
    assert exact.max() <= 40 * np.finfo(dtype).eps


ROW = hnp.arrays(np.float64, 12, elements=st.floats(0, 1) | st.sampled_from([0.0, 0.125, 0.25])).filter(
    lambda p: p.sum() > 1e-3
)


@hypothesis.given(ROW)
@hypothesis.settings(deadline=None, max_examples=100)
def test_dichotomy_order_and_symmetry(p):
    p = p / p.sum()
    lower, upper = (float(x) for x in bracket(p))
    assert 0 <= lower <= upper <= 1
    p_max = p.max()
    if p_max > 2 / 3 + 1e-9:
        assert upper < 8 / 9
        np.testing.assert_allclose([lower, upper], 4 * p_max * (1 - p_max), atol=1e-12)
    elif p_max < 2 / 3 - 1e-9:
        assert lower >= 8 / 9 - 1e-6
    assert float(sens.theta_prefix(p)) <= upper + 1e-14
    assert lower - 1e-15 <= float(sens.theta_exact(p)) <= upper + 1e-15
    again_lower, again_upper = (float(x) for x in bracket(p[::-1].copy()))
    assert lower <= again_upper
    assert again_lower <= upper
    first, last = sens.theta_bounds_from_p_max(jnp.asarray(p_max))
    assert float(first) - 1e-12 <= upper
    assert lower <= float(last) + 1e-12


@pytest.mark.float32
def test_leading_axes_vmap_and_jit_agree(rng):
    p = jax.nn.softmax(jnp.asarray(4 * rng.standard_normal((6, 50, 12)), jnp.float32))
    whole = theta_bracket(p)
    assert whole.lower.shape == (6, 50)
    for other in (bracket(p), jax.vmap(theta_bracket)(p), jax.jit(jax.vmap(jax.vmap(theta_bracket)))(p)):
        np.testing.assert_array_equal(other.lower, whole.lower)
        np.testing.assert_array_equal(other.upper, whole.upper)
    one = theta_bracket(p[0, 0])
    assert one.lower.shape == ()
    assert one.lower == whole.lower[0, 0]


@pytest.mark.float32
def test_blocks_and_chunks_do_not_show(rng):
    """More rows than a block, not a multiple of it, many of them open: the same as row by row in other company."""
    p = jax.nn.softmax(jnp.asarray(3 * rng.standard_normal((600, 1030)), jnp.float32))
    whole, part = bracket(p), bracket(p[300:320])
    np.testing.assert_array_equal(whole.lower[300:320], part.lower)
    np.testing.assert_array_equal(whole.upper[300:320], part.upper)


@pytest.mark.float32
def test_mask_is_the_support(rng):
    p = jnp.asarray([[0.5, 0.3, 0.2, 9.0], [1.0, jnp.nan, -1.0, 0.0]], jnp.float32)
    where = np.array([[True, True, True, False], [True, False, False, True]])
    lower, upper = theta_bracket(p, where)
    same = theta_bracket(jnp.where(where, p, 0))
    np.testing.assert_array_equal(lower, same.lower)
    np.testing.assert_array_equal(upper, same.upper)
    assert lower[0] > 0.999999
    assert upper[1] < 1e-20  # support 1


@pytest.mark.float32
def test_width_follows_tol(rng, dtype):
    p = jax.nn.softmax(jnp.asarray(5 * rng.standard_normal((200, 200)), dtype))
    loose, tight = bracket(p, None, 1e-2), bracket(p, None, 1e-6)
    assert jnp.max(loose.upper - loose.lower) <= 1e-2
    assert jnp.mean(tight.upper - tight.lower) < jnp.mean(loose.upper - loose.lower)
    assert jnp.all(jnp.maximum(loose.lower, tight.lower) <= jnp.minimum(loose.upper, tight.upper))


@pytest.mark.float32
def test_derivative_is_zero_not_nan(rng):
    u = jnp.asarray(rng.standard_normal((3, 9)), jnp.float32)
    for f in (
        lambda u: theta_bracket(sens.softmax(u)).lower.sum(),
        lambda u: theta_bracket(sens.softmax(u)).upper.sum(),
    ):
        np.testing.assert_array_equal(jax.grad(f)(u), 0)


@pytest.mark.float32
def test_runs_on_the_device_alone():
    assert "callback" not in str(jax.make_jaxpr(theta_bracket)(jnp.ones((4, 64), jnp.float32)))


@pytest.mark.float32
def test_no_rows():
    lower, upper = theta_bracket(jnp.zeros((0, 5), jnp.float32))
    assert lower.shape == upper.shape == (0,)


@pytest.mark.float32
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1.5, -0.5, 0, 0, 0], r"p\[1, 1\] = -0.5"),
        ([np.nan, 1, 0, 0, 0], r"p\[1, 0\] = nan"),
        ([0, np.inf, 0, 0, 0], r"p\[1, 1\] = inf"),
        ([0.5, 0.6, 0, 0, 0], r"row \(1,\) sums to 1.1"),
        ([0.0, 0, 0, 0, 0], r"row \(1,\) sums to 0"),
        ([1.0, 1, 1, 1, 1], r"row \(1,\) sums to 5"),
        ([2.0**30, 2.0**30, 2.0**30, 2.0**30, 0], r"row \(1,\) sums to 4.29"),
    ],
)
def test_rows_that_are_not_probabilities(row, message):
    p = np.array([[0.2] * 5, row], np.float32)
    with pytest.raises(ValueError, match=message):
        theta_bracket(p)
    lower, upper = bracket(p)
    assert lower[0] > 0.95
    assert jnp.isnan(lower[1])
    assert jnp.isnan(upper[1])


@pytest.mark.float32
def test_wrong_arguments():
    p = np.full((2, 4), 0.25, np.float32)
    with pytest.raises(ValueError, match=r"row \(1,\): empty support"):
        theta_bracket(p, np.array([[True] * 4, [False] * 4]))
    with pytest.raises(TypeError, match="where has dtype int"):
        theta_bracket(p, np.ones((2, 4), int))
    with pytest.raises(ValueError, match=r"where has shape \(3,\)"):
        theta_bracket(p, np.ones(3, bool))
    with pytest.raises(TypeError, match="dtype int"):
        theta_bracket(np.array([0, 1]))
    with pytest.raises(TypeError, match="float64 is the widest"):
        theta_bracket(np.full(2, 0.5, np.longdouble))
    for tol in (-1.0, np.nan, np.zeros(2)):
        with pytest.raises(ValueError, match="tol = "):
            theta_bracket(np.full(2, 0.5, np.float32), tol=tol)  # pyright: ignore[reportArgumentType]
    swapped = np.array([0.75, 0.25], np.float32)
    np.testing.assert_array_equal(theta_bracket(swapped.astype(">f4")), theta_bracket(swapped))
    with pytest.raises(TypeError, match="float16"):
        theta_bracket(p.astype(np.float16))
    with pytest.raises(ValueError, match="at least one entry"):
        theta_bracket(np.zeros((2, 0), np.float32))
    if not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(TypeError, match="enable_x64"):
            theta_bracket(p.astype(np.float64))
