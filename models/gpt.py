"""The transformer as pure functions of (configuration, parameters, input).

Parameters are a nested dict of arrays::

    {"ends": {"tokens", "positions", "norm_final"}, "blocks": {"norm_attention", "attention", "norm_ffn", "ffn"}}

in which every array under `blocks` has a leading layer axis: the depth is scanned, so compile time does not grow with
it. (`shapes(config)` shows all of it: a configuration has the arrays that it uses.) `layer(params, l)` cuts out one
block; the sublayer functions take that, and are what Jacobian probes differentiate. Padding is marked by `where`: true
for the tokens of a sequence that are real.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models import sharding
from models.config import ModelConfig
from models.layers import Block, Ends
from models.layers import support as support

Params = dict[str, Any]

Remat = Literal["none", "dots", "full"]
"""What is computed again in the backward pass: nothing, all but products with kernels, or all that is in a block."""


def _pure(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@functools.cache
def _graphdef(config: ModelConfig, module: type[Block] | type[Ends]) -> nnx.GraphDef:
    """The static half of a module, made without allocating a parameter."""
    return nnx.graphdef(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))


def _block(config: ModelConfig, block_params: Params) -> Block:
    return nnx.merge(_graphdef(config, Block), sharding.gathered(block_params, "blocks"))


def _ends(config: ModelConfig, params: Params) -> Ends:
    return nnx.merge(_graphdef(config, Ends), sharding.gathered(params["ends"], "ends"))


def init(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Random parameters, float32: N(0, init_std^2), output projections divided by sqrt(2 n_layer), gamma 1, beta 0."""
    key_ends, key_blocks = jax.random.split(key)
    keys = jax.random.split(key_blocks, config.n_layer)
    return {
        "ends": _pure(Ends(config, rngs=nnx.Rngs(key_ends))),
        "blocks": jax.vmap(lambda k: _pure(Block(config, rngs=nnx.Rngs(k))))(keys),
    }


def shapes(config: ModelConfig) -> Params:
    """Shape and dtype of every parameter, without allocating one."""
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, from shapes alone (the tied head counts once)."""
    return sum(leaf.size for leaf in jax.tree.leaves(shapes(config)))


def layer(params: Params, index: int | Int[Array, ""]) -> Params:
    """One block's parameters."""
    return jax.tree.map(lambda leaf: leaf[index], params["blocks"])


def embed(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "*b t"],
    key: PRNGKeyArray | None = None,
    *,
    token_types: Int[Array, "*b t"] | None = None,
) -> Float[Array, "*b t d"]:
    """The residual stream that enters block 0."""
    return _ends(config, params).embed(tokens, key, token_types)


def logits(config: ModelConfig, params: Params, x: Float[Array, "*b t d"]) -> Float[Array, "*b t v"]:
    """From the residual stream that leaves the last block to logits."""
    return _ends(config, params).logits(x)


def block(
    config: ModelConfig,
    block_params: Params,
    x: Float[Array, "*b t d"],
    key: PRNGKeyArray | None = None,
    *,
    where: Bool[Array, "*b t"] | None = None,
    flash: bool = False,
) -> Float[Array, "*b t d"]:
    """One block, as a map of the residual stream; `flash` computes its attention by `Attention.fused`."""
    return _block(config, block_params)(x, key, where, flash)


def attention_sublayer(
    config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"], *, where: Bool[Array, "*b t"] | None = None
) -> Float[Array, "*b t d"]:
    """The attention half of a block with its residual and norm, in evaluation mode."""
    return _block(config, block_params).attention_sublayer(x, where=where)


