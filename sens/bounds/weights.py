"""What the bounds share: checked weights with one key/value head a query head, and spectral norms."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sens import checks
from sens.decompose import top_eigenvalue


class Heads(NamedTuple):
    """Attention weights, key and value heads repeated for the query heads they serve."""

    query: Float[Array, "H d e"]
    key: Float[Array, "H d e"]
    value: Float[Array, "H d v"]
    out: Float[Array, "H v m"]

    @property
    def logit_scale(self) -> float:
        """1/sqrt(d_h), the scale of a logit before the temperature."""
        return 1 / math.sqrt(self.query.shape[-1])

    @property
    def out_norm(self) -> Float[Array, ""]:
        """Spectral norm of the whole output projection, (H v, m)."""
        return spectral(self.out.reshape(-1, self.out.shape[-1]))


def heads(W_query: Array, W_key: Array, W_value: Array, W_out: Array) -> Heads:
    """Check shapes and values, and repeat the key/value heads of grouped-query attention."""
    given = {"W_query": W_query, "W_key": W_key, "W_value": W_value, "W_out": W_out}
    query, key, value, out = (finite(weight, name) for name, weight in given.items())
    shapes = ", ".join(f"{name} {np.shape(weight)}" for name, weight in given.items())
    if any(weight.ndim != 3 for weight in (query, key, value, out)):
        raise ValueError(f"weights of shapes (H, d, e), (G, d, e), (G, d, v), (H, v, m) are wanted, got {shapes}")
    H, d, e = query.shape
    G = key.shape[0]
    fits = key.shape == (G, d, e) and value.shape[:2] == (G, d) and out.shape[:2] == (H, value.shape[2])
    if not fits or H % G:
        raise ValueError(
            f"weights of shapes (H, d, e), (G, d, e), (G, d, v), (H, v, m) with G dividing H are wanted, got {shapes}"
        )
    return Heads(query, jnp.repeat(key, H // G, axis=0), jnp.repeat(value, H // G, axis=0), out)


def finite(value: Any, name: str, shape: tuple[int, ...] | None = None) -> Float[Array, "..."]:
    """A floating array, with the shape asked for; finite where its values are known."""
    array = checks.as_float(value, name)
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    if not checks.is_traced(array) and not np.isfinite(array).all():
        raise ValueError(f"{name} is not finite")
    return array


def positive(value: Any, name: str) -> Any:
    """A positive number; inside jit NaN in place of any other."""
    return _where(value, name, "a positive number", lambda v: v > 0)


def non_negative(value: Any, name: str) -> Any:
    """A number or array that is nowhere negative; inside jit NaN in place of any other entry."""
    return _where(value, name, "a value >= 0", lambda v: v >= 0)


def in_unit_interval(value: Any, name: str) -> Any:
    """Numbers in [0, 1]; inside jit NaN in place of any other entry."""
    return _where(value, name, "a value in [0, 1]", lambda v: (v >= 0) & (v <= 1))


def _where(value: Any, name: str, wanted: str, test: Any) -> Any:
    if checks.is_traced(value):
        return jnp.where(test(value), value, jnp.nan)
    known = np.asarray(value)
    if not (test(known) & np.isfinite(known)).all():
        raise ValueError(f"{name} = {value}: {wanted} is wanted")
    return float(known) if known.ndim == 0 else value


def spectral(W: Float[Array, "*batch a b"]) -> Float[Array, "*batch"]:
    """Spectral norm over the last two axes, by the eigenvalues of the smaller Gram matrix (its top one is accurate)."""
    tall = W.shape[-2] >= W.shape[-1]
    return jnp.sqrt(top_eigenvalue(W.mT @ W if tall else W @ W.mT))
