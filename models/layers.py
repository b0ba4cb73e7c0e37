"""The layers as Flax NNX modules: definition and initialisation of parameters, and the map each of them is.

Modules hold no state but parameters: dropout keys come in as arguments (a key stored in a module would give the same
mask at every call under `jax.jit` and `jax.lax.scan`). The dtype of a result is that of the parameters it is called
with, except attention weights, which are float32 at least.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models.config import ModelConfig
from models.mixing import mix
from models.sharding import constrain


def dropout(x: Float[Array, "*shape"], rate: float, key: PRNGKeyArray | None) -> Float[Array, "*shape"]:
    """Zero entries with probability `rate` and divide the others by `1 - rate`; the identity without a key.

    The draw compares 16 random bits with the rate: a quarter of the cost of a uniform float on a CPU, at a rate that is
    off by at most 2^-17.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bits(key, x.shape, jnp.uint16) >= jnp.uint16(round(rate * 2**16))
    return jnp.where(keep, x * jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros_like(x))


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which sums over entries of `dtype` are kept: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64) if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def gelu(x: Float[Array, "*shape"], *, approximate: bool) -> Float[Array, "*shape"]:
    """`x Phi(x) = x (1 + erf(x / sqrt 2)) / 2`, or its tanh form.

    Through erf, as published models were trained. `jax.nn.gelu` goes through erfc, which keeps digits of values that
    are nearly zero at two to three times the cost on a CPU. Rounded once, at the end.
    """
    wide = x.astype(accumulator(x.dtype))
    if approximate:
        return jax.nn.gelu(wide, approximate=True).astype(x.dtype)
    one, half, scale = (jnp.asarray(value, wide.dtype) for value in (1, 0.5, math.sqrt(0.5)))
    return (half * wide * (one + jax.lax.erf(scale * wide))).astype(x.dtype)


class Linear(nnx.Module):
    """`x W`, or `x W + b`, on the last axis.

    Leading axes are flattened first: with two or more of them XLA's CPU backend computes the gradient of W without its
    fast matrix product, at two to three times the cost.
    """

    def __init__(self, d_in: int, d_out: int, std: float, rngs: nnx.Rngs, *, bias: bool = False):
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (d_in, d_out), jnp.float32))
        if bias:
            self.bias = nnx.Param(jnp.zeros(d_out, jnp.float32))

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        kernel = self.kernel[...]
        y = x.reshape(-1, kernel.shape[0]) @ kernel
        if hasattr(self, "bias"):
            y = y + self.bias[...][None]
        return y.reshape(*x.shape[:-1], kernel.shape[1])


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last axis.

    LayerNorm is `gamma (x - mu) / sigma + beta` with `sigma = sqrt(var + eps)`, population variance; RMSNorm is
    `gamma x / sigma` with `sigma = sqrt(mean(x^2) + eps)`. All of it is float32 at least, rounded once at the end, and
    the variance is that of the centred input. (Flax's own layers promote dtypes implicitly, which strict promotion
    refuses.)
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.scale = nnx.Param(jnp.ones(config.d_model, jnp.float32))
        if config.norm == "layer":
            self.bias = nnx.Param(jnp.zeros(config.d_model, jnp.float32))

    def sigma(self, x: Float[Array, "*b d"]) -> Float[Array, "*b 1"]:
        """`sqrt(var(x) + eps)` of every token, for RMSNorm `sqrt(mean(x^2) + eps)`."""
        x = x.astype(accumulator(x.dtype))
        if self.config.norm == "rms":
            return jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.config.ln_eps)
        return jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + self.config.ln_eps)

    def gain(self, x: Float[Array, "*b d"]) -> Float[Array, "*b"]:
        """`||gamma||_inf / sigma(x)` of every token: the `a_{k,i}` of Corollary A.3, a bound on the Jacobian there."""
        return (jnp.max(jnp.abs(self.scale[...])).astype(accumulator(x.dtype)) / self.sigma(x))[..., 0]

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(accumulator(x.dtype))
        across = lambda parameter: parameter[...].astype(wide.dtype).reshape((1,) * (x.ndim - 1) + (-1,))  # noqa: E731
        if self.config.norm == "rms":
            return (wide / self.sigma(wide) * across(self.scale)).astype(x.dtype)
        normalised = (wide - jnp.mean(wide, axis=-1, keepdims=True)) / self.sigma(wide)
        return (normalised * across(self.scale) + across(self.bias)).astype(x.dtype)


