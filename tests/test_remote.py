"""Sources behind a URL: the same documents and data sets as from a directory, by ranges only, refused in one line."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.hub import FINEWEB
from train.data import prepare
from train.files import DataError
from train.text import open_source

DOCUMENTS = [f"{i:03d} {'some words ' * (i % 7)}" for i in range(200)]
DUMP = "web/data/CC-MAIN-2024-10"


def parquet(documents: list[str], group: int = 25, junk: int = 2000) -> bytes:
    """A file with a large column that nobody wants before the text."""
    n = len(documents)
    table = pa.table({"meta": [{"a": 1, "b": bytes(junk)}] * n, "text": documents, "score": [0.5] * n})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=group, use_dictionary=False, compression="none")
    return sink.getvalue().to_pybytes()


def json_lines(documents: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


FILES = {"000_00000.parquet": parquet(DOCUMENTS[:120]), "000_00001.parquet": parquet(DOCUMENTS[120:])}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    """An empty store."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return fsspec.filesystem("memory")


@pytest.fixture
def web(memory: MemoryFileSystem) -> MemoryFileSystem:
    """Two parquet files, written in the wrong order, and a file that is no text."""
    for name in reversed(FILES):
        memory.pipe(f"/{DUMP}/{name}", FILES[name])
    memory.pipe("/web/LICENSE", b"\xff")
    return memory


def local_copy(directory: Path) -> Path:
    (directory / "web" / "data" / "CC-MAIN-2024-10").mkdir(parents=True)
    for name, content in FILES.items():
        (directory / DUMP / name).write_bytes(content)
    return directory / "web"


@pytest.mark.parametrize(
    "url", ["memory://web", "memory://web/data/*/*.parquet", "memory://w*/**", f"memory://{DUMP}/000_0000[01].parquet"]
)
def test_a_directory_and_a_pattern_give_the_documents_in_order(web, url: str):
    source = open_source(url)
    assert (source.name, source.kind) == (url, ".parquet")
    assert [file.name for file in source.files] == [f"memory:///{DUMP}/{name}" for name in FILES]
    assert list(source.documents()) == DOCUMENTS
    assert list(source.documents()) == DOCUMENTS  # and again from the start


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "txt", "md"])
def test_a_file_of_any_kind(memory, kind: str):
    content = json_lines(DOCUMENTS) if "json" in kind else b"\xef\xbb\xbfa\r\nb"
    with memory.open(f"/a.{kind}", "wb", compression="gzip" if kind.endswith("gz") else None) as file:
        file.write(content)
    assert list(open_source(f"memory://a.{kind}").documents()) == (DOCUMENTS if "json" in kind else ["\ufeffa\r\nb"])


def test_a_file_url_is_the_same_source_as_its_path(tmp_path: Path):
    root = local_copy(tmp_path)
    assert open_source(f"file://{root}").digest == open_source(str(root)).digest
    one = root / "data" / "CC-MAIN-2024-10" / "000_00000.parquet"
    assert open_source(f"file://{one}").digest == open_source(str(one)).digest


def test_the_digest_follows_the_text_where_a_store_says_nothing_of_it(web):
    before = open_source("memory://web").digest
    web.pipe(f"/{DUMP}/000_00001.parquet", FILES["000_00001.parquet"])  # the same content, written later
    assert open_source("memory://web").digest == before
    web.pipe(f"/{DUMP}/000_00001.parquet", FILES["000_00001.parquet"].replace(b"150 some", b"150 Some"))
    assert open_source("memory://web").digest != before


class Store(fsspec.AbstractFileSystem):
    """A store with a hash or tag of each file, whose listing does not know sizes, as that of a web server."""

    protocol = "store"
    cachable = False
    content: ClassVar[dict[str, bytes]] = {}
    said: ClassVar[dict[str, Any]] = {}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        return [{"name": name, "type": "file", "size": None} for name in self.content]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path in self.content:
            return {"name": path, "type": "file", "size": len(self.content[path]), **self.said}
        return {"name": path, "type": "directory", "size": None}

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        return io.BytesIO(self.content[path])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[Store]:
    fsspec.register_implementation("store", Store, clobber=True)
    monkeypatch.setattr(Store, "content", {"d/a.jsonl": json_lines(DOCUMENTS)})
    return Store


