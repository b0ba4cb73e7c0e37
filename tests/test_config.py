"""Configurations: what does not fit is refused when it is made; presets hold; what is written is read back."""

import dataclasses
import json

import pytest

from models import ModelConfig
from train.config import TrainConfig
from train.presets import PRESETS, RunConfig, difference, from_json

MODEL = ModelConfig(vocab_size=7, n_layer=2, n_head=2, d_model=8, d_ff=16, context=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 3}, "n_head must divide d_model: 3 heads do not divide a width of 8"),
        ({"n_layer": 0}, "n_layer must be at least 1, got 0"),
        ({"context": -1}, "context must be at least 1, got -1"),
        ({"placement": "middle"}, "placement must be .*'middle'"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"tau": 0.0}, "tau must be positive, got 0.0"),
        ({"ln_eps": float("nan")}, "ln_eps must be positive, got nan"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODEL, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates": 0}, "updates must be at least 1, got 0"),
        ({"accumulation": 0}, "accumulation must be at least 1"),
        ({"warmup": 2000}, r"warmup must be in \[0, updates\), got 2000 of 2000 updates"),
        ({"warmup": -1}, "warmup must be in"),
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
        ({"compute_dtype": "float16"}, "compute_dtype must be .*'float16'"),
        ({"remat": True}, "remat must be 'none', 'dots' or 'full', got True"),
        ({"keep": 0}, "keep must be at least 1"),
    ],
)
def test_a_training_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


def test_the_paper_preset_is_the_protocol():
    train = PRESETS["paper"].train
    assert (train.lr, train.warmup, train.updates, train.final_lr) == (3e-4, 500, 2000, 0.1)
    assert (train.micro_batch, train.accumulation, train.clip) == (4, 16, 1.0)
    assert (train.beta1, train.beta2, train.eps, train.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (train.compute_dtype, train.attention_every, train.layers_every) == ("bfloat16", 10, 50)
    model = PRESETS["paper"].model
    assert (model.dropout, model.ln_eps, model.init_std, model.tau) == (0.1, 1e-5, 0.02, 1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_comes_back_from_its_json(name):
    config = PRESETS[name]
    assert from_json(json.loads(json.dumps(config.as_json()))) == config


def test_fields_that_are_unknown_or_missing_are_named():
    value = PRESETS["tiny"].as_json()
    value["model"]["colour"] = "red"
    del value["model"]["tau"]
    with pytest.raises(ValueError, match=r"another version: model fields .*colour, tau"):
        from_json(value)


def test_differences_are_named_one_by_one():
    old = PRESETS["tiny"]
    new = RunConfig(dataclasses.replace(old.model, placement="post"), dataclasses.replace(old.train, lr=1.0, seed=3))
    assert difference(old, old) == []
    assert difference(old, new) == ["placement 'pre' -> 'post'", "seed 42 -> 3", "lr 0.003 -> 1.0"]
