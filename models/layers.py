"""The layers as Flax NNX modules: definition and initialisation of parameters, and the map each of them is.

Modules hold no state but parameters: dropout keys come in as arguments (a key stored in a module would give the same
mask at every call under `jax.jit` and `jax.lax.scan`). The dtype of a result is that of the parameters it is called with,
except attention weights, which are float32 at least.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models.config import ModelConfig


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


class Linear(nnx.Linear):
    """`x W`, bias-free, on the last axis.

    Leading axes are flattened first: with two or more of them XLA's CPU backend computes the gradient of W without its
    fast matrix product, at two to three times the cost.
    """

    def __init__(self, d_in: int, d_out: int, std: float, rngs: nnx.Rngs):
        super().__init__(d_in, d_out, use_bias=False, kernel_init=nnx.initializers.normal(std), rngs=rngs)

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return super().__call__(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)


class LayerNorm(nnx.Module):
    """`gamma (x - mu) / sigma + beta` with `sigma = sqrt(var + eps)`, population variance, over the last axis.

    Statistics are float32 at least and the variance is that of the centred input. (Flax's own layer promotes dtypes
    implicitly, which strict promotion refuses.)
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.scale = nnx.Param(jnp.ones(config.d_model, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(config.d_model, jnp.float32))

    def sigma(self, x: Float[Array, "*b d"]) -> Float[Array, "*b 1"]:
        """`sqrt(var(x) + eps)` of every token."""
        x = x.astype(accumulator(x.dtype))
        return jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + self.config.ln_eps)

    def gain(self, x: Float[Array, "*b d"]) -> Float[Array, "*b"]:
        """`||gamma||_inf / sigma(x)` of every token, the `a_{k,i}` of Corollary A.3: bounds the Jacobian's norm there."""
        return (jnp.max(jnp.abs(self.scale[...])).astype(accumulator(x.dtype)) / self.sigma(x))[..., 0]

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(accumulator(x.dtype))
        normalised = (wide - jnp.mean(wide, axis=-1, keepdims=True)) / self.sigma(wide)
        one_each = (1,) * (x.ndim - 1) + (-1,)
        return normalised.astype(x.dtype) * self.scale[...].reshape(one_each) + self.bias[...].reshape(one_each)