def test_a_link_may_end_with_a_query(store):
    store.content["d/a.jsonl?download=true"] = json_lines(["linked"])
    assert list(open_source("store://d/a.jsonl?download=true").documents()) == ["linked"]


@pytest.mark.parametrize("field", ["blob_id", "xet_hash", "md5Hash", "ETag", "etag"])
def test_the_digest_follows_what_a_store_says_of_its_files(store, monkeypatch: pytest.MonkeyPatch, field: str):
    digests = set()
    for said in ({}, {field: "one"}, {field: "another"}):
        monkeypatch.setattr(store, "said", said)
        source = open_source("store://d")
        assert list(source.documents()) == DOCUMENTS
        digests.add(source.digest)
    assert len(digests) == 3


def test_the_amount_of_text_in_many_files_is_told_from_the_first(memory):
    for number in range(40):
        memory.pipe(f"/many/{number:02d}.parquet", FILES["000_00000.parquet"])
    one = open_source("memory://many/00.parquet").text_bytes
    assert open_source("memory://many").text_bytes == pytest.approx(40 * one, rel=1e-6)
    assert one == pytest.approx(sum(map(len, DOCUMENTS[:120])), rel=0.3)


# Ranges.


class Watched:
    """A file that notes what is read of it, until its connection is lost."""

    def __init__(self, file: Any, state: SimpleNamespace) -> None:
        self.file, self.state = file, state
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int) -> bytes:
        assert size >= 0
        if self.state.lost:
            raise ConnectionResetError("the peer\nis gone")
        self.state.reads.append(size)
        return self.file.read(size)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`reads`: the size of every read of a file in memory; `lost`: whether reading fails."""
    state = SimpleNamespace(reads=[], lost=False)
    opened = MemoryFileSystem._open

    def watch(self: MemoryFileSystem, *arguments: Any, **keywords: Any) -> Watched:
        return Watched(opened(self, *arguments, **keywords), state)

    monkeypatch.setattr(MemoryFileSystem, "_open", watch)
    return state


def test_other_columns_are_not_transferred(memory, watched):
    documents = [f"{i} {'text ' * 500}" for i in range(400)]
    memory.pipe("/a.parquet", content := parquet(documents, group=50, junk=50_000))
    source = open_source("memory://a.parquet")
    watched.reads.clear()
    assert list(source.documents()) == documents
    assert len(content) > 20e6
    assert sum(watched.reads) < 1.5 * sum(map(len, documents)) < len(content) / 10


def test_of_a_row_group_that_is_the_whole_file_a_piece_is_read_at_a_time(memory, watched):
    documents = [f"{i} {'text ' * 500}" for i in range(12_000)]
    memory.pipe("/a.parquet", content := parquet(documents, group=12_000, junk=1))
    source = open_source("memory://a.parquet")
    watched.reads.clear()
    stream = source.documents()
    assert next(stream) == documents[0]
    assert sum(watched.reads) < len(content) / 3  # the first batch of rows
    assert list(stream) == documents[1:]
    assert max(watched.reads) < len(content) / 5


# Data sets.


def interrupted(source: str, out: Path) -> set[Path]:
    """A data set stopped on its way, with some shards done."""

    def interrupt(done: int, _: int) -> None:
        if done > 4000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, "bytes", out, shard_bytes=1000, progress=interrupt)
    kept = set(out.glob("shard-*.bin"))
    assert len(kept) >= 3
    return kept


def test_an_interrupted_data_set_continues_to_that_of_the_directory(web, tmp_path: Path):
    kept = {path: path.stat().st_mtime_ns for path in interrupted("memory://web", tmp_path / "out")}
    index = prepare("memory://web", "bytes", tmp_path / "out", shard_bytes=1000)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert index.source == "memory://web"
    local = prepare(str(local_copy(tmp_path)), "bytes", tmp_path / "local", shard_bytes=1000)
    assert (index.shards, index.source_digest) == (local.shards, local.source_digest)
    assert index.documents == len(DOCUMENTS)


def test_a_source_that_changed_is_refused(web, tmp_path: Path):
    interrupted("memory://web", tmp_path / "out")
    web.pipe(f"/{DUMP}/000_00002.parquet", parquet(["more"]))
    with pytest.raises(DataError, match="already holds memory://web in bytes, and its files or the column changed"):
        prepare("memory://web", "bytes", tmp_path / "out", shard_bytes=1000)


def test_a_file_of_the_same_length_that_was_written_anew_is_refused(store, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(store, "said", {"ETag": "1"})
    interrupted("store://d", tmp_path / "out")
    monkeypatch.setattr(store, "said", {"ETag": "2"})
    with pytest.raises(DataError, match="already holds store://d"):
        prepare("store://d", "bytes", tmp_path / "out", shard_bytes=1000)
    monkeypatch.setattr(store, "said", {"ETag": "1"})  # a store that says the same of something else
    store.content["d/a.jsonl"] = store.content["d/a.jsonl"].replace(b"some", b"Some")
    with pytest.raises(DataError, match=r"store://d: the text of shard-00000\.bin changed since"):
        prepare("store://d", "bytes", tmp_path / "out", shard_bytes=1000)


def test_a_connection_that_is_lost_keeps_what_is_done(web, watched, tmp_path: Path):
    def lose(done: int, _: int) -> None:
        watched.lost = done > 3000

    with pytest.raises(DataError) as caught:
        prepare("memory://web", "bytes", tmp_path / "out", shard_bytes=1000, progress=lose)
    assert re.fullmatch(
        r"memory:///web/data/CC-MAIN-2024-10/000_0000\d\.parquet: row group \d, row \d+: ConnectionResetError: the peer"
        r" is gone; remedy: check the connection; the same command continues",
        str(caught.value),
    )
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("shard-*.bin")}
    assert len(kept) >= 3
    watched.lost = False
    index = prepare("memory://web", "bytes", tmp_path / "out", shard_bytes=1000)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert index.shards == prepare("memory://web", "bytes", tmp_path / "whole", shard_bytes=1000).shards


# What is refused, in one line and with status 2.


def test_what_is_not_there_or_no_text(web, refused):
    refused("memory://absent.parquet", ": no such file or directory")
    refused("memory://web/*.parquet", ": no such file or directory")
    refused("memory://web/LIC*", r": no text files here \(want \.txt, \.jsonl, \.jsonl\.gz, \.parquet\)")
    web.pipe("/web/a.jsonl", b"{}")
    refused("memory://web", r": holds files of several kinds \(\.jsonl, \.parquet\); name those of one kind")


def test_a_file_without_the_column(web, refused):
    refused(
        f"memory:///{DUMP}/000_00000.parquet",
        ": no column 'body'; it has 'meta', 'text', 'score'",
        "--column",
        "body",
    )


def test_a_store_that_does_not_say_enough(store, refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "said", {"size": None})
    refused("store://d/a.jsonl", ": the server does not say how large it is; remedy: copy it here")


@pytest.mark.parametrize("url", ["memory://web", "memory://web/*/*/*.parquet"])
def test_a_directory_that_cannot_be_listed_is_not_left_out(web, refused, monkeypatch: pytest.MonkeyPatch, url: str):
    listed = MemoryFileSystem.ls

    def fail(self: MemoryFileSystem, path: str, **keywords: Any) -> Any:
        if path.endswith("CC-MAIN-2024-11"):
            raise TimeoutError("no answer\nin 10 s")
        return listed(self, path, **keywords)

    web.pipe("/web/data/CC-MAIN-2024-11/000_00000.parquet", parquet(["more"]))
    monkeypatch.setattr(MemoryFileSystem, "ls", fail)
    refused(url, r": cannot be reached \(TimeoutError: no answer in 10 s\); remedy: check the connection .*")


def test_packages_that_are_missing(refused, monkeypatch: pytest.MonkeyPatch):
    remedy = r"; remedy: pip install '\.\[hub\]' in this project's folder"
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules["fsspec.registry"]._registry, "hf", raising=False)
        patched.setitem(sys.modules, "huggingface_hub", None)
        refused(f"hf://{FINEWEB}/a.parquet", rf": a package is missing \(.*huggingface_hub.*\){remedy}")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "fsspec", None)
        refused("s3://bucket/a.parquet", rf": a package is missing \(.*fsspec.*\){remedy}")
    refused("s3://bucket/a.parquet", r": a package is missing \(ImportError: Install s3fs to access S3\)")


def test_a_url_of_no_known_kind(refused):
    refused("nonsense://a", r": not a URL that can be read \(ValueError: Protocol not known: nonsense\)")
