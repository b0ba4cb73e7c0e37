"""One update: against plain autodiff and optax written out, accumulation, schedule, clip, decay, dropout, precision."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig, gpt
from train import step
from train.config import TrainConfig

MODEL = ModelConfig(vocab_size=13, n_layer=2, n_head=2, d_model=8, d_ff=16, context=5, dropout=0.0, init_std=0.2)
TRAIN = TrainConfig(updates=20, warmup=4, lr=1e-2, clip=0.5, micro_batch=2, accumulation=3, remat="none")
DROPOUT = dataclasses.replace(MODEL, dropout=0.5)


@functools.cache
def compiled(model: ModelConfig, config: TrainConfig):
    return jax.jit(step.make_update(model, config))


@functools.cache
def state_of(model: ModelConfig = MODEL, config: TrainConfig = TRAIN, seed: int = 0):
    return jax.jit(functools.partial(step.init_state, model, config))(seed)


def batch(*shape: int, seed: int = 0):
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, (*shape, MODEL.context + 1)).astype(np.int32)


def mean_cross_entropy(params, tokens):
    """All micro-batches at once, in evaluation mode."""
    log_p = jax.nn.log_softmax(gpt.apply(MODEL, params, tokens[..., :-1]))
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[..., 1:, None], axis=-1))


@functools.partial(jax.jit, static_argnames="count")
def adamw(params, first, second, grads, count):
    """The formulas of clipping and AdamW, nothing of optax: parameters, moments and the norm before clipping."""
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, TRAIN.clip / norm), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, second, grads)

    def move(path, p, m, v):
        direction = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)
        decay = 0.1 * p if path[-1].key in ("kernel", "embedding") else 0 * p
        return p - 1e-2 * count / TRAIN.warmup * (direction + decay)

    return jax.tree_util.tree_map_with_path(move, params, first, second), first, second, norm


@pytest.mark.float32
def test_two_updates_are_clipped_adamw_on_the_mean_gradient():
    tokens, state = batch(3, 2), state_of()
    params = state["params"]
    first = second = jax.tree.map(np.zeros_like, params)
    gradient = jax.jit(jax.value_and_grad(mean_cross_entropy))
    for count in (1, 2):
        loss, grads = gradient(params, tokens)
        squares = [
            np.sum(np.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(grads["blocks"])
        ]
        params, first, second, norm = adamw(params, first, second, grads, count)
        assert norm > TRAIN.clip  # or the clip is not tested
        state, metrics = compiled(MODEL, TRAIN)(state, tokens)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)  # before clipping
        np.testing.assert_allclose(metrics["learning_rate"], 1e-2 * count / TRAIN.warmup, rtol=1e-6)
        np.testing.assert_allclose(metrics["block_grad_norms"], np.sqrt(sum(squares)), rtol=1e-5)
        assert int(state["update"]) == count
    # Adam divides rounding noise by itself where the gradient is zero: compare steps of the size of the rate.
    chex.assert_trees_all_close(state["params"], params, rtol=1e-4, atol=2e-5)


@pytest.mark.float32
def test_micro_batches_are_one_big_batch():
    tokens = batch(3, 2)
    whole = dataclasses.replace(TRAIN, micro_batch=6, accumulation=1)
    parts_state, parts = compiled(MODEL, TRAIN)(state_of(), tokens)
    whole_state, one = compiled(MODEL, whole)(state_of(), tokens.reshape(1, 6, -1))
    chex.assert_trees_all_close(parts, one, rtol=1e-5)
    chex.assert_trees_all_close(parts_state["opt"], whole_state["opt"], rtol=1e-4, atol=1e-7)  # both of Adam's moments


def test_weight_decay_acts_on_matrices_alone():
    params = state_of()["params"]
    still = jax.tree.map(jnp.zeros_like, params)
    transform = step.optimizer(TRAIN)
    updates, _ = jax.jit(transform.update)(still, transform.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        value = functools.reduce(lambda tree, key: tree[key.key], path, params)
        matrix = value.ndim - name.startswith("blocks") == 2
        wanted = -0.1 * 1e-2 / 4 * np.asarray(value) if matrix else np.zeros(value.shape)
        np.testing.assert_allclose(update, wanted, rtol=1e-5, err_msg=name)


def test_the_learning_rate_of_every_update():
    rate = step.learning_rate(TrainConfig(updates=2000, warmup=500, lr=3e-4))
    wanted = {1: 3e-4 / 500, 250: 1.5e-4, 500: 3e-4, 1250: 3e-4 * 0.55, 2000: 3e-5}
    for update, value in wanted.items():
        np.testing.assert_allclose(rate(update - 1), value, rtol=1e-5)
    straight = step.learning_rate(TrainConfig(updates=10, warmup=0, lr=1.0))
    first = 0.1 + 0.9 * (1 + np.cos(np.pi / 10)) / 2  # no warm-up: the cosine from the first update
    np.testing.assert_allclose(straight(0), first, rtol=1e-5)


def test_dropout_differs_by_update_and_by_micro_batch_and_by_seed_alone():
    tokens = np.repeat(batch(1, 2), 2, axis=0)
    update = compiled(DROPOUT, dataclasses.replace(TRAIN, accumulation=2))
    state = state_of(DROPOUT)
    frozen = {**state, "update": jnp.ones((), jnp.int32)}  # same parameters, next update
    losses = {
        "first": update(state, tokens)[1]["loss"],
        "again": update(state, tokens)[1]["loss"],
        "next": update(frozen, tokens)[1]["loss"],
        "other seed": update({**state, "key": state_of(DROPOUT, seed=1)["key"]}, tokens)[1]["loss"],
    }
    losses = {name: float(loss) for name, loss in losses.items()}
    assert losses["first"] == losses["again"]
    assert len(set(losses.values())) == 3
    # Twice the same micro-batch with the same mask would be the loss of one: the keys of the two differ.
    keys = jax.random.split(jax.random.fold_in(state["key"], 0), 2)
    one_each = [float(jax.jit(functools.partial(step.loss, DROPOUT))(state["params"], tokens[0], key)) for key in keys]
    assert one_each[0] != one_each[1]
    np.testing.assert_allclose(losses["first"], np.mean(one_each), rtol=1e-5)


def test_seeds_decide_parameters_and_dropout_by_different_keys():
    one, same, other = state_of(seed=1), jax.jit(lambda: step.init_state(MODEL, TRAIN, 1))(), state_of(seed=2)
    chex.assert_trees_all_equal(one["params"], same["params"])
    kernels = [s["params"]["blocks"]["ffn"]["up"]["kernel"] for s in (one, other)]
    assert not np.allclose(*kernels)
    words = [tuple(jax.random.key_data(s["key"]).tolist()) for s in (one, other)]
    assert words[0] != words[1]


@pytest.mark.float32
def test_bfloat16_computes_in_half_and_keeps_masters_and_optimizer_whole():
    config = dataclasses.replace(TRAIN, compute_dtype="bfloat16")
    tokens = batch(3, 2)
    state, metrics = compiled(MODEL, config)(state_of(), tokens)
    masters = {leaf.dtype for part in ("params", "opt") for leaf in jax.tree.leaves(state[part])}
    assert masters == {np.dtype(np.float32), np.dtype(np.int32)}
    exact = compiled(MODEL, TRAIN)(state_of(), tokens)[1]
    assert metrics["loss"].dtype == np.float32
    assert 0 < abs(float(metrics["loss"] - exact["loss"])) < 0.02 * float(exact["loss"])
    np.testing.assert_allclose(metrics["grad_norm"], exact["grad_norm"], rtol=0.05)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_is_the_same_update(remat):
    tokens = batch(3, 2)
    one = compiled(MODEL, TRAIN)(state_of(), tokens)[1]
    other = compiled(MODEL, dataclasses.replace(TRAIN, remat=remat))(state_of(), tokens)[1]
    chex.assert_trees_all_close(one, other, rtol=1e-5)


@pytest.mark.float32
@pytest.mark.parametrize(
    ("compute_dtype", "most"),  # 5 positions by two with a rest, and one by one
    [("float32", 2 * 3 * MODEL.vocab_size), ("bfloat16", 2 * MODEL.vocab_size)],
)
def test_the_loss_by_chunks_of_positions_is_that_of_all_at_once(monkeypatch, compute_dtype, most):
    params, tokens = state_of()["params"], batch(2)

    def value_and_grad(params):
        return jax.value_and_grad(step.loss, argnums=1)(MODEL, params, tokens, compute_dtype=compute_dtype)

    def traced():
        return jax.jit(lambda params: value_and_grad(params)).trace(params)

    at_once = traced()
    monkeypatch.setattr(step, "CHUNK_LOGITS", most)
    by_chunks = traced()
    whole, parts = (program.lower().compile()(params) for program in (at_once, by_chunks))
    # Half-precision gradients of the head are added in float32 chunk by chunk, but in bfloat16 within one.
    tolerance = 1e-5 if compute_dtype == "float32" else 2e-2
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    for found, wanted in zip(jax.tree.leaves(parts[1]), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())
    assert "f32[2,5,13]" in str(at_once.jaxpr)
    assert "f32[2,5,13]" not in str(by_chunks.jaxpr)


def test_the_loss_holds_a_quarter_of_a_gigabyte_of_logits_at_most():
    sizes = {(257, 16): 2**13, (50257, 4): 256, (50257, 16): 64, (2**26, 1): 1, (2**26, 8): 1}
    assert {key: step.chunk_positions(*key) for key in sizes} == sizes


def test_the_state_is_donated_to_its_update():
    state = jax.tree.map(jnp.copy, state_of())
    jax.jit(step.make_update(MODEL, TRAIN), donate_argnums=0)(state, batch(3, 2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))


def test_a_run_compiles_its_update_once():
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(step.make_update(DROPOUT, TRAIN), n=1), donate_argnums=0)
    state = jax.tree.map(jnp.copy, state_of(DROPOUT))
    for count in range(3):
        state, _ = update(state, batch(3, 2, seed=count))
    assert int(state["update"]) == 3
