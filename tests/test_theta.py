"""Closed forms, the prefix certificate against a sort, and exact theta against independent solvers."""

import time
from fractions import Fraction

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sens
from sens import theta_bounds_from_p_max, theta_exact, theta_prefix, theta_uniform, theta_within
from sens.theta import subset_masses

ROW = hnp.arrays(np.float64, 10, elements=st.floats(0, 1) | st.sampled_from([0.0, 0.125, 0.25])).filter(
    lambda p: p.sum() > 1e-3
)


def prefix_by_sorting(p: np.ndarray) -> np.ndarray:
    """The paper's definition, in float64."""
    c = np.cumsum(-np.sort(-p.astype(np.float64), axis=-1), axis=-1) / p.sum(-1, keepdims=True, dtype=np.float64)
    nearest = np.take_along_axis(c, np.abs(c - 0.5).argmin(-1)[..., None], -1)[..., 0]
    return 4 * nearest * (1 - nearest)


def rational_theta(p: np.ndarray) -> Fraction:
    """Over all subsets, in exact arithmetic."""
    atoms = [Fraction(float(x)) for x in p]
    masses = {Fraction(0)}
    for x in atoms:
        masses |= {m + x for m in masses}
    total = sum(atoms)
    return max(4 * (m / total) * (1 - m / total) for m in masses)


def test_uniform():
    for k in range(1, 12):
        assert theta_uniform(k) == pytest.approx(float(rational_theta(np.full(k, 0.125))), abs=1e-15)
        assert theta_uniform(k) == pytest.approx(1 - (1 - 2 * (k // 2) / k) ** 2, abs=1e-15)
    with pytest.raises(ValueError, match="k = 0"):
        theta_uniform(0)
    with pytest.raises(ValueError, match=r"k = 2\.5: a whole number"):
        theta_uniform(2.5)  # pyright: ignore[reportArgumentType]


@hypothesis.given(ROW)
@hypothesis.settings(deadline=None, max_examples=100)
def test_bounds_from_p_max(p):
    p = p / p.sum()
    lower, upper = theta_bounds_from_p_max(jnp.asarray(p.max()))
    assert float(lower) - 1e-12 <= float(theta_exact(p)) <= float(upper) + 1e-12


@pytest.mark.float32
def test_bounds_from_p_max_are_reached(dtype):
    """A dominant atom; the extremal row (1/3, 1/3, 1/3); equal pairs. Outside (0, 1] there is no row."""
    lower, upper = jax.jit(theta_bounds_from_p_max)(jnp.asarray([0.7, 1 / 3, 0.5, 1.0, 1.5, 0.0], dtype))
    np.testing.assert_allclose(lower, [0.84, 8 / 9, 1, 0, np.nan, np.nan], atol=1e-6)
    np.testing.assert_allclose(upper, [0.84, 1, 1, 0, np.nan, np.nan], atol=1e-6)
    with pytest.raises(ValueError, match=r"p_max = 1\.5: a largest probability"):
        theta_bounds_from_p_max(jnp.asarray([0.7, 1.5], dtype))


@pytest.mark.float32
@pytest.mark.parametrize("n", [1, 2, 7, 600])
def test_prefix_is_the_papers(rng, dtype, n):
    u = rng.choice([0.3, 3, 10], (90, 1)) * rng.standard_normal((90, n))
    p = np.exp(u - u.max(-1, keepdims=True))
    p[:30] = np.round(p[:30], 1)  # ties, zeros
    p[np.arange(90), rng.integers(0, n, 90)] += 0.01
    p = (p / p.sum(-1, keepdims=True)).astype(dtype)
    result = jax.jit(theta_prefix)(p)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, prefix_by_sorting(p), atol=40 * np.finfo(dtype).eps)


@pytest.mark.float32
def test_prefix_mask_and_shapes(rng):
    p = jax.nn.softmax(jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.float32))
    expected = theta_prefix(p)
    padded = jnp.concatenate([p, jnp.full((2, 3, 2), jnp.nan, jnp.float32)], axis=-1)
    np.testing.assert_array_equal(theta_prefix(padded, jnp.arange(10) < 8), expected)
    np.testing.assert_array_equal(jax.vmap(theta_prefix)(p), expected)


@pytest.mark.float32
@pytest.mark.parametrize("row", [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3] * 3, [0.6, 0.3, 0.1], [0.4, 0.3, 0.3]])
def test_prefix_derivative_is_finite(row, dtype):
    p = jnp.asarray(row, dtype)
    assert jnp.isfinite(jax.grad(theta_prefix)(p / jnp.sum(p))).all()


