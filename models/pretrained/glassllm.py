"""glassllm's `.npz` weights (a small Llama-like model, PyPI `glassllm`), turned to the hub's names and layout."""

import json
import re
import zipfile
from pathlib import Path

import numpy as np

from models.pretrained.gguf import unpair
from models.pretrained.source import ModelError, Source

_BLOCK = {
    "norm1.gamma": "input_layernorm.weight",
    "attn.W_Q": "self_attn.q_proj.weight",
    "attn.W_K": "self_attn.k_proj.weight",
    "attn.W_V": "self_attn.v_proj.weight",
    "attn.W_O": "self_attn.o_proj.weight",
    "norm2.gamma": "post_attention_layernorm.weight",
    "ffn.W1": "mlp.gate_proj.weight",
    "ffn.W3": "mlp.up_proj.weight",
    "ffn.W2": "mlp.down_proj.weight",
}
_ENDS = {"E": "embed_tokens.weight", "norm_f.gamma": "norm.weight"}


def _hub_name(name: str) -> str:
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None:
        return _ENDS.get(name, name)
    return f"layers.{match[1]}.{_BLOCK.get(match[2], match[2])}"


def open_file(path: Path) -> Source:
    """The source of an `.npz` file; arrays that would need unpickling are refused."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        ours = json.loads(str(arrays.pop("__config__")))
        heads = {"q_proj": ours["n_heads"], "k_proj": ours["n_kv_heads"]}
        hub = {
            "model_type": "llama",
            "vocab_size": ours["vocab_size"],
            "num_hidden_layers": ours["n_layers"],
            "num_attention_heads": ours["n_heads"],
            "num_key_value_heads": ours["n_kv_heads"],
            "hidden_size": ours["d_model"],
            "intermediate_size": arrays["blocks.0.ffn.W1"].shape[1],
            "max_position_embeddings": ours["max_len"],
            "rms_norm_eps": ours["eps"],
            "rope_theta": ours["rope_base"],
            "tie_word_embeddings": True,
        }
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path}: missing, truncated or not glassllm's weights ({error})") from error
    named = {_hub_name(name): array for name, array in arrays.items()}
    # Dense layers lie here as (in, out), and only they are matrices apart from the embedding.
    transposed = {name for name, array in named.items() if array.ndim == 2 and not name.startswith("embed_tokens")}

    def read(name: str) -> np.ndarray:
        value = named[name].astype(np.float32)
        if name not in transposed:
            return value
        projection = name.split(".")[-2]
        return unpair(value.T, heads[projection]) if projection in heads else value.T

    shapes = {name: array.shape[::-1] if name in transposed else array.shape for name, array in named.items()}
    return Source(path, hub, shapes, read)
