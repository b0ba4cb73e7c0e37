"""Decompositions of small matrices, each where it is called: never a batch of them, whatever maps over the caller.

On a CPU jaxlib hands the matrices of one batched eigenvalue or singular value decomposition to the threads that run the
program, and waits. Several side by side wait for each other: with jaxlib 0.10.2 on two busy cores 512 matrices of width
64 in eight batches took two to three times as long as one after the other, and one larger program was once seen to wait
for ever.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def in_turn(f: Callable[[Array], Array], matrices: Float[Array, "*batch a b"]) -> Array:
    """`f` of each matrix, one after the other."""
    found = jax.lax.map(f, matrices.reshape(-1, *matrices.shape[-2:]))
    return found.reshape(*matrices.shape[:-2], *found.shape[1:])


@jax.custom_batching.sequential_vmap
def eigh(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Eigenvalues, ascending, and eigenvectors (columns) of a symmetric matrix."""
    eigenvalues, eigenvectors = jnp.linalg.eigh(matrix)
    return eigenvalues, eigenvectors


@jax.custom_batching.sequential_vmap
def svd(matrix: Float[Array, "n n"]) -> tuple[Float[Array, "n n"], Float[Array, " n"]]:
    """Left singular vectors (columns) and singular values, descending."""
    left, values, _ = jnp.linalg.svd(matrix)
    return left, values


def top_eigenvalue(gram: Float[Array, "*batch n n"]) -> Float[Array, "*batch"]:
    """The largest eigenvalue of positive semidefinite matrices."""
    return jnp.maximum(in_turn(_largest, gram), 0)


def triangular_factor(W: Float[Array, "*batch a b"]) -> Float[Array, "*batch c b"]:
    """R of W = Q R, Q with orthonormal columns: as long as W on every vector."""
    return in_turn(lambda one: jnp.linalg.qr(one, mode="r"), W)


@jax.custom_jvp
def _largest(matrix: Array) -> Array:
    return _eigvalsh(matrix)[-1]


@_largest.defjvp
def _(point: tuple[Array], change: tuple[Array]) -> tuple[Array, Array]:
    # With the rule given here, nothing is differentiated through the sequential map, which has no transpose.
    eigenvalues, eigenvectors = eigh(*point)
    top = eigenvectors[:, -1]
    return eigenvalues[-1], top @ change[0] @ top


@jax.custom_batching.sequential_vmap
def _eigvalsh(matrix: Array) -> Array:
    return jnp.linalg.eigvalsh(matrix)
