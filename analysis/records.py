"""The run record: one directory a run, append-only JSON lines, and nothing else decides what happened in it.

::

    RUN/
      config.json       the resolved configuration, every field (compared on a restart)
      versions.json     what it ran on: Python and package versions, platform, devices (informative only)
      updates.jsonl     one line an update (`UPDATE_COLUMNS`)
      attention.jsonl   one line an (update, layer, head, quantity) (`ATTENTION_COLUMNS`)
      layers.jsonl      one line an (update, layer) (`LAYER_COLUMNS`)
      depth.jsonl       one line an (update, sublayer) (`DEPTH_COLUMNS`), if the run was asked for it
      bounds.jsonl      one line an (update, sampled layer) (`BOUND_COLUMNS`), if the run was asked for it
      timing.jsonl      one line an update (`TIMING_COLUMNS`): wall clock, which equal runs do not share
      checkpoints/      parameters, optimizer state, data position and update number
      probe/            what was measured offline on a checkpoint (written by `sens probe`)

Every table reads in one line: ``polars.read_ndjson(path)`` or ``pandas.read_json(path, lines=True)``.
Updates count from 1; what is recorded at update ``u`` about parameters is measured after ``u`` updates, on sequences of
the last micro-batch of update ``u``, so that it can be measured again from a checkpoint of the same number.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from sens import AttentionStats

QUANTITIES = AttentionStats._fields
"""Of a row: normalised entropy, largest entry, prefix certificate, theta's bracket, and its width upper - lower."""

STATISTICS = ("mean", "min", "p5", "p25", "median", "p75", "p95", "max")
"""Statistics over rows, in the order in which they are recorded."""

UPDATE_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "loss": pl.Float64,  # mean cross-entropy per token over exactly this update's micro-batches, nats
    "grad_norm": pl.Float64,  # global norm of the accumulated gradient before clipping
    "learning_rate": pl.Float64,
    "tokens": pl.Int64,  # seen so far, this update included
    # Updates so far, this one included, that changed nothing because loss or gradient were not finite: null above, as
    # the block's grad_norm below
    "skipped": pl.Int64,
}
ATTENTION_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "layer": pl.Int64,
    "head": pl.Int64,  # null: pooled over heads, as the paper does
    "quantity": pl.String,  # one of QUANTITIES
    "count": pl.Int64,  # rows that went in (rows of support 1 have no entropy)
    **dict.fromkeys(STATISTICS, pl.Float64),
}
LAYER_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "layer": pl.Int64,
    "grad_norm": pl.Float64,  # norm of this block's accumulated parameter gradient before clipping
    "residual_rms": pl.Float64,  # root mean square of the residual stream that enters the block
    # The factors of Theorem 4.1 (theta is in the attention table): spectral norms of the whole projection matrices, the
    # attained end of each bracket; their product; the widest of the brackets, as upper / lower - 1;
    "norm_query": pl.Float64,
    "norm_key": pl.Float64,
    "norm_value": pl.Float64,
    "norm_out": pl.Float64,
    "norm_product": pl.Float64,
    "norm_width": pl.Float64,
    "magnitude": pl.Float64,  # B_U = ||U||_{inf,rms} of the attention's input
    "a_attention": pl.Float64,  # max over tokens of ||gamma||_inf / sigma(y): the a_{k,i} of Corollary A.3,
    "a_ffn": pl.Float64,  # for the LayerNorm of the attention and of the FFN sublayer
}
TERMS = ("bare", "first", "rest")
"""Terms of a product of Jacobians (`sens.products`): through no branch, through exactly one, through two or more."""

