"""Lambda of a model's layers on one sequence, the bounds on it, and what they are made of.

A layer's attention is measured at its own input `U` (pre-LN `LN(X)`, post-LN the stream `X`), and dropout is off by
construction: nothing here takes a dropout key, so a model that was trained with dropout is measured without.

Geometries stay apart. Bounds in the block norm (inf,rms) belong beside `lambda_lower` and `lambda_upper`
(`sens.operators.block_operator_norm`, proved over all output rows), those of one head in Frobenius geometry beside
`spectral_lower` and `spectral_upper` (`sens.spectral.spectral_norm`). A figure that does not apply is NaN, null in a
record: with biased queries Newhouse's, Yudin's and Castin's, with rotary positions the latter two.

The figures are the columns `records.BOUND_COLUMNS` (a line a layer) and `probes.HEAD_COLUMNS` (a line a head).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

import sens
from analysis.probes import HEAD_COLUMNS
from analysis.records import BOUND_COLUMNS
from models import ModelConfig, gpt
from models.layers import rotate
from sens import bounds, checks
from sens.bounds.attention import Pathways
from sens.bounds.layers import Activation
from sens.bounds.weights import spectral
from sens.operators import BlockNorm, block_operator_norm
from sens.spectral import spectral_norm

Figures = dict[str, Any]
Layer = int | Int[Array, ""]

ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "swiglu": "silu"}


def measure_layer(
    model: ModelConfig, params: gpt.Params, entering: Float[Array, "n_layer t d"], layer: Layer, key: PRNGKeyArray
) -> tuple[Figures, Figures]:
    """`measure_block` of one layer, from the streams of one sequence that enter the layers.

    Call it under `jax.jit`: one program serves all layers. A layer that the model has not is a `ValueError`, inside jit
    NaN.
    """
    within = (layer >= 0) & (layer < model.n_layer)
    if not checks.is_traced(within) and not within:
        raise ValueError(f"layer {layer}: one of 0 to {model.n_layer - 1} is wanted")
    x = jnp.where(within, entering[layer], jnp.nan)
    below = norm_reach(gpt.layer(params, layer - 1)["norm_ffn"])
    return measure_block(model, gpt.layer(params, layer), x, jnp.where(layer == 0, sens.norm_inf_rms(x), below), key)


def measure_block(
    model: ModelConfig, block: gpt.Params, x: Float[Array, "t d"], entering: Float[Array, ""], key: PRNGKeyArray
) -> tuple[Figures, Figures]:
    """The figures of one layer, and over its heads, at the stream of one sequence that enters it.

    `entering` is what no token of that stream exceeds in RMS norm, by the norm that it leaves (`norm_reach`): a
    post-LN layer's domain. Memory is that of one layer's attention and of the probes.
    """
    at = _attention(model, block, x, entering, key)
    figures, heads = _of_attention(at)
    return {**figures, **_whole_layer(model, block, x, at, key)}, {**heads, **_heads_alone(model, block, x, at, key)}


def measure_attention(
    model: ModelConfig, block: gpt.Params, x: Float[Array, "t d"], entering: Float[Array, ""], key: PRNGKeyArray
) -> tuple[Figures, Figures]:
    """What `measure_block` says of the attention, and not of the FFN, the whole layer and each head alone.

    Those take most of the time in a layer as wide as a published model's.
    """
    return _of_attention(_attention(model, block, x, entering, key))


def _of_attention(at: "_Attention") -> tuple[Figures, Figures]:
    row = jnp.argmax(at.true.row_lower)
    figures = {
        "row": at.true.rows[row],
        "magnitude": at.magnitude,
        "domain": at.domain,
        "lambda_lower": at.true.lower,
        "lambda_upper": at.true.upper,
        "converged": at.true.converged,
        **at.bounds,
    }
    return figures, {"theta": at.theta, **{name: terms[row] for name, terms in at.pathways._asdict().items()}}


def norm_reach(norm: gpt.Params) -> Float[Array, ""]:
    """What no token that leaves a norm exceeds in RMS norm."""
    return bounds.norm_magnitude(norm["scale"], norm.get("bias"))


def record_layer(update: int, layer: int, figures: Figures) -> dict[str, Any]:
    """A line of the bounds table."""
    return _line(BOUND_COLUMNS, {"update": update, "layer": layer, "dtype": str(figures["magnitude"].dtype), **figures})


def record_heads(update: int, layer: int, figures: Figures) -> Iterator[dict[str, Any]]:
    """The lines of the heads table, of one layer."""
    for head in range(len(figures["theta"])):
        of_head = {name: values[head] for name, values in figures.items()}
        yield _line(HEAD_COLUMNS, {"update": update, "layer": layer, "head": head, **of_head})


def _line(columns: Any, figures: Figures) -> dict[str, Any]:
    """Plain numbers in the columns' order; null where nothing was proved or a bound does not apply."""
    plain = {name: value if isinstance(value, str) else np.asarray(value).item() for name, value in figures.items()}
    return {name: None if isinstance(v := plain[name], float) and not math.isfinite(v) else v for name in columns}


