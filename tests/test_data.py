"""Data sets: the stream is the documents and nothing else, windows cover it, order and resumption are exact, faults."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train import data
from train.data import TokenDataset, batches, prepare
from train.files import DataError, RunWarning
from train.text import open_source
from train.tokenizer import train


def write(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def windows_of(dataset: TokenDataset) -> list[np.ndarray]:
    return [dataset[i] for i in range(len(dataset))]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.text(max_size=30), min_size=1, max_size=12).filter(any),
    spec=st.sampled_from(["bytes", "bpe:257"]),
    shard_bytes=st.integers(1, 60),
)
def test_the_stream_is_the_documents_each_with_its_end(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], spec: str, shard_bytes: int
):
    root = tmp_path_factory.mktemp("stream")
    out = root / "out"
    index = prepare(write(root / "a.jsonl", documents), spec, out, shard_bytes=shard_bytes)
    stream = np.concatenate([np.fromfile(out / shard.file, "<u2") for shard in index.shards]).astype(np.int32)
    tokenizer = data.load_tokenizer(index, out)
    ends = np.flatnonzero(stream == index.end_of_text)
    pieces = np.split(stream, ends + 1)
    assert [tokenizer.decode(piece[:-1]) for piece in pieces[:-1]] == documents
    assert pieces[-1].size == 0
    assert (index.documents, index.tokens) == (len(documents), stream.size)
    for shard in index.shards:
        assert hashlib.sha256((out / shard.file).read_bytes()).hexdigest() == shard.sha256
        assert shard.text_bytes + shard.documents >= shard_bytes or shard is index.shards[-1]


def test_index_says_what_is_there(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", ["one", "two two", ""])
    out = tmp_path / "out"
    index = prepare(source, "bytes", out)
    assert dataclasses.asdict(index) | {"shards": ...} == {
        "format": data.FORMAT,
        "source": source,
        "source_digest": open_source(source).digest,
        "tokenizer": "bytes",
        "tokenizer_digest": hashlib.sha256(b"bytes").hexdigest(),
        "vocab_size": 257,
        "end_of_text": 256,
        "dtype": "<u2",
        "shards": ...,
    }
    assert index == data.read_index(out)
    assert files(out)["shard-00000.bin"] == np.array([*b"one", 256, *b"two two", 256, 256], "<u2").tobytes()
    assert {path.name for path in out.iterdir()} == {data.INDEX, data.LOCK, "shard-00000.bin"}


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path):
    """A byte-level vocabulary with an id beyond 16 bits."""
    tokenizer = tmp_path / "wide.json"
    train(["abc"], 257).save(tokenizer)
    parts = json.loads(tokenizer.read_text())
    parts["model"]["vocab"]["a"] = 70_000
    tokenizer.write_text(json.dumps(parts))
    index = prepare(write(tmp_path / "a.jsonl", ["aba"]), str(tokenizer), tmp_path / "out")
    assert index.dtype == "<u4"
    assert TokenDataset(tmp_path / "out", 1).read(0, 3).tolist()[::2] == [70_000, 70_000]


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=10).filter(any), data_=st.data())
def test_windows_cover_the_stream_and_wrap_around(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data_: st.DataObject
):
    root = tmp_path_factory.mktemp("windows")
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(n)) for i, n in enumerate(lengths)]
    prepare(write(root / "a.jsonl", texts), "bytes", root / "out", shard_bytes=7)
    stream = np.array([token for text in texts for token in (*text.encode(), 256)])
    context = data_.draw(st.integers(1, len(stream)))
    dataset = TokenDataset(root / "out", context, verify=True)
    assert len(dataset) == math.ceil(len(stream) / context)
    windows = np.stack(windows_of(dataset))
    assert windows.dtype == np.int32
    np.testing.assert_array_equal(windows[:, :-1].ravel()[: len(stream)], stream)
    # The targets of all windows are the stream one further on, going around.
    np.testing.assert_array_equal(windows[:, 1:].ravel(), np.resize(np.roll(stream, -1), windows[:, 1:].size))
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"example {index} of"):
            dataset[index]


def take(source: TokenDataset, count: int, **options) -> list[np.ndarray]:
    with contextlib.closing(batches(source, **options)) as iterator:
        return list(itertools.islice(iterator, count))


def test_batches_follow_the_stream_over_epochs(numbers: Path):
    source = TokenDataset(numbers, 16)  # 63 windows an epoch
    found = np.stack(take(source, 20, micro_batch=3, accumulation=2))
    assert found.shape == (20, 2, 3, 17)
    assert found.dtype == np.int32
    expected = [source[i % len(source)] for i in range(20 * 6)]
    np.testing.assert_array_equal(found.reshape(-1, 17), expected)


def test_shuffled_epochs_hold_every_window_once(numbers: Path):
    source = TokenDataset(numbers, 16)
    options = {"micro_batch": 3, "accumulation": 1, "data_seed": 5}
    found = np.concatenate(take(source, 42, **options)).reshape(2, 63, 17)
    everything = sorted(map(tuple, windows_of(source)))
    assert all(sorted(map(tuple, epoch)) == everything for epoch in found)
    assert not np.array_equal(found[0], found[1])
    np.testing.assert_array_equal(np.concatenate(take(source, 42, **options)).reshape(2, 63, 17), found)
    assert not np.array_equal(take(source, 1, **(options | {"data_seed": 6}))[0][0], found[0, :3])


@pytest.mark.parametrize("data_seed", [None, 0])
def test_resuming_continues_the_order(numbers: Path, data_seed: int | None):
    source = TokenDataset(numbers, 16)
    options = {"micro_batch": 2, "accumulation": 2, "data_seed": data_seed}
    whole = take(source, 40, **options)
    for start in (0, 1, 15, 16, 33):
        np.testing.assert_array_equal(take(source, 40 - start, start_update=start, **options), whole[start:])
    with contextlib.closing(batches(source, **options)) as iterator:
        for _ in range(17):
            next(iterator)
        assert iterator.get_state() == {"next_index": 17}
        iterator.set_state({"next_index": 3})
        np.testing.assert_array_equal(next(iterator), whole[3])


@pytest.mark.parametrize("data_seed", [None, 0])
@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_sees_one_global_batch(numbers: Path, processes: int, data_seed: int | None):
    source = TokenDataset(numbers, 16)
    options = {"micro_batch": 4, "accumulation": 3, "data_seed": data_seed, "start_update": 2}
    whole = take(source, 12, **options)
    parts = [take(source, 12, process_index=i, process_count=processes, **options) for i in range(processes)]
    np.testing.assert_array_equal([np.concatenate(part, axis=1) for part in zip(*parts, strict=True)], whole)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"micro_batch": 0}, "micro_batch must be at least 1, got 0"),
        ({"accumulation": 0}, "accumulation must be at least 1, got 0"),
        ({"start_update": -1}, "start_update must be at least 0, got -1"),
        ({"process_count": 3}, "a micro-batch of 4 does not divide among 3 processes"),
        ({"process_index": 2, "process_count": 2}, r"process_index must be in \[0, 2\), got 2"),
    ],
)
def test_bad_batch_shapes(numbers: Path, options: dict[str, int], match: str):
    with pytest.raises(ValueError, match=match):
        batches(TokenDataset(numbers, 16), **({"micro_batch": 4, "accumulation": 1} | options))


def test_a_finished_data_set_is_left_alone(numbers: Path, monkeypatch: pytest.MonkeyPatch):
    before = {path.name: path.stat().st_mtime_ns for path in numbers.iterdir()}
    monkeypatch.setattr(data, "_make", None)
    index = prepare(str(numbers.parent / "numbers.jsonl"), "bytes", numbers)
    assert index.tokens == 1000
    assert {path.name: path.stat().st_mtime_ns for path in numbers.iterdir()} == before


def test_another_source_or_tokenizer_is_refused(numbers: Path):
    before = files(numbers)
    source = str(numbers.parent / "numbers.jsonl")
    other = write(numbers.parent / "other.jsonl", ["x" * 2000])
    for arguments in ((other, "bytes"), (source, "bpe:260")):
        with pytest.raises(
            DataError, match=r"already holds .*numbers.jsonl in bytes, not .*; choose another directory"
        ):
            prepare(*arguments, numbers)
    assert files(numbers) == before
    write(Path(source), ["changed"])
    with pytest.raises(DataError, match=r"already holds .* in bytes, and its files or the column changed since"):
        prepare(source, "bytes", numbers)


def test_a_finished_data_set_does_without_its_source_but_not_another_nor_an_unfinished_one(numbers: Path):
    source = numbers.parent / "numbers.jsonl"
    index = prepare(str(source), "bytes", numbers)
    source.unlink()
    with pytest.warns(RunWarning, match=r"numbers\.jsonl: no such file .*; what was made of it in .*numbers is used"):
        assert prepare(str(source), "bytes", numbers) == index
    before = files(numbers)
    for arguments in ((str(source), "bpe:260"), (str(source) + "x", "bytes")):
        with pytest.raises(DataError, match=r"numbers\.jsonlx?: no such file"):
            prepare(*arguments, numbers)
    assert files(numbers) == before
    (numbers / "index.json").rename(numbers / "unfinished.json")
    with pytest.raises(DataError, match=r"numbers\.jsonl: no such file"):
        prepare(str(source), "bytes", numbers)


def test_a_source_without_text_does_not_take_the_directory(tmp_path: Path):
    with pytest.raises(DataError, match=r"empty\.txt: holds no text"):
        prepare(write(tmp_path / "empty.txt", []), "bytes", tmp_path / "out")
    assert prepare(write(tmp_path / "some.jsonl", ["some"]), "bytes", tmp_path / "out").documents == 1


def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text("precious")
    with pytest.raises(DataError, match=r"mine: holds other files \(tokenizer.json\)"):
        prepare(write(tmp_path / "a.jsonl", ["abc"]), "bpe:257", tmp_path / "mine")
    assert files(tmp_path / "mine") == {"tokenizer.json": b"precious"}


def test_a_file_is_no_place_for_a_data_set(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", ["abc"])
    with pytest.raises(DataError, match="a data set is a directory, and this is a file"):
        prepare(source, "bytes", Path(source))


def test_progress_runs_to_the_end(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", ["text"] * 50)
    calls: list[tuple[int, int]] = []
    prepare(source, "bytes", tmp_path / "out", shard_bytes=60, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert (done[0], done[-1]) == (0, 200)
    assert done == sorted(done)
    assert all(done <= total for done, total in calls)


@pytest.fixture
def unfinished(tmp_path: Path) -> tuple[str, Path]:
    """A source and its data set, stopped on the way by a Ctrl-C."""
    source = write(tmp_path / "b.jsonl", [f"document {i}" for i in range(100)])
    out = tmp_path / "unfinished"

    def interrupt(done: int, total: int) -> None:
        if done > 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, "bpe:260", out, shard_bytes=100, progress=interrupt)
    assert not list(out.glob("*.tmp"))
    return source, out


def test_finished_shards_are_kept(unfinished: tuple[str, Path]):
    source, out = unfinished
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shard-*.bin")}
    assert len(kept) >= 2
    index = prepare(source, "bpe:260", out, shard_bytes=100)
    assert len(index.shards) > len(kept)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_an_unfinished_data_set_continues_only_from_the_same(unfinished: tuple[str, Path]):
    source, out = unfinished
    before = files(out)
    with pytest.raises(DataError, match="already holds"):
        prepare(source, "bytes", out)
    assert files(out) == before
    (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text().replace("ByteLevel", "Bytelevel", 1))
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        prepare(source, "bpe:260", out)


def test_text_that_changed_behind_the_digest_is_noticed(unfinished: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    """A change that the digest of both ends of a file cannot see."""
    source, out = unfinished
    corpus = open_source(source)
    write(Path(source), [f"Document {i}" for i in range(100)])
    monkeypatch.setattr(data, "open_source", lambda name, column: corpus)
    with pytest.raises(DataError, match=r"the text of shard-00000.bin changed since"):
        prepare(source, "bpe:260", out)


def test_no_space_left_is_known_before_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write(tmp_path / "a.jsonl", ["text of a kind"] * 4000)
    needed = 2 * 4000 * (len("text of a kind") + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(DataError, match=r"out: no space: about 0\.1 MB are needed, 0\.1 MB are free"):
        prepare(source, "bytes", tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert prepare(source, "bytes", tmp_path / "out").documents == 4000


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The system refuses to write more than `size` bytes to a file, as a full disk would."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_keeps_the_finished_shards(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", ["short"] * 20 + ["long " * 4000] + ["short"] * 20)
    out = tmp_path / "out"
    with file_size_limit(10_000), pytest.raises(DataError, match="after 2 finished shards, which stay; call again"):
        prepare(source, "bytes", out, shard_bytes=50)
    assert {path.name for path in out.iterdir()} == {data.UNFINISHED, data.LOCK, "shard-00000.bin", "shard-00001.bin"}
    prepare(source, "bytes", out, shard_bytes=50)
    prepare(source, "bytes", tmp_path / "whole", shard_bytes=50)
    assert files(out) == files(tmp_path / "whole")


def test_damage_is_named(numbers: Path):
    first = numbers / "shard-00000.bin"
    content = first.read_bytes()
    first.write_bytes(content[:-3])
    for call in (lambda: TokenDataset(numbers, 16), lambda: prepare(str(numbers) + ".jsonl", "bytes", numbers)):
        with pytest.raises(DataError, match=f"shard-00000.bin: {len(content) - 3} bytes, expected {len(content)}"):
            call()
    first.unlink()
    with pytest.raises(DataError, match=r"shard-00000\.bin: missing; remove the data set and prepare it anew"):
        TokenDataset(numbers, 16)
    first.write_bytes(content[:-2] + b"zz")
    TokenDataset(numbers, 16)
    with pytest.raises(DataError, match=r"shard-00000\.bin: changed since it was written"):
        TokenDataset(numbers, 16, verify=True)


def test_a_token_beyond_the_vocabulary_is_refused(numbers: Path):
    path = numbers / "shard-00001.bin"
    shard = np.fromfile(path, "<u2")
    shard[5] = 257
    shard.tofile(path)
    dataset = TokenDataset(numbers, 16)
    position = data.read_index(numbers).shards[0].tokens + 5
    with pytest.raises(
        DataError, match=f"token id 257 at position {position} of the stream, but the vocabulary has 257"
    ):
        dataset[position // 16]


def test_what_is_no_data_set(numbers: Path, tmp_path: Path):
    with pytest.raises(DataError, match="absent: no such data set"):
        TokenDataset(tmp_path / "absent", 8)
    with pytest.raises(DataError, match=r"not a data set \(no index.json\)"):
        TokenDataset(tmp_path, 8)
    with pytest.raises(DataError, match="1000 tokens are fewer than one context of 1001"):
        TokenDataset(numbers, 1001)
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        TokenDataset(numbers, 0)


@pytest.mark.parametrize(
    "change", ["{", "[]", '"x"', {"dtype": "O"}, {"format": "another"}, {"shards": [{"file": "a"}]}, {"shards": 3}]
)
def test_a_bad_index_is_named(numbers: Path, change: str | dict):
    index = numbers / data.INDEX
    index.write_text(change if isinstance(change, str) else json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(DataError, match=r"index\.json: not the index of a data set"):
        TokenDataset(numbers, 8)
