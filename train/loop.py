"""A run from start, or from where it was, to its end: updates, record, telemetry, checkpoints.

Killed at any moment and started again with the same arguments it continues from the newest checkpoint, forgets what was
recorded after it, and ends with the same parameters and the same record, bit for bit, as a run that was left alone (the
timing table apart).
"""

import contextlib
import dataclasses
import functools
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from models import ModelConfig
from train import checkpoint, directory, processes, sharding, step, telemetry
from train.config import TrainConfig
from train.data import TokenDataset, batches, prepare
from train.events import open_events
from train.files import DataError, RunWarning
from train.flops import peak_tflops as known_peak
from train.presets import RunConfig
from train.recording import Progress, Recorder, TrainingError, UnderWay
from train.sharding import MeshShape


class Interrupted(Exception):  # noqa: N818 - not an error: the run is saved and can be continued
    """The run was asked to stop by a signal; its state is saved."""

    def __init__(self, signum: int, update: int):
        super().__init__(f"stopped by {signal.Signals(signum).name} after update {update}; the same command continues")
        self.signum = signum


def train(
    run: Path,
    config: RunConfig,
    data: Path,
    *,
    mesh: MeshShape | None = None,
    tensorboard: bool = False,
    skip_nonfinite: int = 0,
    peak_tflops: float | None = None,
    on_update: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Train in directory `run` on the prepared text in `data`, from wherever `run` is.

    The devices are those of all processes (`train.processes`), by default all along the mesh's data axis. Neither the
    mesh nor the number of processes is part of the run's configuration: a run goes on on others.

    An update whose loss or gradient is not finite changes nothing; up to `skip_nonfinite` of them in a row are
    recorded and passed over, one more stops the run.

    `peak_tflops` is a device's peak for the share of it that is reached; by default what is known of the device.

    Raises `MeshError`, `RecordError` (a directory of something else or of another configuration, no space),
    `DataError`, `CheckpointError`, `TrainingError` (a non-finite loss or gradient, a write that failed), `Interrupted`
    (a signal; the state is saved). Warns with `RunWarning` of a damaged checkpoint that was set aside, and of text that
    is gone after it was prepared.
    """
    devices = sharding.make(sharding.chosen(mesh, config))
    dataset = open_data(config, data)
    directory.check_space(run, config)
    with (
        _claimed(run, config, dataset),
        _signals() as received,
        _failed_writes(run),
        checkpoint.open_checkpoints(run / "checkpoints", config.train.keep) as checkpointer,
        processes.alive(),
    ):
        state = init_state(config, devices)
        restored = checkpoint.restore(checkpointer, state)
        if restored is not None:
            state, position = restored
        else:
            position = {"next_index": 0}
        done = int(state["update"])
        if processes.first():
            directory.rewind(run, done)
        processes.wait("the record is that of the checkpoint")
        wanted = run / "events" if tensorboard and processes.first() else None
        with contextlib.closing(open_events(wanted, done + 1)) as events:
            peak = peak_tflops or known_peak(jax.devices()[0].device_kind, config.train.compute_dtype)
            recorder = Recorder(
                run, config, checkpointer, events, on_update, skip_nonfinite=skip_nonfinite, peak_tflops=peak
            )
            _run(config, devices, dataset, checkpointer, state, position, received, recorder)


def _run(config, mesh, dataset, checkpointer, state, position, received, recorder) -> None:
    """The loop itself: an update is sent to the devices before the numbers of the one before it are asked for."""
    settings = config.train
    update_step = _jitted_update(config.model, dataclasses.replace(settings, seed=0), mesh)
    part, parts = sharding.share(mesh, settings.micro_batch)
    iterator = batches(
        dataset,
        micro_batch=settings.micro_batch,
        accumulation=settings.accumulation,
        process_index=part,
        process_count=parts,
    )
    iterator.set_state(position)
    before = None
    with contextlib.closing(iterator):
        for update in range(int(state["update"]) + 1, settings.updates + 1):
            tokens = next(iterator)
            state, metrics = update_step(state, sharding.place(mesh, tokens, settings.micro_batch))
            now = UnderWay(update, metrics, telemetry.start(config, mesh, update, state["params"], tokens[-1]))
            if before is not None:
                recorder.take(before)
            before = now
            # Read once: a signal that comes after this is for the next update.
            stop = received[0] if received else signal.SIGTERM if processes.stopped(update) else None
            saving = stop or telemetry.due(update, settings.checkpoint_every, settings.updates, first=False)
            slow = telemetry.slow_due(config, update)
            if saving or slow:  # what is measured or saved is the state of this update: first know that it is finite
                measure = functools.partial(telemetry.slow, config, mesh, update, state["params"], dataset)
                recorder.take(now, measure if slow else dict)
                before = None
            if saving:
                checkpoint.save(checkpointer, state, update, iterator.get_state())
            if stop:
                raise Interrupted(stop, update)


def open_data(config: RunConfig, data: Path, **prepare_options: Any) -> TokenDataset:
    """The prepared text of a run, made from its source if it is not there yet."""
    prepare(config.train.source, config.train.tokenizer, data, column=config.train.column, **prepare_options)
    dataset = TokenDataset(data, config.model.context, verify=True)
    if dataset.index.vocab_size > config.model.vocab_size:
        raise DataError(
            f"{data}: the tokenizer has {dataset.index.vocab_size} ids, the model {config.model.vocab_size}; "
            f"remedy: --vocab-size {dataset.index.vocab_size}"
        )
    return dataset


def init_state(config: RunConfig, mesh: Mesh | None = None) -> step.State:
    """The state before the first update, made on its mesh (by default one device): never whole on one device."""
    init = _jitted_init(config.model, dataclasses.replace(config.train, seed=0), mesh or sharding.one_device())
    return init(config.train.seed)


# One compiled program serves every seed: the seed is an argument of the first and no part of the other.
@functools.cache
def _jitted_init(model: ModelConfig, settings: TrainConfig, mesh: Mesh) -> Callable[[int], step.State]:
    shardings = sharding.state_shardings(mesh, RunConfig(model, settings))
    return sharding.on(mesh, jax.jit(functools.partial(step.init_state, model, settings), out_shardings=shardings))


@functools.cache
def _jitted_update(model: ModelConfig, settings: TrainConfig, mesh: Mesh) -> Callable[..., Any]:
    return sharding.on(mesh, sharding.update_program(mesh, RunConfig(model, settings)))


@contextlib.contextmanager
def _claimed(run: Path, config: RunConfig, dataset: TokenDataset) -> Iterator[None]:
    """The run's directory, ours for as long as this lasts: the first process holds it for all."""
    if processes.first():
        run.mkdir(parents=True, exist_ok=True)
        directory.check_directory(run)
        with directory.locked(run):
            directory.claim(run, config, dataset)
            for line in checkpoint.set_damaged_aside(run):
                warnings.warn(line, RunWarning, stacklevel=2)
            processes.wait("the run is claimed")
            yield
    else:
        processes.wait("the run is claimed")
        directory.claim(run, config, dataset)
        yield


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
    """Ctrl-C and SIGTERM noted down, to be acted on between two updates; a second one acts at once.

    Of several processes any may get a SIGTERM: JAX's own handler, which tells the others, is left in place, and a
    Ctrl-C passed on to it.
    """
    received: list[int] = []
    previous = {}

    def note(signum: int, _frame: Any) -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if processes.several():
            signal.raise_signal(signal.SIGTERM)
        else:
            received.append(signum)

    for number in (signal.SIGINT,) if processes.several() else (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not in the main thread: whoever runs us handles signals
            previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
