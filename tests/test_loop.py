"""A run: its record, its cadences, what stops it and what continues it."""

import dataclasses
import fcntl
import itertools
import json
import shutil
import signal
import struct

import jax
import numpy as np
import pandas
import polars as pl
import pytest

from analysis import records
from analysis.attention import measure_rows, record_rows, sampled_layers
from analysis.layers import measure_layers, record_layers
from models import gpt
from tests.trained import contents, final_state, readers, recorded, tiny
from train import checkpoint, loop, step
from train.data import TokenDataset
from train.files import DataError
from train.flops import model_flops
from train.loop import TrainingError, train
from train.probe import last_micro_batch, load

FIRST, LAST = 1, 20  # of the `tiny` preset: attention every 5 updates, layers every 10, checkpoints every 5


class CrashError(Exception):
    """Ends a run between two updates, as an error of any kind would."""


def crash_at(update: int):
    def on_update(now: loop.Progress) -> None:
        if now.update == update:
            raise CrashError

    return on_update


# What is recorded.


def test_every_update_is_recorded(finished, corpus):
    updates, config = records.read_table(finished, "updates"), tiny(corpus)
    assert updates["update"].to_list() == list(range(1, 21))
    assert updates["tokens"].to_list() == [update * 4 * 2 * 32 for update in range(1, 21)]
    rate = step.learning_rate(config.train)
    np.testing.assert_allclose(updates["learning_rate"], [np.asarray(rate(count)) for count in range(20)], rtol=1e-6)
    assert abs(updates["loss"][0] - np.log(257)) < 0.1  # at initialisation every token is as likely
    assert updates["loss"][-1] < updates["loss"][0] - 0.3
    assert (updates["grad_norm"] > 0).all()
    timing = records.read_table(finished, "timing")
    assert timing["update"].to_list() == updates["update"].to_list()
    np.testing.assert_allclose(timing["tokens_per_second"] * timing["seconds"], 4 * 2 * 32)
    assert timing["mfu"].is_null().all()  # a CPU's peak is not known


def test_the_share_of_the_peak_is_recorded_where_the_peak_is_given(tmp_path, finished, corpus):
    shown = []

    def on_update(now: loop.Progress) -> None:
        shown.append(now.mfu)
        crash_at(3)(now)

    config = tiny(corpus)
    with pytest.raises(CrashError):
        train(tmp_path / "run", config, finished.parent / "data", peak_tflops=1e-3, on_update=on_update)
    timing = records.read_table(tmp_path / "run", "timing")
    operations = model_flops(config.model, 4 * 2 * 32)
    np.testing.assert_allclose(timing["mfu"] * timing["seconds"] * 1e9, operations)
    assert timing["mfu"].to_list() == shown


def test_attention_is_recorded_at_its_cadence_for_every_sampled_layer_and_head(finished):
    table = records.read_table(finished, "attention")
    assert sorted(set(table["update"])) == [FIRST, 5, 10, 15, LAST]
    keys = [(row["update"], row["layer"], row["head"], row["quantity"]) for row in table.iter_rows(named=True)]
    wanted = set(itertools.product((1, 5, 10, 15, 20), (0, 1), (None, 0, 1), records.QUANTITIES))
    assert len(keys) == len(wanted)
    assert set(keys) == wanted
    for quantity, head, count in [("entropy", None, 4 * 2 * 31), ("entropy", 0, 4 * 31), ("p_max", 1, 4 * 32)]:
        rows = table.filter(pl.col("quantity") == quantity, pl.col("head").eq_missing(head))
        assert set(rows["count"]) == {count}, quantity


def test_layers_are_recorded_at_their_cadence(finished):
    table = records.read_table(finished, "layers")
    assert table.select("update", "layer").rows() == [(u, layer) for u in (FIRST, 10, LAST) for layer in (0, 1)]
    assert (table.select(pl.exclude("update", "layer")) > 0).to_numpy().all()
    norms = records.read_table(finished, "updates").filter(pl.col("update") == LAST)["grad_norm"][0]
    last = table.filter(pl.col("update") == LAST)["grad_norm"]
    assert 0 < np.linalg.norm(last) < norms  # the blocks' share of the global norm; embeddings have the rest


