"""No batched decomposition reaches LAPACK, and derivatives are those of the plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sens import bounds, decompose
from sens.operators import block_operator_norm
from sens.products import singular_values


def decomposed_ranks(jaxpr):
    """Axes of what every eigenvalue or singular value decomposition in a program takes."""
    ranks = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("eigh", "svd"):
            ranks.append(equation.invars[0].aval.ndim)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            ranks += decomposed_ranks(inner) if hasattr(inner, "eqns") else []
    return ranks


@pytest.mark.parametrize(
    "f",
    [
        lambda W: bounds.ffn(W, W, slope=1.0),
        lambda W: block_operator_norm(lambda x: jnp.tanh(x @ W), jnp.ones((2, 4)), key=jax.random.key(0), rounds=1),
        lambda W: singular_values(lambda v: W @ v, lambda u: W.T @ u, jnp.ones(4), count=1, steps=2),
    ],
    ids=["bounds", "block norm", "singular values"],
)
def test_vmapped_functions_decompose_one_matrix_at_a_time(rng, f):
    batch = jnp.asarray(rng.normal(size=(3, 4, 4)))
    ranks = decomposed_ranks(jax.make_jaxpr(jax.vmap(f))(batch).jaxpr)
    assert set(ranks) == {2}
    assert decomposed_ranks(jax.make_jaxpr(jax.vmap(lambda W: jnp.linalg.eigh(W)[0]))(batch).jaxpr) == [3]


def test_the_gradient_of_a_spectral_norm_is_the_product_of_its_singular_vectors(rng):
    W = rng.normal(size=(3, 5, 4))
    norms = lambda W: bounds.ffn(W[0], W[1].T, slope=1.0) + bounds.ffn(W[2], jnp.eye(4), slope=1.0)  # noqa: E731
    gradient = jax.jit(jax.grad(norms))(jnp.asarray(W))
    left, values, right = np.linalg.svd(W)
    outer = left[:, :, :1] * right[:, :1]
    expected = outer * np.array([values[1, 0], values[0, 0], 1.0])[:, None, None]
    np.testing.assert_allclose(gradient, expected, atol=1e-10)


def test_every_matrix_of_a_batch_has_its_own_largest_eigenvalue(rng):
    A = rng.normal(size=(2, 3, 4, 5))
    gram = A @ A.swapaxes(-1, -2)
    np.testing.assert_allclose(decompose.top_eigenvalue(jnp.asarray(gram)), np.linalg.eigvalsh(gram)[..., -1])
    R = decompose.triangular_factor(jnp.asarray(A[0]).mT)
    np.testing.assert_allclose(R.mT @ R, gram[0], atol=1e-10)
