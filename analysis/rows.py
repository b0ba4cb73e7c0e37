"""Theta of the attention rows in a file: npy, npz or parquet, of any size, a chunk of rows at a time.

The probabilities lie along the last axis; leading axes are kept in the results. A file is never held in memory.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import jax
import numpy as np
import polars as pl

import sens
from analysis.records import STATISTICS
from analysis.row_files import RowsError, mask_for, open_arrays
from sens import checks

CHUNK = 2**22  # probabilities worked on at a time


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
    names: Sequence[str] = (),
) -> Generator[RowThetas]:
    """The bracket and its companions for every array in a file, one array after the other.

    Args:
      path: `.npy`, `.npz` (every member) or `.parquet`: every column of lists, columns that are no lists ignored; or,
        where no column is of lists, its floating columns side by side. Lists may differ in length, as causal rows do:
        the keys that a shorter one does not have are outside its support. float16 counts as float32.
      where: a file of boolean arrays of the same names, which broadcast to those of `path`; a lone array that has none
        of their names goes with all of them.
      tol: as in `sens.theta_bracket`.
      progress: called with (array, rows done, rows in all) after every chunk.
      names: of the arrays (columns) to take, in that order; all by default.

    Raises:
      RowsError: not such a file, an array that has no rows, or a row that is not one of probabilities (named with file,
        array and index).
    """
    with contextlib.ExitStack() as stack:
        arrays, masks = (
            open_arrays(file, Path(stack.enter_context(tempfile.TemporaryDirectory())), chosen) if file else {}
            for file, chosen in ((path, names), (where, ()))
        )
        for name, array in arrays.items():  # all of them before the first is worked on
            _check_rows(path, name, array)
        kept = {name: mask_for(name, array, arrays, masks, where) for name, array in arrays.items()} if where else {}
        for name, array in arrays.items():
            yield _thetas(path, name, array, kept.get(name), tol, progress)


def _check_rows(path: Path, name: str, array: np.ndarray) -> None:
    wanted = None
    if not np.issubdtype(array.dtype, np.floating):
        wanted = "floating rows are wanted (--array names those to measure)"
    elif array.ndim == 0:
        wanted = "a single number; at least one axis, along which rows lie, is wanted"
    elif 0 in array.shape[:-1]:
        wanted = "it has no rows; at least one is wanted"
    elif array.shape[-1] == 0:
        wanted = "its rows have no entries; at least one is wanted"
    if wanted:
        raise RowsError(f"{path}: array {name!r} is {array.dtype} of shape {array.shape}: {wanted}")


def _thetas(path: Path, name: str, array: np.ndarray, mask: np.ndarray | None, tol: float, progress) -> RowThetas:
    leading, n = array.shape[:-1], array.shape[-1]
    dtype = np.float64 if array.dtype.itemsize >= 8 else np.float32
    total = int(np.prod(leading))
    size = min(max(1, CHUNK // n), total)
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
            p5, p25, median, p75, p95 = np.percentile(values, [5, 25, 50, 75, 95])
            numbers = (values.mean(), values.min(), p5, p25, median, p75, p95, values.max())
            line = {"array": results.name, "index": str(list(group)), "quantity": quantity, "count": values.size}
            table.append({**line, **dict(zip(STATISTICS, map(float, numbers), strict=True))})
    return pl.DataFrame(table)