class _Weights(NamedTuple):
    """Attention weights, head first, in the order in which `sens.bounds` takes them."""

    query: Float[Array, "H d e"]
    key: Float[Array, "G d e"]
    value: Float[Array, "G d e"]
    out: Float[Array, "H e d"]


class _Attention(NamedTuple):
    """What is known of a layer's attention at a point."""

    W: _Weights
    u: Float[Array, "t d"]
    probabilities: Float[Array, "H t t"]
    magnitude: Array
    domain: Array
    theta: Float[Array, " H"]
    bounds: Figures
    pathways: Pathways
    true: BlockNorm


def _attention(model: ModelConfig, block: gpt.Params, x: Array, entering: Array, key: PRNGKeyArray) -> _Attention:
    u = gpt.attention_input(model, block, x)
    W = _weights(model, block)
    probabilities = gpt.attention_weights(model, block, x)
    support = jnp.broadcast_to(gpt.support(model, len(x)), probabilities.shape)
    theta = sens.theta_bracket(probabilities, where=support).upper
    queries, keys, values = (jnp.moveaxis(part, 1, 0) for part in gpt.queries_keys_values(model, block, x))
    shared = model.n_head // model.kv_heads  # query heads that a key/value head serves, one after the other
    point: dict[str, Any] = {
        "queries": queries,
        "keys": keys[::shared],
        "values": values[::shared],
        "probabilities": probabilities,
        "theta": theta,
        "tau": model.tau,
        "rotation": _rotation(model, len(x), x.dtype) if model.positions == "rope" else None,
    }
    covariance = bounds.attention_covariance(*W, **point)
    magnitude = sens.norm_inf_rms(u)
    domain = _domain(model, block, entering)
    return _Attention(
        W=W,
        u=u,
        probabilities=probabilities,
        magnitude=magnitude,
        domain=domain,
        theta=jnp.max(theta, axis=1),
        bounds={
            "covariance": jnp.max(covariance),
            "refined": jnp.max(bounds.attention_refined(*W, **point)),
            **_by_magnitude(model, block, W, jnp.max(theta, axis=1), magnitude, domain),
        },
        pathways=bounds.attention_pathways(*W, **point),
        # The covariance bound spares most rows a certificate.
        true=block_operator_norm(
            functools.partial(gpt.attention, model, block), u, key=key, geometry="rms", row_upper=covariance
        ),
    )


def _weights(model: ModelConfig, block: gpt.Params) -> _Weights:
    projections = block["attention"]
    query, key, value = (_by_head(model, projections[name]["kernel"]) for name in ("query", "key", "value"))
    return _Weights(query, key, value, projections["out"]["kernel"].reshape(model.n_head, model.d_head, -1))


def _by_head(model: ModelConfig, columns: Float[Array, "*d heads_times_e"]) -> Float[Array, "heads *d e"]:
    return jnp.moveaxis(columns.reshape(*columns.shape[:-1], -1, model.d_head), -2, 0)


def _rotation(model: ModelConfig, t: int, dtype: Any) -> Float[Array, "t e e"]:
    """Of each position, the orthogonal matrix that turns a query as a column."""
    units = jnp.broadcast_to(jnp.eye(model.d_head, dtype=dtype), (t, model.d_head, model.d_head))
    return rotate(model, units).mT


def _domain(model: ModelConfig, block: gpt.Params, entering: Array) -> Array:
    """B_LN: what no input of the layer's attention and FFN exceeds in token RMS norm, by the norms it comes from."""
    own = jnp.maximum(norm_reach(block["norm_attention"]), norm_reach(block["norm_ffn"]))
    return own if model.placement == "pre" else jnp.maximum(own, entering)


def _by_magnitude(
    model: ModelConfig, block: gpt.Params, W: _Weights, theta: Array, magnitude: Array, domain: Array
) -> Figures:
    """The bounds that know of the input only how large it is, or may be."""
    biases: Figures = {}
    if model.qkv_bias:
        of = ("query", "key") if model.positions == "rope" else ("query",)
        biases = {f"{name}_bias": block["attention"][name]["bias"].reshape(-1, model.d_head) for name in of}
    # Newhouse et al. have no biases, and queries that are longer than the weights make them escape their bound.
    without = not model.qkv_bias
    return {
        "local": bounds.attention_local(*W, theta=theta, magnitude=magnitude, tau=model.tau, **biases),
        "bounded": bounds.attention_bounded(*W, magnitude=domain, tau=model.tau, **biases),
        "newhouse": bounds.newhouse_attention(*W, magnitude=domain, tau=model.tau) if without else jnp.nan * domain,
    }