DEPTH_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "sublayer": pl.Int64,  # from the input up: attention 0, FFN 1, attention 2, ...
    "kind": pl.String,  # "attention" or "ffn"
    # Of the sublayer alone:
    "identity_share": pl.Float64,  # squared cosine between its Jacobian and the identity
    "trace": pl.Float64,  # tr / n of its Jacobian
    "a_max": pl.Float64,  # over tokens, of the a_{k,i} of Corollary A.3
    "a_mean": pl.Float64,
    # Of the product P from what enters the sublayer to what leaves the last one, on n coordinates:
    "bound": pl.Float64,  # max over tokens of the product of a (post-LN; of the LayerNorm-only term's norm)
    "bound_loose": pl.Float64,  # product of the a_max (post-LN)
    "gain": pl.Float64,  # ||P||_F / sqrt(n), the root of the APJN, and its standard error over probes
    "gain_se": pl.Float64,
    "alignment": pl.Float64,  # tr(P) / n, and its standard error over probes
    "alignment_se": pl.Float64,
    **dict.fromkeys(TERMS, pl.Float64),  # root mean square gain of each term, on random cotangents
    **{f"share_{term}": pl.Float64 for term in TERMS},  # <term, P^T u> / ||P^T u||^2
    # The same for the gradient of the loss, a cotangent of its own:
    "gradient": pl.Float64,  # norm of the loss's gradient with respect to what enters the sublayer
    **{f"gradient_{term}": pl.Float64 for term in TERMS},
    **{f"gradient_share_{term}": pl.Float64 for term in TERMS},
}
BOUND_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "layer": pl.Int64,
    "dtype": pl.String,  # of the computation
    "row": pl.Int64,  # output position at which Lambda was attained
    "magnitude": pl.Float64,  # B_U = ||U||_{inf,rms} of the attention's input
    "domain": pl.Float64,  # B_LN: the most that it can be
    # Lambda, the (inf,rms) norm of attention's differential at U: both ends, and whether they met within 1 %;
    "lambda_lower": pl.Float64,
    "lambda_upper": pl.Float64,
    "converged": pl.Boolean,
    # bounds on it at U, ours and the paper's (Theorem 4.1),
    "covariance": pl.Float64,
    "refined": pl.Float64,
    "local": pl.Float64,
    # and on its maximum over ||U||_{inf,rms} <= B_LN: the paper's (Corollary 4.2), Newhouse et al.'s.
    "bounded": pl.Float64,
    "newhouse": pl.Float64,
    # The FFN: the largest norm of a token's Jacobian, and the Lipschitz constant (with a gate, at this magnitude).
    "ffn_norm": pl.Float64,
    "ffn_bound": pl.Float64,
    "a_attention": pl.Float64,  # as in LAYER_COLUMNS, on this sequence
    "a_ffn": pl.Float64,
    # The whole layer, in (inf,rms): both ends of its norm at X;
    "layer_lower": pl.Float64,
    "layer_upper": pl.Float64,
    "layer_converged": pl.Boolean,
    # bounds at X: row by row from the measured norms of its sublayers; from covariance, ffn_bound and the a;
    "layer_composed": pl.Float64,
    "layer_actual": pl.Float64,
    "layer_theorem": pl.Float64,  # and the paper's (Theorem 4.3 or 4.4), from bounded, ffn_bound and 1/sqrt(eps)
}
TIMING_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "seconds": pl.Float64,  # from the numbers of the update before to those of this, record and telemetry included
    "tokens_per_second": pl.Float64,
    "mfu": pl.Float64,  # share of the devices' peak (`train.flops`); null: the peak is not known
}
TABLES: Mapping[str, Mapping[str, Any]] = {
    "updates": UPDATE_COLUMNS,
    "attention": ATTENTION_COLUMNS,
    "layers": LAYER_COLUMNS,
    "depth": DEPTH_COLUMNS,
    "bounds": BOUND_COLUMNS,
    "timing": TIMING_COLUMNS,
}


class RecordError(ValueError):
    """A run directory that is missing, not ours, or made by another configuration."""


def _path(run: Path, table: str) -> Path:
    return run / f"{table}.jsonl"


def append(run: Path, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a table in one write; every row must have exactly the table's columns and finite numbers."""
    columns = TABLES[table]
    lines = []
    for row in rows:
        if row.keys() != columns.keys():
            raise RecordError(f"table {table!r} wants columns {sorted(columns)}, got {sorted(row)}")
        lines.append(json.dumps({name: row[name] for name in columns}, allow_nan=False))
    if lines:
        with _path(run, table).open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def truncate(run: Path, update: int) -> None:
    """Forget what was recorded after `update`, and a last line torn by a crash: a restart continues the record.

    Each file is replaced in one step: a second crash leaves either the old or the new one.
    """
    for table in TABLES:
        path = _path(run, table)
        if not path.exists():
            continue
        kept = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.endswith("\n") or json.loads(line)["update"] > update:
                        break
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordError(
                        f"{path}, line {number}: damaged ({error}); remedy: a copy of the file, or a new run"
                    ) from error
                kept.append(line)
        write_text(path, "".join(kept))


def write_text(path: Path, text: str) -> None:
    """Write a whole file so that a reader, or a crash, sees the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_config(run: Path) -> dict[str, Any]:
    """The run's resolved configuration; an error that names the directory if there is none."""
    path = run / "config.json"
    if not run.is_dir():
        raise RecordError(f"{run}: no such run directory")
    if not path.is_file():
        raise RecordError(f"{run}: not a run directory (it has no config.json)")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path}: not JSON ({error}); it is written once when a run starts and is never edited"
        ) from error
    if not isinstance(config, dict) or not config.keys() >= {"model", "train", "data"}:
        raise RecordError(f"{path}: not the configuration of a run (it lacks model, train or data)")
    return config


def read_table(run: Path, table: str) -> pl.DataFrame:
    """One table as a polars frame with the schema above; empty if nothing was recorded yet.

    A last line without its end, which a crash or a write under way leaves, is not there yet.
    """
    path = _path(run, table)
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if not whole:
        return pl.DataFrame(schema=dict(TABLES[table]))
    try:
        return pl.read_ndjson(whole, schema=dict(TABLES[table]))
    except pl.exceptions.PolarsError as error:
        raise RecordError(f"{path}: a line is damaged ({str(error).splitlines()[0]})") from error


@dataclasses.dataclass(frozen=True)
class Run:
    """A run read back: its directory, configuration and tables."""

    path: Path
    config: dict[str, Any]
    updates: pl.DataFrame
    attention: pl.DataFrame
    layers: pl.DataFrame
    depth: pl.DataFrame
    bounds: pl.DataFrame
    timing: pl.DataFrame

    @property
    def placement(self) -> str:
        return self.config["model"]["placement"]

    @property
    def seed(self) -> int:
        return self.config["train"]["seed"]

    @property
    def label(self) -> str:
        return f"{self.placement}-LN, seed {self.seed}"


def read_run(path: Path) -> Run:
    """Read a run directory (`RecordError` if it is none)."""
    config = read_config(path)
    return Run(path=path, config=config, **{table: read_table(path, table) for table in TABLES})


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read several runs, pre-LN first, then by seed."""
    return sorted((read_run(path) for path in paths), key=lambda run: (run.placement != "pre", run.seed))
