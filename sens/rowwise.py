"""Functions that work row by row, run over blocks of rows."""

import jax
import jax.numpy as jnp
from jax import lax


def by_blocks(f, size: int, x):
    """f(x) for an f that works row by row, `size` rows at a time, so that nothing as large as x is made on the way.

    The last block overlaps the one before where the rows do not divide: no second copy of f to compile.
    """
    R = jax.tree.leaves(x)[0].shape[0]
    if size >= R:
        return f(x)

    def body(i, out):
        start = jnp.minimum(i * size, R - size)
        part = f(jax.tree.map(lambda whole: lax.dynamic_slice_in_dim(whole, start, size), x))
        return jax.tree.map(lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new, start, 0), out, part)

    shapes = jax.eval_shape(f, x)
    return lax.fori_loop(0, -(-R // size), body, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
