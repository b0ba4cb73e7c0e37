"""Bounds on Lambda(U) = ‖D MHA(U)‖ from the (inf,2) to the (inf,2) block norm (theory: "Multi-head attention").

For an output as wide as the input it is the (inf,rms) norm too. Dropout is off, and the paper has no biases:
Q_h = U W^Q_h, K_h = U W^K_h, V_h = U W^V_h, A_h = softmax(Q_h K_hᵀ / (sqrt(d_h) tau)), MHA(U) = [A_1 V_1 | ..] W^O.
With biases the bounds at a point hold for its queries, keys and values as they are; those by magnitude take the biases
of queries, and with rotary positions of keys. Others change no derivative: a shift of all values or of all scores of a
row is nothing to the softmax's Jacobian.

The chain  Lambda ≤ covariance ≤ refined ≤ local ≤ bounded  holds always (to rounding).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sens import checks
from sens.bounds.weights import (
    Heads,
    finite,
    heads,
    in_unit_interval,
    non_negative,
    positive,
    spectral,
)
from sens.decompose import top_eigenvalue, triangular_factor


class Pathways(NamedTuple):
    """Bounds on the pathways of each head's part in each output row; Lambda_i is at most their sum over the heads."""

    value: Float[Array, "L H"]
    """Through the values, with the attention weights held."""
    query: Float[Array, "L H"]
    """Through the row's own query: the exact norm of this pathway."""
    key: Float[Array, "L H"]
    """Through the keys."""


