"""What a run will take, before it is started: its update, compiled for its mesh from shapes alone.

Nothing is allocated. The program is compiled for the devices of this machine if there are enough of them, else for as
many simulated CPU devices: then the memory is that of XLA's CPU backend, which computes bfloat16 products in float32
copies and plans its buffers apart from a GPU's, so that a GPU needs less rather than more.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from models import gpt
from train import sharding
from train.flops import model_flops, peak_tflops
from train.presets import RunConfig
from train.sharding import MeshError, MeshShape

UTILISATION = 0.4
"""Share of the peak that well-tuned training of this kind reaches."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What an update takes; bytes are of one device, by XLA's own analysis of the compiled program."""

    mesh: MeshShape
    compiled_for: str
    parameters: int
    tokens: int
    """Of an update."""
    model_flops: int
    """Of an update, all devices (`train.flops`)."""
    program_flops: int
    """The same of the program's products of matrices as it is: with what rematerialisation does again."""
    state_bytes: int
    """Parameters, moments and tokens: what goes in, and comes out in the same place."""
    temporary_bytes: int
    total_bytes: int
    updates: int
    peak_tflops: float | None
    """Of a device."""

    def seconds(self, utilisation: float) -> float | None:
        """Of an update at a share of the peak; None if the peak is not known."""
        if self.peak_tflops is None:
            return None
        return self.program_flops / (self.peak_tflops * 1e12 * self.mesh.devices * utilisation)


def estimate(config: RunConfig, shape: MeshShape, peak: float | None = None) -> Estimate:
    """Compile the update of a run for a mesh and read off what it takes."""
    sharding.check(shape, config, shape.devices)
    mesh = sharding.make(shape, _devices(shape.devices))
    settings, model = config.train, config.model
    state = sharding.laid_out(sharding.state_shapes(config), sharding.state_shardings(mesh, config))
    tokens = jax.ShapeDtypeStruct(
        (settings.accumulation, settings.micro_batch, model.context + 1),
        jnp.int32,
        sharding=sharding.batch_sharding(mesh),
    )
    with jax.set_mesh(mesh):
        traced = sharding.update_program(mesh, config).trace(state, tokens)
        memory: Any = traced.lower().compile().memory_analysis()
    count = settings.accumulation * settings.micro_batch * model.context
    device = mesh.devices.flat[0]
    return Estimate(
        mesh=shape,
        compiled_for=device.device_kind,
        parameters=gpt.count_parameters(model),
        tokens=count,
        model_flops=model_flops(model, count),
        program_flops=product_flops(traced.jaxpr.jaxpr),
        state_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        total_bytes=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
        updates=settings.updates,
        peak_tflops=peak or peak_tflops(device.device_kind, settings.compute_dtype),
    )


def describe(found: Estimate) -> str:
    """The estimate as lines to print."""
    giga = 1e9
    lines = {
        "mesh": f"{found.mesh}: {found.mesh.devices} devices, compiled for {found.compiled_for}",
        "parameters": f"{found.parameters:,}",
        "an update": f"{found.tokens:,} tokens",
        "operations": f"{found.model_flops:.4g} FLOPs an update; {found.program_flops:.4g} as compiled, with what is "
        "computed again",
        "memory": f"{found.total_bytes / giga:.2f} GB a device: state {found.state_bytes / giga:.2f}, "
        f"temporary {found.temporary_bytes / giga:.2f}",
    }
    best, usual = found.seconds(1.0), found.seconds(UTILISATION)
    if best is None or usual is None:
        lines["time"] = "give a device's --peak-tflops"
    else:
        lines["time"] = (
            f"at {found.peak_tflops:g} TFLOP/s a device {best:.3g} s an update at least; at {UTILISATION:.0%} of that "
            f"{usual:.3g} s, {usual * found.updates / 3600:.3g} h for {found.updates:,} updates"
        )
    return "\n".join(f"{name:<11} {line}" for name, line in lines.items())


def product_flops(jaxpr: Jaxpr, times: int = 1) -> int:
    """Operations of all products of matrices in a program: 2 for each term of each sum, in scans at every step."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            factor, result = (_shape(variable) for variable in (equation.invars[0], equation.outvars[0]))
            total += 2 * times * math.prod(factor[axis] for axis in summed) * math.prod(result)
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += sum(product_flops(inner, times * repeats) for inner in _inside(equation.params))
    return total


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _inside(parameters: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in parameters.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one


def _devices(count: int) -> list[Any]:
    with contextlib.suppress(RuntimeError):  # JAX was used before: it has the devices that it has
        jax.config.update("jax_num_cpu_devices", count)
    for found in (jax.devices(), jax.devices("cpu")):
        if len(found) >= count:
            return found[:count]
    raise MeshError(f"a mesh of {count} devices: this process has begun with {len(jax.devices())}")
