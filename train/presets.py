"""Presets as data, and a run's whole configuration."""

import dataclasses
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

from models import ModelConfig
from train.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A model and how it is trained: what `config.json` of a run holds."""

    model: ModelConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        if not self.model.causal:
            raise ValueError("training predicts every next token, which a model with causal=false sees: true is wanted")
        if self.model.head not in ("tied", "untied"):
            raise ValueError(f"training wants a head that is tied or untied, got {self.model.head!r}")

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_json(value: dict[str, Any]) -> RunConfig:
    """Back from `RunConfig.as_json`; `ValueError` names fields that are unknown, missing or of the wrong type."""
    if not isinstance(value, dict):
        raise ValueError(f"want an object with model and train, got {value!r}")
    parts = {}
    for name, kind in (("model", ModelConfig), ("train", TrainConfig)):
        fields = {field.name for field in dataclasses.fields(kind)}
        given = value.get(name, {})
        if not isinstance(given, dict):
            raise ValueError(f"{name} must be an object, got {given!r}")
        if given.keys() != fields:
            differing = ", ".join(sorted(given.keys() ^ fields))
            raise ValueError(f"configuration of another version: {name} fields that do not match: {differing}")
        for field, hint in get_type_hints(kind).items():
            if not _fits(given[field], hint):
                raise ValueError(f"{field} must be {getattr(hint, '__name__', hint)}, got {given[field]!r}")
        parts[name] = kind(**given)
    return RunConfig(**parts)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read from JSON is of a field's type."""
    if get_origin(hint) is types.UnionType:
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:  # of any length
        return isinstance(value, list | tuple) and all(_fits(entry, get_args(hint)[0]) for entry in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def difference(old: RunConfig, new: RunConfig) -> list[str]:
    """Fields that differ, one readable piece each."""
    pieces = []
    for part in ("model", "train"):
        before, after = dataclasses.asdict(getattr(old, part)), dataclasses.asdict(getattr(new, part))
        pieces += [f"{name} {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name]]
    return pieces


PRESETS: dict[str, RunConfig] = {
    # Tests and CI: seconds on one core.
    "tiny": RunConfig(
        ModelConfig(vocab_size=257, n_layer=2, n_head=2, d_model=16, d_ff=64, context=32),
        TrainConfig(
            updates=20,
            micro_batch=4,
            accumulation=2,
            lr=3e-3,
            warmup=5,
            attention_every=5,
            layers_every=10,
            checkpoint_every=5,
            remat="none",
        ),
    ),
    # The paper's depth at the smallest width, context and length at which both of its stories show on a laptop.
    "mini": RunConfig(
        ModelConfig(vocab_size=257, n_layer=36, n_head=4, d_model=64, d_ff=256, context=64, dropout=0.0),
        TrainConfig(updates=200, micro_batch=16, accumulation=1, lr=3e-3, warmup=50, checkpoint_every=50),
    ),
    "deep": RunConfig(
        ModelConfig(vocab_size=257, n_layer=36, n_head=4, d_model=128, d_ff=512, context=128, dropout=0.0),
        TrainConfig(updates=2000, micro_batch=16, accumulation=1, lr=1e-3, warmup=500),
    ),
    "gpt2-small": RunConfig(
        ModelConfig(vocab_size=50257, n_layer=12, n_head=12, d_model=768, d_ff=3072, context=1024),
        TrainConfig(tokenizer="gpt2", micro_batch=8, accumulation=8, lr=6e-4, compute_dtype="bfloat16", remat="dots"),
    ),
    # The paper's run, 773,615,360 parameters (protocol.md).
    "paper": RunConfig(
        ModelConfig(vocab_size=50257, n_layer=36, n_head=20, d_model=1280, d_ff=5120, context=1024),
        TrainConfig(tokenizer="gpt2", compute_dtype="bfloat16", remat="dots"),
    ),
}
