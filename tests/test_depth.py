"""Depth on the model: the figures against dense Jacobians and against autodiff of the whole network."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

from analysis import depth, records
from analysis.probes import PAIR_COLUMNS
from models import ModelConfig, gpt
from sens import products

SMALL = ModelConfig(vocab_size=11, n_layer=2, n_head=2, d_model=4, d_ff=6, context=4, init_std=0.7)
DEPTH, TOKENS = 4, 4
KEY, PROBES = jax.random.key(0), 200


@functools.cache
def made(model, dtype=np.float64):
    """Parameters whose every array is random, so that no norm is at its initial values, and three sequences."""
    leaves, tree = jax.tree.flatten(jax.jit(gpt.init, static_argnums=0)(model, KEY))
    rng = np.random.default_rng(1)
    shaken = [jnp.asarray(leaf + 0.2 * rng.normal(size=leaf.shape), dtype) for leaf in map(np.asarray, leaves)]
    tokens = rng.integers(0, model.vocab_size, (3, model.context + 1))
    return jax.tree.unflatten(tree, shaken), jnp.asarray(tokens, jnp.int32)


def post(model=SMALL):
    return dataclasses.replace(model, placement="post")


@functools.cache
def jitted(function, model, **options):
    return jax.jit(functools.partial(function, model, **options))


def states(model):
    """The stream of all sequences that enters each block."""
    params, tokens = made(model)
    return gpt.hidden_states(model, params, tokens[:, :-1])[:-1]


def sublayers(model, params):
    """The model's own sublayer functions, in order."""
    for layer in range(model.n_layer):
        block = gpt.layer(params, layer)
        yield functools.partial(gpt.attention_sublayer, model, block)
        yield functools.partial(gpt.ffn_sublayer, model, block)


@functools.cache
def dense_products(model, sequence=0):
    """The product from every depth to the output on one sequence, as matrices, from the model's sublayers alone."""
    params, tokens = made(model)

    @jax.jit
    def factors(x):
        found = []
        for sublayer in sublayers(model, params):
            found.append(jax.jacfwd(sublayer)(x).reshape(x.size, x.size))
            x = sublayer(x)
        return found

    matrices = [np.asarray(matrix) for matrix in factors(gpt.embed(model, params, tokens[sequence, :-1]))]
    above = [np.eye(len(matrices[0]))]
    for matrix in reversed(matrices):
        above.append(above[-1] @ matrix)
    return above[:0:-1]


