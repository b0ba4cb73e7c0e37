"""A run from start, or from where it was, to its end: updates, record, telemetry, checkpoints.

Killed at any moment and started again with the same arguments it continues from the newest checkpoint, forgets what was
recorded after it, and ends with the same parameters and the same record, bit for bit, as a run that was left alone (the
timing table apart).
"""

import contextlib
import dataclasses
import functools
import itertools
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from analysis import records
from analysis.attention import measure_rows, record_rows, sampled_layers
from analysis.layers import measure_layers, record_layers
from models import ModelConfig
from train import checkpoint, directory, step
from train.bounds import bound_lines
from train.config import TrainConfig
from train.data import TokenDataset, batches, prepare
from train.depth import depth_rows
from train.events import open_events
from train.presets import RunConfig
from train.text import DataError


class TrainingError(RuntimeError):
    """A run that cannot go on: what happened, where, and what is kept."""


class RunWarning(UserWarning):
    """Something was wrong and was put right: what, and how."""


class Interrupted(Exception):  # noqa: N818 - not an error: the run is saved and can be continued
    """The run was asked to stop by a signal; its state is saved."""

    def __init__(self, signum: int, update: int):
        super().__init__(f"stopped by {signal.Signals(signum).name} after update {update}; the same command continues")
        self.signum = signum


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a live line shows after an update."""

    update: int
    updates: int
    loss: float
    tokens_per_second: float


def train(
    run: Path,
    config: RunConfig,
    data: Path,
    *,
    tensorboard: bool = False,
    skip_nonfinite: int = 0,
    on_update: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Train in directory `run` on the prepared text in `data`, from wherever `run` is.

    An update whose loss or gradient is not finite changes nothing; up to `skip_nonfinite` of them in a row are
    recorded and passed over, one more stops the run.

    Raises `RecordError` (a directory of something else or of another configuration, no space), `DataError`,
    `CheckpointError`, `TrainingError` (a non-finite loss or gradient, a write that failed), `Interrupted` (a signal;
    the state is saved). Warns with `RunWarning` of a damaged checkpoint that was set aside.
    """
    dataset = open_data(config, data)
    directory.check_space(run, config)
    run.mkdir(parents=True, exist_ok=True)
    directory.check_directory(run)
    with directory.locked(run), _signals() as received:
        directory.claim(run, config, dataset)
        for line in checkpoint.set_damaged_aside(run):
            warnings.warn(line, RunWarning, stacklevel=2)
        with (
            _failed_writes(run),
            checkpoint.open_checkpoints(run / "checkpoints", config.train.keep) as checkpointer,
        ):
            state = init_state(config)
            restored = checkpoint.restore(checkpointer, state)
            if restored is not None:
                state, position = restored
            else:
                position = {"next_index": 0}
            directory.rewind(run, int(state["update"]))
            events = open_events(run / "events" if tensorboard else None, int(state["update"]) + 1)
            _run(run, config, dataset, checkpointer, state, position, received, events, on_update, skip_nonfinite)


