"""What every reader makes of a checkpoint: its configuration in the hub's words, and its tensors by the hub's names."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class ModelError(ValueError):
    """A published model that cannot be used; the message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint as if it lay in the hub's layout; nothing is read before it is asked for."""

    path: Path
    """What messages name."""
    hub: Mapping[str, Any]
    """The entries of `config.json`."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor."""
    read: Callable[[str], np.ndarray]
    """A tensor in float32."""

    def want(self, name: str) -> Any:
        """An entry of the configuration that must be there."""
        if name not in self.hub:
            raise ModelError(f"{self.path}: the configuration lacks {name!r}")
        return self.hub[name]

    def get(self, name: str, default: Any) -> Any:
        """An entry of the configuration; null counts as absent."""
        value = self.hub.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A number that counts something; without a default it must be there."""
        value = self.want(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise ModelError(f"{self.path}: {name} is {value!r}; a whole number, at least {least}, is wanted")
        return int(value)

    def positive(self, name: str, default: float) -> float:
        """A number above zero."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.path}: {name} is {value!r}; a number above zero is wanted")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean, false unless given."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} is {value!r}; true or false is wanted")
        return value

    def refuse_unless(self, name: str, *supported: Any) -> None:
        """An entry may be absent or one of these: with another value the model would compute something else."""
        value = self.hub.get(name)
        if value is not None and value not in supported:
            wanted = " or ".join(map(repr, supported))
            raise ModelError(f"{self.path}: {name} {value!r} is not supported (want {wanted})")


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a parameter of ours is in a checkpoint."""

    name: str
    """The tensor's name; `{layer}` in it stands for the block's number."""
    transposed: bool = False
    """Stored (out, in), where our kernels are (in, out)."""
    third: int | None = None
    """0, 1 or 2 for a tensor that holds three of ours side by side on its last axis."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's shape for a parameter of this shape."""
        if self.third is not None:
            return (*ours[:-1], 3 * ours[-1])
        return ours[::-1] if self.transposed else ours

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """Our parameter from the stored tensor."""
        if self.third is not None:
            width = tensor.shape[-1] // 3
            return tensor[..., self.third * width : (self.third + 1) * width]
        return tensor.T if self.transposed else tensor


def linear(ours: str, stored: str) -> dict[str, Stored]:
    """Kernel and bias of a dense layer stored as (out, in)."""
    return {f"{ours}/kernel": Stored(f"{stored}.weight", transposed=True), f"{ours}/bias": Stored(f"{stored}.bias")}


def norm(ours: str, stored: str) -> dict[str, Stored]:
    """Gamma and beta of a norm."""
    return {f"{ours}/scale": Stored(f"{stored}.weight"), f"{ours}/bias": Stored(f"{stored}.bias")}
