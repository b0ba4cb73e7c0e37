"""A model in one GGUF file: dequantised tensor by tensor, its names and layout turned to the hub's."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.pretrained.source import ModelError, Source

ARCHITECTURES = ("llama", "qwen2")

_ENDS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DIVISORS = "rope_freqs.weight"


def open_file(path: Path) -> tuple[Source, dict[str, Any]]:
    """The source of a GGUF file, and its tokenizer's metadata (the part after `tokenizer.ggml.` of each key)."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError(f"{path}: reading GGUF wants a package: pip install gguf") from error
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError, MemoryError) as error:
        raise ModelError(f"{path}: missing, truncated or not GGUF ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = " and ".join(ARCHITECTURES)
        raise ModelError(f"{path}: architecture {architecture!r} is not supported (from GGUF: {supported})")

    def read(tensor: Any) -> np.ndarray:
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise ModelError(f"{path}: {tensor.name} is {tensor.tensor_type.name}, which cannot be read") from error

    divisors = read(tensors.pop(_DIVISORS)) if _DIVISORS in tensors else None
    hub = _hub_config(path, architecture, fields, tensors, divisors)
    named = {_hub_name(name): tensor for name, tensor in tensors.items()}
    heads = {"q_proj": hub["num_attention_heads"], "k_proj": hub["num_key_value_heads"]}

    def read_named(name: str) -> np.ndarray:
        value = read(named[name])
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            return unpair(value, heads[projection])
        return value

    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in named.items()}
    tokenizer = {key.removeprefix(_TOKENIZER): value for key, value in fields.items() if key.startswith(_TOKENIZER)}
    return Source(path, hub, shapes, read_named), tokenizer


_TOKENIZER = "tokenizer.ggml."


def unpair(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection whose RoPE turns adjacent entries, reordered to turn `i` and `i + c/2`.

    >>> unpair(np.arange(8), heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    width = rows.shape[0] // heads
    return rows.reshape(heads, width // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _hub_name(name: str) -> str:
    """The hub's name of a tensor; a name that is not known stays, and is then found superfluous."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    known = _ENDS.get(part) if layer is None else _BLOCK.get(part)
    prefix = "" if layer is None else f"layers.{layer}."
    return name if known is None else f"{prefix}{known}.{kind}"


def _hub_config(
    path: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Any], divisors: np.ndarray | None
) -> dict[str, Any]:
    """`config.json` as the hub has it for the same model."""

    def want(key: str) -> Any:
        if f"{architecture}.{key}" not in fields:
            raise ModelError(f"{path}: lacks the metadata {architecture}.{key}")
        return fields[f"{architecture}.{key}"]

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    if get("expert_count", 0):
        raise ModelError(f"{path}: mixtures of experts are not supported")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: lacks the tensor token_embd.weight")
    heads, d = want("attention.head_count"), want("embedding_length")
    width = get("attention.key_length", d // heads)
    if get("rope.dimension_count", width) != width:
        raise ModelError(
            f"{path}: RoPE on a part of each head ({get('rope.dimension_count')} of {width}) is not supported"
        )
    return {
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "num_hidden_layers": want("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": width,
        "hidden_size": d,
        "intermediate_size": want("feed_forward_length"),
        "max_position_embeddings": want("context_length"),
        "rms_norm_eps": want("attention.layer_norm_rms_epsilon"),
        "sliding_window": get("attention.sliding_window"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get, divisors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "architectures": ["ForCausalLM"],
    }


def _rope_scaling(get: Any, divisors: np.ndarray | None) -> dict[str, Any] | None:
    if divisors is not None:
        return {"rope_type": "divisors", "divisors": divisors}
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": get("rope.scaling.factor"),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        "attention_factor": get("rope.scaling.attn_factor"),
    }
