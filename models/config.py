"""The transformer's configuration: one frozen level, each field documented once."""

import dataclasses
from typing import Literal, get_args, get_type_hints


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A transformer. The defaults are the paper's: pre-LN, causal, bias-free, GELU, learned positions, tied head."""

    vocab_size: int
    """Tokens in the vocabulary (rows of the token embedding)."""
    n_layer: int
    """Blocks; each is an attention sublayer and an FFN sublayer."""
    n_head: int
    """Attention heads; must divide d_model unless `head_width` is given."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Hidden width of the FFN."""
    context: int
    """The longest input."""
    placement: Literal["pre", "post"] = "pre"
    """Where the norm stands: `pre` X + F(LN(X)), with a final norm; `post` LN(X + F(X)), without."""
    dropout: float = 0.1
    """Rate on attention probabilities, FFN output and the embedding sum; training only."""
    tau: float = 1.0
    """Softmax temperature: A = softmax(Q K^T / (sqrt(d_head) tau))."""
    ln_eps: float = 1e-5
    """Added to the variance in every LayerNorm, to the mean square in every RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections of attention and FFN divide it by sqrt(2 n_layer)."""
    norm: Literal["layer", "rms"] = "layer"
    """`layer` gamma (x - mean)/sigma + beta; `rms` gamma x/sqrt(mean square + eps)."""
    causal: bool = True
    """Whether a token sees only itself and those before it."""
    window: int | None = None
    """With a causal mask, the number of tokens a token sees at most, itself included; without a number, all."""
    n_kv_head: int | None = None
    """Key/value heads, each shared by n_head / n_kv_head query heads; by default one a query head."""
    head_width: int | None = None
    """Width of a head; by default d_model / n_head."""
    positions: Literal["learned", "rope"] = "learned"
    """`learned` an embedding of each position; `rope` queries and keys turned by angles that grow with the position."""
    rope_theta: float = 10000.0
    """RoPE: entries (i, i + d_head/2) turn by rope_theta^(-2i/d_head) a position."""
    rope_divisors: tuple[float, ...] = ()
    """RoPE scaling: what each of the d_head/2 angles is divided by; nothing for none."""
    ffn: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """`gelu`: gelu(x W_up) W_down; `gelu_tanh`: with GELU's tanh form; `swiglu`: (silu(x W_gate) * x W_up) W_down."""
    qkv_bias: bool = False
    """Biases on queries, keys and values."""
    out_bias: bool = False
    """A bias on the attention's output projection."""
    ffn_bias: bool = False
    """Biases on the FFN's projections."""
    token_types: int = 0
    """Token types (segments) with an embedding each, added to the token's; 0 for none."""
    embedding_norm: bool = False
    """A norm on the sum of embeddings."""
    head: Literal["tied", "untied", "masked", "none"] = "tied"
    """To logits: through the token embedding (`tied`), a matrix of its own (`untied`), a dense layer with GELU and norm
    and then the token embedding with a bias (`masked`, BERT's masked language model), or `none`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope_divisors", tuple(self.rope_divisors))  # a list, where it comes from JSON
        for name in (
            "vocab_size",
            "n_layer",
            "n_head",
            "d_model",
            "d_ff",
            "context",
            "window",
            "n_kv_head",
            "head_width",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("placement", "norm", "positions", "ffn", "head"):
            choices = get_args(get_type_hints(type(self))[name])
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}")
        for name in ("tau", "ln_eps", "init_std", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.token_types < 0:
            raise ValueError(f"token_types must not be negative, got {self.token_types}")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.head_width is None and self.d_model % self.n_head:
            raise ValueError(f"n_head must divide d_model: {self.n_head} heads do not divide a width of {self.d_model}")
        if self.n_head % self.kv_heads:
            raise ValueError(f"n_kv_head must divide n_head: {self.kv_heads} do not divide {self.n_head}")
        if self.window is not None and not self.causal:
            raise ValueError(f"a window of {self.window} tokens wants causal attention")
        if self.positions == "rope":
            if self.d_head % 2:
                raise ValueError(f"RoPE turns pairs of entries: a head width of {self.d_head} is odd")
            if self.rope_divisors and len(self.rope_divisors) != self.d_head // 2:
                raise ValueError(f"{len(self.rope_divisors)} rope_divisors for {self.d_head // 2} angles")
            if not all(divisor > 0 for divisor in self.rope_divisors):
                raise ValueError(f"rope_divisors must be positive, got {min(self.rope_divisors)}")
        elif self.rope_divisors or self.rope_theta != 10000.0:
            raise ValueError(f"rope_theta and rope_divisors want positions 'rope', got {self.positions!r}")

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_head if self.head_width is None else self.head_width

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head
