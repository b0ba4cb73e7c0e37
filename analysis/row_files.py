"""Arrays in files, npy, npz or parquet, none of which is ever held in memory.

An npy file is memory-mapped; members of an npz and columns of a parquet file are first unpacked into a directory. What
cannot be read as numbers is refused with the file, the array and the reason; pickled data is never loaded.
"""

import math
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

WANTED = "a .npy, .npz or .parquet file is wanted"
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# What the readers of these formats raise on damaged files; RuntimeError: a zip's encryption or compression is unknown.
UNREADABLE = (ValueError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error, pa.ArrowException)


class RowsError(ValueError):
    """A file of rows that cannot be read as one; the message names file, array and row."""


def open_arrays(path: Path, directory: Path, names: Sequence[str] = ()) -> Mapping[str, np.ndarray]:
    """Memory-mapped arrays by name, all of them or those of the names; what has to be unpacked goes to `directory`."""
    if not path.exists():
        raise RowsError(f"{path}: no such file; {WANTED}")
    if not path.is_file():
        raise RowsError(f"{path}: is {'a directory' if path.is_dir() else 'no regular file'}; {WANTED}")
    try:
        match path.suffix:
            case ".npy":
                _choose(path, [path.stem], names)
                return {path.stem: _open_npy(path)}
            case ".npz":
                return _unpack_npz(path, directory, names)
            case ".parquet":
                return _unpack_parquet(path, directory, names)
    except RowsError:
        raise
    except UNREADABLE as error:
        raise RowsError(f"{path}: cannot be read as {path.suffix[1:]} ({' '.join(str(error).split())})") from error
    raise RowsError(f"{path}: {WANTED}")


def mask_for(
    name: str, array: np.ndarray, others: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray], where: Path
) -> np.ndarray:
    """The mask of that name, broadcast; a lone mask that has no other array's name goes with every array."""
    lone = next(iter(masks)) if len(masks) == 1 else None
    if name not in masks and (lone is None or lone in others):
        raise RowsError(f"{where}: has no array {name!r} (it has {_listed(masks)}); masks go by the arrays' names")
    mask = masks[name if name in masks else str(lone)]
    if mask.dtype != np.bool_:
        raise RowsError(f"{where}: dtype {mask.dtype}; bool is wanted (True: in the support)")
    try:
        return np.broadcast_to(mask, array.shape)
    except ValueError as error:
        raise RowsError(f"{where}: shape {mask.shape} does not broadcast to {array.shape} of array {name!r}") from error


