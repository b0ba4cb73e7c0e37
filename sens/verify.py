"""The identity ‖J_tau(u)‖_{inf→1} = theta(softmax(u/tau)) / tau, checked by two computations that share nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sens.softmax import norm_inf_to_one, softmax
from sens.theta import subset_masses


@dataclasses.dataclass(frozen=True)
class IdentityCheck:
    """Both sides of the identity on random logit rows of one length, in float64."""

    length: int
    tau: float
    norm: np.ndarray
    """‖J‖_{inf→1} per row: J by automatic differentiation, the norm over all sign vectors."""
    theta: np.ndarray
    """theta(p) / tau per row, over all subsets."""

    @property
    def relative_error(self) -> np.ndarray:
        return np.abs(self.norm - self.theta) / self.theta

    @property
    def worst(self) -> float:
        """The largest relative error over the rows."""
        return float(self.relative_error.max())


def verify_identity(length: int, rows: int = 500, tau: float = 1.0, seed: int = 0) -> IdentityCheck:
    """Both sides on `rows` rows of standard normal logits; `length` from 2 to 20. float64 whatever jax's own setting.

    >>> verify_identity(length=4, rows=10).worst < 1e-13
    True
    """
    if not 2 <= length <= 20:
        raise ValueError(f"length = {length}: from 2 to 20 is wanted (2^length subsets a row are tried)")
    if rows < 1:
        raise ValueError(f"rows = {rows}: at least one is wanted")
    logits = np.random.default_rng((seed, length)).standard_normal((rows, length))
    with jax.enable_x64(True):
        u = jnp.asarray(logits, jnp.float64)
        jacobians = jax.vmap(jax.jacfwd(lambda row: softmax(row, tau)))(u)
        norm = np.asarray(norm_inf_to_one(jacobians))
    p = np.exp((logits - logits.max(-1, keepdims=True)) / tau)
    p /= p.sum(-1, keepdims=True)
    masses = (subset_masses(row[1:]) for row in p)  # a subset or its complement leaves the first entry out
    return IdentityCheck(length, tau, norm, np.array([4 * (m * (1 - m)).max() for m in masses]) / tau)
