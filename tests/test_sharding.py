"""Meshes: what does not fit is refused; on eight simulated devices losses and gradients are those of one."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from models import ModelConfig, gpt
from models.sharding import AXES, PARAMETERS, stored
from tests.trained import ROOT
from train import sharding, telemetry
from train.config import TrainConfig
from train.presets import PRESETS, RunConfig
from train.sharding import MeshError, MeshShape

CONFIG = RunConfig(
    ModelConfig(vocab_size=61, n_layer=2, n_head=4, d_model=16, d_ff=32, context=16),
    TrainConfig(updates=20, warmup=4, micro_batch=8, accumulation=2),
)


# Shapes.


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("data=2,fsdp=4", MeshShape(2, 4, 1)),
        ("tensor=8", MeshShape(1, 1, 8)),
        ("tensor=2, data=3", MeshShape(3, 1, 2)),
    ],
)
def test_a_mesh_is_read_from_its_axes(text, shape):
    assert sharding.parse(text) == shape
    assert sharding.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("", "8", "model=2", "data=2,data=4"), "want each of data, fsdp, tensor at most once, as in data=2,fsdp=4"),
        (
            ("data", "data=0", "data=-2", "data=two", "data=2;fsdp=4"),
            "data must be a whole number of at least 1",
        ),
    ],
)
def test_what_is_no_mesh_is_refused(texts, message):
    for text in texts:
        with pytest.raises(MeshError, match=f"mesh '{text}': {message}"):
            sharding.parse(text)


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (
            "data=2,fsdp=3",
            {},
            r"mesh data=2,fsdp=3,tensor=1 is 6 devices, but there are 8; remedy: axes whose product is 8",
        ),
        ("data=4,fsdp=2", {"micro_batch": 12}, r"micro_batch 12 is not divisible by data \* fsdp = 8"),
        ("tensor=8", {}, r"n_head 4 is not divisible by tensor = 8"),
        ("data=4,tensor=2", {"n_kv_head": 1}, r"n_kv_head 1 is not divisible by tensor = 2"),
        ("data=4,tensor=2", {"d_ff": 33}, r"d_ff 33 is not divisible by tensor = 2"),
        ("fsdp=8", {"d_model": 12}, r"d_model 12 is not divisible by fsdp \* tensor = 8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(text, change, message):
    of_train = {name: value for name, value in change.items() if name == "micro_batch"}
    of_model = {name: value for name, value in change.items() if name not in of_train}
    config = RunConfig(dataclasses.replace(CONFIG.model, **of_model), dataclasses.replace(CONFIG.train, **of_train))
    with pytest.raises(MeshError, match=message):
        sharding.check(sharding.parse(text), config, 8)


def test_the_papers_run_fits_the_meshes_that_are_documented():
    for text, micro_batch in (("fsdp=8", 32), ("data=2,fsdp=4", 8), ("fsdp=2,tensor=4", 4)):
        config = PRESETS["paper"]
        train = dataclasses.replace(config.train, micro_batch=micro_batch)
        sharding.check(sharding.parse(text), dataclasses.replace(config, train=train), 8)


# The table.


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"norm": "rms", "positions": "rope", "ffn": "swiglu", "ffn_bias": True, "n_kv_head": 2, "head": "untied"},
    {"head": "masked", "token_types": 2, "embedding_norm": True, "qkv_bias": True, "out_bias": True},
)


def test_every_parameter_of_every_variant_has_a_role_and_every_role_a_parameter():
    seen = set()
    for change in VARIANTS:
        shapes = gpt.shapes(dataclasses.replace(CONFIG.model, **change))
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
            assert len(stored(path)) == leaf.ndim, path
            seen.add("/".join(key.key for key in path[-2:]))
    assert seen == PARAMETERS.keys()


def test_moments_lie_as_their_parameters_and_every_matrix_is_split():
    shardings = sharding.state_shardings(sharding.one_device(), CONFIG)
    moments = shardings["opt"][1][0]
    assert moments.mu == shardings["params"] == moments.nu
    for path, place in jax.tree_util.tree_leaves_with_path(shardings["params"]):
        if path[-1].key in ("kernel", "embedding"):
            assert "fsdp" in str(place.spec), path


# On eight devices, in a process of its own: the number of devices is set when JAX starts.


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("mesh") / "measured.json"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_X64"}
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run(
        [sys.executable, "-m", "tests.on_mesh", str(out)], env={**environment, **flags, **cache}, cwd=ROOT, check=True
    )
    return json.loads(out.read_text())


CASES = ["pre data=2,fsdp=4", "pre data=2,fsdp=2,tensor=2", "post data=2,fsdp=2,tensor=2"]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_one_device(measured, case):
    """To rounding: float32 sums in another order. Measured: at most 1e-6, and 5e-7 of each gradient's largest entry."""
    found, one = measured[case], measured[case.split()[0]]
    assert found["losses"][0] == pytest.approx(one["losses"][0], rel=5e-6)
    assert len(found["gradient_errors"]) == len(one["gradient_errors"]) > 10
    assert max(found["gradient_errors"].values()) < 5e-6