@pytest.mark.parametrize("table", ["updates", "attention", "layers", "timing"])
def test_pandas_and_polars_read_a_table_in_one_line(finished, table):
    path = finished / f"{table}.jsonl"
    ours = records.read_table(finished, table)
    assert pl.read_ndjson(path).equals(ours)
    frame = pandas.read_json(path, lines=True)
    assert list(frame.columns) == ours.columns
    assert len(frame) == len(ours)
    np.testing.assert_array_equal(frame["update"], ours["update"].to_numpy())


def test_the_record_says_what_was_run(finished, corpus):
    config = records.read_config(finished)
    assert {name: config[name] for name in ("model", "train")} == json.loads(json.dumps(tiny(corpus).as_json()))
    assert config["data"]["directory"] == str(finished.parent / "data")
    versions = json.loads((finished / "versions.json").read_text())
    assert versions["jax"] == jax.__version__
    assert {"python", "devices", "flax", "optax", "orbax-checkpoint", "grain", "sens"} <= versions.keys()


def test_telemetry_is_that_of_the_checkpoint_in_evaluation_mode_on_the_last_micro_batch(finished, corpus):
    config, params, update = load(finished)
    assert update == LAST
    assert config == tiny(corpus)
    assert config.model.dropout > 0
    tokens = last_micro_batch(config, TokenDataset(finished.parent / "data", 32), LAST)
    layers = sampled_layers(2)
    rows = jax.device_get(jax.jit(measure_rows, static_argnums=(0, 3))(config.model, params, tokens, layers))
    again = [json.loads(json.dumps(row)) for row in record_rows(LAST, layers, rows)]
    written = [json.loads(line) for line in (finished / "attention.jsonl").read_text().splitlines()]
    assert again == [row for row in written if row["update"] == LAST]
    figures = jax.device_get(jax.jit(measure_layers, static_argnums=0)(config.model, params, tokens))
    again = list(record_layers(LAST, {"grad_norm": np.zeros(2), **figures}))
    written = [json.loads(line) for line in (finished / "layers.jsonl").read_text().splitlines()]
    assert [{**row, "grad_norm": 0.0} for row in written if row["update"] == LAST] == again


def test_checkpoints_are_made_at_their_cadence_and_the_newest_kept(finished):
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["15", "20"]


# Seeds and data.


def test_seeds_and_placements_change_parameters_and_not_the_order_of_the_data(tmp_path, finished, corpus, monkeypatch):
    data, seen = finished.parent / "data", {}
    jitted = loop._jitted_update

    def spy(name):
        def replacement(model, settings, mesh):
            def update(state, tokens):
                seen.setdefault(name, []).append(np.array(tokens))
                return jitted(model, settings, mesh)(state, tokens)

            return update

        monkeypatch.setattr(loop, "_jitted_update", replacement)

    starts, losses = {}, {}
    for name, seed, placement in (("a", 42, "pre"), ("b", 1, "pre"), ("c", 42, "post")):
        spy(name)
        config = tiny(corpus, seed=seed, placement=placement)
        starts[name] = np.asarray(loop.init_state(config)["params"]["ends"]["tokens"]["embedding"])
        with pytest.raises(CrashError):
            train(tmp_path / name, config, data, on_update=crash_at(3))
        losses[name] = records.read_table(tmp_path / name, "updates")["loss"].to_list()
    np.testing.assert_array_equal(seen["a"], seen["b"])
    np.testing.assert_array_equal(seen["a"], seen["c"])
    stream = TokenDataset(data, 32)
    # Three updates are recorded, and the fourth was under way.
    np.testing.assert_array_equal(np.array(seen["a"]).reshape(-1, 33), [stream[i] for i in range(4 * 2 * 4)])
    assert not np.allclose(starts["a"], starts["b"])
    assert len({tuple(values) for values in losses.values()}) == 3


