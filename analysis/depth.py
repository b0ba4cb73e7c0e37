r"""Through depth: what each sublayer's Jacobian is, and what the product of those above it does to a gradient.

Sublayers count from the input up (attention 0, FFN 1, attention 2, ...); sublayer ``k`` takes ``X_k`` to ``X_{k+1}``,
and the last one leaves ``X_N``. With ``P = dX_m/dX_l`` on ``n`` coordinates (all tokens of all sequences):

- *gain* ``||P||_F / sqrt(n)``: the root mean square gain of a random cotangent, the root of its APJN (Doshi et al.,
  arXiv 2111.12143);
- *alignment* ``tr(P) / n``: the multiple of the identity that fits ``P`` best;
- the *terms* of the expansion of ``P`` (`sens.products`): `bare` (pre-LN the identity, post-LN the LayerNorm-only
  term), `first` (through one branch) and `rest`; their gains, and their shares ``<term, P^T u> / ||P^T u||^2`` of the
  squared length: negative where a term works against the sum, and one in total.

Random signs ``u`` estimate all of these, as ``E ||P^T u||^2 = ||P||_F^2`` and ``E <u, P^T u> = tr(P)``, and one
backward pass a probe serves every ``l``. The gradient of the loss takes the same pass, in its own direction.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from analysis.probes import PAIR_COLUMNS
from analysis.records import DEPTH_COLUMNS, TERMS
from models import ModelConfig, gpt
from sens import operators, products

Figures = dict[str, Any]
Depth = int | Int[Array, ""]


def link(model: ModelConfig, params: gpt.Params, tokens: Int[Array, "*b t"]) -> products.Chain:
    """The sublayers of a forward pass in evaluation mode, attention and FFN in turn, from the embedding up.

    Raises:
      ValueError: no tokens, more of them than the model's context, or parameters of another configuration.
    """
    if 0 in tokens.shape:
        raise ValueError(f"at least one token is wanted, got shape {tokens.shape}")
    _check_parameters(model, params)
    return link_blocks(model, params["blocks"], gpt.embed(model, params, tokens))


def link_blocks(model: ModelConfig, blocks: gpt.Params, x: Float[Array, "*b t d"]) -> products.Chain:
    """The sublayers of some blocks, whose arrays have a leading layer axis, from the stream that enters the first."""
    sublayers = (
        products.Sublayer(partial(gpt.attention_branch, model), partial(gpt.attention_join, model)),
        products.Sublayer(partial(gpt.ffn_branch, model), partial(gpt.ffn_join, model)),
    )
    return products.chain(sublayers, blocks, x)


def _check_parameters(model: ModelConfig, params: gpt.Params) -> None:
    wanted = jax.eval_shape(partial(gpt.init, model), jax.random.key(0))["blocks"]
    given = dict(jax.tree_util.tree_leaves_with_path(params["blocks"]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        shape = given[path].shape if path in given else None
        if shape != leaf.shape:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"parameters of another configuration: blocks/{name} is {shape}, {leaf.shape} is wanted")


def loss(
    model: ModelConfig, params: gpt.Params, end: Float[Array, "*b t d"], targets: Int[Array, "*b t"]
) -> Float[Array, ""]:
    """Mean cross-entropy per token, as a function of the stream that leaves the last block."""
    logits = gpt.logits(model, params, end)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def measure_depth(
    model: ModelConfig, params: gpt.Params, tokens: Int[Array, "b t_plus_1"], key: PRNGKeyArray, *, probes: int = 8
) -> Figures:
    """The `DEPTH_COLUMNS` by name, over sublayers: of each sublayer, and of the product from it to the output.

    Time is linear in depth and probes; memory is that of one activation a sublayer, the probes and the inside of one
    sublayer. Call it under `jax.jit`.

    Raises:
      ValueError: fewer than two probes (no standard error), or more tokens than the model's context.
    """
    linked = link(model, params, tokens[:, :-1])
    key_product, key_sublayer = jax.random.split(key)
    gradient = jax.grad(partial(loss, model, params))(linked.end, tokens[:, 1:])
    unit, length = unit_and_length(gradient)
    signs = probe_signs(key_product, probes, linked.end.shape, linked.end.dtype)
    measured = _backwards(linked, jnp.concatenate([signs, unit[None]]), linked.depth)
    return {
        **_sublayers(model, params, linked, key_sublayer, probes),
        **to_output(jax.tree.map(lambda figure: figure[:-1], measured), linked.end.size),
        **to_output_of_gradient(jax.tree.map(lambda figure: figure[-1], measured), length),
    }


def unit_and_length(gradient: Array) -> tuple[Array, Array]:
    """A gradient goes through depth as a vector of length one: squares of a vanishing one would underflow."""
    length = jnp.linalg.norm(gradient.ravel())
    return gradient / jnp.where(length > 0, length, 1), length


def measure_column(
    model: ModelConfig,
    params: gpt.Params,
    tokens: Int[Array, "b t"],
    key: PRNGKeyArray,
    stop: Depth,
    *,
    probes: int = 4,
) -> Figures:
    """Of the product to `stop` from every depth below it: gain, alignment and terms (meaningless from `stop` on)."""
    linked = link(model, params, tokens)
    signs = probe_signs(key, probes, linked.end.shape, linked.end.dtype)
    return to_output(_backwards(linked, signs, stop), linked.end.size)


def measure_pair(
    model: ModelConfig, params: gpt.Params, tokens: Int[Array, " t"], key: PRNGKeyArray, start: Depth, stop: Depth
) -> Figures:
    """Of the product from `start` to `stop` on one sequence: four singular values, the bare term's norm and its bound.

    Call it under `jax.jit`, where one program serves all depths.
    """
    linked = link(model, params, tokens)
    vector = jax.random.normal(key, linked.end.shape, linked.end.dtype)

    def largest(chain: products.Chain, count: int) -> products.SingularValues:
        push, pull = (partial(f, chain, start=start, stop=stop) for f in (products.push, products.pull))
        return products.singular_values(push, pull, vector, count=min(count, vector.size))

    whole, bare = largest(linked, 4), largest(products.bare_chain(linked), 1)
    sigmas = {f"sigma_{i + 1}": value for i, value in enumerate(whole.values)}
    return {
        **sigmas,
        "sigma_1_residual": whole.residuals[0],
        "bare_norm": bare.values[0],
        "bare_norm_residual": bare.residuals[0],
        **_bounds(model, _gains(model, params, linked), start, stop),
    }


def measure_block_norm(
    model: ModelConfig, params: gpt.Params, tokens: Int[Array, " t"], key: PRNGKeyArray, start: Depth, stop: Depth
) -> Figures:
    """Two-sided ``(inf, rms)`` norm of the product from `start` to `stop`, of the row of the last token.

    A row of blocks is a whole problem of its own: all of them would be as many times dearer.
    """
    linked = link(model, params, tokens)
    last = jnp.array([tokens.shape[0] - 1])
    norm = operators.block_operator_norm(
        lambda v: products.push(linked, v, start, stop),
        jnp.zeros_like(linked.end),
        last,
        key=key,
        rtol=0.05,
        restarts=1,
    )
    return {"block_lower": norm.lower, "block_upper": norm.upper}


def boundaries(depth: int, count: int = 13) -> tuple[int, ...]:
    """At most `count` depths from 0 to `depth`, both among them, evenly spread over whole blocks of two sublayers."""
    return tuple(sorted({2 * round(i * depth / (2 * (count - 1))) for i in range(count)}))


def record_depth(update: int, figures: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the depth table, in the order in which the stream passes the sublayers."""
    columns = {name: np.asarray(values, np.float64) for name, values in figures.items()}
    for sublayer in range(len(columns["trace"])):
        numbers = {name: finite(values[sublayer]) for name, values in columns.items()}
        line = {"update": update, "sublayer": sublayer, "kind": "ffn" if sublayer % 2 else "attention", **numbers}
        yield {name: line.get(name) for name in DEPTH_COLUMNS}