def test_prefix_derivative_by_differences(rng):
    u = jnp.asarray(rng.standard_normal(9))

    def f(u):
        return theta_prefix(sens.softmax(u))

    steps = [(f(u + 1e-6 * e) - f(u - 1e-6 * e)) / 2e-6 for e in jnp.eye(9)]
    np.testing.assert_allclose(jax.grad(f)(u), jnp.stack(steps), atol=1e-8)


@pytest.mark.float32
def test_prefix_bad_rows():
    p = np.array([[0.5, 0.5], [0.5, 0.7]], np.float32)
    with pytest.raises(ValueError, match=r"row \(1,\) sums to 1.2"):
        theta_prefix(p)
    np.testing.assert_array_equal(jax.jit(theta_prefix)(p), [1, np.nan])


@hypothesis.given(ROW)
@hypothesis.settings(deadline=None, max_examples=60)
def test_exact_is_rational(p):
    p = p / p.sum()
    assert abs(Fraction(float(theta_exact(p))) - rational_theta(p)) <= Fraction(1, 10**12)


def test_exact_to_24_by_enumeration(rng):
    for n in (12, 17, 24):
        p = rng.dirichlet(np.full(n, 0.5))
        masses = subset_masses(p[1:])
        assert theta_exact(p) == pytest.approx((4 * masses * (1 - masses)).max(), abs=1e-12)


def subset_sums(q: list[int]) -> int:
    """The least |sum of ± q| by dynamic programming: bit b of an integer says that b is a subset's sum."""
    reached = 1
    for x in q:
        reached |= reached << x
    total = sum(q)
    return min(abs(total - 2 * s) for s in range(total + 1) if reached >> s & 1)


@pytest.mark.parametrize("n", [25, 33, 40])
def test_exact_to_40_against_an_integer_solver(rng, n):
    q = rng.integers(1, 50, n)
    q[0] = q[1:].sum() % 2 + q[0] // 2 * 2  # an even total and an odd one in turn
    for row in (q, np.append(q[:-1], q[-1] + 1), 2 * q + (np.arange(n) == 0)):
        difference, total = subset_sums([int(x) for x in row]), int(row.sum())
        assert theta_exact(row / total) == pytest.approx(1 - (difference / total) ** 2, abs=1e-12)


def test_exact_dominant_and_masked(rng):
    p = np.append(0.8, rng.dirichlet(np.ones(39)) / 5)
    assert theta_exact(p) == pytest.approx(4 * 0.8 * 0.2, abs=1e-12)
    long = np.concatenate([p, np.full(100, np.nan)])
    assert theta_exact(long, np.arange(140) < 40) == theta_exact(p)
    assert theta_exact(np.stack([p, p[::-1]])).shape == (2,)


def test_exact_refuses():
    with pytest.raises(ValueError, match=r"row \(1,\) has support 41"):
        theta_exact(np.stack([np.append(1.0, np.zeros(40)), np.full(41, 1 / 41)]))
    with pytest.raises(ValueError, match=r"p\[0\] = nan"):
        theta_exact([np.nan, 1.0])
    with pytest.raises(ValueError, match="empty support"):
        theta_exact([1.0], where=[False])
    with pytest.raises(TypeError, match="int"):
        theta_exact([0, 1])
    with pytest.raises(TypeError, match="masked array"):
        theta_exact(np.ma.array([0.5, 0.3, 0.2], mask=[False, False, True]))


def test_within_contains_the_truth(rng):
    p = np.concatenate([rng.dirichlet(np.full(16, a), 10) for a in (0.1, 1, 30)])
    exact = theta_exact(p)
    done, cut = theta_within(p, seconds=60), theta_within(p, seconds=0)
    for lower, upper in (done, cut):
        assert np.all(lower <= exact)
        assert np.all(exact <= upper)
    assert np.max(done.upper - done.lower) < 2e-15
    assert np.max(cut.upper - cut.lower) > 1e-9  # the honest answer after no time at all
    lower, upper = theta_within(rng.dirichlet(np.ones(300)), seconds=60)
    assert 0 <= upper - lower < 1e-6
    with pytest.raises(ValueError, match="seconds = -1"):
        theta_within(p, -1)


def test_within_stops(rng):
    p = rng.dirichlet(np.ones(40), 400)  # ten seconds or more to solve
    start = time.monotonic()
    lower, upper = theta_within(p, seconds=0.2)
    assert time.monotonic() - start < 5
    assert np.all(lower <= upper)
