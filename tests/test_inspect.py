"""Inspection: the rows it measures are the model's, padding changes nothing, and the report says what was found."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import sens
from analysis import html_page, inspect_report
from analysis.inspect import QUANTITIES, Inspection, Text, cut, inspect, prepare, read_text, record
from models import gpt
from models.pretrained import ModelError, open_model
from models.pretrained import tokenizer as pretrained_tokenizer
from sens.__main__ import main
from tests.pretrained import make

WORDS = ["[CLS]", "[SEP]", "[UNK]", "the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "hats", "<b>", "."]
PROSE = "the cat sat on a mat and looked at hats . " * 3


def write_model(directory: Path, case: str) -> Path:
    """A small random model of `make.py` with a tokenizer of whole words, which puts [CLS] and [SEP] round a text."""
    directory.mkdir(exist_ok=True)
    with np.load(Path(make.__file__).parent / f"{case}.npz") as reference:
        config, shapes = json.loads(str(reference["config"])), json.loads(str(reference["shapes"]))
    config["vocab_size"] = len(WORDS)
    for name in shapes:
        if name.endswith(("wte.weight", "embed_tokens.weight", "word_embeddings.weight", "lm_head.weight")):
            shapes[name][0] = len(WORDS)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(make.weights(case, shapes), directory / "model.safetensors")
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "decoder", "llama")


@pytest.fixture(scope="module")
def found(directory: Path) -> Inspection:
    return prepare(directory, PROSE, length=12, sequences=2)()


def test_a_text_is_cut_into_sequences_and_nothing_of_it_is_lost_silently(directory: Path):
    tokenizer = pretrained_tokenizer.load(directory, len(WORDS))
    ids, _ = tokenizer.encode(PROSE)
    text = cut(PROSE, tokenizer, length=12, sequences=9)
    assert text.left_out == 0
    assert text.tokens.shape == text.where.shape == (4, 12)
    inner = [row[real][1:-1] for row, real in zip(text.tokens, text.where, strict=True)]
    np.testing.assert_array_equal(np.concatenate(inner), ids)
    assert [(row[real][0], row[real][-1]) for row, real in zip(text.tokens, text.where, strict=True)] == [(0, 1)] * 4
    assert "".join("".join(pieces[1:-1]) for pieces in text.pieces).split() == PROSE.split()
    assert text.pieces[0][:3] == ["⟨[CLS]⟩", "the", " cat"]

    assert cut(PROSE, tokenizer, length=12, sequences=2).left_out == ids.size - 20
    short = cut("the cat", tokenizer, length=12, sequences=9)
    assert short.tokens.tolist() == [[0, 3, 4, 1]]
    assert short.where.all()
    for empty in ("", " \n "):
        with pytest.raises(ModelError, match="the text is empty"):
            cut(empty, tokenizer, length=12, sequences=1)
    with pytest.raises(ModelError, match="want at least 4"):
        cut(PROSE, tokenizer, length=3, sequences=1)
    bare = dataclasses.replace(tokenizer, prefix=(), suffix=())
    assert cut("the cat", bare, length=12, sequences=1).tokens.tolist() == [[3, 4]]
    with pytest.raises(ModelError, match="the text is a single token"):
        cut("cat", bare, length=12, sequences=1)


@pytest.mark.parametrize("case", ["llama", "bert", "qwen2-window"])
def test_rows_are_those_of_the_model(case: str, tmp_path: Path, directory: Path):
    model = open_model(write_model(tmp_path / case, case))
    config, params = model.config, model.params()
    text = cut(PROSE, pretrained_tokenizer.load(directory, len(WORDS)), length=12, sequences=4)
    assert not text.where.all()
    found = inspect(model, text, name=case)
    assert {values.shape for values in found.rows.values()} == {(config.n_layer, *np.shape(found.sink)[1:], 12)}

    for s, (tokens, where) in enumerate(zip(text.tokens, text.where, strict=True)):
        n = int(where.sum())  # without padding: the same rows
        x = gpt.embed(config, params, jnp.asarray(tokens[:n]))
        for layer in range(config.n_layer):
            p = gpt.attention_weights(config, gpt.layer(params, layer), x)
            support = np.broadcast_to(gpt.support(config, n), p.shape)
            measured = {name: values[layer, s] for name, values in found.rows.items()}
            kept = support.sum(-1) > 1
            assert np.isnan(measured["lower"][:, n:]).all()
            assert np.isnan(measured["lower"][:, :n][~kept]).all()
            theta = sens.theta_exact(np.asarray(p))
            # The same rows but for rounding: theta of a sharp row changes by four times what its entries do.
            assert (measured["lower"][:, :n] <= theta + 2e-5)[kept].all()
            assert (measured["upper"][:, :n] >= theta - 2e-5)[kept].all()
            assert (measured["upper"] - measured["lower"])[:, :n][kept].max() < 1e-5
            expected = {
                "p_max": jnp.max(p, axis=-1),
                "entropy": sens.normalised_entropy(p, where=jnp.asarray(support)),
                "dominant": np.asarray(jnp.max(p, axis=-1)) > 2 / 3,
                "sink": np.stack([p[h, :, found.sink[layer, s, h]] for h in range(config.n_head)]),
            }
            for name, values in expected.items():
                np.testing.assert_allclose(measured[name][:, :n][kept], np.asarray(values)[kept], atol=2e-5)
            np.testing.assert_array_equal(found.sink[layer, s], np.argmax(p.sum(-2), axis=-1))
            x = gpt.block(config, gpt.layer(params, layer), x)


@pytest.mark.float32
def test_certificates_are_in_order(found: Inspection):
    kept = ~np.isnan(found.rows["lower"])
    rows = {name: values[kept] for name, values in found.rows.items()}
    assert kept.any()
    assert all(np.isfinite(values).all() for values in rows.values())
    assert (rows["lower"] <= rows["upper"]).all()
    assert (rows["prefix"] <= rows["upper"] + 1e-6).all()
    assert (rows["sink"] <= rows["p_max"] + 1e-6).all()
    high = rows["dominant"] == 1
    assert high.any()
    assert not high.all()
    assert (rows["upper"][high] < 8 / 9 + 1e-6).all()
    assert (rows["upper"][~high] >= 8 / 9 - 1e-6).all()


def test_a_lower_temperature_is_a_lower_temperature_in_every_layer(directory: Path, found: Inspection):
    cold = prepare(directory, PROSE, length=12, sequences=2, tau=0.25)()
    assert cold.config == dataclasses.replace(found.config, tau=0.25)
    first = lambda one: np.nanmean(one.rows["p_max"][0])  # noqa: E731
    assert first(cold) > first(found)


def test_only_one_block_is_read_at_a_time_and_none_twice(directory: Path):
    model = open_model(directory)
    read: list[str] = []
    source = dataclasses.replace(
        model._source, read=lambda name, read_one=model._source.read: (read.append(name), read_one(name))[1]
    )
    text = Text(np.ones((1, 5), np.int32), np.ones((1, 5), bool), [["a"] * 5], 0)
    inspect(dataclasses.replace(model, _source=source), text, name="")
    assert sorted(read) == sorted(set(read))
    assert len(read) == len(source.shapes)


def test_progress_and_errors(directory: Path, tmp_path: Path):
    model = open_model(directory)
    steps = []
    text = Text(np.ones((1, 5), np.int32), np.ones((1, 5), bool), [["a"] * 5], 0)
    inspect(model, text, name="", progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)]
    wide = dataclasses.replace(text, tokens=np.ones((1, 65), np.int32), where=np.ones((1, 65), bool))
    with pytest.raises(ModelError, match="65 tokens are more than its 64 positions"):
        inspect(model, wide, name="")
    with pytest.raises(ModelError, match="token 99 is not among its"):
        inspect(model, dataclasses.replace(text, tokens=np.full((1, 5), 99, np.int32)), name="")

    broken = write_model(tmp_path / "broken", "llama")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"] * np.nan
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelError, match="layer 1 gives attention rows that are no probabilities"):
        inspect(open_model(broken), text, name="")


def test_the_record_holds_every_head_and_quantity(found: Inspection):
    lines = pl.DataFrame(record(found))
    heads = [None, *range(found.config.n_head)]
    assert lines.height == found.config.n_layer * (len(heads) * len(QUANTITIES) + len(found.layers))
    stream = lines.filter((pl.col("quantity") == "residual_rms") & (pl.col("layer") == 1))
    assert stream["max"].item() == pytest.approx(found.layers["residual_rms"][1])
    one = lines.filter((pl.col("layer") == 1) & (pl.col("head") == 2) & (pl.col("quantity") == "p_max"))
    values = found.rows["p_max"][1, :, 2]
    assert one["median"].item() == pytest.approx(np.nanmedian(values))
    assert one["count"].item() == np.isfinite(values).sum()
    pooled = lines.filter(pl.col("head").is_null() & (pl.col("quantity") == "lower") & (pl.col("layer") == 0))
    assert pooled["mean"].item() == pytest.approx(np.nanmean(found.rows["lower"][0]), abs=1e-6)


def test_the_report_is_whole_and_escapes_the_text(directory: Path, tmp_path: Path):
    one = prepare(directory, "<b> " + PROSE, length=12)()
    out = inspect_report.write(tmp_path / "out", [one], command="sens inspect <x>", head=(1, 3), rows=True)
    page = (out / "report.html").read_text()
    assert "as layer 1, head 3 reads it" in page
    assert "&lt;b&gt;" in page
    assert "sens inspect &lt;x&gt;" in page
    assert "<b>" not in page
    rows = pl.read_parquet(out / "rows.parquet")
    assert rows.height == int((~np.isnan(one.rows["lower"])).sum())
    line = rows.filter((pl.col("layer") == 1) & (pl.col("head") == 0) & (pl.col("position") == 4))
    assert line["p_max"].item() == one.rows["p_max"][1, 0, 0, 4]
    assert line["token"].item() == one.text.tokens[0, 4]
    assert not list(out.glob("*.tmp"))
    with pytest.raises(ModelError, match="no layer 2 with a head 0"):
        inspect_report.write(tmp_path / "not", [one], command="", head=(2, 0))
    assert not (tmp_path / "not").exists()


def test_tables_put_the_most_dominated_first(found: Inspection):
    share = np.nanmean(found.rows["dominant"], axis=(1, 3))
    table = inspect_report.head_table(found, count=3)
    layer, head = (int(number) for number in table.rows[0][0].split("."))
    assert share[layer, head] == share.max()
    sinks = inspect_report.head_table(found, "sink", count=None)
    masses = [float(row[6]) for row in sinks.rows]
    assert masses == sorted(masses, reverse=True)
    assert len(masses) == found.config.n_layer * found.config.n_head
    assert len(inspect_report.layer_table(found).rows) == found.config.n_layer


def test_shades_outside_the_unit_interval_are_clipped():
    assert html_page.tinted([("a", -1.0, ""), ("b", 7.0, "<")]).count("/0.00)") == 1
    assert "/1.00)" in html_page.tinted([("b", 7.0, "<")])
    assert "&lt;" in html_page.tinted([("b", 7.0, "<")])


def test_read_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "text"
    path.write_bytes("é\r\n".encode())
    assert read_text(path) == "é\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("piped ü".encode())))
    assert read_text(Path("-")) == "piped ü"
    path.write_bytes(b"ab\xff")
    with pytest.raises(ModelError, match=r"not UTF-8 text .byte 2"):
        read_text(path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_text(tmp_path / "nothing")


def test_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    path, out = tmp_path / "text", tmp_path / "out"
    path.write_text(PROSE * 3)
    command = ["inspect", str(directory), "--text", str(path), "--out", str(out), "--length", "12"]
    assert main([*command, "--compare-tau", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "most dominated first" in printed
    assert printed.endswith(f"wrote {out / 'report.html'}\n")
    assert set(pl.read_parquet(out / "inspect.parquet")["model"]) == {"decoder", "decoder, τ × 0.5"}
    page = (out / "report.html").read_text()
    assert "Side by side" in page
    assert f"sens inspect {directory} --text {path}" in page

    (out / "rows.parquet").write_bytes(b"of an earlier inspection")
    assert main([*command, "--compare", str(directory)]) == 0
    assert not (out / "rows.parquet").exists()
    assert set(pl.read_parquet(out / "inspect.parquet")["model"]) == {"decoder", "decoder (2)"}
    for changes, message in {
        ("--length", "0"): "length must be positive, got 0",
        ("--tau", "nan"): "tau must be positive, got nan",
        ("--compare-tau", "inf"): "compare-tau must be positive, got inf",
        ("--length", "65"): "65 tokens are more than its 64 positions",
        ("--compare", str(tmp_path)): "not a model directory",
        ("--compare-tau", "2", "--bounds", "--bounds-layers", "9"): "has no layer 9 (0 to ",
        ("--tokenizer", str(path)): "text: not JSON",
        ("--head", "9", "0"): "has no layer 9",
    }.items():
        other = tmp_path / "other"
        with monkeypatch.context() as patch:
            patch.setattr("analysis.inspect._layer", None)  # before anything is measured, of either model
            assert main([*command, "--out", str(other), *changes]) == 2
        assert message in capsys.readouterr().err
        assert not other.exists()
    for place, message in {path: "is a file; a directory", path / "below": f"{path} is a file; a directory"}.items():
        with monkeypatch.context() as patch:
            patch.setattr("analysis.inspect.prepare", None)  # before any work
            assert main([*command, "--out", str(place)]) == 2
        assert message in capsys.readouterr().err


def test_jax_is_left_as_it_was(found: Inspection):
    assert found.rows["lower"].dtype == np.float32
    assert jax.config.jax_numpy_dtype_promotion == "strict"  # pyright: ignore[reportAttributeAccessIssue]
