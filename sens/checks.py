"""What the functions on rows ask of their arguments, and the errors that say what was given instead.

Shapes and dtypes are checked always. Values are checked where they are known: eagerly an invalid row raises; inside
`jax.jit` it gives NaN, never a plausible number.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

SUM_TOLERANCE = 1e-3
"""A row of probabilities may miss a sum of one by this much; functions of a row mean the row divided by its sum."""


def is_traced(*arrays: Any) -> bool:
    """Whether any of the arrays has no values yet (we are inside a transformation)."""
    return any(isinstance(array, Tracer) for array in arrays)


def as_float(x: ArrayLike, name: str) -> Float[Array, "..."]:
    """`x` as a jax array with its own dtype; a `TypeError` if it is not floating, or would be rounded on the way in."""
    dtype = np.asarray(x).dtype if not hasattr(x, "dtype") else x.dtype  # pyright: ignore[reportAttributeAccessIssue]
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {dtype}; a floating dtype is wanted")
    if isinstance(x, np.ndarray) and not dtype.isnative:
        x, dtype = x.astype(dtype.newbyteorder("=")), dtype.newbyteorder("=")
    if dtype.itemsize > 8:
        raise TypeError(f"{name} has dtype {dtype}; float64 is the widest that jax has: convert it")
    array = jnp.asarray(x)
    if hasattr(x, "dtype") and array.dtype != dtype:
        raise TypeError(
            f"{name} has dtype {dtype}, which this jax would round to {array.dtype}: "
            f"convert it, or call inside `with jax.enable_x64(True):`"
        )
    return array


def as_rows(p: ArrayLike, where: ArrayLike | None = None) -> Float[Array, "*rows n"]:
    """Rows of float32 or float64 with the entries outside `where` set to zero; shapes and dtypes checked."""
    array = as_float(p, "p")
    if array.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"p has dtype {array.dtype}; float32 or float64 is wanted")
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(f"p has shape {array.shape}; at least one entry along the last axis is wanted")
    mask = as_mask(where, array.shape)
    return array if mask is None else jnp.where(mask, array, jnp.zeros((), array.dtype))


def as_mask(where: ArrayLike | None, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
    """`where` broadcast to `shape`; None stays None."""
    if where is None:
        return None
    mask = where if isinstance(where, jax.Array) else np.asarray(where)
    if mask.dtype != np.bool_:
        raise TypeError(f"where has dtype {mask.dtype}; bool is wanted (True: in the support)")
    try:
        return jnp.broadcast_to(mask, shape)
    except ValueError as error:
        raise ValueError(f"where has shape {mask.shape}, which does not broadcast to {shape}") from error


def row_is_valid(p: Float[Array, "*rows n"]) -> Bool[Array, "*rows"]:
    """Whether a row is one of probabilities: no negative or NaN entry, and a sum within `SUM_TOLERANCE` of one."""
    return (jnp.min(p, axis=-1) >= 0) & (jnp.abs(jnp.sum(p, axis=-1) - 1) <= SUM_TOLERANCE)


def raise_on_invalid(result: Float[Array, "*rows"], p: ArrayLike, where: ArrayLike | None = None) -> None:
    """Raise a `ValueError` about the first row whose result is NaN; does nothing inside a transformation."""
    if not is_traced(result, p, where):
        bad = np.isnan(np.asarray(result))
        if bad.any():
            row = tuple(int(i) for i in np.argwhere(bad)[0])
            mask = None if where is None else np.broadcast_to(np.asarray(where), np.shape(p))[row]
            raise ValueError(describe_invalid(np.asarray(p)[row], row, mask))


def describe_invalid(values: np.ndarray, row: tuple[int, ...], mask: np.ndarray | None = None) -> str:
    """What is wrong with one row of values: the first offending entry with its index, or the sum."""
    support = np.ones(values.shape, bool) if mask is None else mask
    offending = np.flatnonzero(support & ~((values >= 0) & (values < np.inf)))
    if not support.any():
        return f"row {row}: empty support (`where` is False along the whole row)"
    if offending.size:
        i = int(offending[0])
        return f"p[{', '.join(map(str, (*row, i)))}] = {values[i]}: a row of probabilities has no such entry"
    total = values[support].sum(dtype=np.float64)
    return f"row {row} sums to {total:.6g}: a row of probabilities sums to 1 (within {SUM_TOLERANCE:g})"