def _heads_alone(model: ModelConfig, block: gpt.Params, x: Array, at: _Attention, key: PRNGKeyArray) -> Figures:
    """Frobenius geometry: the spectral norm of every head's `U -> A_h V_h`, and the published bounds on it."""

    def true(head: Array) -> tuple[Array, Array, Array]:
        found = spectral_norm(functools.partial(gpt.attention, *_one_head(model, block, head)), at.u, key=key)
        return found.lower, found.upper, found.converged

    lower, upper, converged = jax.lax.map(true, jnp.arange(model.n_head))
    figures: Figures = {"spectral_lower": lower, "spectral_upper": upper, "spectral_converged": converged}
    if model.qkv_bias or model.positions == "rope":
        return {**figures, **dict.fromkeys(("yudin", "castin"), jnp.nan * lower)}
    W, (t, d) = at.W[:3], x.shape
    yudin = bounds.yudin_local(*W, X=at.u, probabilities=at.probabilities, tau=model.tau)
    castin = bounds.castin_bounded(*W, radius=math.sqrt(d) * at.magnitude, length=t, tau=model.tau)
    return {**figures, "yudin": yudin, "castin": castin}


def _one_head(model: ModelConfig, block: gpt.Params, head: Array) -> tuple[ModelConfig, gpt.Params]:
    """The model and the block whose attention is that head alone, without its output projection."""
    projections = block["attention"]
    shared = head * model.kv_heads // model.n_head
    parts: gpt.Params = {"out": {"kernel": jnp.eye(model.d_head, dtype=projections["out"]["kernel"].dtype)}}
    for name, index in (("query", head), ("key", shared), ("value", shared)):
        parts[name] = {leaf: _by_head(model, array)[index] for leaf, array in projections[name].items()}
    single = dataclasses.replace(model, n_head=1, n_kv_head=1, head_width=model.d_head, out_bias=False)
    return single, {**block, "attention": parts}


def _whole_layer(model: ModelConfig, block: gpt.Params, x: Array, at: _Attention, key: PRNGKeyArray) -> Figures:
    """The FFN and the whole layer: true norms; the layer from its measured parts, from our bounds, from the paper's."""
    theorem = bounds.pre_ln_layer if model.placement == "pre" else bounds.post_ln_layer
    a_attention, a_ffn = gpt.norm_gains(model, block, x)
    z = gpt.attention_sublayer(model, block, x)
    w = gpt.norm_ffn(model, block, z) if model.placement == "pre" else z
    ffn_bound = _ffn_bound(model, block, sens.norm_inf_rms(w))

    # A row of the layer passes its own token's FFN sublayer, and before that its row of the attention sublayer.
    if model.placement == "pre":
        seen = jnp.max(jnp.where(gpt.support(model, len(x)), a_attention[None], 0), axis=1)
        of_attention = 1 + at.true.row_upper * seen
    else:
        of_attention = a_attention * (1 + at.true.row_upper)
    composed = of_attention * _token_norms(functools.partial(gpt.ffn_sublayer, model, block), z)
    true = block_operator_norm(
        functools.partial(gpt.block, model, block), x, key=key, geometry="rms", row_upper=composed
    )
    norms = [block[name]["scale"] for name in ("norm_attention", "norm_ffn")]
    steepest = functools.reduce(jnp.maximum, (bounds.norm_lipschitz(scale, model.ln_eps) for scale in norms))
    return {
        "ffn_norm": jnp.max(_token_norms(functools.partial(gpt.ffn, model, block), w)),
        "ffn_bound": ffn_bound,
        "a_attention": jnp.max(a_attention),
        "a_ffn": jnp.max(a_ffn),
        "layer_lower": true.lower,
        "layer_upper": true.upper,
        "layer_converged": true.converged,
        "layer_composed": jnp.max(composed),
        "layer_actual": theorem(at.bounds["covariance"], ffn_bound, jnp.max(a_attention), jnp.max(a_ffn)),
        "layer_theorem": theorem(at.bounds["bounded"], _ffn_bound(model, block, at.domain), steepest, steepest),
    }


def _token_norms(f: Callable[[Array], Array], tokens: Float[Array, "t d"]) -> Float[Array, " t"]:
    """Spectral norm of the Jacobian of a map of tokens, at each."""

    def one(token: Array) -> Array:
        return spectral(jax.jacfwd(lambda token: f(token[None])[0])(token))

    return jax.lax.map(one, tokens)


def _ffn_bound(model: ModelConfig, block: gpt.Params, magnitude: Array) -> Array:
    """The FFN's Lipschitz constant: with a gate on tokens of that RMS norm, otherwise over all of space."""
    slope = bounds.activation_lipschitz(ACTIVATIONS[model.ffn])
    up, down = block["ffn"]["up"]["kernel"], block["ffn"]["down"]["kernel"]
    if model.ffn != "swiglu":
        return bounds.ffn(up, down, slope)
    if model.ffn_bias:
        return jnp.nan * magnitude
    return bounds.ffn_gated(block["ffn"]["gate"]["kernel"], up, down, slope=slope, magnitude=magnitude)
