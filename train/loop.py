"""A run from start, or from where it was, to its end: updates, record, telemetry, checkpoints.

Killed at any moment and started again with the same arguments it continues from the newest checkpoint, forgets what was
recorded after it, and ends with the same parameters and the same record, bit for bit, as a run that was left alone (the
timing table apart).
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from analysis import records
from analysis.attention import measure_rows, record_rows, sampled_layers
from analysis.layers import measure_layers, record_layers
from models import ModelConfig
from train import checkpoint, step
from train.bounds import bound_lines
from train.config import TrainConfig
from train.data import TokenDataset, batches, prepare
from train.depth import depth_rows
from train.presets import RunConfig, difference, from_json
from train.text import DataError


class TrainingError(RuntimeError):
    """A run that cannot go on: what happened, where, and what is kept."""


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
    on_update: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Train in directory `run` on the prepared text in `data`, from wherever `run` is.

    Raises `RecordError` (a directory of something else or of another configuration), `DataError`, `CheckpointError`,
    `TrainingError` (a non-finite loss or gradient), `Interrupted` (a signal; the state is saved).
    """
    dataset = open_data(config, data)
    run.mkdir(parents=True, exist_ok=True)
    _check_directory(run)
    with _locked(run), _signals() as received:
        _claim(run, config, dataset)
        with checkpoint.open_checkpoints(run / "checkpoints", config.train.keep) as checkpointer:
            state = init_state(config)
            restored = checkpoint.restore(checkpointer, state)
            if restored is not None:
                state, position = restored
            else:
                position = {"next_index": 0}
            _rewind(run, int(state["update"]))
            events = _events(run, state, tensorboard)
            _run(run, config, dataset, checkpointer, state, position, received, events, on_update)


def _run(run, config, dataset, checkpointer, state, position, received, events, on_update) -> None:
    """The loop itself."""
    settings = config.train
    update_step = _jitted_update(config.model, dataclasses.replace(settings, seed=0))
    iterator = batches(dataset, micro_batch=settings.micro_batch, accumulation=settings.accumulation)
    iterator.set_state(position)
    check = functools.partial(_check_finite, run, checkpointer)
    tokens_per_update = settings.micro_batch * settings.accumulation * config.model.context
    with contextlib.closing(iterator), contextlib.closing(events):
        for update in range(int(state["update"]) + 1, settings.updates + 1):
            started = time.perf_counter()
            tokens = next(iterator)
            state, metrics = update_step(state, tokens)
            metrics = jax.device_get(metrics)
            check(update, metrics, ("loss", "grad_norm"))
            row = {
                "update": update,
                **{name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")},
                "tokens": update * tokens_per_update,
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
            on_update(Progress(update, settings.updates, row["loss"], speed))
            if stop:
                raise Interrupted(received[0], update)


def open_data(config: RunConfig, data: Path, **prepare_options: Any) -> TokenDataset:
    """The prepared text of a run, made from its source if it is not there yet."""
    prepare(config.train.source, config.train.tokenizer, data, **prepare_options)
    dataset = TokenDataset(data, config.model.context)
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
            saved = max((kept.step for kept in checkpointer.checkpoints), default=None)
            kept = "no checkpoint was made yet" if saved is None else f"the checkpoint of update {saved} is kept"
            raise TrainingError(
                f"{run}: {name} is {array[~np.isfinite(array)].flat[0]} at update {update} (learning rate "
                f"{float(values['learning_rate']):.3g}); {kept}. "
                "Remedy: a new run with a lower lr, a longer warmup or a smaller clip"
            )


def _check_directory(run: Path) -> None:
    """Refuse a directory that holds anything but a run, before anything is written into it."""
    strangers = sorted({entry.name for entry in run.iterdir()} - _BEGUN)
    if strangers and not (run / "config.json").is_file():
        raise records.RecordError(f"{run}: not a run directory and not empty ({strangers[0]}); choose another")


def _rewind(run: Path, update: int) -> None:
    """Cut the record back to a checkpoint's update; `RecordError` if it does not reach so far."""
    records.truncate(run, update)
    recorded = records.read_table(run, "updates").height
    if recorded != update:
        raise records.RecordError(
            f"{run}: the newest checkpoint is of update {update}, but updates.jsonl holds {recorded} updates; "
            "something was lost: start a new run"
        )


def _claim(run: Path, config: RunConfig, dataset: TokenDataset) -> None:
    """Write the configuration of a new run, or refuse a run of another one."""
    identity = {"source": dataset.index.source_digest, "tokenizer": dataset.index.tokenizer_digest}
    path = run / "config.json"
    if not path.exists():
        records.write_json(run / "versions.json", versions())
        about = {"directory": str(dataset.directory.absolute()), "unigram_entropy": unigram_entropy(dataset)}
        records.write_json(path, {**config.as_json(), "data": {**identity, **about}})
        return
    recorded = records.read_config(run)
    try:
        changes = difference(from_json(recorded), config)
    except ValueError as error:
        raise records.RecordError(f"{path}: {error}") from error
    if {name: recorded.get("data", {}).get(name) for name in identity} != identity:
        changes.append("the text or the tokenizer")
    if changes:
        raise records.RecordError(
            f"{run}: made with another configuration ({'; '.join(changes)}); choose another directory"
        )


def unigram_entropy(dataset: TokenDataset) -> float:
    """Entropy of the text's token frequencies, nats a token: what a model reaches that knows frequencies alone."""
    counts = np.zeros(dataset.index.vocab_size, np.int64)
    for start in range(0, dataset.index.tokens, 2**22):
        part = dataset.read(start, min(2**22, dataset.index.tokens - start))
        counts += np.bincount(part, minlength=counts.size)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


_LOCK = ".lock"
_BEGUN = {_LOCK, "versions.json", "versions.json.tmp", "config.json.tmp"}  # what a kill before config.json leaves


@contextlib.contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Only one process in a run directory; the system lifts the lock of a killed one."""
    with (run / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise records.RecordError(f"{run}: another process is training here") from error
        yield


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


def versions() -> dict[str, Any]:
    """What a run ran on; informative only."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "sens")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": [device.device_kind for device in jax.devices()],
        **{name: importlib.metadata.version(name) for name in packages},
    }


class _NoEvents:
    def write(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Nothing was asked for."""

    def close(self) -> None:
        """Nothing is open."""


class _TensorBoard:
    """The record as TensorBoard scalars: updates, per-layer figures, and of attention the medians over pooled heads."""

    def __init__(self, directory: Path, first: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first)

    def write(self, table: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if table == "attention":
                values = {row["quantity"]: row["median"]} if row["head"] is None else {}
            else:
                places = ("update", "layer", "sublayer")
                values = {k: v for k, v in row.items() if k not in places and isinstance(v, int | float)}
            place = next((f"{name}-{row[name]}" for name in ("layer", "sublayer") if name in row), "")
            for name, value in values.items():
                self._writer.add_scalar("/".join(part for part in (table, name, place) if part), value, row["update"])

    def close(self) -> None:
        self._writer.close()


def _events(run: Path, state: step.State, tensorboard: bool) -> _NoEvents | _TensorBoard:
    return _TensorBoard(run / "events", int(state["update"]) + 1) if tensorboard else _NoEvents()
