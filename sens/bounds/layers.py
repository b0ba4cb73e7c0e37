"""Bounds on normalisers, feed-forward networks and whole layers (theory: "Norms", "Multi-head attention").

The normalisers and the FFN act token by token, so each of their constants holds in the block norms (inf,2) and
(inf,rms) and in the Frobenius norm alike, if the width in is the width out.
"""

import functools
import math
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from sens.bounds.weights import finite, non_negative, positive, spectral

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


def norm_magnitude(gamma: Float[Array, " d"], beta: Float[Array, " d"] | None = None) -> Float[Array, ""]:
    """‖LN(x)‖_rms ≤ ‖gamma‖_inf + ‖beta‖_inf for every x. RMSNorm is the same with no beta.

    A layer's B_LN is the largest over its normalisers.

    Source: Emadi, arXiv 2602.18849, Lemma 2.4.

    >>> print(norm_magnitude(jnp.array([1.0, -2.0]), jnp.array([0.5, 0.0])))
    2.5
    """
    magnitude = jnp.max(jnp.abs(finite(gamma, "gamma")))
    return magnitude if beta is None else magnitude + jnp.max(jnp.abs(finite(beta, "beta")))


def norm_lipschitz(gamma: Float[Array, " d"], eps: float) -> Float[Array, ""]:
    """Lip(LN) ≤ ‖gamma‖_inf / sqrt(eps), over all of space; RMSNorm likewise. A layer's L_LN is the largest.

    Source: Emadi, arXiv 2602.18849, Lemma A.1; RMSNorm ours (its Jacobian is Diag(g)/r (I - x xᵀ/(d r²)), r² ≥ eps).

    >>> print(norm_lipschitz(jnp.array([1.0, -2.0]), eps=0.25))
    4.0
    """
    return norm_local(gamma, jnp.sqrt(jnp.asarray(positive(eps, "eps"), jnp.result_type(gamma))))


def norm_local(gamma: Float[Array, " d"], sigma: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """‖J_LN(y)‖ ≤ ‖gamma‖_inf / sigma(y) at a token: the a_{k,i} of the paper's condition for the LayerNorm-only term.

    `sigma` is sqrt(var + eps) of the token, or for RMSNorm r = sqrt(mean square + eps). The maximum over tokens bounds
    the Jacobian of the whole sequence at that point.

    Source: Emadi, arXiv 2602.18849, Lemma A.2 and Corollary A.3; RMSNorm ours.

    >>> print(norm_local(jnp.array([1.0, -2.0]), jnp.array([1.0, 4.0])))
    [2.  0.5]
    """
    return jnp.max(jnp.abs(finite(gamma, "gamma"))) / positive(sigma, "sigma")


def dyt_lipschitz(alpha: float | Float[Array, ""], gamma: Float[Array, " d"]) -> Float[Array, ""]:
    """Lipschitz constant of DyT, gamma * tanh(alpha x) + beta: |alpha| ‖gamma‖_inf; attained at x = 0.

    >>> print(dyt_lipschitz(-0.5, jnp.array([1.0, 2.0])))
    1.0
    """
    return jnp.abs(alpha) * jnp.max(jnp.abs(finite(gamma, "gamma")))


def derf_lipschitz(alpha: float | Float[Array, ""], gamma: Float[Array, " d"]) -> Float[Array, ""]:
    """Lipschitz constant of Derf, gamma * erf(alpha x + s) + beta: 2/sqrt(pi) |alpha| ‖gamma‖_inf; attained.

    >>> print(f"{derf_lipschitz(-0.5, jnp.array([1.0, 2.0])):.4f}")
    1.1284
    """
    return 2 / math.sqrt(math.pi) * dyt_lipschitz(alpha, gamma)


@functools.cache
def activation_lipschitz(name: Activation) -> float:
    """The largest slope of an activation, in float64: where its second derivative vanishes, found by bisection.

    `relu` has 1. `gelu` is x Φ(x), steepest at sqrt 2; `gelu_tanh` its tanh form, with a constant of its own; `silu` is
    x times the logistic function.

    >>> print(*(f"{activation_lipschitz(name):.6f}" for name in ("gelu", "gelu_tanh", "silu")))
    1.128904 1.128993 1.099839
    """
    if name == "relu":
        return 1.0
    slopes = {"gelu": _gelu_slopes, "gelu_tanh": _gelu_tanh_slopes, "silu": _silu_slopes}
    if name not in slopes:
        raise ValueError(f"activation {name!r}: one of 'relu', {', '.join(map(repr, slopes))} is wanted")
    slope = slopes[name]
    # Each curvature is positive at 0 and changes sign once on the way to 5, beyond which the slope falls to 1.
    low, high = 0.0, 5.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle)[1] > 0 else (low, middle)
    return slope(low)[0]


def ffn(W_in: Float[Array, "d f"], W_out: Float[Array, "f m"], slope: float) -> Float[Array, ""]:
    """Lipschitz constant of act(x W_in + b) W_out + c over all of space: ‖W_out‖ · slope · ‖W_in‖.

    `slope` is `activation_lipschitz` of the activation.

    Source: Emadi, arXiv 2602.18849, appendix C.2.

    >>> print(ffn(jnp.eye(2), 3 * jnp.eye(2), slope=1.0))
    3.0
    """
    W_in, W_out = _matrices(W_in=W_in, W_out=W_out)
    if W_in.shape[1] != W_out.shape[0]:
        raise ValueError(f"W_in (d, f) and W_out (f, m) are wanted, got {W_in.shape} and {W_out.shape}")
    return spectral(W_out) * spectral(W_in) * positive(slope, "slope")


