"""From text to batches: tokens packed into shards on disk, read back as one endless stream of windows.

A data set is a directory::

    DATA/
      shard-00000.bin ...   token ids, little-endian uint16 (uint32 if the vocabulary needs it), nothing else
      tokenizer.json        the tokenizer, unless it is `bytes`
      index.json            what is in the shards (`Index`); written last: without it the data set is unfinished
      unfinished.json       the same for the shards done so far, while `prepare` is at work

The *stream* is every document in the source's order, each followed by the end-of-text token: nothing is dropped,
nothing is padded. Example ``i`` of a context of ``T`` is ``stream[i T : i T + T + 1]``: inputs and, one
further, targets. Every token is the target of one example, and the last example wraps around to the stream's beginning.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from analysis.records import write_json
from train import shards
from train import tokenizer as tokenizers
from train.files import DataError, RunWarning, SourceGoneError
from train.shards import Shard
from train.text import Source, open_source
from train.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain

FORMAT = "sens tokens 1"
INDEX, UNFINISHED, LOCK = "index.json", "unfinished.json", ".prepare.lock"
SHARD_BYTES = 2**26
"""A shard ends with the document that reaches this much text (`train.shards.split`): seconds of work that a crash can
cost, in memory once for each process."""

_DTYPES = ("<u2", "<u4")
_SAMPLE_BYTES = 2**18  # text that tells tokens per byte before starting

Progress = Callable[[int, int], None]
"""Called with the bytes of text done and an estimate of all."""


@dataclasses.dataclass(frozen=True)
class Index:
    """What a data set holds and what it was made from."""

    format: str
    source: str
    source_digest: str
    tokenizer: str
    """The spec it was asked for by."""
    tokenizer_digest: str
    vocab_size: int
    end_of_text: int
    dtype: str
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)


def prepare(
    source: str,
    tokenizer: str,
    out: Path,
    *,
    column: str = "text",
    shard_bytes: int = SHARD_BYTES,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> Index:
    """Tokenise a source (`train.text.open_source`) with a tokenizer (`train.tokenizer`) into the data set `out`.

    Finished data sets of the same source and tokenizer are returned at once, with a `RunWarning` where the source is
    gone or out of reach: they have all that training needs. Killed at any moment and called again it keeps the finished
    shards and ends with the same files, whatever the number of `workers`: processes that each write a shard at a time
    (one: this process, with a BPE's threads on all cores). Several processes may call it at once: one works, the others
    wait. Raises `DataError` if `out` holds something else, if the disk has not the room (estimated from a sample before
    starting), or if the source cannot be read.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    try:
        corpus = open_source(source, column)
    except SourceGoneError as error:
        return _without_source(out, source, tokenizer, error)
    if not (out / INDEX).is_file():
        with _locked(out):
            if not (out / INDEX).is_file():
                _make(out, corpus, tokenizer, shard_bytes, workers, progress)
    index = read_index(out)
    _check_origin(index, out, corpus, tokenizer)
    return index


def read_index(directory: Path) -> Index:
    """The index of a finished data set whose shards are all there at their full size; `DataError` otherwise."""
    if not directory.is_dir():
        raise DataError(f"{directory}: no such data set")
    if not (directory / INDEX).is_file():
        why = "unfinished; prepare it again to continue" if (directory / UNFINISHED).is_file() else "no index.json"
        raise DataError(f"{directory}: not a data set ({why})")
    index = _read(directory / INDEX)
    _check_sizes(index, directory)
    return index


def load_tokenizer(index: Index, directory: Path) -> Tokenizer:
    """The tokenizer that made a data set, from the copy beside its shards."""
    ready = tokenizers.load(_spec(index, directory))
    if ready.digest != index.tokenizer_digest:
        raise DataError(f"{directory / tokenizers.FILE}: changed since the data set was made; prepare it anew")
    return ready


def _spec(index: Index, directory: Path) -> str:
    """What `tokenizers.load` finds the data set's own tokenizer by."""
    return "bytes" if index.tokenizer == "bytes" else str(directory / tokenizers.FILE)


class TokenDataset:
    """Random access to the windows of a data set; only what is read comes into memory.

    `verify` compares the hash of every shard (about a second a gigabyte); sizes are always compared.
    """

    def __init__(self, directory: Path, context: int, *, verify: bool = False) -> None:
        self.directory, self.context = directory, context
        self.index = read_index(directory)
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        if self.index.tokens < context:
            raise DataError(f"{directory}: {self.index.tokens} tokens are fewer than one context of {context}")
        paths = [directory / shard.file for shard in self.index.shards]
        if verify:
            for path, shard in zip(paths, self.index.shards, strict=True):
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != shard.sha256:
                    raise DataError(
                        f"{path}: changed since it was written (sha256 {found}, index {shard.sha256});"
                        " remove the data set and prepare it anew"
                    )
        self._shards = [np.memmap(path, self.index.dtype, "r") for path in paths]
        self._ends = np.cumsum([shard.tokens for shard in self.index.shards])
        self.tokens = self.index.tokens

    def __len__(self) -> int:
        return math.ceil(self.tokens / self.context)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " T+1"]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.read(int(index) * self.context, self.context + 1)

    def read(self, start: int, count: int) -> Int32[np.ndarray, " count"]:
        """`count` tokens of the stream from position `start`, going around at its end."""
        parts = []
        position = start
        while (left := count - (position - start)) > 0:
            within = position % self.tokens
            number = int(np.searchsorted(self._ends, within, side="right"))
            shard = self._shards[number]
            offset = within - (int(self._ends[number]) - len(shard))
            parts.append(shard[offset : offset + left])
            position += len(parts[-1])
        tokens = np.concatenate(parts)
        if tokens.size and tokens.max() >= self.index.vocab_size:  # an embedding would clamp it without a word
            worst = int(tokens.argmax())
            raise DataError(
                f"{self.directory}: token id {tokens[worst]} at position {(start + worst) % self.tokens}"
                f" of the stream, but the vocabulary has {self.index.vocab_size}; prepare the data set anew"
            )
        return tokens.astype(np.int32)


