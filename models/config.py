"""The transformer's configuration: one frozen level, each field documented once."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: bias-free projections, GELU, tied head, learned positions."""

    vocab_size: int
    """Tokens in the vocabulary (rows of the tied embedding)."""
    n_layer: int
    """Blocks; each is an attention sublayer and an FFN sublayer."""
    n_head: int
    """Attention heads; must divide d_model."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Hidden width of the FFN."""
    context: int
    """Learned positions: the longest input."""
    placement: Literal["pre", "post"] = "pre"
    """Where the LayerNorm stands: `pre` X + F(LN(X)), with a final LayerNorm; `post` LN(X + F(X)), without."""
    dropout: float = 0.1
    """Rate on attention probabilities, FFN output and the embedding sum; training only."""
    tau: float = 1.0
    """Softmax temperature: A = softmax(Q K^T / (sqrt(d_head) tau))."""
    ln_eps: float = 1e-5
    """Added to the variance in every LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; attention-output and FFN-output projections divide it by sqrt(2 n_layer)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "n_head", "d_model", "d_ff", "context"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.d_model % self.n_head:
            raise ValueError(f"n_head must divide d_model: {self.n_head} heads do not divide a width of {self.d_model}")
        if self.placement not in ("pre", "post"):
            raise ValueError(f"placement must be 'pre' or 'post', got {self.placement!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        for name in ("tau", "ln_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head
