"""Attention statistics: the quantities of every row against `sens` and plain NumPy, and their summaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sens
from analysis import attention, records
from models import gpt
from tests.test_gpt import SMALL, as_numpy, jitted, random_params, tokens_of


@pytest.mark.parametrize(
    ("n_layer", "layers"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (0, 1, 2, 3)), (36, (0, 9, 18, 27, 35))]
)
def test_the_protocols_layers_are_sampled_each_once(n_layer, layers):
    assert attention.sampled_layers(n_layer) == layers


@pytest.mark.float32
def test_row_quantities_are_those_of_the_support_alone(rng, dtype):
    """A masked row and the same row without its masked entries give the same numbers."""
    n, support = 9, 6
    p = rng.dirichlet(np.full(support, 0.5), size=20).astype(dtype)
    padded = np.concatenate([p, np.zeros((20, n - support), dtype)], axis=-1)
    where = jnp.arange(n)[None, :] < support
    measure = jax.jit(attention.row_quantities)
    masked, plain = measure(jnp.asarray(padded), where), measure(jnp.asarray(p))
    assert set(masked) == set(records.QUANTITIES)
    accuracy = 2e-6 if dtype == np.float32 else 1e-12
    exact = p.astype(np.float64) / p.astype(np.float64).sum(-1, keepdims=True)
    wanted = {
        "entropy": -(exact * np.log(exact)).sum(-1) / np.log(support),
        "p_max": exact.max(-1),
        "prefix": np.array([_prefix(row) for row in exact]),
    }
    for name in records.QUANTITIES:
        np.testing.assert_allclose(masked[name], plain[name], rtol=accuracy, atol=accuracy, err_msg=name)
        if name in wanted:
            np.testing.assert_allclose(masked[name], wanted[name], rtol=10 * accuracy, err_msg=name)
    theta = np.array([float(sens.theta_exact(row)) for row in exact])
    assert (np.asarray(masked["lower"], np.float64) <= theta + 1e-12).all()
    assert (np.asarray(masked["upper"], np.float64) >= theta - 1e-12).all()
    assert (np.asarray(masked["prefix"], np.float64) <= theta + 10 * accuracy).all()
    np.testing.assert_allclose(masked["width"], np.subtract(masked["upper"], masked["lower"]), atol=1e-7)


def _prefix(p):
    sums = np.cumsum(np.sort(p)[::-1])
    best = sums[np.argmin(np.abs(sums - 0.5))]
    return 4 * best * (1 - best)


@pytest.mark.float32
def test_a_support_of_one_has_no_entropy_and_nothing_else_is_missing(dtype):
    p = jnp.asarray([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype)
    found = jax.jit(attention.row_quantities)(p, jnp.asarray([[True, False, False], [True, True, False]]))
    assert np.isnan(found["entropy"][0])
    np.testing.assert_allclose(found["entropy"][1], 1, rtol=1e-6)
    np.testing.assert_allclose(found["prefix"], [0, 1], atol=1e-6)
    np.testing.assert_allclose(found["upper"], [0, 1], atol=1e-6)
    assert all(np.isfinite(found[name]).all() for name in records.QUANTITIES if name != "entropy")


def test_the_rows_measured_are_the_models_rows_in_evaluation_mode():
    config = SMALL
    assert config.dropout > 0
    params, tokens = random_params(config), tokens_of(config, 2, config.context)
    layers = (0, 2)
    rows = jax.jit(attention.measure_rows, static_argnums=(0, 3))(config, params, tokens, layers)
    states = jitted(gpt.hidden_states, config)(params, tokens)
    for place, layer in enumerate(layers):
        p = as_numpy(jitted(gpt.attention_weights, config)(gpt.layer(params, layer), states[layer]))
        np.testing.assert_allclose(rows["p_max"][place], p.max(-1), rtol=1e-5)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1) / np.log(np.arange(1, config.context + 1))
        np.testing.assert_allclose(rows["entropy"][place][..., 1:], entropy[..., 1:], rtol=1e-4)
        assert np.isnan(rows["entropy"][place][..., 0]).all()
    assert rows["lower"].shape == (2, 2, config.n_head, config.context)
    assert (np.asarray(rows["lower"]) <= np.asarray(rows["upper"])).all()


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(0, 5))
@settings(deadline=None)
def test_a_summary_is_of_the_values_that_are_there(values, missing):
    found = attention.summarise(np.array([np.nan] * missing + values))
    assert found.keys() == {"count", *records.STATISTICS}
    assert found["count"] == len(values)
    levels = {"min": 0, "p5": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "max": 100}
    for name, level in levels.items():
        np.testing.assert_allclose(found[name], np.percentile(values, level), atol=1e-12)
    np.testing.assert_allclose(found["mean"], np.mean(values), atol=1e-9)


def test_a_summary_of_nothing_is_empty():
    assert attention.summarise(np.array([np.nan])) == {"count": 0, **dict.fromkeys(records.STATISTICS)}


def test_the_lines_pool_the_heads_and_tell_them_apart(tmp_path, rng):
    rows = {name: rng.uniform(size=(2, 3, 4, 5)) for name in records.QUANTITIES}  # layer, sequence, head, position
    lines = list(attention.record_rows(7, (0, 9), rows))
    records.append(tmp_path, "attention", lines)  # the schema's columns
    table = records.read_table(tmp_path, "attention")
    assert len(table) == len(records.QUANTITIES) * 2 * (1 + 4)
    assert set(table["update"]) == {7}
    pooled = table.filter(layer=9, quantity="upper").filter(table.filter(layer=9, quantity="upper")["head"].is_null())
    np.testing.assert_allclose(pooled["median"][0], np.median(rows["upper"][1]))
    assert pooled["count"][0] == 60
    one = table.filter(layer=0, quantity="p_max", head=2)
    np.testing.assert_allclose(one["max"][0], rows["p_max"][0, :, 2].max())
    assert one["count"][0] == 15
