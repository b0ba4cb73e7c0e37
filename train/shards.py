"""Shards: lists of documents in, files of token ids out, written by any number of processes with the same bytes.

Where a shard ends is decided by the text alone, before it is tokenised: so each can be written without the others.
"""

import collections
import concurrent.futures
import concurrent.futures.process
import dataclasses
import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from train import tokenizer as tokenizers
from train.tokenizer import Tokenizer

_BATCH_BYTES = 2**22  # text tokenised at a time: enough to keep every core at work, small beside a shard


class WorkerError(RuntimeError):
    """A process that tokenises died."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    documents: int
    sha256: str
    """Of the file."""
    text_bytes: int
    text_sha256: str
    """Of the documents that went in: an interrupted preparation continues only from the same text."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What the shards of a data set have in common."""

    out: Path
    tokenizer: str
    """A spec of `train.tokenizer.load`."""
    end_of_text: int
    dtype: str


def split(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    """Documents in lists: each ends with the one that brings its UTF-8 bytes, and one a document, to `size`."""
    group, held = [], 0
    for document in documents:
        group.append(document)
        held += len(document.encode()) + 1
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


def write_all(
    job: Job, groups: Iterator[list[str]], *, first: int, workers: int, progress: Callable[[int], None]
) -> Iterator[Shard]:
    """Write a shard for each group, the numbers from `first` on, and yield them in order.

    `progress` is called with the bytes of text done. Raises `OSError` where a write fails, `WorkerError`.
    """
    done = 0
    if workers == 1:
        tokenizer = tokenizers.load(job.tokenizer)
        for number, group in enumerate(groups, first):
            shard = _write(job, tokenizer, number, group, lambda more, done=done: progress(done + more))
            done += shard.text_bytes
            yield shard
        return
    # Not forked: a tokenizer's threads would not come along.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _begin, (job,)) as pool:
        waiting: collections.deque[concurrent.futures.Future[Shard]] = collections.deque()
        try:
            for number, group in enumerate(groups, first):
                waiting.append(pool.submit(_work, number, group))
                if len(waiting) > workers:  # one is ready for whoever comes first; more would only fill the memory
                    shard = waiting.popleft().result()
                    progress(done := done + shard.text_bytes)
                    yield shard
            for future in waiting:
                shard = future.result()
                progress(done := done + shard.text_bytes)
                yield shard
        except concurrent.futures.process.BrokenProcessPool as error:
            raise WorkerError("a process that tokenises died") from error
        finally:
            pool.shutdown(cancel_futures=True)


_state: dict[str, tuple[Job, Tokenizer]] = {}  # of a worker: what every call needs, sent once


def _begin(job: Job) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    _state["job"] = (job, tokenizers.load(job.tokenizer))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent takes its workers with it: the next one has the directory to itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(number: int, documents: list[str]) -> Shard:
    return _write(*_state["job"], number, documents, lambda _: None)


def feed(text: "hashlib._Hash", document: bytes) -> None:
    """Add a document to a hash of documents."""
    text.update(document)
    text.update(b"\xff")  # in no UTF-8 text: keeps documents apart


def _write(job: Job, tokenizer: Tokenizer, number: int, documents: list[str], progress: Callable[[int], None]) -> Shard:
    """One shard, under its name only when it is whole."""
    path = job.out / f"shard-{number:05d}.bin"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    tokens = text_bytes = 0
    content, text = hashlib.sha256(), hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for group in split(documents, _BATCH_BYTES):
                for document, ids in zip(group, tokenizer.encode_batch(group), strict=True):
                    data = np.append(ids, job.end_of_text).astype(job.dtype).tobytes()
                    file.write(data)
                    content.update(data)
                    raw = document.encode()
                    feed(text, raw)
                    tokens, text_bytes = tokens + len(ids) + 1, text_bytes + len(raw)
                    progress(text_bytes)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return Shard(path.name, tokens, len(documents), content.hexdigest(), text_bytes, text.hexdigest())
