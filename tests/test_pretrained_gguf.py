"""GGUF: the same model as the hub's directory, dequantised by the package, and a clear word on a bad file."""

import dataclasses
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.pretrained import ModelError, open_model
from tests.pretrained import make


def pair(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which GGUF's Llama keeps the rows of queries and keys: i and i + c/2 side by side."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.swapaxes(halves, 1, 2).reshape(rows.shape)


def write_gguf(path: Path, directory: Path, extra: dict[str, np.ndarray] | None = None) -> None:
    """A hub directory of the Llama family as a GGUF file of F32 tensors."""
    hub = json.loads((directory / "config.json").read_text())
    kind, heads, shared = hub["model_type"], hub["num_attention_heads"], hub["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(hub["num_hidden_layers"])
    writer.add_context_length(hub["max_position_embeddings"])
    writer.add_embedding_length(hub["hidden_size"])
    writer.add_feed_forward_length(hub["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(hub["rms_norm_eps"])
    writer.add_rope_freq_base(hub["rope_parameters"]["rope_theta"])
    if "head_dim" in hub:
        writer.add_key_length(hub["head_dim"])
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "model.layers": "blk", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in load_file(directory / "model.safetensors").items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if kind == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            tensor = pair(tensor, heads if "attn_q" in name else shared)
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", ["llama", "llama-wide", "qwen2"])
def test_gguf_gives_the_same_model_as_the_directory(case: str, tmp_path: Path):
    directory, path = make.write(case, tmp_path), tmp_path / "model.gguf"
    write_gguf(path, directory)
    ours, theirs = open_model(path), open_model(directory)
    mlp_and_out = {"ln_eps": theirs.config.ln_eps}  # the file keeps it in float32
    assert dataclasses.replace(ours.config, **mlp_and_out) == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours.params(), theirs.params())


def test_gguf_states_the_divisors_of_rope(tmp_path: Path):
    directory, path = make.write("llama-llama3", tmp_path), tmp_path / "model.gguf"
    config = open_model(directory).config
    write_gguf(path, directory, {"rope_freqs.weight": np.asarray(config.rope_divisors, np.float32)})
    np.testing.assert_allclose(open_model(path).config.rope_divisors, config.rope_divisors, rtol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_gguf_is_dequantised(kind: str, tmp_path: Path, rng):
    d, vocab = 256, 11
    number = gguf.GGMLQuantizationType[kind]

    def quantised(rows: int, columns: int) -> np.ndarray:
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        if kind != "Q4_K":  # which the package reads and does not write: any codes are a tensor, with finite scales
            return gguf.quantize(values, number)
        blocks = rng.integers(0, 256, (rows, columns // 256, 144), np.uint8)
        blocks[..., :4] = np.asarray([0.01, 0.02], np.float16).view(np.uint8)
        return blocks.reshape(rows, -1)

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(d)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    matrices = {"token_embd": quantised(vocab, d)}
    matrices |= {f"blk.0.{name}": quantised(d, d) for name in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
    for name, tensor in matrices.items():
        writer.add_tensor(f"{name}.weight", tensor, raw_dtype=number)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model = open_model(tmp_path / "model.gguf")
    block = model.block(0)
    for ours, theirs in {"up": "ffn_up", "down": "ffn_down", "gate": "ffn_gate"}.items():
        expected = gguf.dequantize(matrices[f"blk.0.{theirs}"], number)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(block["ffn"][ours]["kernel"], expected.T)
    np.testing.assert_array_equal(
        model.ends()["tokens"]["embedding"], gguf.dequantize(matrices["token_embd"], number))  # fmt: skip


def test_a_truncated_gguf(tmp_path: Path):
    path, cut = tmp_path / "model.gguf", tmp_path / "cut.gguf"
    write_gguf(path, make.write("llama", tmp_path))
    content = path.read_bytes()
    for length in (0, 3, 20, 100, 500, 2000, len(content) // 2, len(content) - 40):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut.gguf"):
            open_model(cut)


def test_a_gguf_of_another_architecture(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'rwkv6' is not supported .from GGUF: llama and qwen2"):
        open_model(tmp_path / "model.gguf")