def batches(
    source: TokenDataset,
    *,
    micro_batch: int,
    accumulation: int,
    start_update: int = 0,
    data_seed: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> "grain.DatasetIterator[np.ndarray]":
    """The endless batches of a run, `[accumulation, micro_batch / process_count, T + 1]` an update.

    The order is the stream's own (as in the paper), or with `data_seed` another permutation every epoch; no training
    seed enters. Epochs follow each other without a seam: a batch may hold the end of one and the beginning of the next.
    The processes' parts, joined along the second axis, are the same global batch for any number of processes.
    A thread has the next batch ready while the last one is at work. The iterator's whole state is the number of the
    update to be handed out next, ``{"next_index": n}``, whatever was read ahead; close it when done, which ends the
    thread.
    """
    import grain

    for name, value, least in (
        ("micro_batch", micro_batch, 1),
        ("accumulation", accumulation, 1),
        ("start_update", start_update, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), got {process_index}")
    if micro_batch % process_count:
        raise ValueError(f"a micro-batch of {micro_batch} does not divide among {process_count} processes")
    data = grain.MapDataset.source(source)
    if data_seed is not None:
        data = data.seed(data_seed).shuffle()
    data = data.repeat().batch(micro_batch // process_count, drop_remainder=True)
    data = data[process_index::process_count].batch(accumulation, drop_remainder=True)
    # No threads for single windows: each is a memory copy, and handing it over costs more than making it. One for whole
    # batches: pages that are not in memory yet are waited for beside the devices' work.
    ready = data.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    iterator = iter(grain.experimental.ThreadPrefetchIterDataset(ready, prefetch_buffer_size=1))
    iterator.set_state({"next_index": start_update})
    return iterator


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """A directory of ours for one process at a time; the system lifts the lock of a killed one."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: a data set is a directory, and this is a file")
    out.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in out.iterdir()}
    if names and not names & {LOCK, UNFINISHED}:
        raise DataError(f"{out}: holds other files ({min(names)}); choose an empty or a new directory")
    with (out / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(out: Path, corpus: Source, spec: str, shard_bytes: int, workers: int, progress: Progress) -> None:
    """Begin a data set or continue an unfinished one."""
    if (out / UNFINISHED).is_file():
        index = _read(out / UNFINISHED)
        _check_origin(index, out, corpus, spec)
        _check_sizes(index, out)
        _check_space(out, corpus, load_tokenizer(index, out), index)
    else:
        size = tokenizers.trained_size(spec)
        ready = tokenizers.load(spec) if size is None else tokenizers.train(corpus.documents(), size)
        index = _new_index(corpus, spec, ready)
        _check_space(out, corpus, ready, index)  # before the directory is the source's
        if isinstance(ready, tokenizers.BPETokenizer):
            ready.save(out / tokenizers.FILE)
        _write(index, out / UNFINISHED)
    _tokenise(out, corpus, index, shard_bytes, workers, progress)


def _check_origin(index: Index, out: Path, corpus: Source, spec: str) -> None:
    """Refuse a directory that was made from another source or by another tokenizer."""
    # A trained tokenizer is named by its spec: the source decides the rest.
    trained = tokenizers.trained_size(spec) is not None
    same = index.tokenizer == spec if trained else index.tokenizer_digest == tokenizers.load(spec).digest
    if index.source_digest != corpus.digest or not same:
        holds, wanted = f"{index.source} in {index.tokenizer}", f"{corpus.name} in {spec}"
        why = "and its files or the column changed since" if holds == wanted else f"not {wanted}"
        raise DataError(f"{out}: already holds {holds}, {why}; choose another directory or remove this one")


def _without_source(out: Path, source: str, spec: str, error: SourceGoneError) -> Index:
    """The finished data set that was made from a source of this name by this tokenizer, or the error."""
    if not (out / INDEX).is_file():
        raise error
    index = read_index(out)
    if index.source != source or index.tokenizer != spec:
        raise error
    warnings.warn(f"{error}; what was made of it in {out} is used", RunWarning, stacklevel=3)
    return index


def _new_index(corpus: Source, spec: str, ready: Tokenizer) -> Index:
    return Index(
        format=FORMAT,
        source=corpus.name,
        source_digest=corpus.digest,
        tokenizer=spec,
        tokenizer_digest=ready.digest,
        vocab_size=ready.vocab_size,
        end_of_text=ready.end_of_text,
        dtype=_DTYPES[ready.vocab_size > 2**16],
        shards=(),
    )


def _write(index: Index, path: Path) -> None:
    write_json(path, {**dataclasses.asdict(index), "tokens": index.tokens, "documents": index.documents})


def _read(path: Path) -> Index:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in dataclasses.fields(Index)]
        shards = tuple(Shard(**shard) for shard in fields["shards"])
        index = Index(**{**{name: fields[name] for name in names}, "shards": shards})
        if index.format != FORMAT or index.dtype not in _DTYPES:
            raise ValueError(f"format {index.format!r} in {index.dtype!r}; this version reads {FORMAT!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not the index of a data set ({type(error).__name__}: {error})") from error
    return index


def _check_sizes(index: Index, directory: Path) -> None:
    for shard in index.shards:
        path = directory / shard.file
        expected = shard.tokens * np.dtype(index.dtype).itemsize
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            what = "missing" if found is None else f"{found} bytes, expected {expected}"
            raise DataError(f"{path}: {what}; remove the data set and prepare it anew")


def _check_space(out: Path, corpus: Source, ready: Tokenizer, index: Index) -> None:
    """Refuse to start what the disk cannot hold, judged by the tokens per byte of the source's beginning."""
    sample = next(shards.split(corpus.documents(), _SAMPLE_BYTES))
    tokens = sum(len(ids) + 1 for ids in ready.encode_batch(sample))
    ahead = max(corpus.text_bytes - sum(shard.text_bytes for shard in index.shards), 0)
    ratio = tokens / sum(len(document.encode()) for document in sample)
    needed = round(ahead * ratio * np.dtype(index.dtype).itemsize)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise DataError(f"{out}: no space: about {needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free")


def _tokenise(out: Path, corpus: Source, index: Index, shard_bytes: int, workers: int, progress: Progress) -> None:
    documents = corpus.documents()
    for shard in index.shards:
        _skip(documents, shard, corpus.name)
    for left in out.glob("*.tmp"):  # of a process that was killed
        left.unlink()
    done = sum(shard.text_bytes for shard in index.shards)
    progress(done, max(corpus.text_bytes, done))
    job = shards.Job(out, _spec(index, out), index.end_of_text, index.dtype)
    written = shards.write_all(
        job,
        shards.split(documents, shard_bytes),
        first=len(index.shards),
        workers=workers,
        progress=lambda more: progress(done + more, max(corpus.text_bytes, done + more)),
    )
    try:
        for shard in written:
            index = dataclasses.replace(index, shards=(*index.shards, shard))
            _write(index, out / UNFINISHED)
    except (OSError, shards.WorkerError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"{out}: {reason} after {len(index.shards)} finished shards, which stay; call again to continue"
        ) from error
    (out / UNFINISHED).replace(out / INDEX)


def _skip(documents: Iterator[str], shard: Shard, name: str) -> None:
    """Go past the documents of a finished shard, making sure that they are the ones that went in."""
    text = hashlib.sha256()
    for document in itertools.islice(documents, shard.documents):
        shards.feed(text, document.encode())
    if text.hexdigest() != shard.text_sha256:
        raise DataError(f"{name}: the text of {shard.file} changed since; remove the data set and prepare it anew")