def _choose(path: Path, found: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of the names, or all that were found: at least one."""
    if twice := [name for i, name in enumerate(found) if name in found[:i]]:
        raise RowsError(f"{path}: has two arrays {twice[0]!r}; names that differ are wanted")
    if missing := [name for name in names if name not in found]:
        raise RowsError(f"{path}: has no array {missing[0]!r} (it has {_listed(found)})")
    if not found:
        raise RowsError(f"{path}: has no arrays; at least one is wanted")
    return list(dict.fromkeys(names)) or list(found)


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _open_npy(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        shape, fortran, dtype = _read_header(file)
        offset = file.tell()
    held, taken = path.stat().st_size - offset, math.prod(shape) * dtype.itemsize
    if held != taken:  # cut off, or written over something longer: it is not known what was meant
        raise ValueError(f"it holds {held} bytes of data, but {dtype} of shape {shape} takes {taken}")
    if taken == 0:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    start = file.read(len(np.lib.format.MAGIC_PREFIX))
    if start != np.lib.format.MAGIC_PREFIX:
        what = f"it begins with {start!r}" if start else "it is empty"
        raise ValueError(f"{what}; an npy file begins with {np.lib.format.MAGIC_PREFIX!r}")
    file.seek(0)
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"version {version[0]}.{version[1]} of the format; 1.0 or 2.0 is wanted")
    shape, fortran, dtype = HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("its entries are Python objects; numbers are wanted")
    return shape, fortran, dtype


def _unpack_npz(path: Path, directory: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
        held = [member.removesuffix(".npy") for member in members]
        for i, name in enumerate(_choose(path, held, names)):
            unpacked = directory / f"{i}.npy"
            with archive.open(members[held.index(name)]) as source, unpacked.open("wb") as target:
                shutil.copyfileobj(source, target)
            try:
                arrays[name] = _open_npy(unpacked)
            except ValueError as error:
                raise ValueError(f"array {name!r}: {error}") from error
    return arrays


def _unpack_parquet(path: Path, directory: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    file = pq.ParquetFile(path)
    schema = file.schema_arrow
    lists = [field.name for field in schema if _is_list(field.type)]
    chosen = _choose(path, schema.names, names or lists)
    kinds = {name: schema.field(name).type for name in chosen}
    if all(name in lists for name in chosen):
        wanted = "lists of floating numbers are wanted (--array names those to measure)"
        for name, kind in kinds.items():
            if not _is_number(kind.value_type):
                raise RowsError(f"{path}: column {name!r} is {kind}; {wanted}")
        return {name: _unpack_lists(path, file, name, directory / f"{i}.npy") for i, name in enumerate(chosen)}
    wanted = "columns of lists, or else floating columns alone, are wanted (--array names those to measure)"
    for name, kind in kinds.items():
        if not _is_number(kind) or pa.types.is_boolean(kind) != pa.types.is_boolean(kinds[chosen[0]]):
            raise RowsError(f"{path}: column {name!r} is {kind}; {wanted}")
    return {path.stem: _unpack_columns(path, file, kinds, directory / "columns.npy")}


def _unpack_columns(path: Path, file: pq.ParquetFile, kinds: Mapping[str, pa.DataType], target: Path) -> np.ndarray:
    """Columns side by side: a row of the file is a row of the array."""
    dtype = np.result_type(*(kind.to_pandas_dtype() for kind in kinds.values()))
    array = _new(target, dtype, (file.metadata.num_rows, len(kinds)))
    for start, batch in _batches(file, list(kinds)):
        for i, name in enumerate(kinds):
            column = batch.column(name)
            if column.null_count:
                raise RowsError(f"{path}: column {name!r}, row {start + _first_null(column)}: null; a number is wanted")
            array[start : start + len(batch), i] = column.to_numpy(zero_copy_only=False)
    return array


def _unpack_lists(path: Path, file: pq.ParquetFile, name: str, target: Path) -> np.ndarray:
    """A column of lists, a row each; shorter ones are filled up with zeros, which change nothing about a row."""
    longest = 0
    for start, batch in _batches(file, [name]):
        column = batch.column(0)
        lengths = _lengths(column)
        if column.null_count or not lengths.all():
            row = _first_null(column) if column.null_count else int(np.argmin(lengths))
            what = "null" if column.null_count else "an empty list"
            raise RowsError(f"{path}: column {name!r}, row {start + row}: {what}; a list of numbers is wanted")
        longest = max(longest, int(lengths.max(initial=0)))
    dtype = np.dtype(file.schema_arrow.field(name).type.value_type.to_pandas_dtype())
    array = _new(target, dtype, (file.metadata.num_rows, longest))
    for start, batch in _batches(file, [name]):
        column = batch.column(0)
        lengths, entries = _lengths(column), column.flatten()
        if entries.null_count:
            ends = np.cumsum(lengths)
            row = int(np.searchsorted(ends, null := _first_null(entries), side="right"))
            entry = null - int(ends[row] - lengths[row])
            raise RowsError(f"{path}: column {name!r}, row {start + row}, entry {entry}: null; a number is wanted")
        inside = np.arange(longest) < lengths[:, None]
        block = np.zeros(inside.shape, dtype)
        block[inside] = entries.to_numpy(zero_copy_only=False)
        array[start : start + len(batch)] = block
    return array


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    """Floating, or boolean as in a file of masks."""
    return pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _lengths(column: pa.Array) -> np.ndarray:
    """The length of every list; a missing one has none."""
    return pc.call_function("list_value_length", [column]).fill_null(0).to_numpy()


def _first_null(column: pa.Array) -> int:
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())


def _batches(file: pq.ParquetFile, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    start = 0
    for batch in file.iter_batches(batch_size=4096, columns=columns):
        yield start, batch
        start += len(batch)


def _new(path: Path, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
