"""Lambda and its bounds on a trained model: they hold against dense Jacobians, in order, and reach the record whole."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

import sens.__main__ as cli
from analysis import bounds, bounds_figures, probes, records, report
from models import ModelConfig, gpt
from tests.trained import contents, tiny
from train.bounds import bound_lines
from train.loop import train
from train.probe import last_micro_batch, load, open_data

VARIANT = ModelConfig(
    vocab_size=11, n_layer=2, n_head=4, d_model=6, d_ff=8, context=5, head_width=2, n_kv_head=2, init_std=0.7,
    placement="post", norm="rms", positions="rope", ffn="swiglu", qkv_bias=True, tau=0.8,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory, corpus):
    """A tiny run, with dropout in training, that recorded its bounds at the first and the last update."""
    run = tmp_path_factory.mktemp("bounds") / "run"
    config = tiny(corpus, bounds_every=20)
    assert config.model.dropout > 0
    train(run, config, run.parent / "data")
    return run


@pytest.fixture(scope="module")
def probed(measured):
    """The same run with its last checkpoint probed by the command."""
    assert cli.main(["probe", str(measured), "--bounds"]) == 0
    return records.read_run(measured)


@functools.cache
def jitted(model, function):
    return jax.jit(functools.partial(function, model))


@functools.cache
def jacobian(model, function):
    """The dense Jacobian of one of the model's functions of (block, x): (out token, out, in token, in)."""
    return jax.jit(lambda block, x: jax.jacfwd(functools.partial(function, model, block))(x))


def attained(blocks, starts=8):
    """The most that alternating ascent finds of max ||sum_j B_j h_j|| over ||h_j|| <= 1, of every output row."""
    rows, e, keys, d = blocks.shape
    B = blocks.reshape(rows, e, keys * d)
    y = np.tile(np.random.default_rng(0).normal(size=(1, starts, e)), (rows, 1, 1))
    for _ in range(100):
        h = (y @ B).reshape(rows, starts, keys, d)
        h /= np.maximum(np.linalg.norm(h, axis=-1, keepdims=True), 1e-300)
        y = h.reshape(rows, starts, keys * d) @ B.mT
    return np.linalg.norm(y, axis=-1).max(axis=-1)


def check_against_dense(model, params, tokens, lines, heads, slack):
    """Every figure of the lines against float64 Jacobians of the model's own functions."""
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)
    entering = jitted(model, gpt.hidden_states)(params, jnp.asarray(tokens))[:-1]
    for line in lines:
        block, x = gpt.layer(params, line["layer"]), entering[line["layer"]]
        u = jitted(model, gpt.attention_input)(block, x)
        found = attained(np.asarray(jacobian(model, gpt.attention)(block, u)))
        assert line["row"] == np.argmax(found)
        np.testing.assert_allclose(line["lambda_lower"], found.max(), rtol=1e-2)
        assert found.max() <= line["lambda_upper"] * slack
        assert line["lambda_upper"] <= line["covariance"] * 1.01
        whole = attained(np.asarray(jacobian(model, gpt.block)(block, x))).max()
        np.testing.assert_allclose(line["layer_lower"], whole, rtol=1e-2)
        assert whole <= line["layer_upper"] * slack
        z = jitted(model, gpt.attention_sublayer)(block, x)
        w = jitted(model, gpt.norm_ffn)(block, z) if model.placement == "pre" else z
        ffn = np.asarray(jacobian(model, gpt.ffn)(block, w))
        norms = [np.linalg.norm(ffn[i, :, i], 2) for i in range(len(ffn))]
        np.testing.assert_allclose(line["ffn_norm"], max(norms), rtol=1e-4)
        for head in (head for head in heads if head["layer"] == line["layer"]):
            picked = {**block, "attention": {**block["attention"]}}
            columns = slice(head["head"] * model.d_head, (head["head"] + 1) * model.d_head)
            picked["attention"]["out"] = {"kernel": jnp.eye(model.n_head * model.d_head)[:, columns]}
            alone = np.asarray(jacobian(model, gpt.attention)(picked, u))
            exact = np.linalg.norm(alone.reshape(alone.shape[0] * alone.shape[1], -1), 2)
            assert head["spectral_lower"] <= exact * slack
            assert exact <= head["spectral_upper"] * slack


