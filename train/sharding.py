"""The mesh of a run: its shape, what must divide by it, where state and batches lie (the table: `models.sharding`).

Losses and gradients on a mesh are those of one device up to rounding: sums are taken in another order, nothing else.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.sharding import AXES, BATCH, stored
from train import step
from train.presets import RunConfig


class MeshError(ValueError):
    """A mesh that does not fit the devices or the configuration."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis; their product is the number of devices."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)


def parse(text: str) -> MeshShape:
    """`data=2,fsdp=4` as a shape; an axis that is not named is 1."""
    sizes: dict[str, int] = {}
    for piece in text.split(","):
        axis, _, size = piece.strip().partition("=")
        if axis not in AXES or axis in sizes:
            raise MeshError(f"mesh {text!r}: want each of {', '.join(AXES)} at most once, as in data=2,fsdp=4")
        if not size.isdecimal() or int(size) < 1:
            raise MeshError(f"mesh {text!r}: {axis} must be a whole number of at least 1, as in data=2,fsdp=4")
        sizes[axis] = int(size)
    return MeshShape(**sizes)


def check(shape: MeshShape, config: RunConfig, devices: int) -> None:
    """`MeshError` for the first thing that does not divide."""
    if shape.devices != devices:
        raise MeshError(
            f"mesh {shape} is {shape.devices} devices, but there are {devices}; remedy: axes whose product is {devices}"
        )
    if config.train.flash:
        _check_flash(config)
    model, tensor, batch = config.model, shape.tensor, shape.data * shape.fsdp
    wanted = [
        ("micro_batch", config.train.micro_batch, "data * fsdp", batch),
        ("n_head", model.n_head, "tensor", tensor),
        ("n_kv_head", model.kv_heads, "tensor", tensor),
        ("d_ff", model.d_ff, "tensor", tensor),
        ("d_model", model.d_model, "fsdp * tensor", shape.fsdp * tensor),
        ("n_head * d_head", model.n_head * model.d_head, "fsdp * tensor", shape.fsdp * tensor),
        ("d_ff", model.d_ff, "fsdp * tensor", shape.fsdp * tensor),
    ]
    for name, value, axes, size in wanted:
        if value % size:
            raise MeshError(
                f"mesh {shape}: {name} {value} is not divisible by {axes} = {size}; remedy: another mesh or {name}"
            )


def chosen(shape: MeshShape | None, config: RunConfig) -> MeshShape:
    """The shape, by default all devices along `data`; `MeshError` if it does not fit."""
    shape = shape or MeshShape(data=jax.device_count())
    check(shape, config, jax.device_count())
    return shape


def _check_flash(config: RunConfig) -> None:
    """`MeshError` where the fused attention cannot do what is asked for."""
    wanted = [
        (jax.default_backend() == "gpu", f"CUDA devices, and JAX has {jax.default_backend()} here"),
        (config.train.compute_dtype == "bfloat16", f"compute_dtype bfloat16, not {config.train.compute_dtype}"),
        (not config.model.dropout, f"dropout 0, not {config.model.dropout}: it acts on attention rows"),
        (
            config.model.d_head % 8 == 0 and config.model.d_head <= 128,
            f"heads of width 8, 16, ... 128, not {config.model.d_head}",
        ),
    ]
    for fits, want in wanted:
        if not fits:
            raise MeshError(f"flash attention wants {want}; remedy: --no-flash")


def make(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh, devices in the order of their processes: a process's devices hold neighbouring parts of a batch."""
    order = np.array(jax.devices() if devices is None else devices).reshape([getattr(shape, axis) for axis in AXES])
    return Mesh(order, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def one_device() -> Mesh:
    """The mesh of this process's first device."""
    return make(MeshShape(), jax.local_devices()[:1])


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def state_shardings(mesh: Mesh, config: RunConfig) -> Any:
    """Where each array of a training state lies: the optimizer's moments as their parameters, counters everywhere."""

    def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
        names = [getattr(key, "key", None) for key in path]
        start = next((i for i, name in enumerate(names) if name in ("blocks", "ends")), None)
        return replicated(mesh) if start is None else NamedSharding(mesh, stored(path[start:]))

    return jax.tree_util.tree_map_with_path(place, state_shapes(config))


def state_shapes(config: RunConfig) -> step.State:
    """Shapes and dtypes of a training state."""
    return jax.eval_shape(functools.partial(step.init_state, config.model, config.train), 0)


def laid_out(shapes: Any, shardings: Any) -> Any:
    """Shapes with where they lie: what to compile for, or to restore onto, without an array."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, shardings
    )


def batch_sharding(mesh: Mesh, dimensions: int = 3) -> NamedSharding:
    """Of tokens (..., sequence, position): by sequence."""
    return NamedSharding(mesh, PartitionSpec(*[None] * (dimensions - 2), BATCH, None))


def share(mesh: Mesh, micro_batch: int) -> tuple[int, int]:
    """Which part of every micro-batch this process's devices hold: the part's number and of how many.

    Several processes have the same part where the tensor axis goes across processes.
    """
    indices = batch_sharding(mesh).addressable_devices_indices_map((1, micro_batch, 1)).values()
    starts, stops = zip(*(index[1].indices(micro_batch)[:2] for index in indices if index is not None), strict=True)
    start, size = min(starts), max(stops) - min(starts)
    if start % size or micro_batch % size:
        raise MeshError(
            f"a process holds sequences {start} to {start + size - 1} of a micro-batch of {micro_batch}, which is no "
            "whole part of it; remedy: a mesh whose axes divide by the devices of a process"
        )
    return start // size, micro_batch // size


def place(mesh: Mesh, tokens: np.ndarray, micro_batch: int) -> jax.Array:
    """Tokens (..., sequence, position) on the devices, from this process's part of the sequences."""
    shape = (*tokens.shape[:-2], micro_batch, tokens.shape[-1])
    return jax.make_array_from_process_local_data(batch_sharding(mesh, tokens.ndim), tokens, shape)


def on(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called (and so traced) with the mesh set."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with jax.set_mesh(mesh):
            return function(*arguments)

    return call


def update_program(mesh: Mesh, config: RunConfig) -> Any:
    """The jitted update on a mesh, to be called with it set: the state is donated and comes back laid out as it was."""
    shardings = (state_shardings(mesh, config), replicated(mesh))
    return jax.jit(step.make_update(config.model, config.train), donate_argnums=0, out_shardings=shardings)


def measuring(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a program for the mesh whose results every process has whole."""
    return on(mesh, jax.jit(function, out_shardings=replicated(mesh)))


def gathered(mesh: Mesh, params: Any) -> Any:
    """The parameters whole on one device of this process. Every process must call it."""
    whole = _gather(mesh)(params)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


@functools.cache
def _gather(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda params: params, out_shardings=replicated(mesh))
