"""Checkpoints: everything comes back, bit for bit, and what is not ours is refused by name."""

import dataclasses
import functools
import json
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from models import ModelConfig
from tests.trained import is_key
from train import checkpoint, step
from train.config import TrainConfig

MODEL = ModelConfig(vocab_size=5, n_layer=2, n_head=1, d_model=4, d_ff=8, context=4)
TRAIN = TrainConfig(updates=10, warmup=2)


@functools.cache
def _init(model: ModelConfig):
    return jax.jit(functools.partial(step.init_state, model, TRAIN))


def state_of(model: ModelConfig = MODEL, seed: int = 0):
    return _init(model)(seed)


def save_some(directory, updates, keep=9):
    with checkpoint.open_checkpoints(directory, keep) as checkpointer:
        for update in updates:
            checkpoint.save(checkpointer, state_of(seed=update), update, {"next_index": update})


def restore(directory, like, update=None) -> Any:
    with checkpoint.reading(directory) as checkpointer:
        return checkpoint.restore(checkpointer, like, update)


def assert_same(found, wanted):
    chex.assert_trees_all_equal_structs(found, wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        if is_key(one):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


def test_a_state_comes_back_with_its_types_keys_and_data_position(tmp_path):
    save_some(tmp_path, [3, 7])
    like = jax.eval_shape(lambda: step.init_state(MODEL, TRAIN, 0))
    for update, wanted in ((None, 7), (3, 3), (7, 7)):
        state, data = restore(tmp_path, like, update)
        assert_same(state, state_of(seed=wanted))
        assert data == {"next_index": wanted}
        jax.random.split(state["key"])  # still a key


def test_parameters_alone_can_be_read(tmp_path):
    save_some(tmp_path, [3])
    state, _ = restore(tmp_path, {"params": state_of()["params"]})
    assert_same(state, {"params": state_of(seed=3)["params"]})


def test_a_state_saved_while_it_is_donated_is_the_state_before(tmp_path):
    advance = jax.jit(
        lambda state: jax.tree.map(lambda leaf: leaf if is_key(leaf) else leaf + 1, state), donate_argnums=0
    )
    wanted = jax.tree.map(np.asarray, state_of()["params"])
    with checkpoint.open_checkpoints(tmp_path, 1) as checkpointer:
        state = state_of()
        checkpoint.save(checkpointer, state, 1, {"next_index": 1})
        advance(state)
    chex.assert_trees_all_equal(restore(tmp_path, {"params": state_of()["params"]})[0]["params"], wanted)


def test_the_newest_are_kept(tmp_path):
    save_some(tmp_path, [1, 2, 3, 4], keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint of update 1; there are \[3, 4\]"):
        restore(tmp_path, state_of(), 1)


def test_none_yet(tmp_path):
    assert restore(tmp_path, state_of()) is None
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint yet"):
        restore(tmp_path, state_of(), 5)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"d_ff": 12}, r"blocks/ffn/down/kernel is \(2, 8, 4\) there, \(2, 12, 4\) in this configuration"),
        ({"n_layer": 3}, r"blocks/attention/key/kernel is \(2, 4, 4\) there, \(3, 4, 4\)"),
        ({"placement": "post"}, r"ends/norm_final/bias is \(4,\) there, absent in this configuration"),
    ],
)
def test_another_model_is_refused_by_the_parameter_that_differs(tmp_path, change, name):
    save_some(tmp_path, [3])
    with pytest.raises(
        checkpoint.CheckpointError, match=f"{re.escape(str(tmp_path / '3'))}: made by another model.*{name}"
    ):
        restore(tmp_path, state_of(dataclasses.replace(MODEL, **change)))


def foreign_files(directory):
    (directory / "weights.bin").write_bytes(b"1")


def foreign_step(directory):
    (directory / "5").mkdir()
    (directory / "5" / "weights.bin").write_bytes(b"1")


def another_program(directory):
    with ocp.training.Checkpointer(directory) as checkpointer:
        checkpointer.save_checkpointables(5, {"state": {"params": {"w": jnp.zeros(3)}}})


def another_state(directory):
    with ocp.training.Checkpointer(directory) as checkpointer:
        checkpointer.save(5, {"w": jnp.zeros(3)}, custom_metadata={"format": checkpoint.FORMAT, "data": {}})


@pytest.mark.parametrize("make", [foreign_files, foreign_step, another_program, another_state])
def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path, make):
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(checkpoint.CheckpointError, match=f"{re.escape(str(tmp_path))}.*: (not a|made by another)"):
        restore(tmp_path, state_of())
    with (
        pytest.raises(checkpoint.CheckpointError),
        checkpoint.open_checkpoints(tmp_path, 2) as checkpointer,
    ):
        checkpoint.restore(checkpointer, state_of())
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_save_leaves_is_ignored_and_removed_by_the_next_run_alone(tmp_path):
    save_some(tmp_path, [3])
    debris = tmp_path / "4.orbax-checkpoint-tmp"
    debris.mkdir()
    (debris / "descriptor").write_text(json.dumps({}))
    state, data = restore(tmp_path, state_of())
    assert data == {"next_index": 3}
    assert debris.exists()  # it may be a save under way in another process
    with checkpoint.open_checkpoints(tmp_path, 2) as checkpointer:
        again = checkpoint.restore(checkpointer, state)
    assert again is not None
    assert again[1] == {"next_index": 3}
    assert not debris.exists()


def test_a_killed_first_save_leaves_a_directory_without_checkpoints(tmp_path):
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    with checkpoint.open_checkpoints(tmp_path, 2) as checkpointer:
        assert checkpoint.restore(checkpointer, state_of()) is None
