"""Every field from the command line, presets from files, and several runs by one command."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sens.__main__ as cli
from analysis import records
from models import ModelConfig
from tests.trained import contents, final_state, recorded, tiny
from train import loop, sweep
from train.config import TrainConfig
from train.presets import PRESETS, RunConfig

# Of every field a value that is not the preset's, as it is written and as it is meant.
MODEL: dict[str, tuple[str, Any]] = {
    "vocab_size": ("300", 300),
    "n_layer": ("3", 3),
    "n_head": ("4", 4),
    "d_model": ("32", 32),
    "d_ff": ("48", 48),
    "context": ("24", 24),
    "placement": ("post", "post"),
    "dropout": ("0.25", 0.25),
    "tau": ("2", 2.0),
    "ln_eps": ("1e-6", 1e-6),
    "init_std": ("0.1", 0.1),
    "norm": ("rms", "rms"),
    "causal": ("true", True),
    "window": ("4", 4),
    "n_kv_head": ("2", 2),
    "head_width": ("4", 4),
    "positions": ("rope", "rope"),
    "rope_theta": ("500.0", 500.0),
    "rope_divisors": ("1,2.5", (1.0, 2.5)),
    "ffn": ("swiglu", "swiglu"),
    "qkv_bias": ("true", True),
    "out_bias": ("true", True),
    "ffn_bias": ("true", True),
    "token_types": ("2", 2),
    "embedding_norm": ("true", True),
    "head": ("untied", "untied"),
}
TRAIN: dict[str, tuple[str, Any]] = {
    "source": ("some=where.txt", "some=where.txt"),
    "column": ("body", "body"),
    "tokenizer": ("bpe:300", "bpe:300"),
    "seed": ("7", 7),
    "updates": ("11", 11),
    "micro_batch": ("3", 3),
    "accumulation": ("5", 5),
    "lr": ("1e-2", 1e-2),
    "warmup": ("2", 2),
    "final_lr": ("0", 0.0),
    "beta1": ("0.8", 0.8),
    "beta2": ("0.9", 0.9),
    "eps": ("1e-7", 1e-7),
    "weight_decay": ("0.5", 0.5),
    "clip": ("2", 2.0),
    "compute_dtype": ("bfloat16", "bfloat16"),
    "remat": ("dots", "dots"),
    "flash": ("true", True),
    "attention_every": ("3", 3),
    "layers_every": ("4", 4),
    "telemetry_sequences": ("5", 5),
    "probe_every": ("6", 6),
    "bounds_every": ("8", 8),
    "checkpoint_every": ("9", 9),
    "keep": ("4", 4),
}


@pytest.fixture
def asked(monkeypatch) -> list[RunConfig]:
    """The configurations that `sens train` would have trained."""
    seen: list[RunConfig] = []
    monkeypatch.setattr("train.data.prepare", lambda *_arguments, **_options: None)
    monkeypatch.setattr(
        "train.sharding.check", lambda *_arguments: None
    )  # what this machine cannot do is not the matter
    monkeypatch.setattr(loop, "train", lambda _run, config, _data, **_options: seen.append(config))
    return seen


def train(*arguments: object) -> int:
    return cli.main(["train", *map(str, arguments)])


def complaint(capsys, *arguments: object) -> str:
    assert train("--preset", "tiny", "--out", "nowhere", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_set_reaches_every_field_as_its_own_option_does(asked):
    preset = PRESETS["tiny"]
    for values, kind, of_preset in ((MODEL, ModelConfig, preset.model), (TRAIN, TrainConfig, preset.train)):
        assert list(values) == [field.name for field in dataclasses.fields(kind)]
        unlike = {name for name, (_, value) in values.items() if getattr(of_preset, name) != value}
        assert unlike >= values.keys() - {"causal"}  # there is one value that can be trained
    wanted = RunConfig(
        ModelConfig(**{name: value for name, (_, value) in MODEL.items()}),
        TrainConfig(**{name: value for name, (_, value) in TRAIN.items()}),
    )
    settings = [f"{name}={written}" for values in (MODEL, TRAIN) for name, (written, _) in values.items()]
    assert train("--preset", "tiny", "--set", *settings, "--out", "nowhere") == 0
    assert train("--preset=tiny", *[f"--set={setting.replace('_', '-', 1)}" for setting in settings], "--out", "x") == 0
    options = [
        part
        for values in (MODEL, TRAIN)
        for name, (written, value) in values.items()
        for part in option(name.replace("_", "-"), written, value)
    ]
    assert train("--preset", "tiny", "--out", "nowhere", *options) == 0
    assert asked == [wanted] * 3


def option(name: str, written: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *(written.split(",") if isinstance(value, tuple) else [written])]


def test_no_window(asked):
    assert train("--preset", "tiny", "--set", "window=None", "--out", "nowhere") == 0
    assert asked[0].model.window is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["lr=fast"], ("lr", "fast")),
        (["updates=1.5"], ("updates", "1.5")),
        (["placement=middle"], ("placement", "middle")),
        (["causal=perhaps"], ("--set causal=perhaps: causal is true or false",)),
        (["causal=false"], ("which a model with causal=false sees: true is wanted",)),
        (["head=none"], ("training wants a head that is tied or untied, got 'none'",)),
        (["seed=99999999999999999999"], ("seed must be from 0 to 2147483647, got 99999999999999999999",)),
        (["lr=inf"], ("lr must be finite, got inf",)),
        (["warmpu=3"], ("--set warmpu=3: no field 'warmpu'; did you mean warmup?",)),
        (["zzz=3"], ("--set zzz=3: no field 'zzz'\n",)),
        (["lr"], ("--set lr: want field=value",)),
        (["n_head=3"], ("3 heads do not divide a width of 16",)),
        (["rope_divisors=1,x"], ("rope", "x")),
    ],
)
def test_a_setting_that_does_not_fit_is_named(capsys, settings, words):
    line = complaint(capsys, "--set", *settings)
    for word in words:
        assert word in line


def test_the_configuration_of_a_run_is_a_preset(asked, finished, corpus):
    assert train("--preset", finished / "config.json", "--out", "nowhere", "--lr", "0.5") == 0
    config = tiny(corpus)
    assert asked == [RunConfig(config.model, dataclasses.replace(config.train, lr=0.5))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"lr": "fast"}}, "lr must be float, got 'fast'"),
        ({"train": {"updates": 2.5}}, "updates must be int, got 2.5"),
        ({"train": {"updates": True}}, "updates must be int, got True"),
        ({"model": {"causal": 1}}, "causal must be bool, got 1"),
        ({"model": {"rope_divisors": ["x"]}}, "rope_divisors must be tuple"),
        ({"model": {"placement": "middle"}}, "placement must be"),
        ({"model": {"window": "wide"}}, "window must be int | None, got 'wide'"),
        ({"train": {"epochs": 3}}, "train fields that do not match: epochs"),
        ({"train": {"lr": -1.0}}, "lr must be positive, got -1.0"),
    ],
)
def test_a_preset_with_a_field_that_does_not_fit_is_named(capsys, tmp_path, change, message):
    value = PRESETS["tiny"].as_json()
    for part, fields in change.items():
        value[part] |= fields
    path = tmp_path / "preset.json"
    path.write_text(json.dumps(value))
    line = complaint(capsys, "--preset", path)
    assert f"preset {path}: " in line
    assert message in line


@pytest.mark.parametrize(("content", "message"), [("[]", "want an object"), ("{", "Expecting"), (None, "No such file")])
def test_a_preset_that_is_none(capsys, tmp_path, content, message):
    path = tmp_path / "preset.json"
    if content is not None:
        path.write_text(content)
    assert message in complaint(capsys, "--preset", path)


def test_the_column_of_a_parquet_file(tmp_path, capsys, corpus):
    path = tmp_path / "text.parquet"
    pq.write_table(pa.table({"body": corpus.read_text().split("\n")}), path)
    arguments = ("--preset", "tiny", "--source", path, "--out", tmp_path / "run")
    assert train(*arguments) == 2
    assert capsys.readouterr().err == f"sens: error: {path}: no column 'text'; it has 'body'\n"
    path.with_name("cut.parquet").write_bytes(path.read_bytes()[:-9])
    assert train(*arguments[:3], path.with_name("cut.parquet"), *arguments[4:]) == 2
    assert "cut.parquet: unreadable parquet (" in capsys.readouterr().err
    assert train(*arguments, "--column", "body", "--updates", 6, "--workers", 2) == 0
    assert records.read_table(tmp_path / "run", "updates").height == 6
    assert not list(tmp_path.rglob("*.tmp"))


# Several runs.


def test_seeds_and_placements_are_one_command_that_continues(tmp_path, finished, corpus, capsys):
    out = tmp_path / "sweep"
    arguments = ("--preset", "tiny", "--source", corpus, "--out", out, "--seeds", 42, 7, "--placements", "pre", "post")
    names = ["pre-42", "pre-7", "post-42", "post-7"]
    shutil.copytree(finished, out / "pre-42")  # as an interrupted sweep leaves it: a run that is done,
    shutil.copytree(finished, out / "pre-7")  # and one that is none of its own
    assert train(*arguments) == 2
    changed = f"{out / 'pre-7'}: made with another configuration (seed 42 -> 7); choose another directory"
    assert capsys.readouterr().err == f"sens: error: {changed}\n"
    shutil.rmtree(out / "pre-7")
    assert train(*arguments) == 0
    said = capsys.readouterr().out
    assert [line.split(" updates, into ")[1] for line in said.splitlines()] == [str(out / name) for name in names[1:]]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "data"])
    for name in names:
        run = records.read_run(out / name)
        assert (f"{run.placement}-{run.seed}", run.updates.height) == (name, 20)
    before = contents(out)
    assert train(*arguments) == 0
    assert capsys.readouterr().out == ""
    assert contents(out) == before
    # A run of the sweep is the run that the command for one makes.
    alone = ("--preset", "tiny", "--source", corpus, "--seed", 7, "--out", tmp_path / "alone", "--data", out / "data")
    assert train(*alone) == 0
    assert recorded(tmp_path / "alone") == recorded(out / "pre-7")
    config = tiny(corpus, seed=7)
    assert str(final_state(tmp_path / "alone", config)) == str(final_state(out / "pre-7", config))


def test_a_run_that_cannot_go_on_does_not_keep_the_others(tmp_path, corpus, capsys, monkeypatch):
    real, tried = loop.train, []

    def one_fails(run: Path, config: RunConfig, data: Path, **options: Any) -> None:
        tried.append(run.name)
        if run.name == "pre-1":
            raise loop.TrainingError(f"{run}: loss is nan at update 3")
        real(run, config, data, **options)

    monkeypatch.setattr(sweep, "train", one_fails)
    out = tmp_path / "out"
    assert train("--preset", "tiny", "--source", corpus, "--out", out, "--seeds", 1, 2) == 1
    assert tried == ["pre-1", "pre-2"]
    assert capsys.readouterr().err == f"sens: 1 of 2 runs stopped: {out / 'pre-1'}: loss is nan at update 3\n"
    assert records.read_table(out / "pre-2", "updates").height == 20
