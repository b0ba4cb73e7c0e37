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

from analysis.records import RecordError, Run

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

DEPTH_COLUMNS: Mapping[str, Any] = {
    "update": pl.Int64,
    "sublayer": pl.Int64,  # from the input up: attention 0, FFN 1, attention 2, ...
    "kind": pl.String,  # "attention" or "ffn"
    "identity_share": pl.Float64,  # squared cosine between the sublayer's Jacobian and the identity
    "a_max": pl.Float64,  # over tokens, of a_{k,i} of Corollary A.3
    "a_mean": pl.Float64,
}


def _checked(path: Path, frame: pl.DataFrame, columns: Mapping[str, Any]) -> pl.DataFrame:
    missing = columns.keys() - set(frame.columns)
    if missing:
        raise RecordError(f"{path}: lacks the columns {sorted(missing)}; measure it again with `sens probe`")
    return frame.select(columns.keys()).cast(pl.Schema(columns))


def read_rows(run: Run) -> pl.DataFrame | None:
    """`RUN/probe/rows.parquet`: one line an attention row of the checkpoint (`ROW_COLUMNS`)."""
    path = run.path / "probe" / "rows.parquet"
    if not path.is_file():
        return None
    try:
        return _checked(path, pl.read_parquet(path), ROW_COLUMNS)
    except pl.exceptions.PolarsError as error:
        raise RecordError(f"{path}: not a table of attention rows ({_line(error)})") from error


def read_depth(run: Run) -> pl.DataFrame | None:
    """`RUN/probe/depth.jsonl`: one line a sublayer (`DEPTH_COLUMNS`), in order."""
    path = run.path / "probe" / "depth.jsonl"
    if not path.is_file():
        return None
    try:
        return _checked(path, pl.read_ndjson(path), DEPTH_COLUMNS).sort("sublayer")
    except pl.exceptions.PolarsError as error:
        raise RecordError(f"{path}: not a table of sublayers ({_line(error)})") from error


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