def _run(run, config, dataset, checkpointer, state, position, received, events, on_update, skip_nonfinite) -> None:
    """The loop itself."""
    settings = config.train
    update_step = _jitted_update(config.model, dataclasses.replace(settings, seed=0))
    iterator = batches(dataset, micro_batch=settings.micro_batch, accumulation=settings.accumulation)
    iterator.set_state(position)
    check = functools.partial(_check_finite, run, checkpointer)
    tokens_per_update = settings.micro_batch * settings.accumulation * config.model.context
    skips = _skips(run)
    with contextlib.closing(iterator), contextlib.closing(events):
        for update in range(int(state["update"]) + 1, settings.updates + 1):
            started = time.perf_counter()
            tokens = next(iterator)
            state, metrics = update_step(state, tokens)
            metrics = jax.device_get(metrics)
            skipped, in_a_row = skips
            finite = np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
            skips = (skipped, 0) if finite else (skipped + 1, in_a_row + 1)
            if in_a_row >= skip_nonfinite:
                check(update, metrics, ("loss", "grad_norm"))
            figures = {name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")}
            row = {
                "update": update,
                **{name: value if np.isfinite(value) else None for name, value in figures.items()},
                "tokens": update * tokens_per_update,
                "skipped": skips[0],
            }
            tables = {
                "updates": [row],
                **_telemetry(config, update, state["params"], tokens[-1], metrics, check),
            }
            for table, rows in tables.items():
                records.append(run, table, rows)
                events.write(table, rows)
            stop = bool(received)  # read once: a signal that comes after this is for the next update
            if stop or _due(update, settings.checkpoint_every, settings.updates, first=False):
                checkpoint.save(checkpointer, state, update, iterator.get_state())
            seconds = time.perf_counter() - started
            speed = tokens_per_update / seconds
            records.append(run, "timing", [{"update": update, "seconds": seconds, "tokens_per_second": speed}])
            on_update(Progress(update, settings.updates, figures["loss"], speed))
            if stop:
                raise Interrupted(received[0], update)


def open_data(config: RunConfig, data: Path, **prepare_options: Any) -> TokenDataset:
    """The prepared text of a run, made from its source if it is not there yet."""
    prepare(config.train.source, config.train.tokenizer, data, **prepare_options)
    dataset = TokenDataset(data, config.model.context, verify=True)
    if dataset.index.vocab_size > config.model.vocab_size:
        raise DataError(
            f"{data}: the tokenizer has {dataset.index.vocab_size} ids, the model {config.model.vocab_size}; "
            f"remedy: --vocab-size {dataset.index.vocab_size}"
        )
    return dataset


def init_state(config: RunConfig) -> step.State:
    """The state before the first update, made under `jax.jit`."""
    init = _jitted_init(config.model, dataclasses.replace(config.train, seed=0))
    return init(config.train.seed)


# One compiled program serves every seed: the seed is an argument of the first and no part of the others.
@functools.cache
def _jitted_init(model: ModelConfig, settings: TrainConfig) -> Callable[[int], step.State]:
    return jax.jit(functools.partial(step.init_state, model, settings))


@functools.cache
def _jitted_update(model: ModelConfig, settings: TrainConfig) -> Callable[..., tuple[step.State, step.Metrics]]:
    return jax.jit(step.make_update(model, settings), donate_argnums=0)


@functools.cache
def jitted_rows(model: ModelConfig, layers: tuple[int, ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(measure_rows, model, layers=layers))


@functools.cache
def _jitted_layers(model: ModelConfig) -> Callable[..., Any]:
    return jax.jit(functools.partial(measure_layers, model))


def _due(update: int, every: int, last: int, *, first: bool = True) -> bool:
    return update % every == 0 or update == last or (first and update == 1)


def _telemetry(
    config: RunConfig,
    update: int,
    params: Any,
    sequences: np.ndarray,
    metrics: dict[str, Any],
    check: Callable[..., None],
) -> dict[str, list[dict[str, Any]]]:
    """The tables of telemetry at their cadences, in evaluation mode, on the update's last micro-batch."""
    settings, tokens, tables = config.train, sequences[:, :-1], {}
    if _due(update, settings.attention_every, settings.updates):
        layers = sampled_layers(config.model.n_layer)
        rows = jax.device_get(jitted_rows(config.model, layers)(params, tokens))
        check(update, {**metrics, **rows}, ("p_max",))
        tables["attention"] = list(record_rows(update, layers, rows))
    if _due(update, settings.layers_every, settings.updates):
        figures = jax.device_get(_jitted_layers(config.model)(params, tokens))
        check(update, {**metrics, **figures}, tuple(figures))
        tables["layers"] = list(record_layers(update, {"grad_norm": metrics["block_grad_norms"], **figures}))
    if settings.probe_every and _due(update, settings.probe_every, settings.updates):
        tables["depth"] = depth_rows(config.model, params, update, sequences)
    if settings.bounds_every and _due(update, settings.bounds_every, settings.updates):
        layers = sampled_layers(config.model.n_layer)
        tables["bounds"], _ = bound_lines(config.model, params, update, tokens, layers)
    return tables


def _check_finite(run: Path, checkpointer: Any, update: int, values: dict[str, Any], names: Sequence[str]) -> None:
    """Stop before anything of an update is recorded or saved whose named values are not all finite."""
    for name in names:
        array = np.asarray(values[name])
        if not np.isfinite(array).all():
            checkpointer.wait()  # a save under way is that of an update that was finite
            raise TrainingError(
                f"{run}: {name} is {array[~np.isfinite(array)].flat[0]} at update {update} (learning rate "
                f"{float(values['learning_rate']):.3g}); {directory.kept(run)}. Remedy: a new run with a lower lr, a "
                "longer warmup or a smaller clip, or --skip-nonfinite to pass over a few such updates"
            )


def _skips(run: Path) -> tuple[int, int]:
    """Updates that were skipped so far, and how many of them in a row up to now."""
    counts = records.read_table(run, "updates")["skipped"].to_list()
    steps = [after - before for before, after in itertools.pairwise([0, *counts])]
    return sum(steps), sum(1 for _ in itertools.takewhile(bool, reversed(steps)))


@contextlib.contextmanager
def _failed_writes(run: Path) -> Iterator[None]:
    """A full disk, or any other write that fails, ends a run that can go on once there is room."""
    try:
        yield
    except (checkpoint.SaveError, OSError) as error:
        reason = f"{error.filename or run}: {error.strerror}" if isinstance(error, OSError) else str(error)
        remedy = "Remedy: make room; the same command continues"
        raise TrainingError(f"{reason}; {directory.kept(run)}. {remedy}") from error


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM noted down, to be acted on between two updates; a second one acts at once."""
    received: list[int] = []
    previous = {}

    def note(signum: int, _frame: Any) -> None:
        received.append(signum)
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not in the main thread: whoever runs us handles signals
            previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
