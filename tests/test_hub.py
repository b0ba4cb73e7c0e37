"""The hub's own client against a server that answers as the hub does."""

import contextlib
import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest

from tests.hub import FINEWEB, Hub, serving
from tests.test_remote import DOCUMENTS, FILES, interrupted, parquet
from train.data import prepare
from train.files import DataError, RunWarning
from train.text import open_source


@contextlib.contextmanager
def nowhere() -> Iterator[str]:
    """An address that is bound and not listened at: whoever connects is turned away."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    monkeypatch.setattr(Hub, "files", {f"sample/10BT/{name}": content for name, content in FILES.items()})
    monkeypatch.setattr(Hub, "ranges", [])
    with serving() as address:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": address, "token": False})
        yield Hub


@pytest.mark.parametrize("where", ["/sample/10BT/*.parquet", "@main/sample/10BT", "/sample/10BT/"])
def test_files_of_the_hub(hub, where: str, tmp_path: Path):
    source = open_source(f"hf://{FINEWEB}{where}")
    repository = f"hf://{FINEWEB}{where.split('/')[0]}"
    assert [file.name for file in source.files] == [f"{repository}/sample/10BT/{name}" for name in FILES]
    assert [file.tag for file in source.files] == [hashlib.sha1(content).hexdigest() for content in FILES.values()]
    assert list(source.documents()) == DOCUMENTS


def test_a_file_of_the_hub_is_read_by_ranges(hub):
    documents = [f"{i} {'text ' * 5000}" for i in range(800)]
    content = hub.files["sample/big.parquet"] = parquet(documents, group=50)
    source = open_source(f"hf://{FINEWEB}/sample/big.parquet")
    assert list(source.documents()) == documents
    assert len(content) > 20e6
    assert max(hub.ranges) < len(content) / 2


def test_a_file_that_changed_on_the_hub_is_refused(hub, tmp_path: Path):
    url = f"hf://{FINEWEB}/sample/10BT"
    interrupted(url, tmp_path / "out")
    name = "sample/10BT/000_00001.parquet"
    whole = hub.files[name]
    hub.files[name] = whole.replace(b"150 some", b"150 Some")
    with pytest.raises(DataError, match=f"already holds {url} in bytes, and its files or the column changed"):
        prepare(url, "bytes", tmp_path / "out", shard_bytes=1000)
    hub.files[name] = whole
    assert prepare(url, "bytes", tmp_path / "out", shard_bytes=1000).documents == len(DOCUMENTS)


def test_a_finished_data_set_does_without_the_hub(hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    url = f"hf://{FINEWEB}/sample/10BT"
    index = prepare(url, "bytes", tmp_path / "out")
    with nowhere() as address:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": address, "token": False})
        with pytest.warns(RunWarning, match=r"10BT: cannot be reached \(ConnectError.*\); .* what was made of it in"):
            assert prepare(url, "bytes", tmp_path / "out") == index


@pytest.mark.parametrize("path", ["/absent", "/sample/*.jsonl", "@v9/sample"])
def test_what_the_hub_does_not_have(hub, refused, path: str):
    refused(f"hf://{FINEWEB}{path}", ": no such file or directory")
    refused("hf://datasets/no/such", ": no such file or directory")


def test_a_hub_that_cannot_be_reached(refused, monkeypatch: pytest.MonkeyPatch):
    with nowhere() as address:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": address, "token": False})
        refused(
            f"hf://{FINEWEB}/sample/10BT",
            r": cannot be reached \(ConnectError: .*\); remedy: check the connection and the URL, or copy the files"
            " here and name their directory",
        )
