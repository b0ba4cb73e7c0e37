"""The spectral norm of a map's differential, by Golub-Kahan-Lanczos with a status: the Frobenius-geometry twin."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from sens.operators import linearise

_STRIDE = 4  # Lanczos steps between two looks at the bracket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpectralNorm:
    """A spectral norm between a Ritz value and a bound that fails with a probability the caller chose."""

    lower: Float[Array, ""]
    """Largest Ritz value: attained."""
    upper: Float[Array, ""]
    """Holds with probability at least 1 - `failure` over the random start."""
    converged: Bool[Array, ""]
    """`upper <= (1 + rtol) lower`."""
    steps: Int[Array, ""]
    """Lanczos steps taken; each is one push and one pull."""


def spectral_norm(
    f: Callable[[Float[Array, "..."]], Float[Array, "..."]],
    x: Float[Array, "..."],
    *,
    key: Key[Array, ""],
    rtol: float = 1e-2,
    failure: float = 1e-6,
    steps: int = 128,
) -> SpectralNorm:
    """Bracket the spectral norm of J = D f(x), from the Frobenius to the Frobenius norm.

    k steps from a random unit v give the orthonormal polynomials p_0 .. p_k of the spectral measure of JᵀJ at v.

    - *Lower*: the largest zero of p_k is the largest Ritz value; its root is attained.
    - *Upper*: the measure has mass c² at λ_max, c the component of v along a top singular vector; with n = x.size,
      |c| ≥ delta with probability 1 - delta sqrt(2n/pi) at least. By Christoffel c² ≤ 1 / Σ_j p_j(λ_max)², so λ_max is
      at most the μ at which Σ_j p_j(μ)² = 1/delta². It adapts to the spectrum, where the bound of Kuczyński and
      Woźniakowski (1992) assumes the worst one.

    No basis is kept: memory is a few vectors. Lost orthogonality repeats Ritz values that have converged and leaves the
    largest right. `failure` enters through its logarithm, so that a small one costs few steps.

    Args:
      f: any map with forward and reverse derivatives. It is linearised once.
      x: the point.
      key: for the random start.
      rtol: relative width at which the bracket counts as converged. Rounding is part of the width, 8 sqrt(n) eps of it
        (1e-4 for n = 10^4 in float32): a smaller rtol is never reached.
      failure: probability with which `upper` may be too small.
      steps: most Lanczos steps.

    Returns:
      `SpectralNorm`. Without convergence the bracket stays wide and says so.

    Raises:
      ValueError: an option out of range; a point or value that is not finite.
      TypeError: a point that is not floating, or a map that changes its dtype.
        Inside jit, where values are unknown, bad values give NaN.

    >>> W = jnp.array([[3.0, 0.0], [0.0, 1.0]])
    >>> norm = spectral_norm(lambda x: x @ W, jnp.ones((4, 2)), key=jax.random.key(0))
    >>> print(f"{norm.lower:.3f} {norm.upper:.3f} {norm.converged}")
    3.000 3.000 True
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not 0 < rtol < math.inf:
        raise ValueError(f"rtol must be positive, got {rtol}")
    if not 0 < failure < 1:
        raise ValueError(f"failure must be in (0, 1), got {failure}")
    value, push, pull = linearise(f, x)
    x = jnp.asarray(x)
    if not x.size or not value.size:
        raise ValueError(f"a map between arrays with entries is wanted, got {x.shape} to {value.shape}")
    slack = 1 + 4 * math.sqrt(x.size) * float(jnp.finfo(x.dtype).eps)  # for sums over all of x, on either end
    enough = (1 + rtol) / slack**2
    log_delta = math.log(failure) - math.log(2 * x.size / math.pi) / 2

    def step(k: Array, state: Any) -> Any:
        u, v, alphas, betas = state
        u, alpha = _normalise(push(v) - betas[k] * u)
        v, beta = _normalise(pull(u) - alpha * v)
        return u, v, alphas.at[k].set(alpha), betas.at[k + 1].set(beta)

    def advance(state: Any) -> Any:
        k, krylov, *_ = state
        until = jnp.minimum(k + _STRIDE, steps)
        krylov = jax.lax.fori_loop(k, until, step, krylov)
        return until, krylov, *_bracket(krylov[2], krylov[3], until, log_delta)

    def unfinished(state: Any) -> Array:
        k, _, lower, upper = state
        return (k < steps) & (upper > enough * lower)

    v, _ = _normalise(jax.random.normal(key, x.shape, x.dtype))
    krylov = jnp.zeros_like(value), v, jnp.zeros(steps, x.dtype), jnp.zeros(steps + 1, x.dtype)
    zero = jnp.zeros((), x.dtype)
    taken, _, lower, upper = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), krylov, zero, zero + jnp.inf))
    lower, upper = lower / slack, upper * slack
    return SpectralNorm(lower, upper, upper <= (1 + rtol) * lower, taken)


def _bracket(alphas: Array, betas: Array, k: Array, log_delta: float) -> tuple[Array, Array]:
    """The largest Ritz value and the bound after k steps, as singular values.

    Ratios of consecutive polynomials at μ are the pivots of μ I - T over its off-diagonal: all positive exactly above
    the largest Ritz value, and without overflow. Each end is the least point that passes a monotone test on them; both
    are searched together, many points at once on a log scale. (The largest p_j² stands for the sum of them all.)
    """
    diagonal = alphas**2 + betas[:-1] ** 2  # T = BᵀB for the bidiagonal B of alphas and betas
    off = alphas * betas[1:]
    above = jnp.concatenate([jnp.zeros_like(off[:1]), off[:-1]])
    grid = jnp.linspace(0, 1, 32, dtype=alphas.dtype)[:, None]
    wanted = jnp.array([[-jnp.inf, -log_delta]], alphas.dtype)  # of the largest log p_j: nothing, or 1/delta

    def narrow(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        mu = low * (high / low) ** grid

        def pivot(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            ratio, log_p, largest, positive = state
            ratio = (mu - diagonal[j] - above[j] / ratio) / off[j]
            log_p = log_p + jnp.log(jnp.where(ratio > 0, ratio, 1))
            return ratio, log_p, jnp.maximum(largest, log_p), positive & (ratio > 0)

        flat = jnp.zeros_like(mu)
        _, _, largest, positive = jax.lax.fori_loop(0, k, pivot, (flat + 1, flat, flat, mu > 0))
        passed = positive & (largest >= wanted)
        first = jnp.argmax(passed.at[-1].set(True), axis=0)[None]
        cell = [jnp.take_along_axis(mu, index, axis=0) for index in (jnp.maximum(first - 1, 0), first)]
        return cell[0], cell[1]

    # T's diagonal is nowhere above its largest eigenvalue; far out p_1 alone reaches 1/delta.
    near = diagonal.max() * (1 - 4 * float(jnp.finfo(alphas.dtype).eps))
    far = 2 * (diagonal.max() + off.max()) * math.exp(-log_delta)
    ends = jnp.full((1, 2), near), jnp.full((1, 2), far)
    passes = 6 if alphas.dtype == jnp.float32 else 12  # 31-fold each: to a unit in the last place or so
    _, high = jax.lax.fori_loop(0, passes, narrow, ends)
    ritz, bound = jnp.sqrt(jnp.where(near > 0, high[0], near))
    return ritz, bound


def _normalise(vector: Array) -> tuple[Array, Array]:
    """A unit vector (zero if the vector is zero) and the length."""
    length = jnp.linalg.norm(vector.ravel())
    return vector / jnp.where(length > 0, length, 1), length
