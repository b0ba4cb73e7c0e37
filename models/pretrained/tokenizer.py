"""The tokenizer of a published model: text to ids, with the stretch of text that each id stands for.

Text is only ever data: a text that spells out a special token is encoded letter by letter.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from models.pretrained.hub import read_json
from models.pretrained.source import ModelError


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encoder of one model."""

    prefix: tuple[int, ...]
    """Ids that the model expects before any text (beginning of text, `[CLS]`)."""
    suffix: tuple[int, ...]
    """Ids that it expects after (`[SEP]`)."""
    _backend: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    def encode(self, text: str) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, "n 2"]]:
        """Ids of a text without prefix and suffix, and where in the text each stands (start, end)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Int[np.ndarray, " n"]) -> str:
        """The text of ids."""
        return self._backend.decode(ids.tolist(), skip_special_tokens=False)


def load(
    model: Path, vocab_size: int, metadata: Mapping[str, Any] | None = None, given: Path | None = None
) -> Tokenizer:
    """The tokenizer of the model at `model`, or the one `given` (a file or directory) instead.

    It is looked for beside the weights, and for GGUF in the file's `metadata`. One whose ids cannot be the model's is
    refused: `vocab_size` is the number of rows of its embedding.
    """
    if given is None and metadata is not None:
        name, (backend, ends) = f"{model}: its tokenizer", _from_gguf(model, metadata)
    else:
        path = _find(given or model)
        name, backend, ends = str(path), _from_files(path), None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    size = backend.get_vocab_size()
    if not 0.9 * vocab_size <= size <= vocab_size:
        raise ModelError(f"{name} has {size} ids, the model {vocab_size}: not the tokenizer of this model")
    prefix, suffix = _specials(backend) if ends is None else ends
    return Tokenizer(prefix, suffix, backend)


def _specials(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer itself puts before and after a text."""
    encoding = backend.encode("a")
    inner = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    if not inner:
        return (), ()
    return tuple(encoding.ids[: inner[0]]), tuple(encoding.ids[inner[-1] + 1 :])


def _find(path: Path) -> Path:
    """The tokenizer's first file: of a directory in the hub's layout, beside a file of weights, or the file itself."""
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "vocab.json", "vocab.txt") if (path / name).is_file()]
        if not found:
            wanted = "tokenizer.json, vocab.json with merges.txt, or vocab.txt"
            raise ModelError(f"{path}: no tokenizer (want {wanted}; or name one with --tokenizer)")
        return found[0]
    if path.suffix == ".npz":
        path = path.with_suffix(".tokenizer.json")
    if not path.is_file():
        raise ModelError(f"{path}: no tokenizer there (name one with --tokenizer)")
    return path


def _from_files(path: Path) -> tokenizers.Tokenizer:
    try:
        if path.name == "vocab.txt":
            return _word_piece(path)
        if path.name == "vocab.json":
            merges = [
                tuple(line.split(" ")) for line in _lines(path.with_name("merges.txt")) if not line.startswith("#v")
            ]
            return _byte_level(read_json(path, "no vocabulary"), merges, "gpt-2", path)
        content = read_json(path, "no tokenizer")
        if "alphabet" in content:
            return _characters(content)
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{path}: not a tokenizer ({error})") from error


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ModelError(f"{path.parent}: no {path.name}")
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


# How text is cut before merging, by the name that GGUF gives it. None: GPT-2's own cut, which the library has built in.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "qwen2": _QWEN2,
    "llama-bpe": _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),
}


def _byte_level(vocabulary: dict[str, int], merges: Any, cut: str, path: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE."""
    if cut not in _CUTS:
        supported = ", ".join(_CUTS)
        raise ModelError(f"{path}: tokenizer {cut!r} is not supported (want one of {supported}; or use --tokenizer)")
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    pattern = _CUTS[cut]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Any]:
    """The tokenizer in a GGUF file's metadata, and what stands before and after a text."""
    kind = metadata.get("model")
    if kind != "gpt2" or not {"tokens", "merges"} <= metadata.keys():
        raise ModelError(
            f"{path}: its tokenizer is {kind!r}; from GGUF only byte-level BPE ('gpt2') is read. "
            "Name the model's tokenizer.json with --tokenizer"
        )
    vocabulary = {token: i for i, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["merges"]]
    backend = _byte_level(vocabulary, merges, metadata.get("pre", "default"), path)
    # Llama 3's files leave the flag out: its tokenizer begins a text all the same.
    begins = metadata.get("add_bos_token", metadata.get("pre") == "llama-bpe")
    prefix = (int(metadata["bos_token_id"]),) if begins and "bos_token_id" in metadata else ()
    return backend, (prefix, ())


def _word_piece(path: Path) -> tokenizers.Tokenizer:
    """BERT's: from its list of pieces, and lower case unless the configuration beside it says otherwise."""
    from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

    settings = path.with_name("tokenizer_config.json")
    lower = read_json(settings, "")["do_lower_case"] if settings.is_file() else True
    vocabulary = {piece: i for i, piece in enumerate(_lines(path))}
    return BertWordPieceTokenizer(vocabulary, lowercase=lower)._tokenizer  # pyright: ignore[reportArgumentType]


def _characters(content: dict[str, Any]) -> tokenizers.Tokenizer:
    """glassllm's: a BPE over characters, a space written as its own mark."""
    merges = [tuple(pair) for pair in content["merges"]]
    pieces = ["<pad>", "<unk>", "<bos>", "<eos>", *content["alphabet"], *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return backend