def ffn_gated(
    W_gate: Float[Array, "d f"],
    W_up: Float[Array, "d f"],
    W_out: Float[Array, "f m"],
    *,
    slope: float,
    magnitude: float | Float[Array, ""],
) -> Float[Array, ""]:
    """Lipschitz constant of (act(x W_gate) * (x W_up)) W_out, as in SwiGLU, on tokens with ‖x‖_rms ≤ `magnitude`.

    sqrt(d) B ‖W_out‖ (slope · max_i ‖W_up[:,i]‖ ‖W_gate‖ + max_i ‖W_gate[:,i]‖ ‖W_up‖), for an activation with
    |act(z)| ≤ |z|, as all of `activation_lipschitz` are. A gated FFN has no constant over all of space.

    Source: ours.
    """
    W_gate, W_up, W_out = _matrices(W_gate=W_gate, W_up=W_up, W_out=W_out)
    if W_gate.shape != W_up.shape or W_gate.shape[1] != W_out.shape[0]:
        raise ValueError(
            f"W_gate (d, f), W_up (d, f), W_out (f, m) are wanted, got {W_gate.shape}, {W_up.shape}, {W_out.shape}"
        )
    tokens = math.sqrt(W_gate.shape[0]) * non_negative(magnitude, "magnitude")
    gate, up = (jnp.max(jnp.linalg.norm(W, axis=0)) for W in (W_gate, W_up))
    return tokens * spectral(W_out) * (positive(slope, "slope") * up * spectral(W_gate) + gate * spectral(W_up))


def pre_ln_layer(attention: Any, ffn: Any, attention_norm: Any, ffn_norm: Any) -> Any:
    """Bound on X + MHA(LN(X)) followed by Z + FFN(LN(Z)), from its parts: (1 + a L_MHA)(1 + b L_FFN).

    - Theorem 4.3: a = b = L_LN, the largest `norm_lipschitz`; attention `attention_bounded` at B_LN, the largest
      `norm_magnitude`; `ffn`. Then a Lipschitz constant over all of space. RMSNorm and a gated FFN (at B_LN) likewise.
    - Ours, at a point: a, b the largest `norm_local` over each normaliser's tokens, the *actual* ‖gamma‖_inf/sigma;
      attention any bound at LN(X), or the upper end of `sens.operators.block_operator_norm`. Then it bounds the
      Jacobian at that point.

    Geometry: the block norms, input and output.

    Source: Emadi, arXiv 2602.18849, Theorem 4.3.

    >>> pre_ln_layer(1.0, 2.0, 0.5, 0.25)
    2.25
    """
    attention, ffn, attention_norm, ffn_norm = _parts(attention, ffn, attention_norm, ffn_norm)
    return (1 + attention_norm * attention) * (1 + ffn_norm * ffn)


def post_ln_layer(attention: Any, ffn: Any, attention_norm: Any, ffn_norm: Any) -> Any:
    """Bound on LN(X + MHA(X)) followed by LN(Z + FFN(Z)), from its parts: a b (1 + L_MHA)(1 + L_FFN).

    - Theorem 4.4: a = b = L_LN and attention at B_LN: a Lipschitz constant on inputs with ‖X‖_{inf,rms} ≤ B_LN, so from
      the second layer on, whose input is a LayerNorm's output. For the first take the embedding's own magnitude.
    - Ours, at a point: a, b the largest `norm_local` over the tokens of X + MHA(X) and of Z + FFN(Z); attention any
      bound at X, or the upper end.

    Geometry: the block norms, input and output.

    Source: Emadi, arXiv 2602.18849, Theorem 4.4.

    >>> post_ln_layer(1.0, 2.0, 0.5, 0.25)
    0.75
    """
    attention, ffn, attention_norm, ffn_norm = _parts(attention, ffn, attention_norm, ffn_norm)
    return attention_norm * ffn_norm * (1 + attention) * (1 + ffn)


def _parts(attention: Any, ffn: Any, attention_norm: Any, ffn_norm: Any) -> tuple[Any, ...]:
    parts = {"attention": attention, "ffn": ffn, "attention_norm": attention_norm, "ffn_norm": ffn_norm}
    return tuple(non_negative(part, name) for name, part in parts.items())


def _matrices(**weights: Array) -> list[Array]:
    arrays = [finite(weight, name) for name, weight in weights.items()]
    if any(array.ndim != 2 for array in arrays):
        raise ValueError(
            f"matrices are wanted, got {', '.join(f'{name} {jnp.shape(W)}' for name, W in weights.items())}"
        )
    return arrays


def _gelu_slopes(x: float) -> tuple[float, float]:
    """First and second derivative of x Φ(x)."""
    density = math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return (1 + math.erf(x / math.sqrt(2))) / 2 + x * density, density * (2 - x**2)


def _gelu_tanh_slopes(x: float) -> tuple[float, float]:
    """First and second derivative of x (1 + tanh(c (x + 0.044715 x³))) / 2, c = sqrt(2/pi)."""
    c, cubic = math.sqrt(2 / math.pi), 0.044715
    t = math.tanh(c * (x + cubic * x**3))
    inner, bend = c * (1 + 3 * cubic * x**2), 6 * c * cubic * x
    sech2 = 1 - t**2
    return (1 + t + x * sech2 * inner) / 2, sech2 * (inner + x * (bend / 2 - t * inner**2))


def _silu_slopes(x: float) -> tuple[float, float]:
    """First and second derivative of x s(x), s the logistic function."""
    s = 1 / (1 + math.exp(-x))
    return s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))