class Attention(nnx.Module):
    """Causal multi-head attention, bias-free: `[A_1 V_1 | ... | A_H V_H] W^O` (theory.md, section 3)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, std = config.d_model, config.init_std
        self.config = config
        self.query = Linear(d, d, std, rngs)
        self.key = Linear(d, d, std, rngs)
        self.value = Linear(d, d, std, rngs)
        self.out = Linear(d, d, std / math.sqrt(2 * config.n_layer), rngs)

    def _heads(self, x: Float[Array, "*b t d"]) -> Float[Array, "*b t h k"]:
        return x.reshape(*x.shape[:-1], self.config.n_head, self.config.d_head)

    def weights(self, u: Float[Array, "*b t d"]) -> Float[Array, "*b h t t"]:
        """Attention rows `A_h = softmax(Q_h K_h^T / (sqrt(d_head) tau))` over the causal support."""
        q, k = self._heads(self.query(u)), self._heads(self.key(u))
        scale = 1 / (math.sqrt(self.config.d_head) * self.config.tau)
        accumulate = accumulator(u.dtype)
        scores = jnp.einsum("...qhc,...khc->...hqk", q * jnp.asarray(scale, q.dtype), k, preferred_element_type=accumulate)
        t = u.shape[-2]
        causal = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
        causal = causal.reshape((1,) * (scores.ndim - 2) + causal.shape)
        return jax.nn.softmax(scores, axis=-1, where=causal)

    def __call__(self, u: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        a = dropout(self.weights(u), self.config.dropout, key)
        v = self._heads(self.value(u))
        mixed = jnp.einsum("...hqk,...khc->...qhc", a.astype(v.dtype), v)
        return self.out(mixed.reshape(u.shape))


class FeedForward(nnx.Module):
    """`gelu(x W_1) W_2`, bias-free, with the exact GELU."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.up = Linear(config.d_model, config.d_ff, config.init_std, rngs)
        self.down = Linear(config.d_ff, config.d_model, config.init_std / math.sqrt(2 * config.n_layer), rngs)

    def __call__(self, u: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        return dropout(self.down(jax.nn.gelu(self.up(u), approximate=False)), self.config.dropout, key)


class Block(nnx.Module):
    """An attention sublayer and an FFN sublayer, with the LayerNorm before (`pre`) or after (`post`) the residual sum."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.norm_attention = LayerNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.norm_ffn = LayerNorm(config)
        self.ffn = FeedForward(config, rngs=rngs)

    def _branch(self, norm, f, x, key):
        return f(norm(x), key) if self.config.placement == "pre" else f(x, key)

    def _join(self, norm, x, branch):
        return x + branch if self.config.placement == "pre" else norm(x + branch)

    def attention_branch(self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        """What the attention sublayer adds to the stream: pre `MHA(LN(X))`, post `MHA(X)`."""
        return self._branch(self.norm_attention, self.attention, x, key)

    def attention_join(self, x: Float[Array, "*b t d"], branch: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
        """How it is added: pre `X + B`, post `LN(X + B)`."""
        return self._join(self.norm_attention, x, branch)

    def attention_sublayer(self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        """Pre `X + MHA(LN(X))`, post `LN(X + MHA(X))`."""
        return self.attention_join(x, self.attention_branch(x, key))

    def ffn_branch(self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        """What the FFN sublayer adds to the stream: pre `FFN(LN(X))`, post `FFN(X)`."""
        return self._branch(self.norm_ffn, self.ffn, x, key)

    def ffn_join(self, x: Float[Array, "*b t d"], branch: Float[Array, "*b t d"]) -> Float[Array, "*b t d"]:
        """How it is added: pre `X + B`, post `LN(X + B)`."""
        return self._join(self.norm_ffn, x, branch)

    def ffn_sublayer(self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        """Pre `X + FFN(LN(X))`, post `LN(X + FFN(X))`."""
        return self.ffn_join(x, self.ffn_branch(x, key))

    def norm_inputs(self, x: Float[Array, "*b t d"]) -> tuple[Float[Array, "*b t d"], Float[Array, "*b t d"]]:
        """What the two LayerNorms act on, in evaluation mode: pre `X` and `Z`, post `X + MHA(X)` and `Z + FFN(Z)`."""
        z = self.attention_sublayer(x)
        if self.config.placement == "pre":
            return x, z
        return x + self.attention(x), z + self.ffn(z)

    def __call__(self, x: Float[Array, "*b t d"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        key_attention, key_ffn = (None, None) if key is None else jax.random.split(key)
        return self.ffn_sublayer(self.attention_sublayer(x, key_attention), key_ffn)


class Ends(nnx.Module):
    """What stands before and after the blocks: embeddings, the final LayerNorm of pre-LN, and the tied head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(config.init_std)
        self.config = config
        self.tokens = nnx.Embed(config.vocab_size, config.d_model, embedding_init=normal, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.d_model, embedding_init=normal, rngs=rngs)
        if config.placement == "pre":
            self.norm_final = LayerNorm(config)

    def embed(self, tokens: Int[Array, "*b t"], key: PRNGKeyArray | None = None) -> Float[Array, "*b t d"]:
        """Token plus position embeddings."""
        t = tokens.shape[-1]
        if t > self.config.context:
            raise ValueError(f"{t} tokens are more than the model's {self.config.context} positions")
        positions = self.positions.embedding[...][:t].reshape((1,) * (tokens.ndim - 1) + (t, self.config.d_model))
        return dropout(self.tokens.embedding[...][tokens] + positions, self.config.dropout, key)

    def logits(self, x: Float[Array, "*b t d"]) -> Float[Array, "*b t v"]:
        """Logits through the transposed token embedding, accumulated in float32 at least."""
        if self.config.placement == "pre":
            x = self.norm_final(x)
        accumulate = accumulator(x.dtype)
        return jnp.einsum("...d,vd->...v", x, self.tokens.embedding[...], preferred_element_type=accumulate)
