"""What is measured offline on a checkpoint of a run, and written beside its record."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import polars as pl

from analysis import records
from analysis.attention import sampled_layers
from models import gpt
from train import checkpoint, depth, sharding, step
from train.bounds import bound_lines
from train.data import TokenDataset
from train.loop import open_data
from train.presets import RunConfig, from_json
from train.telemetry import jitted_rows, last_sequences

ROWS = "rows.parquet"
DEPTH = "depth.jsonl"
PAIRS = "pairs.jsonl"
BOUNDS = "bounds.jsonl"
HEADS = "heads.jsonl"


def load(run: Path, update: int | None = None) -> tuple[RunConfig, gpt.Params, int]:
    """Configuration and parameters of a run's checkpoint (the newest without `update`), and its update number."""
    recorded = records.read_config(run)
    try:
        config = from_json(recorded)
    except ValueError as error:
        raise records.RecordError(f"{run / 'config.json'}: {error}") from error
    like = jax.eval_shape(functools.partial(step.init_state, config.model, config.train), 0)
    if not (run / "checkpoints").is_dir():
        raise checkpoint.CheckpointError(f"{run}: no checkpoint yet")
    saved = checkpoint.saved(run / "checkpoints")
    wanted = update if update is not None or not saved else saved[-1]
    if wanted in saved and (what := checkpoint.damage(path := run / "checkpoints" / str(wanted))):
        raise checkpoint.CheckpointError(f"{path}: damaged ({what})")
    with checkpoint.reading(run / "checkpoints") as checkpointer:
        restored = checkpoint.restore(checkpointer, {"params": like["params"]}, wanted)
    if restored is None:
        raise checkpoint.CheckpointError(f"{run}: no checkpoint yet")
    state, position = restored
    return config, state["params"], int(position["next_index"])


def last_micro_batch(config: RunConfig, dataset: TokenDataset, update: int) -> np.ndarray:
    """Its inputs alone: some of these sequences are what the telemetry of that update was measured on."""
    return last_sequences(config, dataset, update)[:, :-1]


def probe(
    run: Path,
    update: int | None = None,
    data: Path | None = None,
    *,
    pairs: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Measure a checkpoint: every row of the sampled layers, and every sublayer; returns the directory written to.

    Args:
      run: the run's directory.
      update: of the checkpoint; the newest by default.
      data: the text; by default where the run recorded it.
      pairs: also measure products between pairs of depths: singular values, block norms, the map over both depths.
      progress: called with the number of pairs done and of all.
    """
    config, params, at = load(run, update)
    recorded = Path(records.read_config(run)["data"]["directory"])
    dataset = open_data(config, data or recorded)
    sequences = last_sequences(config, dataset, at)
    out = run / "probe"
    out.mkdir(exist_ok=True)
    layers = sampled_layers(config.model.n_layer)
    rows = jax.device_get(jitted_rows(config.model, layers, sharding.one_device())(params, sequences[:, :-1]))
    temporary = out / (ROWS + ".tmp")
    _rows_frame(at, layers, rows).write_parquet(temporary)
    temporary.replace(out / ROWS)
    _write_lines(out / DEPTH, depth.depth_rows(config.model, params, at, sequences))
    if pairs:
        _write_lines(out / PAIRS, depth.pair_rows(config.model, params, at, sequences, progress))
    return out


def probe_bounds(
    run: Path,
    update: int | None = None,
    data: Path | None = None,
    *,
    layers: Sequence[int] | None = None,
    float64: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Measure Lambda and its bounds on a checkpoint, and return the directory written to.

    Measured is the first sequence of the last micro-batch before the checkpoint, with dropout off.

    Args:
      run, update, data: as for `probe`.
      layers: the sampled ones by default.
      float64: compute in float64 (the parameters are float32).
      progress: called with the number of layers done and of all.

    Raises:
      CheckpointError: also for parameters that are not finite.
    """
    config, params, at = load(run, update)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        raise checkpoint.CheckpointError(f"{run}: the checkpoint of update {at} holds parameters that are not finite")
    dataset = open_data(config, data or Path(records.read_config(run)["data"]["directory"]))
    of_layers, of_heads = bound_lines(
        config.model,
        params,
        at,
        last_micro_batch(config, dataset, at),
        sampled_layers(config.model.n_layer) if layers is None else sorted(set(layers)),
        float64=float64,
        progress=progress,
    )
    out = run / "probe"
    out.mkdir(exist_ok=True)
    _write_lines(out / HEADS, of_heads)
    _write_lines(out / BOUNDS, of_layers)
    return out


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    records.write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def _rows_frame(update: int, layers: tuple[int, ...], rows: dict[str, Any]) -> pl.DataFrame:
    """One line an attention row."""
    shape = np.shape(rows["p_max"])  # (layer, sequence, head, position)
    layer, sequence, head, position = (axis.ravel() for axis in np.indices(shape, dtype=np.int32))
    axes = {"layer": np.asarray(layers, np.int32)[layer], "sequence": sequence, "head": head, "position": position}
    values = {quantity: np.ravel(array) for quantity, array in rows.items()}
    return pl.DataFrame({"update": np.full(layer.size, update, np.int32), **axes, **values})