def record_pairs(
    update: int, stop: int, column: Mapping[str, Any], pairs: Mapping[int, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The lines of the pairs table with one `stop`; `pairs` holds by start what was measured of single products."""
    columns = {name: np.asarray(values, np.float64) for name, values in column.items()}
    for start in range(stop):
        numbers = {name: finite(values[start]) for name, values in columns.items()}
        single = {name: finite(value) for name, value in pairs.get(start, {}).items()}
        line = {"update": update, "start": start, "stop": stop, **numbers, **single}
        yield {name: line.get(name) for name in PAIR_COLUMNS}


def finite(value: Any) -> float | None:
    """A number for a record; none where it is not finite (the share of a gradient that vanished)."""
    return float(value) if math.isfinite(value) else None


def probe_signs(
    key: PRNGKeyArray, probes: int, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> Float[Array, "probes ..."]:
    """Random signs, one cotangent a probe: ``E u u^T = I``, and ``||u||^2`` is exactly the number of coordinates."""
    if probes < 2:
        raise ValueError(f"probes must be at least 2, for a standard error; got {probes}")
    return jax.random.rademacher(key, (probes, *shape), dtype)


def _backwards(linked: products.Chain, cotangents: Float[Array, "vectors ..."], stop: Depth) -> Figures:
    """`inner_products` at every depth, for every cotangent at `stop`: axes (vector, sublayer)."""

    def one(u: Array) -> Figures:
        return products.pull_terms(linked, u, 0, stop, lambda _, terms: inner_products(u, terms))[1]

    return jax.vmap(one)(cotangents)


def inner_products(u: Array, terms: products.Terms) -> Figures:
    """Of the terms of ``P^T u`` with their sum, with themselves and with `u`.

    Terms are divided by `scale`, their largest entry: the squares of a gain of 1e-20 would underflow.
    """
    scale = jnp.max(jnp.abs(jnp.stack(terms)))
    total, *parts = (
        part / jnp.where(scale > 0, scale, 1) for part in (terms.total, terms.bare, terms.first, terms.rest)
    )
    return {
        "scale": scale,
        "start": jnp.vdot(u, total),
        "total": jnp.vdot(total, total),
        "with_total": {name: jnp.vdot(part, total) for name, part in zip(TERMS, parts, strict=True)},
        "square": {name: jnp.vdot(part, part) for name, part in zip(TERMS, parts, strict=True)},
    }


def to_output(measured: Figures, size: int) -> Figures:
    """Means over probes of `inner_products`, with standard errors: ``E u u^T = I``. Axes (probe, sublayer)."""
    scales = measured["scale"]
    scale = jnp.max(scales, axis=0)
    relative = scales / jnp.where(scale > 0, scale, 1)[None]
    start = relative * measured["start"] / size
    quadratic = {name: measured[name] for name in ("total", "with_total", "square")}
    squares = jax.tree.map(lambda figure: relative**2 * figure / size, quadratic)
    means = jax.tree.map(lambda figure: jnp.mean(figure, axis=0), squares)
    gain = jnp.sqrt(means["total"])

    def standard_error(figure: Array) -> Array:
        return jnp.std(figure, axis=0, ddof=1) / math.sqrt(figure.shape[0])

    return {
        "gain": scale * gain,
        "gain_se": scale * standard_error(squares["total"]) / (2 * gain),
        "alignment": scale * jnp.mean(start, axis=0),
        "alignment_se": scale * standard_error(start),
        **_terms("", means, scale),
    }


def to_output_of_gradient(measured: Figures, length: Array) -> Figures:
    """Of the one cotangent that is the loss's gradient, whose length is `length`."""
    scale = length * measured["scale"]
    return {"gradient": scale * jnp.sqrt(measured["total"]), **_terms("gradient_", measured, scale)}


def _terms(prefix: str, figures: Figures, scale: Array) -> Figures:
    """Gain and share of each term, from its square and its inner product with the sum."""
    gains = {f"{prefix}{name}": scale * jnp.sqrt(square) for name, square in figures["square"].items()}
    shares = {f"{prefix}share_{name}": inner / figures["total"] for name, inner in figures["with_total"].items()}
    return {**gains, **shares}


def _sublayers(
    model: ModelConfig, params: gpt.Params, linked: products.Chain, key: PRNGKeyArray, probes: int
) -> Figures:
    """Of each sublayer alone: how near its Jacobian is to a multiple of the identity, and the `a` of its norm."""
    points = linked.points.reshape(-1, 2, *linked.end.shape)
    near = jax.lax.map(
        lambda one: near_identity(linked.sublayers, one[0], one[1], key, probes), (params["blocks"], points)
    )
    return {**jax.tree.map(jnp.ravel, near), **gain_figures(model, _gains(model, params, linked))}


def near_identity(
    sublayers: tuple[products.Sublayer, ...],
    block: gpt.Params,
    points: Float[Array, "sublayers ..."],
    key: PRNGKeyArray,
    probes: int,
) -> Figures:
    """Of a block's sublayers alone, ``tr(A) / n`` and the squared cosine between ``A`` and the identity."""

    def one(sublayer: products.Sublayer, x: Array) -> tuple[Array, Array]:
        _, push = jax.linearize(lambda x: sublayer.join(block, x, sublayer.branch(block, x)), x)

        def probe(v: Array) -> tuple[Array, Array]:
            pushed = push(v)
            return jnp.vdot(v, pushed) / x.size, jnp.vdot(pushed, pushed) / x.size

        trace, square = jax.lax.map(probe, jax.random.rademacher(key, (probes, *x.shape), x.dtype))
        return jnp.mean(trace), jnp.mean(trace) ** 2 / jnp.mean(square)

    traces, shares = zip(*(one(sublayer, x) for sublayer, x in zip(sublayers, points, strict=True)), strict=True)
    return {"trace": jnp.stack(traces), "identity_share": jnp.stack(shares)}


def gain_figures(model: ModelConfig, a: Float[Array, "depth tokens"]) -> Figures:
    """The `a` of every sublayer, and what they bound of the products from it to the output."""
    to_end = jax.vmap(lambda start: _bounds(model, a, start, a.shape[0]))(jnp.arange(a.shape[0]))
    return {"a_max": jnp.max(a, axis=1), "a_mean": jnp.mean(a, axis=1), **to_end}


def _gains(model: ModelConfig, params: gpt.Params, linked: products.Chain) -> Float[Array, "depth tokens"]:
    """``a_{k,i} = ||gamma_k||_inf / sigma_k(y_{k,i})`` of every sublayer and token."""
    entering = linked.points[::2]
    a = jax.lax.map(lambda layer: jnp.stack(gpt.norm_gains(model, *layer)), (params["blocks"], entering))
    return a.reshape(linked.depth, -1)


def _bounds(model: ModelConfig, a: Float[Array, "depth tokens"], start: Depth, stop: Depth) -> Figures:
    """Corollary A.3 on the LayerNorm-only term: ``max_i prod_k a_{k,i} <= prod_k max_i a_{k,i}``; of post-LN alone."""
    if model.placement == "pre":
        return {}
    k = jnp.arange(a.shape[0])
    logs = jnp.where(((k >= start) & (k < stop))[:, None], jnp.log(a), 0)
    return {"bound": jnp.exp(jnp.max(jnp.sum(logs, axis=0))), "bound_loose": jnp.exp(jnp.sum(jnp.max(logs, axis=1)))}