@pytest.mark.parametrize("case", CASES)
def test_three_updates_are_those_of_one_device(measured, case):
    found, one = measured[case], measured[case.split()[0]]
    assert len(set(one["losses"])) == 3
    for name in ("losses", "grad_norms"):
        assert found[name] == pytest.approx(one[name], rel=2e-5), name


def test_a_device_holds_its_part_of_the_state_and_no_more(measured):
    for case in CASES:
        # All but the norms, a hundredth of it, is split by fsdp * tensor = 4.
        assert measured[case]["state_bytes"] < 1.1 * measured[case.split()[0]]["state_bytes"] / 4


def test_a_checkpoint_restores_onto_another_mesh_to_the_same_bits(measured):
    assert measured["restored"] == {"fsdp=8": True, "data=2,tensor=4": True, "one device": True}


def test_attention_is_split_by_head_and_the_ffn_by_width(measured):
    """The compiled program holds arrays of the shapes of one device's part, and none of the whole."""
    # Of 8 sequences, 4 heads, 16 positions, 32 hidden, on data=2,fsdp=2,tensor=2: 2 sequences, 2 heads, 16 hidden.
    assert measured["post data=2,fsdp=2,tensor=2"]["shapes"] == {
        "[2,2,16,16]": True,
        "[8,4,16,16]": False,
        "[2,16,16]": True,
        "[8,16,32]": False,
    }


def test_telemetry_of_a_split_model_is_that_of_one_device(measured):
    assert {"entropy", "p_max", "lower", "upper"} <= measured["telemetry"].keys()
    assert max(measured["telemetry"].values()) < 1e-5


# What is measured during training.


@pytest.mark.parametrize(
    ("wanted", "shape", "processes", "measured"),
    [
        (4, (1, 1, 1), 1, [0, 4, 8, 12]),
        (4, (2, 2, 2), 2, [0, 4, 8, 12]),
        (4, (1, 4, 1), 4, [0, 4, 8, 12]),
        (4, (4, 2, 1), 4, [0, 2, 4, 6, 8, 10, 12, 14]),  # one in each part
        (3, (1, 1, 1), 1, [0, 5, 10]),
        (3, (2, 1, 1), 2, [0, 4, 8, 12]),
        (99, (2, 1, 1), 2, list(range(16))),
    ],
)
def test_telemetry_measures_the_same_sequences_on_every_mesh_whose_parts_divide_them(
    wanted, shape, processes, measured
):
    train = dataclasses.replace(CONFIG.train, micro_batch=16, telemetry_sequences=wanted)
    mesh = AbstractMesh(shape, AXES)
    parts = [
        telemetry.sampled_sequences(RunConfig(CONFIG.model, train), mesh, part)
        for part in np.split(np.arange(16), processes)
    ]
    assert np.concatenate([own for own, _ in parts]).tolist() == measured
    assert {of_all for _, of_all in parts} == {len(measured)}
