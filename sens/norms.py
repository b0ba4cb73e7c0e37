"""Block norms of a sequence X of shape (L, d), one token a row (theory: "Norms").

The derivative at a zero token is zero (a subgradient), never NaN.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sens import checks


def norm_inf_two(Z: Float[ArrayLike, "*batch L d"]) -> Float[Array, "*batch"]:
    """‖Z‖_{inf,2} = max over tokens i of ‖z_i‖_2.

    >>> import jax.numpy as jnp
    >>> print(norm_inf_two(jnp.array([[3.0, 4.0], [1.0, 0.0]])))
    5.0
    """
    Z = checks.as_float(Z, "Z")
    if Z.ndim < 2 or 0 in Z.shape[-2:]:
        raise ValueError(f"shape {Z.shape}: (..., L, d) with at least one token and one feature is wanted")
    # Scaled by the largest entry, so that squares neither overflow nor vanish; the result does not depend on it.
    scale = lax.stop_gradient(jnp.max(jnp.abs(Z), axis=-1, keepdims=True))
    scale = jnp.where((scale > 0) & (scale < jnp.inf), scale, 1)
    squares = jnp.sum(jnp.square(Z / scale), axis=-1)
    lengths = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), squares)
    return jnp.max(scale[..., 0] * lengths, axis=-1)


def norm_inf_rms(X: Float[ArrayLike, "*batch L d"]) -> Float[Array, "*batch"]:
    """‖X‖_{inf,rms} = max over tokens i of ‖x_i‖_2 / sqrt(d).

    >>> import jax.numpy as jnp
    >>> print(norm_inf_rms(jnp.array([[3.0, 3.0], [1.0, 0.0]])))
    3.0
    """
    X = checks.as_float(X, "X")
    return norm_inf_two(X) / jnp.sqrt(jnp.asarray(X.shape[-1], X.dtype))
