"""Bounds from other papers, each in its own geometry (theory: "Published bounds, side by side").

Never rank across geometries: set each against the true norm of its own.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from sens import checks
from sens.bounds.weights import Heads, finite, heads, in_unit_interval, non_negative, positive, spectral


def yudin_local(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    *,
    X: Float[Array, "L d"],
    probabilities: Float[Array, "H L L"],
    tau: float | Float[Array, ""] = 1.0,
) -> Float[Array, " H"]:
    """Of each head X ↦ P(X) X W_V at the point: ‖W_V‖ (‖P‖ + 2 ‖X‖² ‖W_Q W_Kᵀ‖ / (tau sqrt(d_h)) · max_i g_1(P_i)).

    Geometry: Frobenius to Frobenius (a spectral norm), one head without the output projection. No rotary positions.
    g_1(p) = p_(1) (1 - p_(1) + p_(2)) with the two largest entries; ‖X‖ is spectral.

    Source: Yudin et al. 2025, arXiv 2507.07814, known to us second-hand; it holds in our tests.
    """
    W = _heads_alone(W_query, W_key, W_value)
    X = finite(X, "X")
    H, d, _ = W.query.shape
    if X.ndim != 2 or X.shape[1] != d or jnp.shape(probabilities) != (H, X.shape[0], X.shape[0]):
        raise ValueError(
            f"X (L, {d}) and probabilities ({H}, L, L) are wanted, got {X.shape} and {jnp.shape(probabilities)}"
        )
    P = checks.as_rows(probabilities)
    poison = jnp.where(checks.row_is_valid(P), 0, jnp.nan).astype(P.dtype)
    checks.raise_on_invalid(poison, probabilities)
    two = jnp.sort(P, axis=-1)[..., -2:] if P.shape[-1] > 1 else jnp.concatenate([0 * P, P], axis=-1)
    g_1 = jnp.max(two[..., 1] * (1 - two[..., 1] + two[..., 0]) + poison, axis=-1)
    bilinear = spectral(W.query @ W.key.mT) * (W.logit_scale / positive(tau, "tau"))
    return spectral(W.value) * (spectral(P) + 2 * spectral(X) ** 2 * bilinear * g_1)


def castin_bounded(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    *,
    radius: float | Float[Array, ""],
    length: int,
    tau: float | Float[Array, ""] = 1.0,
) -> Float[Array, " H"]:
    """Lipschitz constant of each head X ↦ P(X) X W_V on tokens of ‖x_i‖_2 ≤ R = `radius`, n = `length` of them.

    sqrt(3) ‖W_V‖ (‖A‖² R⁴ (4 n + 1) + n)^(1/2), A = W_Q W_Kᵀ / (tau sqrt(d_h)).

    Geometry: Frobenius to Frobenius, one head without the output projection; under a mask too. No rotary positions.

    Source: Castin, Ablin, Peyré 2024, arXiv 2312.14820 (statement recalled, re-derived).
    """
    W = _heads_alone(W_query, W_key, W_value)
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    A = spectral(W.query @ W.key.mT) * (W.logit_scale / positive(tau, "tau"))
    score = (A * non_negative(radius, "radius") ** 2) ** 2 * (4 * length + 1)
    return math.sqrt(3) * spectral(W.value) * jnp.sqrt(score + length)


def nair_softmax(tau: float | Float[Array, ""] = 1.0) -> float | Float[Array, ""]:
    """‖J_tau‖_{q→q} ≤ 1/(2 tau): every same-norm Lipschitz constant of the tempered softmax, 1 ≤ q ≤ inf, at once.

    Source: Nair 2025, arXiv 2510.23012.

    >>> nair_softmax(2.0)
    0.25
    """
    return 1 / (2 * positive(tau, "tau"))


def softmax_same_norm(theta: Float[Array, "*rows"], tau: float | Float[Array, ""] = 1.0) -> Float[Array, "*rows"]:
    """‖J_tau(u)‖_{q→q} ≤ theta(p)/(2 tau) for every 1 ≤ q ≤ inf: Nair's constant, row by row. `theta` is an upper end.

    At q = 1 and inf the norm is 2 max p_i (1 - p_i), at most theta/2; between by interpolation.

    Source: ours.

    >>> print(softmax_same_norm(jnp.array([0.5, 1.0])))
    [0.25 0.5 ]
    """
    return in_unit_interval(finite(theta, "theta"), "theta") * nair_softmax(tau)


def newhouse_attention(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    W_out: Float[Array, "H v m"],
    *,
    magnitude: float | Float[Array, ""],
    tau: float | Float[Array, ""] = 1.0,
) -> Float[Array, ""]:
    """Lipschitz constant of attention on ‖U‖_{inf,rms} ≤ B: ‖W^O‖ max_h (‖W^V_h‖ + 2 s B² ‖W^Q_h‖ ‖W^K_h‖ ‖W^V_h‖).

    Here ‖W‖ is the RMS-to-RMS norm, sqrt(d_in/d_out) times the spectral norm, and s = sqrt(d_h)/tau the scale of
    q·k/d_h. It is `attention_bounded` with sqrt(H) max_h in place of the sum over heads: sqrt(H) times below it for
    equal heads, above it where one head outweighs the others.

    Geometry: (inf,rms) to (inf,rms), as in Large et al. 2024, arXiv 2405.14813, to whom it is due.

    Source: Newhouse et al. 2025, arXiv 2507.13338, without their design factor 1/3. Their code multiplies the value
    term by s as well, which under-bounds for s < 1.
    """
    W = heads(W_query, W_key, W_value, W_out)
    H, d, e = W.query.shape
    v, m = W.out.shape[1:]
    query, key = (math.sqrt(d / e) * spectral(weight) for weight in (W.query, W.key))
    value = math.sqrt(d / v) * spectral(W.value)
    score = 2 * math.sqrt(e) / positive(tau, "tau") * non_negative(magnitude, "magnitude") ** 2
    return math.sqrt(H * v / m) * W.out_norm * jnp.max(value * (1 + score * query * key))


def newhouse_residual(sublayers: Float[Array, " k"], alpha: float | Float[Array, ""]) -> Float[Array, ""]:
    """Lipschitz constant of k residual sublayers (1 - alpha) x + alpha f(x) in a row: Π ((1 - alpha) + alpha L_f).

    Geometry: that of the constants L_f, such as `newhouse_attention` and `ffn`, each on the domain its input keeps to.

    Source: Newhouse et al. 2025, arXiv 2507.13338; residuals as in Large et al. 2024.

    >>> print(newhouse_residual(jnp.array([3.0, 1.0]), 0.5))
    2.0
    """
    alpha = in_unit_interval(alpha, "alpha")
    return jnp.prod((1 - alpha) + alpha * non_negative(finite(sublayers, "sublayers"), "sublayers"))


def zhai_entropy(spread: Float[Array, "*rows"], support: int) -> Float[Array, "*rows"]:
    """Least entropy (nats) of a softmax over T = `support` logits u (already over tau) with ‖u - mean u‖_2 ≤ `spread`.

    log(1 + (T-1) b) + s sqrt(T (T-1)) b / (1 + (T-1) b),  b = exp(-s sqrt(T/(T-1))): a *lower* bound, and tight: it is
    attained by one logit above T - 1 equal ones. A support of one has entropy zero.

    Source: Zhai et al. 2023, arXiv 2303.06296, with the row's own centred logits for their norm of weights and tokens.

    >>> print(f"{zhai_entropy(jnp.array(0.0), support=4):.4f}")
    1.3863
    """
    if support < 1:
        raise ValueError(f"support must be at least 1, got {support}")
    s = non_negative(finite(spread, "spread"), "spread")
    if support == 1:
        return jnp.zeros_like(s)
    b = jnp.exp(-s * math.sqrt(support / (support - 1)))
    total = 1 + (support - 1) * b
    return jnp.log(total) + s * math.sqrt(support * (support - 1)) * b / total


def _heads_alone(W_query: Array, W_key: Array, W_value: Array) -> Heads:
    """Weights of heads that nothing mixes afterwards: an output projection that no bound reads."""
    H, v = jnp.shape(W_query)[:1], jnp.shape(W_value)[-1:]
    return heads(W_query, W_key, W_value, jnp.ones((*H, *v, 1), jnp.result_type(W_query)))
