"""Theta of the attention rows in a file: npy, npz or parquet, of any size, a chunk of rows at a time.

The probabilities lie along the last axis; leading axes are kept in the results. A file is never held in memory: npy is
memory-mapped, members of an npz and columns of a parquet file are first unpacked into a temporary directory.
"""

import contextlib
import dataclasses
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import sens
from analysis.records import STATISTICS
from sens import checks

CHUNK = 2**22  # probabilities worked on at a time


class RowsError(ValueError):
    """A file of rows that cannot be read as one; the message names file, array and row."""


@dataclasses.dataclass(frozen=True)
class RowThetas:
    """What is known of each row of one array; every field has the array's leading shape."""

    name: str
    p_max: np.ndarray
    prefix: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @property
    def width(self) -> np.ndarray:
        return self.upper - self.lower

    @property
    def discrepancy(self) -> np.ndarray:
        """D = sqrt(1 - theta), its upper end: what tells rows near theta = 1 apart."""
        return np.sqrt(1 - self.lower)


QUANTITIES = ("p_max", "prefix", "lower", "upper", "width", "discrepancy")


def thetas_of_file(
    path: Path,
    where: Path | None = None,
    tol: float = 1e-6,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Generator[RowThetas]:
    """The bracket and its companions for every array in a file, one array after the other.

    Args:
      path: `.npy`, `.npz` (every member) or `.parquet` (every column of lists, or else its floating columns side by
        side; shorter lists are as if filled up with zeros). float16 counts as float32.
      where: a file of boolean arrays of the same names (a lone array needs no name) that broadcast to those of `path`.
      tol: as in `sens.theta_bracket`.
      progress: called with (array, rows done, rows in all) after every chunk.

    Raises:
      RowsError: not such a file, or a row that is not one of probabilities (named with file, array and index).
    """
    with contextlib.ExitStack() as stack:
        arrays, masks = (
            open_arrays(file, Path(stack.enter_context(tempfile.TemporaryDirectory()))) if file else {}
            for file in (path, where)
        )
        for name, array in arrays.items():
            mask = None if where is None else _mask_for(name, array, masks, path, where)
            yield _thetas(path, name, array, mask, tol, progress)


def _thetas(path: Path, name: str, array: np.ndarray, mask: np.ndarray | None, tol: float, progress) -> RowThetas:
    if not np.issubdtype(array.dtype, np.floating) or array.ndim < 1 or array.shape[-1] == 0:
        raise RowsError(f"{path}: array {name!r} is {array.dtype} of shape {array.shape}; floating rows are wanted")
    leading, n = array.shape[:-1], array.shape[-1]
    dtype = np.float64 if array.dtype.itemsize >= 8 else np.float32
    total = int(np.prod(leading))
    size = min(max(1, CHUNK // n), max(total, 1))
    out = np.empty((4, total), dtype)
    with jax.enable_x64(dtype is np.float64):
        for start in range(0, total, size):
            index = np.unravel_index(np.arange(start, min(start + size, total)), leading) if leading else ()
            given = np.atleast_2d(np.asarray(array[index], dtype))
            kept = np.ones(given.shape, bool) if mask is None else np.atleast_2d(mask[index])
            count = len(given)
            rows = np.zeros((size, n), dtype)  # every chunk of one shape: one compilation
            rows[:, 0] = 1
            rows[:count] = np.where(kept, given, 0)
            out[:, start : start + count] = np.asarray(_measure(rows, tol))[:, :count]
            bad = np.isnan(out[2, start : start + count])
            if bad.any():
                i = int(bad.argmax())
                row = tuple(int(x) for x in np.unravel_index(start + i, leading)) if leading else ()
                message = checks.describe_invalid(given[i], row, kept[i])
                raise RowsError(f"{path}: array {name!r}: {message}")
            progress(name, start + count, total)
    return RowThetas(name, *(x.reshape(leading) for x in out))


@jax.jit
def _measure(p: jax.Array, tol: float) -> jax.Array:
    bracket = sens.theta_bracket(p, tol=tol)
    p_max = jax.numpy.max(p, axis=-1) / jax.numpy.sum(p, axis=-1)
    return jax.numpy.stack([p_max, sens.theta_prefix(p), bracket.lower, bracket.upper])


def summary(results: RowThetas) -> pl.DataFrame:
    """Statistics over the last leading axis (queries), one line for each index of the others and each quantity."""
    table = []
    groups = results.lower.shape[:-1]
    for group in np.ndindex(groups):
        for quantity in QUANTITIES:
            values = np.atleast_1d(getattr(results, quantity)[group]).astype(np.float64)
            if values.size:
                p5, p25, median, p75, p95 = np.percentile(values, [5, 25, 50, 75, 95])
                numbers = (values.mean(), values.min(), p5, p25, median, p75, p95, values.max())
                line = {"array": results.name, "index": str(list(group)), "quantity": quantity, "count": values.size}
                table.append({**line, **dict(zip(STATISTICS, map(float, numbers), strict=True))})
    return pl.DataFrame(table)


def open_arrays(path: Path, directory: Path) -> Mapping[str, np.ndarray]:
    """Memory-mapped arrays by name; what has to be unpacked goes to `directory`. Pickled data is refused."""
    if not path.is_file():
        raise RowsError(f"{path}: no such file")
    try:
        match path.suffix:
            case ".npy":
                return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False)}
            case ".npz":
                return _unpack_npz(path, directory)
            case ".parquet":
                return _unpack_parquet(path, directory)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, pa.ArrowException) as error:
        raise RowsError(f"{path}: cannot be read as {path.suffix[1:]} ({error})") from error
    raise RowsError(f"{path}: .npy, .npz or .parquet is wanted")


