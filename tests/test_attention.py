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
def test_statistics_are_those_of_the_support_alone(rng, dtype):
    """A masked row and the same row without its masked entries give the same numbers."""
    n, support = 9, 6
    p = rng.dirichlet(np.full(support, 0.5), size=20).astype(dtype)
    padded = np.concatenate([p, np.zeros((20, n - support), dtype)], axis=-1)
    where = jnp.arange(n)[None, :] < support
    measure = jax.jit(lambda *arguments: sens.attention_stats(*arguments)._asdict())
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
    found = jax.jit(sens.attention_stats)(p, jnp.asarray([[True, False, False], [True, True, False]]))._asdict()
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


class Foreign:
    """An array of another framework: only the protocols named are there."""

    def __init__(self, array, *protocols):
        self.dtype, self.shape = array.dtype, array.shape
        for name in protocols:
            setattr(self, name, getattr(array, name))


class ThroughArray:
    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        if self._array.dtype == jnp.bfloat16:
            raise TypeError("no such dtype")
        return np.asarray(self._array, dtype)


class ThroughDLPack(ThroughArray):
    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.float32
def test_arrays_of_any_framework_give_the_same_statistics(rng):
    p = rng.dirichlet(np.full(6, 0.4), size=(2, 3)).astype(np.float32)
    where = np.ones((3, 6), bool)
    wanted = sens.attention_stats(jnp.asarray(p), jnp.asarray(where))
    for make in (np.asarray, ThroughArray, ThroughDLPack, lambda x: Foreign(x, "__array_interface__")):
        found = sens.attention_stats(make(p), make(where))
        for name, values in found._asdict().items():
            np.testing.assert_array_equal(values, getattr(wanted, name), err_msg=name)
    np.testing.assert_allclose(wanted.discrepancy, np.sqrt(1 - np.asarray(wanted.lower)))
    assert wanted.discrepancy.shape == (2, 3)


@pytest.mark.float32
def test_sixteen_bit_rows_are_taken_as_float32_rows_of_sum_one(rng):
    p = rng.dirichlet(np.full(12, 0.2), size=256).astype(np.float32)
    for half in (jnp.float16, jnp.bfloat16):
        rounded = jnp.asarray(p).astype(half)
        wide = np.asarray(rounded, np.float32)
        found = sens.attention_stats(ThroughDLPack(rounded))  # NumPy has no bfloat16: DLPack
        wanted = sens.attention_stats(wide / wide.sum(-1, keepdims=True))
        assert found.lower.dtype == jnp.float32
        np.testing.assert_allclose(found.lower, wanted.lower, atol=2e-6)
        with pytest.raises(ValueError, match=r"row \(0,\) sums to"):
            sens.attention_stats(rounded * jnp.asarray(1.1, half))
    assert (np.abs(wide.sum(-1) - 1) > 1e-3).any(), "no row was beyond the tolerance of wider rows"


def test_a_mask_takes_keys_out_of_the_support(rng):
    p = rng.dirichlet(np.ones(4), size=5)
    padded = np.concatenate([p, np.full((5, 2), 7.0)], axis=-1)
    found = sens.attention_stats(padded, np.arange(6) < 4)
    for name, values in sens.attention_stats(p)._asdict().items():
        np.testing.assert_allclose(values, getattr(found, name), atol=1e-12, err_msg=name)


def test_what_is_no_array_of_probabilities_is_refused():
    class Faulty:
        dtype = np.dtype("float32")

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **_):
            raise BufferError("on another planet")

    good = np.full((2, 2), 0.5)
    for p, where, error, message in (
        ([[0.5, 0.5]], None, TypeError, r"p is a list; an array .* is wanted"),
        (Faulty(), None, TypeError, "p, a Faulty, cannot be taken through DLPack: on another planet"),
        (np.ones((2, 2), int), None, TypeError, "p has dtype int64; a floating dtype is wanted"),
        (np.float64(1.0), None, ValueError, "at least one entry along the last axis"),
        (np.array([[0.5, 0.5], [0.5, np.nan]]), None, ValueError, r"p\[1, 1\] = nan"),
        (np.array([[0.5, 0.5], [3.0, -1.0]]), None, ValueError, r"p\[1, 1\] = -1.0"),
        (good, np.ones((2, 3), bool), ValueError, r"where has shape \(2, 3\), which does not broadcast to \(2, 2\)"),
        (good, np.ones((2, 2)), TypeError, "where has dtype float64; bool is wanted"),
        (good, [True], TypeError, "where is a list"),
        (good, np.zeros((2, 2), bool), ValueError, "empty support"),
    ):
        with pytest.raises(error, match=message):
            sens.attention_stats(p, where)
    bad = jax.jit(sens.attention_stats)(np.array([[0.5, 0.5], [0.5, 0.6]]))
    for figure in bad:
        np.testing.assert_array_equal(np.isnan(figure), [False, True])


def test_sinks_are_where_most_mass_goes(rng):
    p = rng.dirichlet(np.full(5, 0.3), size=(2, 3, 5))
    position, mass = sens.attention_sinks(p)
    np.testing.assert_array_equal(position, p.sum(-2).argmax(-1))
    np.testing.assert_array_equal(
        mass, p[np.arange(2)[:, None, None], np.arange(3)[:, None], np.arange(5), position[..., None]]
    )
    padding = np.arange(5)[:, None] < 3  # the last two queries do not count
    np.testing.assert_array_equal(sens.attention_sinks(p, padding).position, p[..., :3, :].sum(-2).argmax(-1))
    with pytest.raises(ValueError, match=r"weights have shape \(5,\)"):
        sens.attention_sinks(p[0, 0, 0])