# Going on.


def test_a_finished_run_is_left_as_it_is(finished, corpus):
    before = contents(finished)
    train(finished, tiny(corpus), finished.parent / "data")
    assert contents(finished) == before


@pytest.mark.parametrize("update", [1, 12])
def test_a_run_that_crashed_continues_to_the_same_bits(tmp_path, finished, corpus, update):
    """Before the first checkpoint and between two, with a line torn as a kill would tear it."""
    run, config, data = tmp_path / "run", tiny(corpus), finished.parent / "data"
    with pytest.raises(CrashError):
        train(run, config, data, on_update=crash_at(update))
    assert records.read_table(run, "updates")["update"].to_list() == list(range(1, update + 1))
    with (run / "attention.jsonl").open("a") as file:
        file.write('{"update": 13, "layer": 0, "he')
    train(run, config, data)
    assert recorded(run) == recorded(finished)
    jax.tree.map(np.testing.assert_array_equal, final_state(run, config), final_state(finished, config))


def test_a_run_killed_while_it_wrote_its_configuration_starts(tmp_path, finished, corpus):
    run = tmp_path / "run"
    run.mkdir()
    for left in (".lock", "versions.json", "config.json.tmp"):
        (run / left).write_text("{")
    with pytest.raises(CrashError):
        train(run, tiny(corpus), finished.parent / "data", on_update=crash_at(1))
    assert records.read_config(run)["train"]["seed"] == 42


# Stopping.


def interrupt_at(update: int):
    def on_update(now: loop.Progress) -> None:
        if now.update == update:
            signal.raise_signal(signal.SIGINT)

    return on_update


@pytest.mark.parametrize(("stop", "error"), [(crash_at(3), CrashError), (interrupt_at(3), loop.Interrupted)])
def test_the_thread_that_reads_ahead_ends_with_the_run(tmp_path, finished, corpus, stop, error):
    seen = []

    def on_update(now: loop.Progress) -> None:
        seen.append(readers())
        stop(now)

    with pytest.raises(error):
        train(tmp_path / "run", tiny(corpus), finished.parent / "data", on_update=on_update)
    assert set(seen) == {1}
    assert readers() == 0


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path, finished, corpus, monkeypatch
):
    run, config, data = tmp_path / "run", tiny(corpus), finished.parent / "data"
    jitted = loop._jitted_update

    def poisoned(model, settings, mesh):
        def update(state, tokens):
            if int(state["update"]) == 10:  # the update right after a checkpoint, whose save is still under way
                state["params"]["blocks"]["ffn"]["up"]["kernel"] *= np.float32(np.nan)
            return jitted(model, settings, mesh)(state, tokens)

        return update

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_jitted_update", poisoned)
        with pytest.raises(
            TrainingError, match=r"run: loss is nan at update 11 .*the checkpoint of update 10 is kept.*lower lr"
        ):
            train(run, config, data)
    assert records.read_table(run, "updates")["update"].to_list() == list(range(1, 11))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(final_state(run, config)))
    train(run, config, data)  # with the cause gone, the same run goes on from there
    assert recorded(run) == recorded(finished)


def test_weights_that_are_not_finite_stop_the_run_before_anything_is_recorded(tmp_path, finished, corpus):
    run, config = tmp_path / "run", tiny(corpus)
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "20")
    with checkpoint.open_checkpoints(run / "checkpoints", 2) as checkpointer:
        restored = checkpoint.restore(checkpointer, loop.init_state(config))
        assert restored is not None
        state, _ = restored
        state["params"]["ends"]["tokens"]["embedding"] *= np.float32(np.inf)
        checkpoint.save(checkpointer, {**state, "update": state["update"] + 1}, 16, {"next_index": 16})
    with pytest.raises(TrainingError, match=r"loss is nan at update 17 .*the checkpoint of update 16 is kept"):
        train(run, config, finished.parent / "data")
    assert records.read_table(run, "updates")["update"].to_list() == list(range(1, 17))


