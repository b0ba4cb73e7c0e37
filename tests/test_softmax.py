"""The softmax, its Jacobian four ways, and the order of its norms."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sens
from sens import g_1, lambda_max, norm_inf_to_one, norm_one_to_one, normalised_entropy, softmax, softmax_jacobian

# One shape, so that one compilation serves all; -inf makes supports shorter, equal logits make ties.
logits = hnp.arrays(np.float64, 8, elements=st.floats(-30, 30) | st.sampled_from([0.0, 1.0, -np.inf])).filter(
    lambda u: np.isfinite(u).any()
)


@jax.jit
def norms(u, tau=1.0):
    p = softmax(u, tau)
    return p, lambda_max(p), g_1(p), norm_one_to_one(p)


MASK = np.array([True, False, True, True, False])


@pytest.mark.float32
def test_equals_the_reference(rng, dtype):
    u = jnp.asarray(rng.standard_normal((4, 3, 7)), dtype)
    p = softmax(u, 0.7)
    assert p.dtype == dtype
    np.testing.assert_allclose(p, jax.nn.softmax(u / jnp.asarray(0.7, dtype)), rtol=2e-6)


@pytest.mark.float32
def test_mask_is_the_softmax_of_the_support(rng, dtype):
    u = jnp.asarray(rng.standard_normal((2, 5)), dtype).at[:, 1].set(jnp.nan)  # a masked entry may be anything
    p = softmax(u, where=MASK)
    np.testing.assert_allclose(p[:, MASK], softmax(u[:, MASK]), rtol=1e-6)
    np.testing.assert_array_equal(p[:, ~MASK], 0)
    J = jax.jacfwd(lambda u: softmax(u, where=MASK))(u[0])
    np.testing.assert_array_equal(J[:, ~MASK], 0)
    np.testing.assert_array_equal(J[~MASK], 0)
    assert jnp.isfinite(J).all()


@pytest.mark.float32
@pytest.mark.parametrize("tau", [0.25, 1.0, 4.0])
def test_jacobian_is_the_derivative(rng, dtype, tau):
    u = jnp.asarray(3 * rng.standard_normal((3, 6)), dtype)
    for where in (None, np.array([True, False, True, True, True, False])):
        f = functools.partial(softmax, tau=tau, where=where)
        closed = softmax_jacobian(u, tau, where)
        tolerance = {"rtol": 1e-5, "atol": 100 * np.finfo(dtype).eps / tau}
        np.testing.assert_allclose(closed, jax.vmap(jax.jacfwd(f))(u), **tolerance)
        np.testing.assert_allclose(closed, jax.vmap(jax.jacrev(f))(u), **tolerance)


def test_jacobian_by_differences(rng):
    u, h = jnp.asarray(rng.standard_normal(6)), 1e-6
    columns = [(softmax(u + h * e) - softmax(u - h * e)) / (2 * h) for e in jnp.eye(6)]
    np.testing.assert_allclose(softmax_jacobian(u), jnp.stack(columns, axis=1), atol=1e-9)


@pytest.mark.float32
def test_infinite_and_extreme_logits(dtype):
    u = jnp.asarray([0.0, -jnp.inf, 1e30, -1e30], dtype)
    np.testing.assert_array_equal(softmax(u), [0, 0, 1, 0])
    assert jnp.isfinite(jax.jacrev(softmax)(u)).all()
    assert jnp.isfinite(jax.grad(lambda tau: softmax(u, tau)[2])(jnp.asarray(1.0, dtype)))


@pytest.mark.float32
def test_softmax_bad_input():
    with pytest.raises(ValueError, match=r"row \(1,\): empty support"):
        softmax(jnp.zeros((2, 2)), where=np.array([[True, True], [False, False]]))
    for where in (None, np.array([[True, True], [True, False]])):
        with pytest.raises(ValueError, match=r"row \(1,\): empty support \(no entry in it is above -inf\)"):
            softmax(jnp.array([[0.0, 1.0], [-jnp.inf, -jnp.inf if where is None else 0.0]]), where=where)
    with pytest.raises(ValueError, match="tau = 0"):
        softmax(jnp.zeros(2), 0.0)
    with pytest.raises(TypeError, match="int"):
        softmax(np.arange(3))
    empty = jax.jit(lambda u, where: softmax(u, where=where))(jnp.zeros(2), jnp.zeros(2, bool))
    assert jnp.isnan(empty).all()


@pytest.mark.float32
@pytest.mark.parametrize("n", [1, 2, 5, 14])
def test_norm_inf_to_one_tries_every_corner(rng, dtype, n):
    J = rng.standard_normal((2, 3, n)).astype(dtype)
    signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    expected = np.abs(np.einsum("rmn,sn->rsm", J, signs)).sum(-1).max(-1)
    np.testing.assert_allclose(norm_inf_to_one(J), expected, rtol=1e-5)


@pytest.mark.float32
def test_norm_inf_to_one_derivative_and_nan(rng):
    J = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    G = jax.grad(norm_inf_to_one)(J)
    np.testing.assert_allclose(jnp.sum(G * J), norm_inf_to_one(J), rtol=1e-5)  # Euler: a norm is 1-homogeneous
    np.testing.assert_array_equal(jnp.abs(G), 1)
    assert jnp.isnan(norm_inf_to_one(J.at[0, 0].set(jnp.nan)))
    with pytest.raises(ValueError, match="24"):
        norm_inf_to_one(np.zeros((2, 25), np.float32))


@hypothesis.given(logits, st.floats(0.1, 10))
@hypothesis.settings(deadline=None, max_examples=60)
def test_norms_are_ordered(u, tau):
    p, eigenvalue, yudin, one = norms(u, tau)
    theta = sens.theta_exact(np.asarray(p))
    slack, rounding = 1 + 1e-12, 1e-14  # the row misses a sum of one by some units in the last place
    assert eigenvalue <= yudin * slack + rounding
    assert yudin <= one * slack + rounding
    assert one <= theta / 2 * slack + rounding
    assert theta <= 1


@hypothesis.given(logits)
@hypothesis.settings(deadline=None, max_examples=60)
def test_norms_are_what_they_say(u):
    p, eigenvalue, _, one = norms(u)
    J = np.diag(p) - np.outer(p, p)
    np.testing.assert_allclose(eigenvalue, np.linalg.eigvalsh(J).max(), atol=1e-14)
    np.testing.assert_allclose(one, np.abs(J).sum(0).max(), atol=1e-14)
    np.testing.assert_allclose(one, np.abs(J).sum(1).max(), atol=1e-14)


@pytest.mark.float32
@pytest.mark.parametrize(
    "row", [[1.0], [1.0, 0.0, 0.0], [0.5, 0.5], [1 / 3] * 3, [0.4, 0.4, 0.2], [0.4, 0.39999998, 0.2]]
)
def test_lambda_max_at_ties_and_corners(row, dtype):
    p = jnp.asarray(row, dtype)
    p = p / jnp.sum(p)
    J = np.diag(p) - np.outer(p, p)
    np.testing.assert_allclose(
        lambda_max(p), np.linalg.eigvalsh(J.astype(np.float64)).max(), atol=4 * np.finfo(dtype).eps
    )
    for f in (lambda_max, g_1, norm_one_to_one):
        assert jnp.isfinite(jax.grad(f)(p)).all()


@pytest.mark.float32
@pytest.mark.parametrize(
    "row",
    [
        [0.3, 0.3000002, 0.2, 0.2],
        [0.4, 0.4000001, 0.1, 0.0999999],
        [1 / 3 - 1e-7, 1 / 3, 1 / 3 + 1e-7],
        [0.3, 0.3 * (1 + 2**-50), 0.2, 0.2],
    ],
)
def test_lambda_max_of_nearly_tied_rows(row, dtype):
    p = np.asarray(row, dtype)
    q = p.astype(np.float64) / p.sum(dtype=np.float64)
    expected = np.linalg.eigvalsh(np.diag(q) - np.outer(q, q))[-1]
    np.testing.assert_allclose(lambda_max(p), expected, rtol=8 * np.finfo(dtype).eps)


@pytest.mark.float32
@pytest.mark.parametrize("row", [[1.0005, 0, 0], [0.9, 0.05, 0.0491], [0.999999, 1e-6], [1.0, 1e-30], [0.5, 0.4995]])
def test_norms_are_those_of_the_normalised_row(row, dtype):
    """In order for rows off in sum; relative to themselves next to one-hot, where 1 - p cancels."""
    p = np.asarray(row, dtype)
    q = p.astype(np.float64)
    q = q / q.sum()
    slack = 1 + 8 * np.finfo(dtype).eps
    assert 0 <= lambda_max(p) <= g_1(p) * slack
    assert g_1(p) <= norm_one_to_one(p) * slack
    np.testing.assert_allclose(norm_one_to_one(p), 2 * q[0] * q[1:].sum(), rtol=8 * np.finfo(dtype).eps)
    if len(row) == 2:
        np.testing.assert_allclose(lambda_max(p), 2 * q[0] * q[1], rtol=8 * np.finfo(dtype).eps)


def test_lambda_max_derivative_by_differences(rng):
    u = jnp.asarray(rng.standard_normal(6))

    def f(u):
        return lambda_max(softmax(u))

    steps = [(f(u + 1e-6 * e) - f(u - 1e-6 * e)) / 2e-6 for e in jnp.eye(6)]
    np.testing.assert_allclose(jax.grad(f)(u), jnp.stack(steps), atol=1e-8)


@pytest.mark.float32
def test_entropy(rng, dtype):
    p = softmax(jnp.asarray(rng.standard_normal((5, 9)), dtype))
    expected = -(np.asarray(p, np.float64) * np.log(np.asarray(p, np.float64))).sum(-1) / np.log(9)
    np.testing.assert_allclose(normalised_entropy(p), expected, rtol=1e-5)
    uniform = jnp.asarray(MASK / 3, dtype)
    np.testing.assert_allclose(normalised_entropy(uniform, where=MASK), 1, rtol=1e-6)
    one_hot = jnp.asarray([1.0, 0.0, 0.0], dtype)
    assert normalised_entropy(one_hot) == 0
    assert normalised_entropy(one_hot, where=np.array([True, False, False])) == 0  # support 1
    assert jnp.isfinite(jax.grad(normalised_entropy)(one_hot)).all()
    assert jnp.isfinite(jax.grad(lambda p: normalised_entropy(p, where=MASK))(uniform)).all()


@pytest.mark.float32
@pytest.mark.parametrize("f", [normalised_entropy, lambda_max, g_1, norm_one_to_one])
def test_bad_rows(f):
    bad = np.array([[0.5, 0.5], [0.9, 0.2]], np.float32)
    with pytest.raises(ValueError, match=r"row \(1,\) sums to 1.1"):
        f(bad)
    result = jax.jit(f)(bad)
    assert jnp.isfinite(result[0])
    assert jnp.isnan(result[1])
