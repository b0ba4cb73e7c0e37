"""Inspection of Lambda and of depth: a block at a time gives what the whole model does, and it reaches the record."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

from analysis import depth, inspect_depth, inspect_report
from analysis.inspect import Inspection, Text, inspect, record
from models import gpt
from models.pretrained import ModelError, Pretrained, open_model
from sens.__main__ import main
from tests.test_analysis_bounds import attained, in_order
from tests.test_inspect import PROSE, write_model

TOKENS = np.array([[0, 3, 4, 5, 6, 7, 8]], np.int32)
TEXT = Text(TOKENS, np.ones_like(TOKENS, bool), [["a"] * TOKENS.size], 0)
SHORT = dataclasses.replace(TEXT, tokens=TOKENS[:, :6], where=TEXT.where[:, :6])
BLOCKS = 2

CASES = ("qwen2", "bert")  # pre-LN, grouped keys, rotary, biases on queries and keys; post-LN, bidirectional, biases


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> tuple[Pretrained, Inspection]:
    model = open_model(write_model(tmp_path_factory.mktemp("models") / request.param, request.param))
    found = inspect(model, TEXT, name=request.param, bounds_layers=(0, 1), bounds_text=SHORT, depth=True)
    return model, found


def test_lambda_and_the_bounds_are_those_of_the_models_attention(case):
    model, found = case
    config, params = model.config, model.params()
    assert found.bounds is not None
    x = gpt.embed(config, params, jnp.asarray(SHORT.tokens[0]))
    for layer, line in enumerate(found.bounds.to_dicts()):
        block = gpt.layer(params, layer)
        u = gpt.attention_input(config, block, x)
        dense = jax.jit(jax.jacfwd(lambda u, block=block: gpt.attention(config, block, u)))(u)
        true = attained(np.asarray(dense, np.float64))
        assert line["layer"] == layer
        assert line["row"] == np.argmax(true)
        np.testing.assert_allclose(line["lambda_lower"], true.max(), rtol=1e-2)
        assert true.max() <= line["lambda_upper"] * (1 + 1e-5)
        in_order(line, "lambda_lower", "lambda_upper", "covariance", "refined", "local", "bounded")
        in_order(line, "magnitude", "domain")
        np.testing.assert_allclose(line["magnitude"], np.sqrt((np.asarray(u) ** 2).mean(-1).max()), rtol=1e-5)
        assert line["newhouse"] is None  # it knows no biases
        x = gpt.block(config, block, x)
    assert found.pathways is not None
    assert found.pathways.height == BLOCKS * config.n_head
    sums = found.pathways.group_by("layer", maintain_order=True).agg(pl.sum("value", "query", "key"))
    assert (
        sums.select(pl.sum_horizontal("value", "query", "key")).to_series() * 1.001 > found.bounds["lambda_upper"]
    ).all()


def test_a_block_at_a_time_is_the_depth_of_the_whole_model(case):
    model, found = case
    config, params = model.config, model.params()
    assert found.depth is not None
    assert found.depth["layer"].to_list() == [0, 0, 1, 1]
    assert found.depth["kind"].to_list() == ["attention", "ffn"] * BLOCKS
    headed = config if config.head != "none" else dataclasses.replace(config, head="tied")  # the loss wants logits
    shifted = jnp.concatenate([jnp.asarray(TOKENS), jnp.zeros((1, 1), jnp.int32)], axis=1)
    key = jax.random.key(inspect_depth.KEY)
    measure = jax.jit(depth.measure_depth, static_argnums=0)
    whole = measure(headed, params, shifted, key)
    for name, values in whole.items():
        if not name.startswith("gradient"):
            np.testing.assert_allclose(found.depth[name].to_numpy(), values, rtol=2e-3, atol=1e-5, err_msg=name)
    assert ("bound" in whole) == (config.placement == "post")


def test_the_gradient_is_that_of_the_next_tokens_loss(case):
    model, found = case
    config, params = model.config, model.params()
    assert found.depth is not None
    if not config.causal:
        assert found.depth["gradient"].is_null().all()
        return
    tokens = jnp.asarray(TOKENS[0])

    def loss(x, layer):
        for upper in range(layer, BLOCKS):
            x = gpt.block(config, gpt.layer(params, upper), x)
        log_p = jax.nn.log_softmax(gpt.logits(config, params, x)[:-1])
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[1:, None], axis=-1))

    states = gpt.hidden_states(config, params, tokens)
    wanted = [np.linalg.norm(jax.grad(loss)(states[layer], layer)) for layer in range(BLOCKS)]
    np.testing.assert_allclose(found.depth["gradient"].to_numpy()[::2], wanted, rtol=1e-4)
    shares = found.depth.select(pl.sum_horizontal(f"gradient_share_{term}" for term in ("bare", "first", "rest")))
    np.testing.assert_allclose(shares.to_series(), 1, rtol=1e-4)


def test_the_record_and_the_report_hold_them(case, tmp_path: Path):
    _, found = case
    assert found.bounds is not None
    assert found.depth is not None
    lines = pl.DataFrame(record(found), infer_schema_length=None)
    one = lines.filter((pl.col("quantity") == "bounds.lambda_upper") & (pl.col("layer") == 1))
    assert (one["count"].item(), one["max"].item()) == (1, pytest.approx(found.bounds["lambda_upper"][1]))
    heads = lines.filter(pl.col("quantity") == "bounds.value")
    assert heads["head"].to_list() == list(range(found.config.n_head)) * BLOCKS
    gain = lines.filter((pl.col("quantity") == "depth.ffn.gain") & (pl.col("layer") == 0))
    assert gain["mean"].item() == pytest.approx(found.depth["gain"][1])
    assert not lines["mean"].is_null().any()
    page = (inspect_report.write(tmp_path, [found], command="") / "report.html").read_text()
    assert page.count("Attention and its bounds") == 1
    assert page.count("Through depth") == 1
    assert ("Corollary A.3" in page) == (found.config.placement == "post")
    other = dataclasses.replace(found, name="other")
    shown = inspect_report.tables([found, other])
    assert sum("how many times larger" in table.title for table in shown) == 2
    products = next(table for table in shown if "Products of Jacobians" in table.title)
    assert products.columns == ("", found.name, "other")
    assert products.rows[0] == ("root mean square gain", *2 * (f"{found.depth['gain'][2]:.3g}",))


def test_for_the_depth_alone_each_block_is_read_again(tmp_path: Path):
    model = open_model(write_model(tmp_path / "model", CASES[0]))
    read: list[str] = []
    source = dataclasses.replace(
        model._source, read=lambda name, read_one=model._source.read: (read.append(name), read_one(name))[1]
    )
    steps = []
    watched = dataclasses.replace(model, _source=source)
    inspect(watched, TEXT, name="", depth=True, progress=lambda done, total: steps.append((done, total)))
    assert sorted(read) == sorted(2 * list(set(read)))
    assert steps == [(n, 2 * BLOCKS) for n in range(1, 2 * BLOCKS + 1)]
    with pytest.raises(ModelError, match=r"has no layer 2 \(0 to 1\)"):
        inspect(model, TEXT, name="", bounds_layers=(2,), bounds_text=SHORT)


def test_the_options_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    directory, path, out = write_model(tmp_path / "decoder", CASES[0]), tmp_path / "text", tmp_path / "out"
    path.write_text(PROSE)
    command = ["inspect", str(directory), "--text", str(path), "--out", str(out), "--length", "7"]
    assert main([*command, "--bounds", "--bounds-layers", "1", "--bounds-length", "6", "--depth"]) == 0
    printed = capsys.readouterr().out
    assert "decoder: Λ(U) in (inf,rms)" in printed
    assert "root mean square gain" in printed
    assert "…" not in printed
    record = pl.read_parquet(out / "inspect.parquet").filter(pl.col("quantity") == "bounds.lambda_lower")
    assert record["layer"].to_list() == [1]
    for changes, message in {
        ("--bounds", "--bounds-layers", "2"): "has no layer 2 (0 to 1)",
        ("--bounds-layers", "1"): "--bounds-layers is about --bounds",
        ("--bounds", "--bounds-layers"): "at least one layer",
        ("--bounds", "--bounds-length", "3"): "want at least 4",
        ("--bounds", "--bounds-length", "0"): "bounds-length must be positive, got 0",
    }.items():
        other = tmp_path / "other"
        assert main([*command, "--out", str(other), *changes]) == 2
        assert message in capsys.readouterr().err
        assert not other.exists()