def test_parameters_that_diverge_are_seen_by_the_telemetry_and_not_saved(tmp_path, finished, corpus):
    config = tiny(corpus, lr=1e30, warmup=0, checkpoint_every=1)
    with pytest.raises(TrainingError, match=r"p_max is \S+ at update 1 .*no checkpoint was made yet"):
        train(tmp_path / "run", config, finished.parent / "data")
    assert not (tmp_path / "run" / "updates.jsonl").exists()


def test_a_record_that_is_shorter_than_its_checkpoint_is_refused(tmp_path, finished, corpus):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    records.truncate(run, 18)
    with pytest.raises(records.RecordError, match=r"newest checkpoint is of update 20, but updates.jsonl holds 18"):
        train(run, tiny(corpus), finished.parent / "data")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, r"made with another configuration \(.*seed 42 -> 7\); choose another directory"),
        ({"placement": "post", "lr": 1.0}, r"placement 'pre' -> 'post'; .*lr 0.003 -> 1.0"),
    ],
)
def test_another_configuration_is_refused_and_nothing_is_touched(finished, corpus, change, message):
    before = contents(finished)
    with pytest.raises(records.RecordError, match=message):
        train(finished, tiny(corpus, **change), finished.parent / "data")
    assert contents(finished) == before


def test_a_run_goes_on_with_fewer_checkpoints_kept(tmp_path, finished, corpus):
    run, before = tmp_path / "run", recorded(finished)
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "20")
    train(run, tiny(corpus, keep=1), finished.parent / "data")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["20"]
    assert recorded(run) == before


def test_another_text_is_refused(tmp_path, finished, corpus):
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text()[::-1])
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = records.read_config(run)
    config["train"]["source"] = str(other)  # the same configuration but for the words in the file
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(records.RecordError, match=r"another configuration .*the text or the tokenizer"):
        train(run, tiny(other), tmp_path / "data")


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path, finished, corpus):
    (tmp_path / "thesis.tex").write_text("x")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(records.RecordError, match=r"not a run directory and not empty \(thesis.tex\); choose another"):
        train(tmp_path, tiny(corpus), finished.parent / "data")
    assert sorted(tmp_path.iterdir()) == before


def test_a_second_process_in_the_same_run_is_refused(finished, corpus):
    with (finished / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(records.RecordError, match="another process is training here"):
            train(finished, tiny(corpus), finished.parent / "data")


def test_a_vocabulary_that_the_model_lacks_is_refused(tmp_path, finished, corpus):
    config = tiny(corpus)
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=256))
    with pytest.raises(DataError, match="the tokenizer has 257 ids, the model 256"):
        train(tmp_path / "run", small, finished.parent / "data")
    assert not (tmp_path / "run").exists()


# TensorBoard.


def events(directory):
    """(tag, step, value) of every scalar: a TFRecord is a length, a checksum, the bytes, a checksum."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    for path in sorted(directory.glob("events.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += 12 + length + 4
            yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)


def test_tensorboard_gets_the_record_too(tmp_path, finished, corpus):
    with pytest.raises(CrashError):
        train(tmp_path / "run", tiny(corpus), finished.parent / "data", tensorboard=True, on_update=crash_at(5))
    scalars = {(tag, at): value for tag, at, value in events(tmp_path / "run" / "events")}
    updates = records.read_table(tmp_path / "run", "updates")
    for row in updates.iter_rows(named=True):
        np.testing.assert_allclose(scalars["updates/loss", row["update"]], row["loss"], rtol=1e-6)
    pooled = records.read_table(tmp_path / "run", "attention").filter(pl.col("head").is_null(), update=5, layer=1)
    for row in pooled.iter_rows(named=True):
        np.testing.assert_allclose(scalars[f"attention/{row['quantity']}/layer-1", 5], row["median"], rtol=1e-6)
    assert ("layers/norm_query/layer-0", 1) in scalars


def test_the_parameters_are_the_models(finished):
    config, params, _ = load(finished)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == gpt.count_parameters(config.model)