VARIANTS = {
    "pre": SMALL,
    "post": post(),
    "rms rope grouped swiglu": dataclasses.replace(
        SMALL, norm="rms", positions="rope", n_kv_head=1, ffn="swiglu", qkv_bias=True, head="untied"
    ),
    "post rms both ways": dataclasses.replace(post(), norm="rms", causal=False, ffn_bias=True, out_bias=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_chain_is_the_models_forward_pass_in_evaluation_mode(name):
    model = VARIANTS[name]
    params, tokens = made(model)
    assert model.dropout > 0
    linked = depth.link(model, params, tokens[:, :-1])
    states = gpt.hidden_states(model, params, tokens[:, :-1])
    np.testing.assert_allclose(linked.points[::2], states[:-1], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(linked.end, states[-1], rtol=1e-12, atol=1e-13)
    x = linked.points[0]
    for k, sublayer in enumerate(sublayers(model, params)):
        np.testing.assert_allclose(linked.points[k], x, rtol=1e-12, atol=1e-13)
        x = sublayer(x)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_at_every_depth_is_that_of_the_whole_network(name):
    model = VARIANTS[name]
    params, tokens = made(model)

    @jax.jit
    def gradients(shifts):
        def loss(shifts):
            x = gpt.embed(model, params, tokens[:, :-1])
            for shift, sublayer in zip(shifts, sublayers(model, params), strict=True):
                x = sublayer(x + shift)
            log_p = jax.nn.log_softmax(gpt.logits(model, params, x))
            return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

        return jax.grad(loss)(shifts)

    @jax.jit
    def pulled(params):
        linked = depth.link(model, params, tokens[:, :-1])
        at_end = jax.grad(functools.partial(depth.loss, model, params))(linked.end, tokens[:, 1:])
        return products.pull_terms(linked, at_end, 0, DEPTH, lambda _, terms: terms.total)[1]

    linked = depth.link(model, params, tokens[:, :-1])
    expected = gradients(jnp.zeros_like(linked.points))
    np.testing.assert_allclose(pulled(params), expected, rtol=1e-10, atol=1e-14)
    if name in ("pre", "post"):
        figures = jitted(depth.measure_depth, model, probes=PROBES)(params, tokens, KEY)
        np.testing.assert_allclose(figures["gradient"], [jnp.linalg.norm(g) for g in expected], rtol=1e-10)


@pytest.mark.parametrize("model", [SMALL, post()], ids=["pre", "post"])
def test_figures_of_the_products_match_dense_ones_within_sampling_error(model):
    params, tokens = made(model)
    figures = jitted(depth.measure_depth, model, probes=PROBES)(params, tokens, KEY)
    size = TOKENS * model.d_model
    dense = np.asarray([dense_products(model, sequence) for sequence in range(3)])  # (sequence, depth, out, in)
    gain = np.sqrt(np.sum(dense**2, axis=(0, 2, 3)) / (3 * size))
    alignment = np.trace(dense, axis1=2, axis2=3).sum(axis=0) / (3 * size)
    for name, exact in (("gain", gain), ("alignment", alignment)):
        error, deviation = np.asarray(figures[name]) - exact, np.asarray(figures[f"{name}_se"])
        assert (np.abs(error) < 4 * deviation).all(), name
        assert (deviation < 0.05 * gain).all(), name
    np.testing.assert_allclose(sum(figures[f"share_{term}"] for term in records.TERMS), 1, rtol=1e-10)
    np.testing.assert_allclose(sum(figures[f"gradient_share_{term}"] for term in records.TERMS), 1, rtol=1e-10)
    last = jax.tree.map(lambda figure: figure[-1], figures)  # one sublayer: no path enters two branches
    np.testing.assert_allclose([last["rest"], last["gradient_rest"]], 0, atol=1e-13)
    np.testing.assert_allclose(last["trace"], last["alignment"], atol=5 * float(last["alignment_se"]))
    assert ((figures["identity_share"] >= 0) & (figures["identity_share"] <= 1)).all()


@pytest.mark.parametrize("model", [SMALL, post()], ids=["pre", "post"])
def test_singular_values_and_block_norm_of_a_pair_match_dense_ones(model):
    params, tokens = made(model)
    size = TOKENS * model.d_model
    pair, block = jitted(depth.measure_pair, model), jitted(depth.measure_block_norm, model)
    for start in (0, 2):
        matrix = dense_products(model)[start]
        found = pair(params, tokens[0, :-1], KEY, start, DEPTH)
        exact = np.linalg.svd(matrix, compute_uv=False)
        np.testing.assert_allclose([found[f"sigma_{i}"] for i in range(1, 5)], exact[:4], rtol=1e-6)
        rows = matrix.reshape(TOKENS, model.d_model, TOKENS, model.d_model)[-1]  # (out, token, in)
        norm = block(params, tokens[0, :-1], KEY, start, DEPTH)
        assert norm["block_lower"] <= norm["block_upper"] <= 1.06 * norm["block_lower"]
        assert np.linalg.norm(rows.reshape(model.d_model, size), 2) <= norm["block_upper"]
        assert norm["block_lower"] <= sum(np.linalg.norm(rows[:, j], 2) for j in range(TOKENS)) * (1 + 1e-9)


def test_the_layer_norm_only_term_stays_under_the_corollary():
    model = post()
    params, tokens = made(model)
    linked = depth.link(model, params, tokens[0, :-1])
    held = products.bare_chain(linked)
    a = np.asarray([gpt.norm_gains(model, gpt.layer(params, k), linked.points[2 * k]) for k in range(2)]).reshape(4, -1)
    jacobian = jax.jit(lambda start, stop: jax.jacfwd(lambda x: products.push(held, x, start, stop))(linked.end))
    for start, stop in [(0, 4), (1, 3), (3, 4)]:
        bare = np.asarray(jacobian(start, stop))
        exact = np.linalg.norm(bare.reshape(16, 16), 2)
        found = jitted(depth.measure_pair, model)(params, tokens[0, :-1], KEY, start, stop)
        np.testing.assert_allclose(found["bare_norm"], exact, rtol=1e-6)
        np.testing.assert_allclose(found["bound"], a[start:stop].prod(axis=0).max(), rtol=1e-12)
        np.testing.assert_allclose(found["bound_loose"], a[start:stop].max(axis=1).prod(), rtol=1e-12)
        assert exact <= found["bound"] <= found["bound_loose"] * (1 + 1e-12)
    a = np.asarray([gpt.norm_gains(model, gpt.layer(params, k), x) for k, x in enumerate(states(model))]).reshape(4, -1)
    figures = jitted(depth.measure_depth, model, probes=PROBES)(params, tokens, KEY)
    np.testing.assert_allclose(figures["a_max"], a.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(figures["a_mean"], a.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(figures["bound"], [a[k:].prod(axis=0).max() for k in range(4)], rtol=1e-12)
    np.testing.assert_allclose(figures["bound_loose"], [a[k:].max(axis=1).prod() for k in range(4)], rtol=1e-12)


@pytest.mark.float32
def test_without_branches_pre_norm_is_the_identity_and_post_norm_contracts(dtype):
    for model in (SMALL, post()):
        params, tokens = made(model, dtype)
        zeroed = jax.tree.map(jnp.copy, params)
        for part in (zeroed["blocks"]["attention"]["out"], zeroed["blocks"]["ffn"]["down"]):
            part["kernel"] = jnp.zeros_like(part["kernel"])
        figures = jitted(depth.measure_depth, model, probes=PROBES)(zeroed, tokens, KEY)
        np.testing.assert_array_equal(figures["first"], 0)
        np.testing.assert_array_equal(figures["gradient_rest"], 0)
        np.testing.assert_allclose(figures["share_bare"], 1, rtol=1e-6)
        if model.placement == "pre":
            for name in ("identity_share", "trace", "gain", "alignment", "bare"):
                np.testing.assert_allclose(figures[name], 1, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(figures["gradient"], figures["gradient"][-1], rtol=1e-6)
        else:
            assert (figures["identity_share"] < 0.9).all()
            assert (figures["bare"] <= figures["bound"] * (1 + 1e-6)).all()


@pytest.mark.float32
def test_gains_whose_squares_underflow_are_still_gains(dtype):
    model = post()
    params, tokens = made(model, dtype)
    small = jax.tree.map(jnp.copy, params)
    for part in (small["blocks"]["norm_attention"], small["blocks"]["norm_ffn"]):
        part["scale"] = 1e-8 * part["scale"]
    figures, ordinary = (jitted(depth.measure_depth, model, probes=PROBES)(p, tokens, KEY) for p in (small, params))
    # At the top one norm's gamma has shrunk (its bias, so the stream, has not), below it ever more of them.
    assert (np.diff(np.log10(figures["gain"])) > 4).all()
    assert 0 < figures["gain"][0] < 1e-22
    assert (figures["gradient"] > 0).all()
    for term in records.TERMS[:2]:
        assert np.isfinite(figures[f"share_{term}"]).all()
    assert (ordinary["gain"] > 1e-3).all()


def test_a_column_has_the_figures_of_every_start():
    model = SMALL
    params, tokens = made(model)
    column = jitted(depth.measure_column, model, probes=PROBES)(params, tokens[:, :-1], KEY, 3)
    exact = np.zeros(3)
    for sequence in range(3):
        to_output, above = dense_products(model, sequence), dense_products(model, sequence)[3]
        for start in range(3):
            exact[start] += np.sum(np.linalg.solve(above, to_output[start]) ** 2) / (3 * TOKENS * model.d_model)
    error = np.asarray(column["gain"])[:3] - np.sqrt(exact)
    assert (np.abs(error) < 4 * np.asarray(column["gain_se"])[:3]).all()
    assert column.keys() <= PAIR_COLUMNS.keys()


def test_records_have_every_column_in_order():
    for model in (SMALL, post()):
        params, tokens = made(model)
        figures = jax.device_get(jitted(depth.measure_depth, model, probes=PROBES)(params, tokens, KEY))
        lines = list(depth.record_depth(7, {**figures, "gradient_share_rest": np.array([np.nan, 0.5, 0.5, 0.5])}))
        table = pl.DataFrame(lines, schema=dict(records.DEPTH_COLUMNS), strict=True)
        assert table["sublayer"].to_list() == [0, 1, 2, 3]
        assert table["kind"].to_list() == ["attention", "ffn"] * 2
        assert set(table["update"]) == {7}
        assert table["gradient_share_rest"].to_list() == [None, 0.5, 0.5, 0.5]
        nulls = {name for name in table.columns if table[name].null_count()} - {"gradient_share_rest"}
        assert nulls == ({"bound", "bound_loose"} if model.placement == "pre" else set())
        column = jax.device_get(jitted(depth.measure_column, model, probes=PROBES)(params, tokens[:, :-1], KEY, DEPTH))
        pair = jax.device_get(jitted(depth.measure_pair, model)(params, tokens[0, :-1], KEY, 2, DEPTH))
        lines = list(depth.record_pairs(7, DEPTH, column, {2: pair}))
        table = pl.DataFrame(lines, schema=dict(PAIR_COLUMNS), strict=True)
        assert table["start"].to_list() == [0, 1, 2, 3]
        assert table["sigma_1"].is_not_null().to_list() == [False, False, True, False]


@pytest.mark.parametrize(("whole", "count"), [(2, 13), (4, 13), (72, 13), (72, 4), (24, 7)])
def test_boundaries_span_the_depth_in_whole_blocks(whole, count):
    found = depth.boundaries(whole, count)
    assert found[0] == 0
    assert found[-1] == whole
    assert len(found) == min(count, whole // 2 + 1)
    assert list(found) == sorted(set(found))
    assert all(k % 2 == 0 for k in found)


def test_what_cannot_be_measured_is_refused():
    params, tokens = made(SMALL)
    with pytest.raises(ValueError, match="at least 2, for a standard error; got 1"):
        depth.measure_depth(SMALL, params, tokens, KEY, probes=1)
    with pytest.raises(ValueError, match="6 tokens are more than the model's 4"):
        depth.measure_depth(SMALL, params, jnp.zeros((1, 7), jnp.int32), KEY)
    with pytest.raises(ValueError, match="got start 0 and stop 5"):
        depth.measure_pair(SMALL, params, tokens[0, :-1], KEY, 0, 5)
    with pytest.raises(ValueError, match=r"at least one token is wanted, got shape \(1, 0\)"):
        depth.link(SMALL, params, jnp.zeros((1, 0), jnp.int32))
    wider = dataclasses.replace(SMALL, d_ff=2 * SMALL.d_ff)
    with pytest.raises(ValueError, match=r"another configuration: blocks/ffn/down/kernel is .* is wanted"):
        depth.link(wider, params, tokens[:, :-1])
