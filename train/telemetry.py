"""What is measured on the model during training, at its cadences, in evaluation mode.

It is measured on some sequences of the update's last micro-batch (`TrainConfig.telemetry_sequences`).

Attention rows and figures of layers are measured on the mesh and fetched later, when the next update is under way.
Products through depth and bounds take many updates' time: they are measured at once, on one device.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from analysis.attention import measure_rows, record_rows, sampled_layers
from analysis.layers import measure_layers, record_layers
from models import ModelConfig
from models.sharding import BATCH
from train import processes, sharding
from train.bounds import bound_lines
from train.data import TokenDataset, batches
from train.depth import depth_rows
from train.presets import RunConfig

Lines = list[dict[str, Any]]


def due(update: int, every: int, last: int, *, first: bool = True) -> bool:
    """Whether something is done at this update, as at the last and (unless told otherwise) the first."""
    return update % every == 0 or update == last or (first and update == 1)


def start(config: RunConfig, mesh: Mesh, update: int, params: Any, sequences: np.ndarray) -> dict[str, Any]:
    """Begin to measure what is due, by table, on this process's part of a micro-batch; nothing is waited for."""
    settings, begun = config.train, {}

    def tokens() -> jax.Array:
        measured, of_all = sampled_sequences(config, mesh, sequences)
        return sharding.place(mesh, measured[:, :-1], of_all)

    if due(update, settings.attention_every, settings.updates):
        begun["attention"] = jitted_rows(config.model, sampled_layers(config.model.n_layer), mesh)(params, tokens())
    if due(update, settings.layers_every, settings.updates):
        begun["layers"] = _jitted_layers(config.model, mesh)(params, tokens())
    return begun


def sampled_sequences(config: RunConfig, mesh: Mesh | AbstractMesh, sequences: np.ndarray) -> tuple[np.ndarray, int]:
    """Which of this process's sequences of a micro-batch are measured, and how many all processes measure.

    The same ones on every mesh whose batch parts divide their number.
    """
    micro_batch, parts = config.train.micro_batch, math.prod(mesh.shape[axis] for axis in BATCH)
    of_all = min(parts * math.ceil(config.train.telemetry_sequences / parts), micro_batch)
    own = of_all * len(sequences) // micro_batch
    return sequences[np.arange(own) * len(sequences) // own], of_all


def finish(
    config: RunConfig, update: int, begun: dict[str, Any], metrics: dict[str, Any], check: Callable[..., None]
) -> dict[str, Lines]:
    """The lines of the tables that were begun; `check(update, values, names)` sees the numbers first."""
    tables = {}
    if "attention" in begun:
        rows = jax.device_get(begun["attention"])
        check(update, {**metrics, **rows}, ("p_max",))
        tables["attention"] = list(record_rows(update, sampled_layers(config.model.n_layer), rows))
    if "layers" in begun:
        figures = jax.device_get(begun["layers"])
        check(update, {**metrics, **figures}, tuple(figures))
        tables["layers"] = list(record_layers(update, {"grad_norm": metrics["block_grad_norms"], **figures}))
    return tables


def slow_due(config: RunConfig, update: int) -> bool:
    """Whether products through depth or bounds are due."""
    settings = config.train
    return any(
        every and due(update, every, settings.updates) for every in (settings.probe_every, settings.bounds_every)
    )


def slow(config: RunConfig, mesh: Mesh, update: int, params: Any, dataset: TokenDataset) -> dict[str, Lines]:
    """The lines of depth and bounds that are due, measured by the first process; every process must call it."""
    settings, tables = config.train, {}
    whole = sharding.gathered(mesh, params)
    if not processes.first():
        return tables
    sequences = last_sequences(config, dataset, update)
    if settings.probe_every and due(update, settings.probe_every, settings.updates):
        tables["depth"] = depth_rows(config.model, whole, update, sequences)
    if settings.bounds_every and due(update, settings.bounds_every, settings.updates):
        layers = sampled_layers(config.model.n_layer)
        tables["bounds"], _ = bound_lines(config.model, whole, update, sequences[:, :-1], layers)
    return tables


def last_sequences(config: RunConfig, dataset: TokenDataset, update: int) -> np.ndarray:
    """An update's last micro-batch: inputs and, shifted by one, targets."""
    settings = config.train
    iterator = batches(
        dataset, micro_batch=settings.micro_batch, accumulation=settings.accumulation, start_update=update - 1
    )
    try:
        return next(iterator)[-1]
    finally:
        iterator.close()


@functools.cache
def jitted_rows(model: ModelConfig, layers: tuple[int, ...], mesh: Mesh) -> Callable[..., Any]:
    """`measure_rows` of some layers as one program for a mesh."""
    return sharding.measuring(mesh, functools.partial(measure_rows, model, layers=layers))


@functools.cache
def _jitted_layers(model: ModelConfig, mesh: Mesh) -> Callable[..., Any]:
    return sharding.measuring(mesh, functools.partial(measure_layers, model))
