"""The transformer: its definition against plain NumPy, causality, depth as a scan, dropout, initialisation."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig, gpt
from models.layers import Norm, dropout, gelu
from tests import reference
from train.presets import PRESETS

SMALL = ModelConfig(
    vocab_size=11, n_layer=3, n_head=2, d_model=8, d_ff=12, context=7, dropout=0.25, tau=0.7, init_std=0.3
)
SUBLAYERS = {"block": gpt.block, "attention": gpt.attention_sublayer, "ffn": gpt.ffn_sublayer}


@pytest.fixture(params=["pre", "post"])
def config(request) -> ModelConfig:
    return dataclasses.replace(SMALL, placement=request.param)


@functools.cache
def jitted(f, config: ModelConfig, **options):
    """One compiled program for all tests that call it with the same shapes."""
    return jax.jit(functools.partial(f, config, **options))


@functools.cache
def random_params(config: ModelConfig, dtype=np.float32):
    """Initial parameters, with LayerNorm parameters that are not the trivial ones."""
    params = jitted(gpt.init, config)(jax.random.key(0))
    rng = np.random.default_rng(0)

    def stir(path, leaf):
        leaf = np.asarray(leaf, dtype)
        return leaf + 0.3 * rng.normal(size=leaf.shape).astype(dtype) if path[-1].key in ("scale", "bias") else leaf

    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(stir, params))


def stream(config: ModelConfig, dtype, *leading: int, seed: int = 1):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=(*leading, config.context, config.d_model)).astype(dtype)
    )


def tokens_of(config: ModelConfig, *shape: int):
    return jnp.asarray(np.random.default_rng(2).integers(0, config.vocab_size, shape), jnp.int32)


def as_numpy(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def tolerance(dtype) -> float:
    return 1e-11 if dtype == np.float64 else 3e-5


# What it computes.


@pytest.mark.float32
def test_logits_equal_the_written_definition(config, dtype):
    params, tokens = random_params(config, dtype), tokens_of(config, 2, 3, config.context)
    found = jitted(gpt.apply, config)(params, tokens)
    assert found.dtype == dtype
    assert found.shape == (2, 3, config.context, config.vocab_size)
    wanted = [[reference.logits(config, as_numpy(params), row) for row in part] for part in np.asarray(tokens)]
    np.testing.assert_allclose(found, np.array(wanted), rtol=tolerance(dtype), atol=tolerance(dtype))


@pytest.mark.float32
def test_each_part_equals_the_written_definition(config, dtype):
    params = gpt.layer(random_params(config, dtype), 1)
    x = stream(config, dtype)
    plain, x64, eps = as_numpy(params), np.asarray(x, np.float64), config.ln_eps
    z, out, y_attention, y_ffn = reference.sublayers(config, plain, x64)
    seen = reference.layer_norm(plain["norm_attention"], x64, eps) if config.placement == "pre" else x64

    def call(f, x):
        return jitted(f, config)(params, x)

    gain_attention, gain_ffn = jitted(gpt.norm_gains, config)(params, x)
    pairs = {
        "attention sublayer": (call(gpt.attention_sublayer, x), z),
        "ffn sublayer": (call(gpt.ffn_sublayer, jnp.asarray(z, dtype)), out),
        "block": (call(gpt.block, x), out),
        "attention": (call(gpt.attention, x), reference.attention(config, plain["attention"], x64)),
        "ffn": (call(gpt.ffn, x), reference.ffn(plain["ffn"], x64)),
        "norm_attention": (call(gpt.norm_attention, x), reference.layer_norm(plain["norm_attention"], x64, eps)),
        "norm_ffn": (call(gpt.norm_ffn, x), reference.layer_norm(plain["norm_ffn"], x64, eps)),
        "attention input": (call(gpt.attention_input, x), seen),
        "attention rows": (call(gpt.attention_weights, x), reference.attention_rows(config, plain["attention"], seen)),
        "gain attention": (
            gain_attention,
            np.abs(plain["norm_attention"]["scale"]).max() / np.sqrt(y_attention.var(-1) + eps),
        ),
        "gain ffn": (gain_ffn, np.abs(plain["norm_ffn"]["scale"]).max() / np.sqrt(y_ffn.var(-1) + eps)),
    }
    for name, (found, wanted) in pairs.items():
        assert found.dtype == dtype, name
        np.testing.assert_allclose(found, wanted, rtol=tolerance(dtype), atol=tolerance(dtype), err_msg=name)


@pytest.mark.float32
def test_the_sublayers_compose_to_the_block_and_the_blocks_to_the_scan(config):
    params, x = random_params(config), stream(config, np.float32, 2)
    loop, entering = x, []
    for index in range(config.n_layer):
        entering.append(loop)
        one = gpt.layer(params, index)
        after = jitted(gpt.block, config)(one, loop)
        composed = jitted(gpt.ffn_sublayer, config)(one, jitted(gpt.attention_sublayer, config)(one, loop))
        chex.assert_trees_all_close(composed, after, rtol=1e-6, atol=1e-6)
        loop = after
    collect = functools.partial(gpt.scan_blocks, collect=lambda block_params, x: (x, block_params["norm_ffn"]["bias"]))
    out, collected = jax.jit(functools.partial(collect, config))(params, x)
    chex.assert_trees_all_close(out, loop, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(collected[0], jnp.stack(entering), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(collected[1], params["blocks"]["norm_ffn"]["bias"])


def test_the_program_does_not_grow_with_depth(config):
    def equations(n_layer: int) -> int:
        deep = dataclasses.replace(config, n_layer=n_layer)
        params = jax.eval_shape(functools.partial(gpt.init, deep), jax.random.key(0))
        jaxpr = jax.make_jaxpr(jax.grad(lambda p, x: jnp.sum(gpt.apply(deep, p, x))))(params, tokens_of(deep, 1, 4))
        return str(jaxpr).count(" = ")

    assert equations(2) == equations(20)


def test_hidden_states_run_from_the_embedding_to_what_the_head_reads(config):
    params, tokens = random_params(config), tokens_of(config, 2, 5)
    states = jitted(gpt.hidden_states, config)(params, tokens)
    assert states.shape == (config.n_layer + 1, 2, 5, config.d_model)
    chex.assert_trees_all_equal(states[0], jitted(gpt.embed, config)(params, tokens))
    chex.assert_trees_all_close(
        states[2], jitted(gpt.block, config)(gpt.layer(params, 1), states[1]), rtol=1e-5, atol=1e-5
    )
    head, whole = jitted(gpt.logits, config)(params, states[-1]), jitted(gpt.apply, config)(params, tokens)
    chex.assert_trees_all_close(head, whole, rtol=1e-5, atol=1e-5)


def test_rematerialisation_changes_nothing_but_what_is_kept(config):
    params, tokens, key = random_params(config), tokens_of(config, 2, 5), jax.random.key(3)

    def gradient(remat):
        return jax.jit(
            jax.value_and_grad(lambda p: jnp.mean(jnp.square(gpt.apply(config, p, tokens, key, remat=remat))))
        )

    def products(remat):
        """Products of matrices in the program: those of one block, as blocks are scanned, and of the head."""
        return str(jax.make_jaxpr(gradient(remat))(params)).count("dot_general[")

    chex.assert_trees_all_close(gradient("full")(params), gradient("none")(params), rtol=1e-4, atol=1e-6)
    # Forward 8 in a block and 1 in the head, each with 2 derivatives. Again: `dots` the two between activations, `full`
    # all 8, but without a norm after it not the last.
    again = {"none": 0, "dots": 2, "full": 7 if config.placement == "pre" else 8}
    assert {remat: products(remat) for remat in ("none", "dots", "full")} == {r: 27 + n for r, n in again.items()}


# Causality.


@pytest.mark.float32
def test_no_position_sees_a_later_one_and_every_one_sees_all_before(config):
    params, x = random_params(config), stream(config, np.float32)

    def f(x):
        return gpt.logits(config, params, gpt.scan_blocks(config, params, x)[0])

    jacobian = jax.jit(jax.jacrev(f))(x)  # (position out, v, position in, d)
    sizes = np.abs(np.asarray(jacobian)).max(axis=(1, 3))
    later = np.triu_indices(config.context, 1)
    assert (sizes[later] == 0).all()
    assert (sizes[np.tril_indices(config.context)] > 1e-6).all()


@pytest.mark.float32
def test_a_later_token_changes_no_earlier_logit(config):
    params, tokens = random_params(config), tokens_of(config, 2, 5)
    changed = tokens.at[0, 3].set((tokens[0, 3] + 1) % config.vocab_size)
    before, after = (np.asarray(jitted(gpt.apply, config)(params, t)[0]) for t in (tokens, changed))
    assert (before[:3] == after[:3]).all()
    assert (np.abs(before[3:] - after[3:]).max(axis=-1) > 1e-6).all()


@pytest.mark.float32
def test_attention_rows_are_distributions_on_the_causal_support(config, dtype):
    rows = np.asarray(
        jitted(gpt.attention_weights, config)(gpt.layer(random_params(config, dtype), 0), 5 * stream(config, dtype, 2))
    )
    assert rows.shape == (2, config.n_head, config.context, config.context)
    np.testing.assert_allclose(rows.sum(-1), 1, rtol=8 * np.finfo(dtype).eps)
    support = np.tril(np.ones((config.context, config.context), bool))
    assert (rows[..., ~support] == 0).all()
    assert (rows[..., support] > 0).all()


# Derivatives.


@pytest.mark.parametrize("name", SUBLAYERS)
def test_forward_derivatives_equal_central_differences_and_the_transpose(config, name):
    params = gpt.layer(random_params(config, np.float64), 1)
    f = functools.partial(jitted(SUBLAYERS[name], config), params)
    x, v, w = (stream(config, np.float64, 2, seed=seed) for seed in (1, 2, 3))
    step = 1e-5
    _, derivative = jax.jvp(f, (x,), (v,))
    differences = (f(x + step * v) - f(x - step * v)) / (2 * step)
    np.testing.assert_allclose(derivative, differences, rtol=1e-7, atol=1e-8)
    (cotangent,) = jax.vjp(f, x)[1](w)
    np.testing.assert_allclose(jnp.vdot(w, derivative), jnp.vdot(cotangent, v), rtol=1e-11)


def test_the_head_is_the_embedding_so_gradients_reach_it_from_both_ends(config):
    params, tokens = random_params(config, np.float64), tokens_of(config, 2, 5)

    def split(first, last):  # the embedding's two uses, apart
        def with_embedding(embedding):
            return {**params, "ends": {**params["ends"], "tokens": {"embedding": embedding}}}

        x = gpt.embed(config, with_embedding(first), tokens)
        return jnp.mean(jnp.square(gpt.logits(config, with_embedding(last), gpt.scan_blocks(config, params, x)[0])))

    embedding = params["ends"]["tokens"]["embedding"]
    first, last = jax.jit(jax.grad(split, argnums=(0, 1)))(embedding, embedding)
    whole = jax.jit(jax.grad(lambda p: jnp.mean(jnp.square(gpt.apply(config, p, tokens)))))(params)
    assert jnp.linalg.norm(first) > 1e-3
    assert jnp.linalg.norm(last) > 1e-3
    chex.assert_trees_all_close(whole["ends"]["tokens"]["embedding"], first + last, rtol=1e-10, atol=1e-14)


# Initialisation.


def test_initial_statistics(config):
    wide = dataclasses.replace(config, vocab_size=300, d_model=64, d_ff=256, context=200, n_layer=4, init_std=0.02)
    params = jitted(gpt.init, wide)(jax.random.key(0))
    residual = 0.02 / np.sqrt(2 * wide.n_layer)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert leaf.dtype == np.float32, name
        values = np.asarray(leaf, np.float64)
        if name.endswith("scale"):
            assert (values == 1).all(), name
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        else:
            std = residual if name.endswith(("out/kernel", "down/kernel")) else 0.02
            error = 1 / np.sqrt(
                values.size
            )  # relative standard error of a mean is this; of a standard deviation 0.71 of it
            np.testing.assert_allclose(values.std(), std, rtol=5 * error, err_msg=name)
            assert abs(values.mean()) < 5 * std * error, name
    kernels = params["blocks"]["attention"]["query"]["kernel"].reshape(wide.n_layer, -1)
    assert np.abs(np.corrcoef(kernels) - np.eye(wide.n_layer)).max() < 0.1  # every layer has its own


def test_bias_stands_in_layer_norms_alone_and_post_has_no_final_one(config):
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    norms = ["blocks/norm_attention", "blocks/norm_ffn", *(["ends/norm_final"] if config.placement == "pre" else [])]
    assert {name for name in names if name.endswith("bias")} == {f"{norm}/bias" for norm in norms}


def test_the_paper_model_has_773_615_360_parameters():
    config = PRESETS["paper"].model
    v, t, n, d, f = config.vocab_size, config.context, config.n_layer, config.d_model, config.d_ff
    assert (v, t, n, d, f, config.n_head, config.d_head) == (50257, 1024, 36, 1280, 5120, 20, 64)
    assert gpt.count_parameters(config) == v * d + t * d + n * (4 * d * d + 2 * d * f + 4 * d) + 2 * d == 773_615_360
    assert gpt.count_parameters(dataclasses.replace(config, placement="post")) == 773_615_360 - 2 * d


# Dropout.


@pytest.mark.float32
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_mean_and_drops_at_its_rate(rate):
    n = 400_000
    kept = np.asarray(dropout(jnp.full(n, 2.0, np.float32), rate, jax.random.key(0)))
    share = (kept == 0).mean()
    assert abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / n)
    np.testing.assert_allclose(kept[kept != 0], 2 / (1 - rate), rtol=1e-6)


def test_without_a_key_or_a_rate_nothing_is_dropped(config):
    params, tokens = random_params(config), tokens_of(config, 2, 5)
    off = dataclasses.replace(config, dropout=0.0)
    key = jax.random.key(0)
    evaluated = jitted(gpt.apply, config)(params, tokens)
    chex.assert_trees_all_equal(evaluated, jitted(gpt.apply, off)(params, tokens))
    chex.assert_trees_all_close(evaluated, jitted(gpt.apply, off)(params, tokens, key), rtol=1e-6)
    assert not np.allclose(evaluated, jitted(gpt.apply, config)(params, tokens, key))


def test_dropout_acts_on_the_embedding_sum(config):
    params, tokens = random_params(config), tokens_of(config, 8, config.context)
    clean, dropped = (np.asarray(jitted(gpt.embed, config)(params, tokens, key)) for key in (None, jax.random.key(0)))
    kept = dropped != 0
    assert abs(kept.mean() - (1 - config.dropout)) < 5 * np.sqrt(config.dropout / kept.size)
    np.testing.assert_allclose(dropped[kept], clean[kept] / (1 - config.dropout), rtol=1e-6)


def test_dropout_on_attention_weights_is_unbiased_and_leaves_the_output_whole():
    config = dataclasses.replace(SMALL, dropout=0.4)
    params, u = gpt.layer(random_params(config), 0), stream(config, np.float32)
    attention = gpt._block(config, params).attention
    draws = np.asarray(jax.jit(jax.vmap(lambda key: attention(u, key)))(jax.random.split(jax.random.key(0), 4000)))
    error = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - np.asarray(jitted(gpt.attention, config)(params, u))) < 6 * error + 1e-6).all()
    assert (draws[:, 2:] == 0).mean() < 0.05  # zeros come only from rows that lost all their weights


def test_dropout_on_the_ffn_output_differs_by_layer_and_by_key():
    config = dataclasses.replace(SMALL, placement="pre", dropout=0.25)
    params = random_params(config)
    blocks = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), params["blocks"])  # every layer the same
    blocks["norm_ffn"]["scale"] = jnp.zeros_like(blocks["norm_ffn"]["scale"])  # the FFN's output no longer depends on x
    blocks["attention"]["out"]["kernel"] = jnp.zeros_like(blocks["attention"]["out"]["kernel"])

    def masks(key):
        x = jnp.zeros((64, config.d_model), jnp.float32)
        scan = functools.partial(gpt.scan_blocks, config, collect=lambda _, x: x)
        out, entering = scan({"blocks": blocks}, x, key)
        return np.asarray(jnp.diff(jnp.concatenate([entering, out[None]]), axis=0)) != 0

    one, two = masks(jax.random.key(0)), masks(jax.random.key(1))
    assert abs(one.mean() - 0.75) < 0.05
    independent = 2 * 0.25 * 0.75  # share of entries in which two independent masks differ
    for a, b in [(one[0], one[1]), (one[1], one[2]), (one[0], two[0])]:
        assert abs((a != b).mean() - independent) < 0.1


# Precision and limits.


@pytest.mark.float32
def test_bfloat16_follows_float32(config):
    params, tokens = random_params(config), tokens_of(config, 2, 5)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    apply, key = jitted(gpt.apply, config), jax.random.key(0)
    found, wanted = apply(half, tokens, key), apply(params, tokens, key)
    assert found.dtype == np.float32
    error = jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)
    assert 0 < error < 0.05
    states = jax.eval_shape(functools.partial(gpt.hidden_states, config), half, tokens)
    assert states.dtype == jnp.bfloat16
    rows = jax.eval_shape(functools.partial(gpt.attention_weights, config), gpt.layer(half, 0), states)
    assert rows.dtype == np.float32


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gelu_and_norms_of_bfloat16_are_those_of_float32_rounded_once(norm):
    x = jax.random.normal(jax.random.key(0), (50, SMALL.d_model), jnp.bfloat16) * jnp.bfloat16(3)
    for approximate in (False, True):
        whole = gelu(x.astype(jnp.float32), approximate=approximate)
        np.testing.assert_array_equal(gelu(x, approximate=approximate), whole.astype(jnp.bfloat16))
    module = Norm(dataclasses.replace(SMALL, norm=norm))
    module.scale[...] = jnp.linspace(0.5, 2, SMALL.d_model, dtype=jnp.float32)
    whole = module(x.astype(jnp.float32))
    np.testing.assert_array_equal(module(x), whole.astype(jnp.bfloat16))


def test_more_tokens_than_positions_are_refused(config):
    with pytest.raises(ValueError, match="8 tokens are more than the model's 7 positions"):
        gpt.apply(config, random_params(config), tokens_of(config, 1, 8))


@pytest.mark.parametrize("token", [-1, 11])
def test_a_token_outside_the_vocabulary_is_named(token):
    config = ModelConfig(vocab_size=11, n_layer=1, n_head=1, d_model=4, d_ff=4, context=3)
    with pytest.raises(ValueError, match=rf"token {token} at \[0, 2\]: ids from 0 to 10 are wanted"):
        gpt.apply(config, random_params(config), jnp.array([[0, 10, token]]))