def in_order(line, *names):
    values = {name: line[name] for name in names}
    assert all(low <= high * (1 + 1e-4) for low, high in itertools.pairwise(values.values())), values


def test_every_figure_of_a_trained_run_holds_against_dense_jacobians(probed):
    config, params, at = load(probed.path)
    tokens = last_micro_batch(config, open_data(config, probed.path.parent / "data"), at)[0]
    layers, heads = probes.read_bounds(probed), probes.read_heads(probed)
    assert layers is not None
    assert heads is not None
    lines = layers.to_dicts()
    check_against_dense(config.model, params, tokens, lines, heads.to_dicts(), 1 + 1e-4)
    for line in lines:
        in_order(line, "lambda_lower", "lambda_upper", "covariance", "refined", "local", "bounded")
        in_order(line, "lambda_upper", "newhouse")
        in_order(line, "ffn_norm", "ffn_bound")
        in_order(line, "layer_lower", "layer_upper", "layer_composed", "layer_actual", "layer_theorem")
        in_order(line, "magnitude", "domain")
        assert line["converged"]
        assert line["layer_converged"]
        of_row = heads.filter(layer=line["layer"]).select(pl.sum_horizontal("value", "query", "key").sum()).item()
        in_order({**line, "sum": of_row}, "lambda_lower", "sum")
    for head in heads.iter_rows(named=True):
        in_order(head, "spectral_upper", "yudin", "castin")
        assert 0 <= head["theta"] <= 1


def test_a_run_records_at_its_cadence_what_its_checkpoint_gives_again(probed):
    assert probed.bounds["update"].to_list() == [1, 1, 20, 20]
    assert probed.bounds["layer"].to_list() == [0, 1, 0, 1]
    assert dict(probed.bounds.schema) == dict(records.BOUND_COLUMNS)
    again = probes.read_bounds(probed)
    assert again is not None
    assert again.equals(probed.bounds.filter(update=20))


def test_dropout_in_training_changes_nothing(measured):
    config, params, at = load(measured)
    without = dataclasses.replace(config.model, dropout=0.0)
    tokens = last_micro_batch(config, open_data(config, measured.parent / "data"), at)
    found, _ = bound_lines(without, params, at, tokens, [1])
    recorded = records.read_run(measured).bounds.filter(update=20, layer=1).to_dicts()
    assert found == recorded