def _unpack_npz(path: Path, directory: Path) -> dict[str, np.ndarray]:
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for i, member in enumerate(archive.namelist()):
            unpacked = directory / f"{i}.npy"
            with archive.open(member) as source, unpacked.open("wb") as target:
                shutil.copyfileobj(source, target)
            arrays[member.removesuffix(".npy")] = np.load(unpacked, mmap_mode="r", allow_pickle=False)
    return arrays


def _unpack_parquet(path: Path, directory: Path) -> dict[str, np.ndarray]:
    file = pq.ParquetFile(path)
    schema, rows = file.schema_arrow, file.metadata.num_rows
    lists = [f for f in schema if pa.types.is_list(f.type) or pa.types.is_fixed_size_list(f.type)]
    if not lists:
        if not all(pa.types.is_floating(f.type) or pa.types.is_boolean(f.type) for f in schema):
            raise ValueError(f"neither a column of lists nor floating columns alone: {schema.names}")
        array = _new(directory / "columns.npy", schema.field(0).type, (rows, len(schema)))
        for start, batch in _batches(file, schema.names):
            array[start : start + len(batch)] = np.stack([c.to_numpy(zero_copy_only=False) for c in batch.columns], 1)
        return {path.stem: array}
    arrays = {}
    for i, field in enumerate(lists):
        longest = max((_lengths(batch).max() for _, batch in _batches(file, [field.name])), default=0)
        array = _new(directory / f"{i}.npy", field.type.value_type, (rows, int(longest)))
        for start, batch in _batches(file, [field.name]):
            inside = np.arange(array.shape[1]) < _lengths(batch)[:, None]
            block = np.zeros(inside.shape, array.dtype)
            block[inside] = batch.column(0).flatten().to_numpy(zero_copy_only=False)
            array[start : start + len(batch)] = block
        arrays[field.name] = array
    return arrays


def _lengths(batch: pa.RecordBatch) -> np.ndarray:
    """The length of every list in the batch's only column; a missing list has none."""
    return pc.call_function("list_value_length", [batch.column(0)]).fill_null(0).to_numpy()


def _batches(file: pq.ParquetFile, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    start = 0
    for batch in file.iter_batches(batch_size=4096, columns=columns):
        yield start, batch
        start += len(batch)


def _new(path: Path, kind: pa.DataType, shape: tuple[int, int]) -> np.ndarray:
    if 0 in shape:
        return np.zeros(shape, kind.to_pandas_dtype())
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(kind.to_pandas_dtype()), shape=shape)


def _mask_for(name: str, array: np.ndarray, masks: Mapping[str, np.ndarray], path: Path, where: Path) -> np.ndarray:
    if name not in masks and len(masks) != 1:
        raise RowsError(f"{where}: has no array {name!r} to go with that of {path} (it has {sorted(masks)})")
    mask = masks.get(name, next(iter(masks.values())))
    if mask.dtype != np.bool_:
        raise RowsError(f"{where}: dtype {mask.dtype}; bool is wanted (True: in the support)")
    try:
        return np.broadcast_to(mask, array.shape)
    except ValueError as error:
        raise RowsError(f"{where}: shape {mask.shape} does not broadcast to {array.shape} of array {name!r}") from error
