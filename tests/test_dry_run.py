"""What a run will take: operations counted two ways, memory by XLA's analysis; nothing allocated, nothing written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from models import ModelConfig, gpt
from tests.trained import finish, start
from train import dry_run, flops, sharding, step
from train.config import TrainConfig
from train.dry_run import estimate, product_flops
from train.presets import PRESETS, RunConfig
from train.sharding import MeshError, MeshShape

MODEL = ModelConfig(vocab_size=61, n_layer=3, n_head=4, d_model=16, d_ff=40, context=16)
TRAIN = TrainConfig(updates=20, warmup=4, micro_batch=8, accumulation=2, remat="none")
TOKENS = 2 * 8 * 16


def counted(model: ModelConfig, train: TrainConfig) -> int:
    state = jax.eval_shape(functools.partial(step.init_state, model, train), 0)
    tokens = jax.ShapeDtypeStruct((2, 8, 17), jnp.int32)
    return product_flops(jax.make_jaxpr(step.make_update(model, train))(state, tokens).jaxpr)


# Operations.


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"placement": "post", "dropout": 0.0},
        {"norm": "rms", "positions": "rope", "ffn": "swiglu", "n_kv_head": 2, "head_width": 8, "head": "untied"},
        {"head": "masked"},
    ],
)
def test_the_formula_is_what_the_program_does(change):
    model = dataclasses.replace(MODEL, **change)
    assert counted(model, TRAIN) == flops.model_flops(model, TOKENS)


def test_rematerialisation_is_counted_on_top_and_chunks_of_the_loss_cost_nothing(monkeypatch):
    """`dots` does the scores and the mixture again, `full` the blocks forward but for their last product."""
    whole = flops.model_flops(MODEL, TOKENS)
    scores = 2 * TOKENS * 2 * MODEL.n_layer * 16 * 16
    blocks = (whole - 6 * TOKENS * 61 * 16) // 3
    last = 2 * TOKENS * MODEL.n_layer * 16 * 40
    wanted = {"dots": whole + scores, "full": whole + blocks - last}
    assert {name: counted(MODEL, dataclasses.replace(TRAIN, remat=name)) for name in wanted} == wanted
    monkeypatch.setattr(step, "CHUNK_LOGITS", 8 * 4 * 61)
    assert counted(MODEL, TRAIN) == whole


def test_the_peak_is_known_of_some_devices_in_bfloat16_alone():
    assert flops.peak_tflops("NVIDIA H200", "bfloat16") == 989
    assert flops.peak_tflops("NVIDIA H200", "float32") is None
    assert flops.peak_tflops("cpu", "bfloat16") is None


# The estimate.


def test_the_papers_run_fits_one_device_of_141_gb_and_nothing_is_allocated():
    before = sum(array.nbytes for array in jax.live_arrays())
    found = estimate(PRESETS["paper"], MeshShape(), 989)
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1e6
    assert (found.parameters, found.tokens) == (773_615_360, 16 * 4 * 1024)
    # Three float32 numbers a parameter go in and come out in the same place; the gradients are among the temporaries.
    assert found.state_bytes == pytest.approx(12 * found.parameters, rel=1e-3)
    assert 4 * found.parameters < found.temporary_bytes
    assert found.total_bytes == pytest.approx(found.state_bytes + found.temporary_bytes, rel=1e-3)
    assert found.total_bytes < 40e9
    assert found.model_flops == flops.model_flops(PRESETS["paper"].model, found.tokens) < found.program_flops
    assert found.seconds(1.0) == pytest.approx(found.program_flops / 989e12)
    unknown = dataclasses.replace(found, peak_tflops=None)
    assert unknown.seconds(1.0) is None
    assert dry_run.describe(unknown).splitlines()[-1].split(None, 1) == ["time", "give a device's --peak-tflops"]


def test_a_mesh_of_simulated_devices_is_described_and_nothing_is_written(tmp_path):
    command = ["train", "--preset", "tiny", "--dry-run", "--mesh", "fsdp=2"]
    status, out, err = finish(start(*command, "--peak-tflops", 0.5, cwd=tmp_path))
    assert (status, err) == (0, "")
    lines = dict(line.split(None, 1) for line in out.splitlines() if not line.startswith("an update"))
    assert lines["mesh"] == "data=1,fsdp=2,tensor=1: 2 devices, compiled for cpu"
    assert lines["parameters"] == f"{gpt.count_parameters(PRESETS['tiny'].model):,}"
    assert "at 0.5 TFLOP/s a device" in lines["time"]
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused_before_anything_is_compiled():
    config = RunConfig(MODEL, TRAIN)
    with pytest.raises(MeshError, match="n_head 4 is not divisible by tensor = 3"):
        estimate(config, sharding.parse("tensor=3"))
