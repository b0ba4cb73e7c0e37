"""Files behind a URL, read where they are: whatever fsspec knows, above all ``hf://datasets/OWNER/NAME/...``.

Only the ranges that are asked for are transferred, and what is transferred is data: nothing that comes from a store is
ever run. Credentials and proxies are the business of the libraries that know the stores.
"""

import functools
import io
import math
import re
from collections.abc import Iterator
from typing import Any

from train.files import DataError, File, SourceGoneError, kind_of, of_one_kind

_TAGS = ("blob_id", "xet_hash", "md5Hash", "ETag", "etag")
"""Where stores say which content a file has, the best first: the hub's hash of a git or LFS object, its hash of chunks,
Google's MD5, and the ETags of S3, Azure and web servers, which change whenever a file is written."""


def is_url(name: str) -> bool:
    """Whether a source is named by a URL."""
    return "://" in name


def remote(url: str) -> tuple[str, list[File]]:
    """The kind and the files of a URL: of a file, of a directory searched in depth, or of a pattern with * or [...].

    Raises `DataError`, in one line with its remedy, if a package is missing, if the store cannot be reached, if nothing
    is there, or if it is not text of one kind.
    """
    store, path = _store(url)
    try:
        named, found = _found(store, path)
    except FileNotFoundError as error:
        raise SourceGoneError(f"{url}: no such file or directory") from error
    except Exception as error:  # every store raises errors of its own
        raise SourceGoneError(
            f"{url}: cannot be reached ({_said(error)}); remedy: check the connection and the URL,"
            " or copy the files here and name their directory"
        ) from error
    if not found:
        raise SourceGoneError(f"{url}: no such file or directory")
    files = [_file(store, key, info) for key, info in found]
    # A link to one file may end with a query.
    return (kind_of(path.partition("?")[0]), files) if named else of_one_kind(url, files)


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        import fsspec

        return fsspec.url_to_fs(url)
    except ImportError as error:
        hub = error.name == "fsspec" or url.startswith("hf://")
        remedy = "; remedy: pip install '.[hub]' in this project's folder" if hub else ""
        raise DataError(f"{url}: a package is missing ({_said(error)}){remedy}") from error
    except Exception as error:
        raise DataError(f"{url}: not a URL that can be read ({_said(error)})") from error


def _found(store: Any, path: str) -> tuple[bool, list[tuple[str, dict[str, Any]]]]:
    """Whether a path is that of one file, and the files it stands for: their places, what the store says of them."""
    import fsspec.utils

    store.invalidate_cache()  # of the listings of an earlier call: it is now that counts
    magic = min((place for letter in "*[" if (place := path.find(letter)) >= 0), default=None)
    if magic is not None:
        root, _, pattern = path[:magic].rpartition("/")
        found = _below(store, root, math.inf if "**" in path else path.count("/", len(root) + 1) + 1)
        wanted = re.compile(fsspec.utils.glob_translate(pattern + path[magic:]))
        found = [(key, info) for key, info in found if wanted.match(key)]
    elif (info := store.info(path))["type"] == "directory":
        found = _below(store, path, math.inf)
    else:
        return True, [(info["name"].rpartition("/")[2], info)]
    # A listing of links knows no sizes.
    return False, [(key, store.info(info["name"]) if info.get("size") is None else info) for key, info in found]


def _below(store: Any, directory: str, depth: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files below a directory, each with its place there. fsspec's own `find` leaves out what it could not list."""
    for info in store.ls(directory, detail=True):
        name = info["name"].rstrip("/")
        last = name.rpartition("/")[2]
        if info["type"] == "file":
            yield last, info
        elif info["type"] == "directory" and depth > 1 and name != directory.rstrip("/"):
            yield from ((f"{last}/{key}", more) for key, more in _below(store, name, depth - 1))


def _file(store: Any, key: str, info: dict[str, Any]) -> File:
    name = info["name"]
    url = store.unstrip_protocol(name)
    if info.get("size") is None:
        raise DataError(f"{url}: the server does not say how large it is; remedy: copy it here")
    tag = next((str(info[field]) for field in _TAGS if info.get(field)), "")
    return File(url, key, info["size"], functools.partial(_open, store, name), tag)


def _open(store: Any, name: str) -> io.BufferedReader:
    try:
        return io.BufferedReader(_Ranged(store.open(name, "rb")))
    except Exception as error:
        raise _failed(error) from error


class _Ranged(io.RawIOBase):
    """A file of a store, by the ranges that are asked for; whatever goes wrong is an `OSError`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return self._file.seek(offset, whence)
        except Exception as error:
            raise _failed(error) from error

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:
            raise _failed(error) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _failed(error: Exception) -> OSError:
    return OSError(f"{_said(error)}; remedy: check the connection; the same command continues")


def _said(error: Exception) -> str:
    """An error of another's in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
