"""Fused attention: called with the right arguments it is the model's attention; what it cannot do is refused.

cuDNN's kernel itself needs a GPU; here JAX's own reference of the same call stands in for it.
"""

import dataclasses
import functools

import chex
import jax
import pytest

from models import ModelConfig, gpt
from train import sharding, step
from train.config import TrainConfig
from train.presets import RunConfig
from train.sharding import MeshError, MeshShape

MODEL = ModelConfig(vocab_size=13, n_layer=2, n_head=4, d_model=32, d_ff=16, context=9, dropout=0.0, init_std=0.5)
TRAIN = TrainConfig(updates=20, warmup=4, compute_dtype="bfloat16", flash=True)


@pytest.fixture
def asked(monkeypatch):
    """The implementations that were asked for."""
    names, real = [], jax.nn.dot_product_attention

    def stand_in(*arguments, implementation, **options):
        names.append(implementation)
        return real(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return names


@pytest.mark.parametrize(
    "change",
    [
        {"placement": "post", "window": 3, "tau": 0.7},
        {"causal": False, "n_kv_head": 2, "positions": "rope"},
    ],
)
def test_loss_and_gradient_are_those_of_the_rows(asked, change):
    model = dataclasses.replace(MODEL, **change)
    params = jax.jit(functools.partial(gpt.init, model))(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 10), 0, 13)

    def value_and_grad(flash):
        return jax.jit(lambda params: jax.value_and_grad(step.loss, argnums=1)(model, params, tokens, flash=flash))

    plain = value_and_grad(False)(params)
    assert asked == []
    fused = value_and_grad(True)(params)
    assert set(asked) == {"cudnn"}
    chex.assert_trees_all_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_neither_padding_nor_dropout():
    params = jax.eval_shape(functools.partial(gpt.init, MODEL), jax.random.key(0))
    model = dataclasses.replace(MODEL, dropout=0.1)
    tokens = jax.numpy.zeros((2, 9), int)
    for options in ({"key": jax.random.key(0)}, {"where": tokens == 0}):
        with pytest.raises(ValueError, match="flash attention knows neither padding nor dropout"):
            jax.eval_shape(lambda p, options=options: gpt.apply(model, p, tokens, flash=True, **options), params)


@pytest.mark.parametrize(
    ("backend", "model", "train", "message"),
    [
        ("cpu", {}, {}, "CUDA devices, and JAX has cpu here; remedy: --no-flash"),
        ("gpu", {}, {"compute_dtype": "float32"}, "compute_dtype bfloat16, not float32"),
        ("gpu", {"dropout": 0.1}, {}, "dropout 0, not 0.1"),
        ("gpu", {"head_width": 12}, {}, "heads of width 8, 16, ... 128, not 12"),
    ],
)
def test_what_it_cannot_do_is_refused(monkeypatch, backend, model, train, message):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = RunConfig(dataclasses.replace(MODEL, **model), dataclasses.replace(TRAIN, **train))
    with pytest.raises(MeshError, match=f"flash attention wants {message}"):
        sharding.check(MeshShape(), config, 1)


def test_what_it_can_do_is_accepted(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sharding.check(MeshShape(), RunConfig(MODEL, TRAIN), 1)