def attention_local(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    W_out: Float[Array, "H v m"],
    *,
    theta: Float[Array, " H"],
    magnitude: float | Float[Array, ""],
    tau: float | Float[Array, ""] = 1.0,
    query_bias: Float[Array, "H e"] | None = None,
    key_bias: Float[Array, "G e"] | None = None,
) -> Float[Array, ""]:
    """The paper's local bound: Lambda(U) ≤ ‖W^O‖ Σ_h (‖W^V_h‖ + theta_h/tau · Phi_h).

    Phi_h = 2 d B² / sqrt(d_h) · ‖W^Q_h‖ ‖W^K_h‖ ‖W^V_h‖, at a point with B = ‖U‖_{inf,rms} = `magnitude` and `theta[h]`
    at least theta of every row of head h. Any fixed mask; rotary positions are orthogonal and change nothing.

    With biases (ours) q_i is at most b = sqrt(d) B ‖W^Q_h‖ + ‖b^Q_h‖ long and k_j, about b^K_h or with rotary positions
    about zero, c = sqrt(d) B ‖W^K_h‖ (+ ‖b^K_h‖): Phi_h = sqrt(d) B / sqrt(d_h) · ‖W^V_h‖ (‖W^Q_h‖ c + ‖W^K_h‖ b). So
    `key_bias` is wanted with rotary positions alone.

    Raises ValueError on shapes that do not fit, weights that are not finite, tau ≤ 0, theta outside [0, 1].

    Source: Emadi, arXiv 2602.18849, Theorem 4.1.

    >>> W = jnp.eye(2)[None]
    >>> print(f"{attention_local(W, W, W, W, theta=jnp.array([0.5]), magnitude=1.0):.4f}")
    2.4142
    """
    W = heads(W_query, W_key, W_value, W_out)
    H, d, e = W.query.shape
    theta = in_unit_interval(finite(theta, "theta", (H,)), "theta") / positive(tau, "tau")
    token = math.sqrt(d) * non_negative(magnitude, "magnitude")
    query, key, value = spectral(W.query), spectral(W.key), spectral(W.value)
    longest_query, longest_key = token * query, token * key
    if query_bias is not None:
        longest_query = longest_query + jnp.linalg.norm(finite(query_bias, "query_bias", (H, e)), axis=1)
    if key_bias is not None:
        lengths = jnp.linalg.norm(finite(key_bias, "key_bias", (W_key.shape[0], e)), axis=1)
        longest_key = longest_key + jnp.repeat(lengths, H // W_key.shape[0])
    score = theta * W.logit_scale * token * (query * longest_key + key * longest_query)
    return W.out_norm * jnp.sum(value * (1 + score))


def attention_bounded(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    W_out: Float[Array, "H v m"],
    *,
    magnitude: float | Float[Array, ""],
    tau: float | Float[Array, ""] = 1.0,
    query_bias: Float[Array, "H e"] | None = None,
    key_bias: Float[Array, "G e"] | None = None,
) -> Float[Array, ""]:
    """The paper's Lipschitz constant on ‖U‖_{inf,rms} ≤ B = `magnitude`: the local bound with theta = 1.

    Holds for every pair of points of that set (which is convex), and at any length L. Raises as `attention_local`.

    Source: Emadi, arXiv 2602.18849, Corollary 4.2.

    >>> W = jnp.eye(2)[None]
    >>> print(f"{attention_bounded(W, W, W, W, magnitude=1.0):.4f}")
    3.8284
    """
    one = jnp.ones(jnp.shape(W_query)[:1], jnp.result_type(W_query))
    biases = {"query_bias": query_bias, "key_bias": key_bias}
    return attention_local(W_query, W_key, W_value, W_out, theta=one, magnitude=magnitude, tau=tau, **biases)


def attention_refined(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    W_out: Float[Array, "H v m"],
    *,
    queries: Float[Array, "H L e"],
    keys: Float[Array, "G L e"],
    values: Float[Array, "G L v"],
    probabilities: Float[Array, "H L L"],
    theta: Float[Array, "H L"],
    tau: float | Float[Array, ""] = 1.0,
    rotation: Float[Array, "L e e"] | None = None,
) -> Float[Array, " L"]:
    """Ours, at the cost of the local bound: scores count by half their range, values by their radius, heads as squares.

    The softmax's Jacobian kills constants and its columns sum to zero. With R_K, R_V the radius of the keys and values
    over the row's support, T_h = ‖W^V_h‖ + theta_{h,i} / (tau sqrt(d_h)) · (‖W^Q_h‖ R_K + ‖W^K_h q_i‖) R_V,

    Lambda_i ≤ min( ‖W^O‖ (Σ_h T_h²)^(1/2),  Σ_h T'_h ),  T' with V W^O_h in place of V.

    Every centre gives a valid radius: the smaller of those about the support's mean and about zero is taken, so that
    refined ≤ local always. Arguments and errors as in `attention_covariance`, of the probabilities only the support.

    Source: ours; the pathways are those of Emadi, arXiv 2602.18849, Theorem 4.1.
    """
    point = _point(W_query, W_key, W_value, W_out, queries, keys, values, probabilities, theta, tau, rotation)
    folded, plain = point.value_forms()

    def one_row(row: "_Row") -> Array:
        support = row.p > 0
        query = spectral(point.W.query) * _radius(point.keys, support)

        def total(form: "_Form") -> Array:
            score = row.theta * (query + point.key_reach(row)) * _radius(form.values, support)
            return form.norm + point.logit_scale * score

        return jnp.minimum(total(folded).sum(), point.W.out_norm * jnp.linalg.norm(total(plain)))

    return jax.lax.map(one_row, point.rows())


def attention_covariance(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    W_out: Float[Array, "H v m"],
    *,
    queries: Float[Array, "H L e"],
    keys: Float[Array, "G L e"],
    values: Float[Array, "G L v"],
    probabilities: Float[Array, "H L L"],
    theta: Float[Array, "H L"],
    tau: float | Float[Array, ""] = 1.0,
    rotation: Float[Array, "L e e"] | None = None,
) -> Float[Array, " L"]:
    """Ours, tightest: covariances under the attention row in place of radii. One bound for each output row.

    With Cov_i the covariance under row i of head h, V' = V_h W^O_h and T_h = value + query + key,

    value = ‖W^V_h W^O_h‖,  query = ‖Cov_i(V', K) (W^Q_h)ᵀ‖ / (tau sqrt(d_h)),
    key = (theta_{h,i} λ_max(Cov_i(V')))^(1/2) ‖W^K_h q_i‖ / (tau sqrt(d_h)):

    Lambda_i ≤ min( Σ_h T_h,  ‖W^O‖ (Σ_h T''_h²)^(1/2) ),  T'' with V in place of V'. The query term is that pathway's
    exact norm; the key term is Cauchy-Schwarz with Var_p(s) ≤ theta ‖s‖_inf².

    Args:
      W_query, W_key, W_value, W_out: weights, head first (see the package).
      queries, keys, values: Q_h, K_h, V_h at the point; with rotary positions after the rotation.
      probabilities: A_h, each row a probability vector; zero outside the mask.
      theta: at least theta of each row of `probabilities` (the upper end of a bracket).
      tau: softmax temperature.
      rotation: with rotary positions the orthogonal R_i of each position (q_i as a column becomes R_i q_i). Then in
        place of ‖W^K_h q_i‖ stands the largest ‖W^K_h R_jᵀ q_i‖ over the support.

    Raises:
      ValueError: shapes that do not fit, values that are not finite, tau ≤ 0, theta outside [0, 1], a row outside the
        simplex. Inside jit such values give NaN.

    Source: ours.
    """
    point = _point(W_query, W_key, W_value, W_out, queries, keys, values, probabilities, theta, tau, rotation)
    folded, plain = point.value_forms()

    def one_row(row: "_Row") -> Array:
        def total(form: "_Form") -> Array:
            value, query, key = _pathways(point, form, row)
            return value + query + key

        return jnp.minimum(total(folded).sum(), point.W.out_norm * jnp.linalg.norm(total(plain)))

    return jax.lax.map(one_row, point.rows())


def attention_pathways(
    W_query: Float[Array, "H d e"],
    W_key: Float[Array, "G d e"],
    W_value: Float[Array, "G d v"],
    W_out: Float[Array, "H v m"],
    *,
    queries: Float[Array, "H L e"],
    keys: Float[Array, "G L e"],
    values: Float[Array, "G L v"],
    probabilities: Float[Array, "H L L"],
    theta: Float[Array, "H L"],
    tau: float | Float[Array, ""] = 1.0,
    rotation: Float[Array, "L e e"] | None = None,
) -> Pathways:
    """The three terms of `attention_covariance` for every row and head: what a row's sensitivity can come from.

    Their sum over pathways and heads is the first of the two forms of that bound. Arguments and errors are the same.
    """
    point = _point(W_query, W_key, W_value, W_out, queries, keys, values, probabilities, theta, tau, rotation)
    folded, _ = point.value_forms()
    return jax.lax.map(lambda row: _pathways(point, folded, row), point.rows())


class _Row(NamedTuple):
    """What one output row contributes, all heads."""

    p: Float[Array, "H L"]
    q: Float[Array, "H e"]
    theta: Float[Array, " H"]
    rotation: Float[Array, "e e"] | None


class _Form(NamedTuple):
    """Values as a bound uses them, and the norm of the map from a token to them."""

    values: Float[Array, "H L v"]
    norm: Float[Array, " H"]


class _Point(NamedTuple):
    """Checked weights and statistics at a point; W^Q and W^K also as triangular factors R (W = Q R, Q orthonormal)."""

    W: Heads
    query_factor: Float[Array, "H e e"]
    key_factor: Float[Array, "H e e"]
    queries: Float[Array, "H L e"]
    keys: Float[Array, "H L e"]
    values: Float[Array, "H L v"]
    probabilities: Float[Array, "H L L"]
    theta: Float[Array, "H L"]
    logit_scale: Any
    rotation: Float[Array, "L e e"] | None

    def rows(self) -> _Row:
        return _Row(self.probabilities.swapaxes(0, 1), self.queries.swapaxes(0, 1), self.theta.T, self.rotation)

    def value_forms(self) -> tuple[_Form, _Form]:
        """With the output projection folded in head by head (up to a rotation, which keeps v small), and without."""
        out_factor = triangular_factor(self.W.out.mT)
        folded = _Form(self.values @ out_factor.mT, spectral(self.W.value @ out_factor.mT))
        return folded, _Form(self.values, spectral(self.W.value))

    def key_reach(self, row: _Row) -> Float[Array, " H"]:
        """The largest change of a logit of this row that a unit change of a key's token makes, before the scale."""
        if self.rotation is None:
            return jnp.linalg.norm(jnp.einsum("hef,hf->he", self.key_factor, row.q), axis=-1)
        unrotated = jnp.einsum("jfe,hf->hje", self.rotation, row.q)
        reach = jnp.linalg.norm(jnp.einsum("hef,hjf->hje", self.key_factor, unrotated), axis=-1)
        return jnp.max(jnp.where(row.p > 0, reach, 0), axis=-1)


def _point(
    W_query: Array,
    W_key: Array,
    W_value: Array,
    W_out: Array,
    queries: Array,
    keys: Array,
    values: Array,
    probabilities: Array,
    theta: Array,
    tau: Any,
    rotation: Array | None,
) -> _Point:
    W = heads(W_query, W_key, W_value, W_out)
    H, _, e = W.query.shape
    G = W_key.shape[0]
    L = jnp.shape(queries)[1] if jnp.ndim(queries) == 3 else 0
    queries = finite(queries, "queries", (H, L, e))
    keys = jnp.repeat(finite(keys, "keys", (G, L, e)), H // G, axis=0)
    values = jnp.repeat(finite(values, "values", (G, L, W.value.shape[2])), H // G, axis=0)
    probabilities = checks.as_float(probabilities, "probabilities")
    if probabilities.shape != (H, L, L):
        raise ValueError(f"probabilities must have shape {(H, L, L)}, got {probabilities.shape}")
    poison = jnp.where(checks.row_is_valid(probabilities), 0, jnp.nan).astype(probabilities.dtype)
    checks.raise_on_invalid(poison, probabilities)
    theta = in_unit_interval(finite(theta, "theta", (H, L)), "theta") + poison
    if rotation is not None:
        rotation = finite(rotation, "rotation", (L, e, e))
    return _Point(
        W=W,
        query_factor=triangular_factor(W.query),
        key_factor=triangular_factor(W.key),
        queries=queries,
        keys=keys,
        values=values,
        probabilities=probabilities + poison[..., None],
        theta=theta,
        logit_scale=W.logit_scale / positive(tau, "tau"),
        rotation=rotation,
    )


def _pathways(point: _Point, form: _Form, row: _Row) -> Pathways:
    weighted = row.p[..., None]
    values = form.values - jnp.sum(weighted * form.values, axis=1, keepdims=True)
    spread = jnp.einsum("hj,hja,hjb->hab", row.p, values, values)
    cross = jnp.einsum("hj,hja,hjb->hab", row.p, values, point.keys)
    if row.rotation is not None:
        cross = cross @ row.rotation
    variance = top_eigenvalue(spread)
    return Pathways(
        value=form.norm,
        query=point.logit_scale * spectral(cross @ point.query_factor.mT),
        key=point.logit_scale * jnp.sqrt(row.theta * variance) * point.key_reach(row),
    )


def _radius(points: Float[Array, "H L e"], support: Array) -> Float[Array, " H"]:
    """Radius of the supported points: the smaller of those about their mean and about zero."""
    inside = support[..., None].astype(points.dtype)
    mean = jnp.sum(inside * points, axis=1, keepdims=True) / jnp.sum(inside, axis=1, keepdims=True)

    def about(centre: Array | float) -> Array:
        return jnp.max(jnp.where(support, jnp.linalg.norm(points - centre, axis=-1), 0), axis=-1)

    return jnp.minimum(about(mean), about(0.0))
