"""What is measured offline beside a run, read back: `RUN/probe/` (from a checkpoint) and `verify.json` (the identity).

A file that is not there yet reads as None; a file that is there and not what it should be is a `RecordError`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from analysis.records import BOUND_COLUMNS, DEPTH_COLUMNS, TERMS, RecordError, Run

ROW_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,  # of the checkpoint
    "layer": pl.Int64,
    "head": pl.Int64,
    "position": pl.Int64,  # of the query: the row of the attention matrix
    "p_max": pl.Float64,
    "prefix": pl.Float64,  # theta's prefix certificate, and the two ends of its bracket
    "lower": pl.Float64,
    "upper": pl.Float64,
}
CLOSED = 1e-6
"""Width at which a bracket counts as one number."""

PAIR_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "start": pl.Int64,  # of the product P from what enters sublayer `start` to what enters sublayer `stop`
    "stop": pl.Int64,
    "gain": pl.Float64,  # this and what follows: as in DEPTH_COLUMNS
    "gain_se": pl.Float64,
    "alignment": pl.Float64,
    "alignment_se": pl.Float64,
    **dict.fromkeys(TERMS, pl.Float64),
    **{f"share_{term}": pl.Float64 for term in TERMS},
    # On one sequence, between the depths of a coarse grid (null elsewhere):
    **{f"sigma_{i}": pl.Float64 for i in range(1, 5)},  # largest singular values of P; the first bounds its norm below
    "sigma_1_residual": pl.Float64,  # some singular value of P lies within this of sigma_1
    "bare_norm": pl.Float64,  # largest singular value of the bare term
    "bare_norm_residual": pl.Float64,
    "bound": pl.Float64,  # what Corollary A.3 says of it on this sequence (post-LN)
    "bound_loose": pl.Float64,
    "block_lower": pl.Float64,  # (inf, rms) norm of P's last row of blocks, both ends (to the output alone)
    "block_upper": pl.Float64,
}

HEAD_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "layer": pl.Int64,
    "head": pl.Int64,
    "theta": pl.Float64,  # theta~_h: the largest upper end over the head's rows
    # In the row at which the layer's Lambda is attained, bounds on the head's pathways (the query's is exact):
    "value": pl.Float64,
    "query": pl.Float64,
    "key": pl.Float64,
    # Spectral norm (Frobenius geometry) of the head alone, U to A_h V_h; `upper` but for a chance of 1e-6:
    "spectral_lower": pl.Float64,
    "spectral_upper": pl.Float64,
    "spectral_converged": pl.Boolean,
    "yudin": pl.Float64,  # bounds on it: at U, and over all inputs with tokens as long as the longest here
    "castin": pl.Float64,
}


def _checked(path: Path, frame: pl.DataFrame, columns: Mapping[str, Any]) -> pl.DataFrame:
    missing = columns.keys() - set(frame.columns)
    if missing:
        raise RecordError(f"{path}: lacks the columns {sorted(missing)}; measure it again with `sens probe`")
    return frame.select(columns.keys()).cast(pl.Schema(columns))


def read_rows(run: Run) -> pl.DataFrame | None:
    """`RUN/probe/rows.parquet`: one line an attention row of the checkpoint (`ROW_COLUMNS`)."""
    return _read(run, "rows.parquet", "attention rows", ROW_COLUMNS)


def read_depth(run: Run) -> pl.DataFrame | None:
    """`RUN/probe/depth.jsonl`: one line a sublayer (`records.DEPTH_COLUMNS`), in order."""
    table = _read(run, "depth.jsonl", "sublayers", DEPTH_COLUMNS)
    return None if table is None else table.sort("sublayer")


def read_pairs(run: Run) -> pl.DataFrame | None:
    """`RUN/probe/pairs.jsonl`: one line a pair of depths (`PAIR_COLUMNS`), in order."""
    table = _read(run, "pairs.jsonl", "pairs of depths", PAIR_COLUMNS)
    return None if table is None else table.sort("stop", "start")


def read_bounds(run: Run) -> pl.DataFrame | None:
    """`RUN/probe/bounds.jsonl`: one line a layer (`records.BOUND_COLUMNS`), in order."""
    table = _read(run, "bounds.jsonl", "bounds", BOUND_COLUMNS)
    return None if table is None else table.sort("layer")


def read_heads(run: Run) -> pl.DataFrame | None:
    """`RUN/probe/heads.jsonl`: one line a head of those layers (`HEAD_COLUMNS`), in order."""
    table = _read(run, "heads.jsonl", "heads", HEAD_COLUMNS)
    return None if table is None else table.sort("layer", "head")


def _read(run: Run, name: str, what: str, columns: Mapping[str, Any]) -> pl.DataFrame | None:
    path = run.path / "probe" / name
    if not path.is_file():
        return None
    try:
        # A column may begin with many nulls: its type is that of the whole.
        frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_ndjson(path, infer_schema_length=None)
        return _checked(path, frame, columns)
    except pl.exceptions.PolarsError as error:
        raise RecordError(f"{path}: not a table of {what} ({_line(error)})") from error


@dataclasses.dataclass(frozen=True)
class Check:
    """The identity ||J||_{inf->1} = theta / tau on random logits of one length; one entry a row of logits."""

    length: int
    norm: list[float]
    theta_over_tau: list[float]
    relative_error: list[float]

    @property
    def worst(self) -> float:
        return max(self.relative_error)


@dataclasses.dataclass(frozen=True)
class Verification:
    """`verify.json`: the checks, and the relative error that each row was held to."""

    tolerance: float
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.worst < self.tolerance for check in self.checks)


def read_verification(path: Path) -> Verification | None:
    """`verify.json` as `sens verify` writes it."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        checks = [
            Check(**{field.name: check[field.name] for field in dataclasses.fields(Check)}) for check in value["checks"]
        ]
        verification = Verification(float(value["tolerance"]), checks)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: not the result of `sens verify` ({_line(error)})") from error
    for check in checks:
        columns = (check.norm, check.theta_over_tau, check.relative_error)
        if len({len(column) for column in columns}) != 1 or not check.norm:
            raise RecordError(f"{path}: the check of length {check.length} has columns of different lengths or none")
        if not all(isinstance(x, float | int) and math.isfinite(x) for column in columns for x in column):
            raise RecordError(f"{path}: the check of length {check.length} holds entries that are no finite numbers")
    return verification


def _line(error: Exception) -> str:
    """An error on one line: the first of its text, its kind before it."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