def support(config: ModelConfig, t: int, where: Bool[Array, "*b t"] | None = None) -> Bool[Array, "*b_1 t t"]:
    """Where attention rows may be non-zero: no later token if causal, none outside the window, no padding.

    Shape (query, key), with `where` (*b, 1, query, key). A token always sees itself, so that no row is empty: that of
    a padding token means nothing, but is finite.
    """
    query, key = jnp.arange(t)[:, None], jnp.arange(t)[None, :]
    seen = query >= key if config.causal else jnp.ones((t, t), bool)
    if config.window is not None:
        seen = seen & (query - key < config.window)
    if where is None:
        return seen
    if where.dtype != jnp.bool_ or where.shape[-1:] != (t,):
        raise ValueError(f"where is {where.dtype}{where.shape}; bool, True for real tokens, ending in ({t},) is wanted")
    square = (1,) * where.ndim + (t, t)
    return (seen.reshape(square) & where[..., None, None, :]) | (query == key).reshape(square)


def rotate(config: ModelConfig, x: Float[Array, "*b t h c"]) -> Float[Array, "*b t h c"]:
    """RoPE, an orthogonal map: entries `i`, `i + c/2` of the token at position m turn by `m theta^(-2i/c) / divisor_i`.

    The angles are constants of the shape, made in float64: a float32 angle at position 10^4 is off by 10^-3.
    """
    t, c = x.shape[-3], x.shape[-1]
    divisors = np.asarray(config.rope_divisors or 1.0)
    angles = np.outer(np.arange(t), config.rope_theta ** (-np.arange(0, c, 2) / c) / divisors)
    dtype = accumulator(x.dtype)
    cos, sin = (jnp.asarray(f(angles), dtype).reshape((1,) * (x.ndim - 3) + (t, 1, c // 2)) for f in (np.cos, np.sin))
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def heads_first(x: Float[Array, "*b t h c"]) -> Float[Array, "*b h t c"]:
    """Swap positions and heads, or back: on a CPU a product of matrices wants both of its axes last."""
    return jnp.swapaxes(x, -3, -2)


class Attention(nnx.Module):
    """Multi-head attention: `[A_1 V_1 | ... | A_H V_H] W^O` (theory.md, section 3)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, std, bias = config.d_model, config.init_std, config.qkv_bias
        inner, shared = config.n_head * config.d_head, config.kv_heads * config.d_head
        self.config = config
        self.query = Linear(d, inner, std, rngs, bias=bias)
        self.key = Linear(d, shared, std, rngs, bias=bias)
        self.value = Linear(d, shared, std, rngs, bias=bias)
        self.out = Linear(inner, d, std / math.sqrt(2 * config.n_layer), rngs, bias=config.out_bias)

    def _heads(self, x: Float[Array, "*b t i"]) -> Float[Array, "*b t h c"]:
        """By query head: a key or value head stands once for each query head that shares it."""
        heads = constrain(x.reshape(*x.shape[:-1], -1, self.config.d_head), "heads")
        shared_by = self.config.n_head // heads.shape[-2]
        return heads if shared_by == 1 else jnp.repeat(heads, shared_by, axis=-2)

    def queries_and_keys(self, u: Float[Array, "*b t d"]) -> tuple[Float[Array, "*b t h c"], Float[Array, "*b t h c"]]:
        """What the scores are products of: with RoPE, rotated."""
        q, k = self._heads(self.query(u)), self._heads(self.key(u))
        return (rotate(self.config, q), rotate(self.config, k)) if self.config.positions == "rope" else (q, k)

    def values(self, u: Float[Array, "*b t d"]) -> Float[Array, "*b t h c"]:
        """What the rows mix."""
        return self._heads(self.value(u))

    def _scores(
        self, q: Float[Array, "*b h q c"], k: Float[Array, "*b h k c"], seen: Bool[Array, "*b_1 q k"]
    ) -> Float[Array, "*b h q k"]:
        """`Q_h K_h^T / (sqrt(d_head) tau)`, minus infinity for what is not seen."""
        scale = 1 / (math.sqrt(self.config.d_head) * self.config.tau)
        product = jnp.einsum(
            "...qc,...kc->...qk", q * jnp.asarray(scale, q.dtype), k, preferred_element_type=accumulator(q.dtype)
        )
        seen = seen.reshape((1,) * (product.ndim - seen.ndim) + seen.shape)
        # Not `softmax(where=seen)`: that selects again in the backward pass, at a tenth of the attention's time.
        return constrain(jnp.where(seen, product, -jnp.inf), "rows")

    def weights(self, u: Float[Array, "*b t d"], where: Bool[Array, "*b t"] | None = None) -> Float[Array, "*b h t t"]:
        """Attention rows `A_h = softmax(Q_h K_h^T / (sqrt(d_head) tau))` over their `support`."""
        q, k = (heads_first(x) for x in self.queries_and_keys(u))
        return constrain(jax.nn.softmax(self._scores(q, k, support(self.config, u.shape[-2], where)), axis=-1), "rows")

    def __call__(
        self, u: Float[Array, "*b t d"], key: PRNGKeyArray | None = None, where: Bool[Array, "*b t"] | None = None
    ) -> Float[Array, "*b t d"]:
        v = heads_first(self.values(u))
        if key is not None and self.config.dropout:
            rows = dropout(self.weights(u, where), self.config.dropout, key)
            mixed = jnp.einsum("...qk,...kc->...qc", rows.astype(v.dtype), v)
        else:
            (q, k), seen = (heads_first(x) for x in self.queries_and_keys(u)), support(self.config, u.shape[-2], where)
            parts = [
                mix(self._scores(q[..., rows, :], k[..., keys, :], seen[..., rows, keys]), v[..., keys, :])
                for rows, keys in self._parts(u.shape[-2])
            ]
            mixed = jnp.concatenate(parts, axis=-2)
        return self.out(heads_first(mixed).reshape(*u.shape[:-1], -1))

    def _parts(self, t: int) -> tuple[tuple[slice, slice], ...]:
        """Queries, and the keys that some of them may see: a causal model's in halves, for a quarter less work."""
        if not self.config.causal or t < 128:  # short rows are not worth more kernels, nor their compilation
            return ((slice(t), slice(t)),)
        return (slice(t // 2), slice(t // 2)), (slice(t // 2, t), slice(t))

    def fused(self, u: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """The same without dropout by cuDNN's flash attention: the rows never stand in memory.

        On CUDA devices, in half precision. Not for probes: it has no forward-mode derivative.
        """
        q, k = self.queries_and_keys(u)
        mixed = jax.nn.dot_product_attention(
            q,
            k,
            self.values(u),
            scale=1 / (math.sqrt(self.config.d_head) * self.config.tau),
            is_causal=self.config.causal,
            local_window_size=None if self.config.window is None else (self.config.window - 1, 0),
            implementation="cudnn",
        )
        return self.out(mixed.reshape(*u.shape[:-1], -1))


class FeedForward(nnx.Module):
    """`gelu(x W_up) W_down`, or `(silu(x W_gate) * x W_up) W_down`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, hidden, std, bias = config.d_model, config.d_ff, config.init_std, config.ffn_bias
        self.config = config
        self.up = Linear(d, hidden, std, rngs, bias=bias)
        self.down = Linear(hidden, d, std / math.sqrt(2 * config.n_layer), rngs, bias=bias)
        if config.ffn == "swiglu":
            self.gate = Linear(d, hidden, std, rngs, bias=bias)

    def __call__(self, u: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        if self.config.ffn == "swiglu":
            hidden = jax.nn.silu(self.gate(u)) * self.up(u)
        else:
            hidden = gelu(self.up(u), approximate=self.config.ffn == "gelu_tanh")
        return dropout(self.down(constrain(hidden, "hidden")), self.config.dropout, key)


class Block(nnx.Module):
    """An attention sublayer and an FFN sublayer, with the norm before (`pre`) or after (`post`) the residual sum."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.norm_attention = Norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.norm_ffn = Norm(config)
        self.ffn = FeedForward(config, rngs=rngs)

    def _branch(self, norm, f, x, *arguments):
        return f(norm(x), *arguments) if self.config.placement == "pre" else f(x, *arguments)

    def _join(self, norm, x, branch):
        return x + branch if self.config.placement == "pre" else norm(x + branch)

    def attention_branch(
        self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None, where: Bool[Array, "*b t"] | None = None
    ) -> Float[Array, "*b t d"]:
        """What the attention sublayer adds to the stream: pre `MHA(LN(X))`, post `MHA(X)`."""
        return self._branch(self.norm_attention, self.attention, x, key, where)

    def attention_join(self, x: Float[Array, "*b t d"], branch: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
        """How it is added: pre `X + B`, post `LN(X + B)`."""
        return self._join(self.norm_attention, x, branch)

    def attention_sublayer(
        self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None, where: Bool[Array, "*b t"] | None = None
    ) -> Float[Array, "*b t d"]:
        """Pre `X + MHA(LN(X))`, post `LN(X + MHA(X))`."""
        return self.attention_join(x, self.attention_branch(x, key, where))

    def ffn_branch(self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        """What the FFN sublayer adds to the stream: pre `FFN(LN(X))`, post `FFN(X)`."""
        return self._branch(self.norm_ffn, self.ffn, x, key)

    def ffn_join(self, x: Float[Array, "*b t d"], branch: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
        """How it is added: pre `X + B`, post `LN(X + B)`."""
        return self._join(self.norm_ffn, x, branch)

    def ffn_sublayer(self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        """Pre `X + FFN(LN(X))`, post `LN(X + FFN(X))`."""
        return self.ffn_join(x, self.ffn_branch(x, key))

    def norm_inputs(
        self, x: Float[Array, "*b t d"], where: Bool[Array, "*b t"] | None = None
    ) -> tuple[Float[Array, "*b t d"], Float[Array, "*b t d"]]:
        """What the two norms act on, in evaluation mode: pre `X` and `Z`, post `X + MHA(X)` and `Z + FFN(Z)`."""
        z = self.attention_sublayer(x, where=where)
        if self.config.placement == "pre":
            return x, z
        return x + self.attention(x, where=where), z + self.ffn(z)

    def __call__(
        self,
        x: Float[Array, "*b t d"],
        key: PRNGKeyArray | None = None,
        where: Bool[Array, "*b t"] | None = None,
        flash: bool = False,
    ) -> Float[Array, "*b t d"]:
        key_attention, key_ffn = (None, None) if key is None else jax.random.split(key)
        if flash:
            if where is not None or (key is not None and self.config.dropout):
                raise ValueError("flash attention knows neither padding nor dropout")
            z = self.attention_join(x, self._branch(self.norm_attention, self.attention.fused, x))
        else:
            z = self.attention_sublayer(x, key_attention, where)
        z = constrain(z, "stream")
        return constrain(self.ffn_sublayer(z, key_ffn), "stream")


def _check_ids(ids: Int[Array, "*b t"], what: str, count: int) -> None:
    if not isinstance(ids, Tracer):
        outside = np.argwhere((np.asarray(ids) < 0) | (np.asarray(ids) >= count))
        if outside.size:
            at = tuple(int(i) for i in outside[0])
            raise ValueError(f"{what} {int(ids[at])} at {list(at)}: ids from 0 to {count - 1} are wanted")


class Ends(nnx.Module):
    """What stands before and after the blocks: embeddings and their norm, the final norm of pre-LN, and the head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(config.init_std)
        embedding = lambda rows: nnx.Embed(rows, config.d_model, embedding_init=normal, rngs=rngs)  # noqa: E731
        self.config = config
        self.tokens = embedding(config.vocab_size)
        if config.positions == "learned":
            self.positions = embedding(config.context)
        if config.token_types:
            self.token_types = embedding(config.token_types)
        if config.embedding_norm:
            self.norm_embedding = Norm(config)
        if config.placement == "pre":
            self.norm_final = Norm(config)
        if config.head == "untied":
            self.head = embedding(config.vocab_size)
        if config.head == "masked":
            self.transform = Linear(config.d_model, config.d_model, config.init_std, rngs, bias=True)
            self.norm_head = Norm(config)
            self.head_bias = nnx.Param(jnp.zeros(config.vocab_size, jnp.float32))

    def embed(
        self,
        tokens: Int[Array, "*b t"],
        key: PRNGKeyArray | None = None,
        token_types: Int[Array, "*b t"] | None = None,
    ) -> Float[Array, "*b t d"]:
        """The embeddings of token, position (if learned) and type (0 unless given), summed, and their norm if any.

        A token that is not in the vocabulary is a `ValueError`; inside jit it stands for the nearest that is.
        """
        t, config = tokens.shape[-1], self.config
        if t == 0:
            raise ValueError(f"at least one token is wanted, got shape {tokens.shape}")
        _check_ids(tokens, "token", config.vocab_size)
        if t > config.context:
            raise ValueError(f"{t} tokens are more than the model's {config.context} positions")
        if token_types is not None and not config.token_types:
            raise ValueError("token_types given to a model without token types")
        x = self.tokens.embedding[...][tokens]
        if config.positions == "learned":
            positions = self.positions.embedding[...][:t].reshape((1,) * (tokens.ndim - 1) + (t, config.d_model))
            x = x + positions
        if config.token_types:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            _check_ids(types, "token type", config.token_types)
            x = x + self.token_types.embedding[...][types]
        if config.embedding_norm:
            x = self.norm_embedding(x)
        return constrain(dropout(x, config.dropout, key), "stream")

    def logits(self, x: Float[Array, "*b t d"]) -> Float[Array, "*b t v"]:
        """Logits of every position, accumulated in float32 at least."""
        config = self.config
        if config.head == "none":
            raise ValueError("this model has no head: it gives hidden states, no logits")
        x = constrain(x, "head")
        if config.placement == "pre":
            x = self.norm_final(x)
        if config.head == "masked":
            x = self.norm_head(gelu(self.transform(x), approximate=config.ffn == "gelu_tanh"))
        rows = (self.head if config.head == "untied" else self.tokens).embedding[...]
        logits = jnp.einsum("...d,vd->...v", x, rows, preferred_element_type=accumulator(x.dtype))
        if config.head == "masked":
            logits = logits + self.head_bias[...].astype(logits.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return logits
