"""The identity: its two sides agree, whatever jax's precision, and a broken side would be seen."""

import jax
import numpy as np
import pytest

from sens import verify, verify_identity


@pytest.mark.float32
@pytest.mark.parametrize(("length", "tau"), [(2, 1.0), (8, 1.0), (9, 0.5), (13, 3.0)])
def test_identity(length, tau):
    check = verify_identity(length, rows=50, tau=tau)
    assert check.norm.dtype == check.theta.dtype == np.float64
    assert check.norm.shape == check.theta.shape == (50,)
    assert check.theta.min() > 0
    assert check.theta.max() <= 1 / tau
    assert check.worst < 1e-13


def test_reproducible_and_different_by_seed():
    first, again, other = verify_identity(4, 5, seed=1), verify_identity(4, 5, seed=1), verify_identity(4, 5, seed=2)
    np.testing.assert_array_equal(first.theta, again.theta)
    assert not np.array_equal(first.theta, other.theta)


def test_a_wrong_softmax_is_noticed(monkeypatch):
    monkeypatch.setattr(verify, "softmax", lambda u, tau: jax.nn.softmax(u * (1 + 1e-9)))
    assert verify_identity(6, rows=20).worst > 1e-12


@pytest.mark.float32
def test_leaves_the_precision_setting_alone():
    before = jax.numpy.asarray(1.0).dtype
    verify_identity(3, rows=2)
    assert jax.numpy.asarray(1.0).dtype == before


@pytest.mark.parametrize("arguments", [(1,), (21,), (8, 0)])
def test_out_of_range(arguments):
    with pytest.raises(ValueError, match="wanted"):
        verify_identity(*arguments)
