"""RoPE scaling as published configurations state it: divisors of the angles, and for YaRN a temperature."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.pretrained.source import ModelError, Source

_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


def scaling(source: Source, width: int) -> tuple[float, tuple[float, ...], float]:
    """Base of the angles, their divisors (none without scaling) and the softmax temperature.

    - `linear`: every angle is divided by the factor.
    - `llama3`: angles with few turns over the original context are, those with many are not, the rest lie between.
    - `yarn`: likewise, between by the angle's index; queries and keys are multiplied by m = 0.1 log(factor) + 1 each,
      which is a softmax temperature of 1/m².
    - `dynamic`: changes the base past the original context only, so up to there it is no scaling.
    """
    # Entries of `rope_parameters` in newer files, of the file itself and of `rope_scaling` in older ones.
    settings = _settings(source, "rope_scaling") | _settings(source, "rope_parameters")
    theta = settings.get("rope_theta", source.positive("rope_theta", 10000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    share = settings.get("partial_rotary_factor", source.get("partial_rotary_factor", 1.0))
    if share != 1:
        raise ModelError(f"{source.path}: RoPE on a part of each head (partial_rotary_factor {share}) is not supported")
    turns = theta ** (-np.arange(0, width, 2) / width) / (2 * math.pi)  # a token
    try:
        if kind in ("default", "dynamic"):
            return theta, (), 1.0
        if kind == "linear":
            return theta, (float(settings["factor"]),) * (width // 2), 1.0
        if kind == "llama3":
            return theta, _as_tuple(_llama3(settings, turns)), 1.0
        if kind == "yarn":
            return theta, _as_tuple(_yarn(settings, theta, width)), 1 / _yarn_scale(settings) ** 2
        if kind == "divisors":  # from a GGUF file, which states them
            return theta, _as_tuple(settings["divisors"]), 1.0
    except KeyError as error:
        raise ModelError(f"{source.path}: RoPE scaling {kind!r} lacks {error}") from error
    supported = "linear, llama3, yarn, dynamic"
    raise ModelError(f"{source.path}: RoPE scaling {kind!r} is not supported (want one of {supported})")


def _settings(source: Source, name: str) -> dict[str, Any]:
    """The entries of one table; what is a number in them must be one, above zero."""
    table = source.get(name, {})
    if not isinstance(table, Mapping):
        raise ModelError(f"{source.path}: {name} is {table!r}; a table of settings is wanted")
    for key, value in table.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _NUMBERS and value is not None and not (number and 0 < value < math.inf):
            raise ModelError(f"{source.path}: {key} in {name} is {value!r}; a number above zero is wanted")
    return {key: value for key, value in table.items() if value is not None}


def _as_tuple(divisors: Any) -> tuple[float, ...]:
    return tuple(float(divisor) for divisor in divisors)


def _llama3(settings: dict[str, Any], turns: np.ndarray) -> np.ndarray:
    """One above `high_freq_factor` turns over the original context, the factor below `low_freq_factor`."""
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    kept = np.clip((settings["original_max_position_embeddings"] * turns - low) / (high - low), 0, 1)
    return 1 / (kept + (1 - kept) / settings["factor"])


def _yarn(settings: dict[str, Any], theta: float, width: int) -> np.ndarray:
    """One up to the index with `beta_fast` turns over the original context, the factor from that with `beta_slow`."""
    original = settings["original_max_position_embeddings"]

    def index(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(settings.get("beta_fast", 32)), index(settings.get("beta_slow", 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return 1 / (1 - ramp + ramp / settings["factor"])


def _yarn_scale(settings: dict[str, Any]) -> float:
    """What queries and keys are multiplied by."""
    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(max(settings["factor"], 1)) + 1

    weight, weight_all = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(weight) / scale(weight_all) if weight and weight_all else scale(1)