def ffn_sublayer(config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
    """The FFN half of a block with its residual and norm, in evaluation mode."""
    return _block(config, block_params).ffn_sublayer(x)


def attention_branch(
    config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"], *, where: Bool[Array, "*b t"] | None = None
) -> Float[Array, "*b t d"]:
    """What the attention half adds to the residual stream, in evaluation mode: pre `MHA(LN(X))`, post `MHA(X)`."""
    return _block(config, block_params).attention_branch(x, where=where)


def attention_join(
    config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"], branch: Float[Array, "*b t d"]
) -> Float[Array, "*b t d"]:
    """How the attention half adds it: pre `X + B`, post `LN(X + B)`; `attention_sublayer` is join(x, branch(x))."""
    return _block(config, block_params).attention_join(x, branch)


def ffn_branch(config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
    """What the FFN half adds to the residual stream, in evaluation mode: pre `FFN(LN(X))`, post `FFN(X)`."""
    return _block(config, block_params).ffn_branch(x)


def ffn_join(
    config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"], branch: Float[Array, "*b t d"]
) -> Float[Array, "*b t d"]:
    """How the FFN half adds it: pre `X + B`, post `LN(X + B)`; `ffn_sublayer` is join(x, branch(x))."""
    return _block(config, block_params).ffn_join(x, branch)


def attention(
    config: ModelConfig, block_params: Params, u: Float[Array, "*b t d"], *, where: Bool[Array, "*b t"] | None = None
) -> Float[Array, "*b t d"]:
    """`MHA(U)` alone, in evaluation mode (dropout off): the map that Theorem 4.1 bounds."""
    return _block(config, block_params).attention(u, where=where)


def ffn(config: ModelConfig, block_params: Params, u: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
    """`FFN(U)` alone, in evaluation mode."""
    return _block(config, block_params).ffn(u)


def norm_attention(config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
    """The norm of the attention sublayer."""
    return _block(config, block_params).norm_attention(x)


def norm_ffn(config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
    """The norm of the FFN sublayer."""
    return _block(config, block_params).norm_ffn(x)


def attention_input(config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
    """What the attention of a block sees of its residual stream: `LN(X)` for pre-LN, `X` for post-LN."""
    return norm_attention(config, block_params, x) if config.placement == "pre" else x


def norm_gains(
    config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"], *, where: Bool[Array, "*b t"] | None = None
) -> tuple[Float[Array, "*b t"], Float[Array, "*b t"]]:
    """`a_{k,i} = ||gamma||_inf / sigma(y_i)` of a block's attention and FFN norm, at every token (Corollary A.3)."""
    module = _block(config, block_params)
    y_attention, y_ffn = module.norm_inputs(x, where)
    return module.norm_attention.gain(y_attention), module.norm_ffn.gain(y_ffn)


def attention_weights(
    config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"], *, where: Bool[Array, "*b t"] | None = None
) -> Float[Array, "*b h t t"]:
    """A block's attention rows, in evaluation mode, from the residual stream that enters it.

    `support(config, t, where)` says where they may be non-zero.
    """
    return _block(config, block_params).attention.weights(attention_input(config, block_params, x), where)


def queries_keys_values(
    config: ModelConfig, block_params: Params, x: Float[Array, "*b t d"]
) -> tuple[Float[Array, "*b t h c"], Float[Array, "*b t h c"], Float[Array, "*b t h c"]]:
    """Queries and keys (with RoPE, rotated) and values of a block, from the residual stream that enters it.

    By query head: a key or value head that several query heads share stands there once for each.
    """
    module, u = _block(config, block_params).attention, attention_input(config, block_params, x)
    return *module.queries_and_keys(u), module.values(u)


def _recomputed(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The body of a scan, with what its backward pass is to compute again."""
    if remat == "none":
        return body
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return jax.checkpoint(body, prevent_cse=False, policy=policy)  # inside a scan no guard against CSE is needed


def scan_blocks(
    config: ModelConfig,
    params: Params,
    x: Float[Array, "*b t d"],
    key: PRNGKeyArray | None = None,
    *,
    where: Bool[Array, "*b t"] | None = None,
    remat: Remat = "none",
    flash: bool = False,
    collect: Callable[[Params, Float[Array, "*b t d"]], Any] | None = None,
) -> tuple[Float[Array, "*b t d"], Any]:
    """All blocks in order.

    Returns the stream that leaves the last one, and `collect(block_params, x)` of every block and the stream that
    enters it, stacked over layers (None without `collect`). `remat` says what of a block's inside is computed again in
    the backward pass instead of being stored.
    """

    def body(x, block_and_key):
        block_params, block_key = block_and_key
        collected = None if collect is None else collect(block_params, x)
        return block(config, block_params, x, block_key, where=where, flash=flash), collected

    keys = None if key is None else jax.random.split(key, config.n_layer)
    return jax.lax.scan(_recomputed(body, remat), x, (params["blocks"], keys))


def stream(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "*b t"],
    key: PRNGKeyArray | None = None,
    *,
    where: Bool[Array, "*b t"] | None = None,
    token_types: Int[Array, "*b t"] | None = None,
    remat: Remat = "none",
    flash: bool = False,
) -> Float[Array, "*b t d"]:
    """The residual stream that leaves the last block; with a key in training mode (dropout)."""
    key_embed, key_blocks = (None, None) if key is None else jax.random.split(key)
    x = embed(config, params, tokens, key_embed, token_types=token_types)
    return scan_blocks(config, params, x, key_blocks, where=where, remat=remat, flash=flash)[0]


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "*b t"],
    key: PRNGKeyArray | None = None,
    **options: Any,
) -> Float[Array, "*b t v"]:
    """Logits of every position; with a key in training mode (dropout), without in evaluation mode.

    `options` are those of `stream`.
    """
    return logits(config, params, stream(config, params, tokens, key, **options))


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "*b t"],
    *,
    where: Bool[Array, "*b t"] | None = None,
    token_types: Int[Array, "*b t"] | None = None,
) -> Float[Array, "n_plus_1 *b t d"]:
    """The residual stream that enters each block, and the one that leaves the last: `n_layer + 1` of them."""
    x = embed(config, params, tokens, token_types=token_types)
    x, entering = scan_blocks(config, params, x, where=where, collect=lambda _, x: x)
    return jnp.concatenate([entering, x[None]])