def test_a_variant_in_float64_has_what_applies_and_null_for_the_rest():
    """Post-LN RMSNorm, rotary positions, shared key heads with biases, a gated FFN, a temperature."""
    rng = np.random.default_rng(3)
    leaves, tree = jax.tree.flatten(jax.jit(gpt.init, static_argnums=0)(VARIANT, jax.random.key(0)))
    shaken = [np.asarray(leaf) + 0.2 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    params = jax.tree.unflatten(tree, shaken)
    tokens = rng.integers(0, VARIANT.vocab_size, (2, VARIANT.context))
    calls = []
    lines, heads = bound_lines(VARIANT, params, 7, tokens, [0, 1], float64=True, progress=lambda *at: calls.append(at))
    assert calls == [(1, 2), (2, 2)]
    check_against_dense(VARIANT, params, tokens[0], lines, heads, 1 + 1e-9)
    for line in lines:
        assert list(line) == list(records.BOUND_COLUMNS)
        assert line["dtype"] == "float64"
        in_order(line, "lambda_upper", "covariance", "refined", "local", "bounded")
        in_order(line, "layer_upper", "layer_composed", "layer_actual", "layer_theorem")
        in_order(line, "ffn_norm", "ffn_bound")
        assert {name for name, value in line.items() if value is None} == {"newhouse"}
    assert {name for name, value in heads[0].items() if value is None} == {"yudin", "castin"}
    json.dumps([lines, heads], allow_nan=False)


def test_matrices_are_decomposed_one_at_a_time():
    """On a CPU batches decomposed side by side can wait for each other for ever (`sens.bounds.weights`)."""
    streams = jax.ShapeDtypeStruct((VARIANT.n_layer, VARIANT.context, VARIANT.d_model), jnp.float32)
    measure = jax.jit(functools.partial(bounds.measure_layer, VARIANT))
    text = measure.lower(gpt.shapes(VARIANT), streams, jnp.int32(0), jax.random.key(0)).as_text()
    operands = re.findall(r"@lapack_\w+\([^)]*\).*?: \(tensor<([0-9x]+)xf", text)
    assert operands
    assert all(operand.count("x") == 1 for operand in operands), operands


@pytest.mark.parametrize("layer", [-1, VARIANT.n_layer])
def test_a_layer_that_the_model_has_not_is_refused(layer):
    streams = np.zeros((VARIANT.n_layer, VARIANT.context, VARIANT.d_model), np.float32)
    with pytest.raises(ValueError, match=f"layer {layer}: one of 0 to"):
        bounds.measure_layer(VARIANT, {}, jnp.asarray(streams), layer, jax.random.key(0))


def test_what_is_not_a_number_is_null():
    figures = dict.fromkeys(records.BOUND_COLUMNS, np.float32(1)) | {"covariance": np.float32(np.inf)}
    line = bounds.record_layer(
        3, 1, figures | {"converged": np.bool_(True), "row": np.int32(4), "local": np.float32("nan")}
    )
    assert (line["covariance"], line["local"], line["converged"], line["row"]) == (None, None, True, 4)


# The command and what shows its results.


def test_the_command_prints_the_tables_of_the_layers_asked_for(measured, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert cli.main(["probe", str(measured), "--bounds", "--layers", "1", "1"]) == 0
    out = capsys.readouterr().out
    assert "layer 1, head 1" in out
    assert "layer 1, all heads" in out
    assert "layer 0" not in out
    assert "Theorem 4.1" in out
    table = probes.read_bounds(records.read_run(measured))
    assert table is not None
    assert table["layer"].to_list() == [1]
    assert cli.main(["probe", str(measured), "--bounds"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "1"], "--layers and --float64 are about --bounds"),
        (["--float64"], "--layers and --float64 are about --bounds"),
        (["--bounds", "--layers", "0", "2"], "layers must be from 0 to 1, got 0 2"),
        (["--bounds", "--layers"], "layers must be from 0 to 1, got none"),
        (["--bounds", "--checkpoint", "7"], "no checkpoint of update 7"),
    ],
)
def test_what_does_not_fit_is_one_line(measured, capsys, options, message):
    before = contents(measured)
    assert cli.main(["probe", str(measured), *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("sens: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert contents(measured) == before


def test_the_report_shows_the_bounds_where_they_were_measured(probed, tmp_path):
    section = report._bounds([probed], tmp_path)
    assert "Attention and its bounds" in section
    assert {path.stem for path in tmp_path.glob("*.svg")} == {"figure_5a_bounds", "figure_5a_factors"}
    assert [len(table.rows) for table in bounds_figures.checkpoint_tables([probed])] == [2, 2, 6]
    assert report._bounds([dataclasses.replace(probed, path=tmp_path)], tmp_path) == ""


def test_figure_5a_draws_lambda_and_every_bound_that_applies(probed):
    table = probes.read_bounds(probed)
    assert table is not None
    figure = bounds_figures.against_bounds({"a": table, "b": table.with_columns(newhouse=pl.lit(None, pl.Float64))})
    attention, other = figure.axes[0], figure.axes[1]
    assert attention.get_yscale() == "log"
    assert len(attention.lines) == 1 + len(bounds_figures.ATTENTION)
    assert len(other.lines) == len(bounds_figures.ATTENTION)
    np.testing.assert_array_equal(attention.lines[0].get_ydata(), table["lambda_lower"])
    local = 1 + list(bounds_figures.ATTENTION).index("local")
    np.testing.assert_array_equal(attention.lines[local].get_ydata(), table["local"])


@pytest.mark.parametrize("name", ["bounds.jsonl", "heads.jsonl"])
def test_a_damaged_table_is_named(probed, tmp_path, name):
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / name).write_bytes(b"not a table\n")
    read = {"bounds.jsonl": probes.read_bounds, "heads.jsonl": probes.read_heads}[name]
    with pytest.raises(records.RecordError, match=name):
        read(dataclasses.replace(probed, path=tmp_path))
