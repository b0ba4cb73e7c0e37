"""Per-layer figures of the record against plain NumPy, layer by layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis import layers, records
from models import gpt
from tests import reference
from tests.test_gpt import SMALL, as_numpy, random_params, tokens_of


@pytest.mark.float32
@pytest.mark.parametrize("shape", [(2, 9, 4), (3, 30, 40)])
def test_spectral_norms_are_largest_singular_values(rng, dtype, shape):
    kernels = rng.normal(size=shape).astype(dtype)
    found = layers.spectral_norms(jnp.asarray(kernels))
    assert found.lower.dtype == dtype
    wanted = np.linalg.svd(kernels.astype(np.float64), compute_uv=False)[:, 0]
    assert (np.asarray(found.lower) <= wanted).all()
    assert (wanted <= np.asarray(found.upper)).all()
    np.testing.assert_allclose(found.lower, wanted, rtol=1e-4)
    np.testing.assert_allclose(found.upper, wanted, rtol=1.02e-2)


@pytest.mark.float32
def test_the_norm_of_nothing_is_zero(dtype):
    found = layers.spectral_norms(jnp.zeros((2, 4, 3), dtype))
    np.testing.assert_array_equal(found.lower, 0)
    np.testing.assert_array_equal(found.upper, 0)


def test_fewer_key_heads_and_layers_of_nothing(rng):
    config = dataclasses.replace(SMALL, n_head=4, n_kv_head=1, d_model=8, head_width=3)
    params = random_params(config)
    attention = params["blocks"]["attention"]
    attention["key"]["kernel"] = attention["key"]["kernel"].at[1].set(0)
    found = jax.jit(layers.measure_layers, static_argnums=0)(config, params, tokens_of(config, 1, config.context))
    for name in layers.PROJECTIONS:
        wanted = [np.linalg.norm(kernel, 2) for kernel in np.asarray(attention[name]["kernel"])]
        np.testing.assert_allclose(found[f"norm_{name}"], wanted, rtol=1e-4)
    assert found["norm_product"][1] == 0
    assert ((found["norm_width"] >= 0) & (found["norm_width"] < 0.0101)).all()


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_every_column_of_every_layer(tmp_path, placement):
    config = dataclasses.replace(SMALL, placement=placement)
    params, tokens = random_params(config), tokens_of(config, 2, config.context)
    figures = jax.jit(layers.measure_layers, static_argnums=0)(config, params, tokens)
    plain = as_numpy(params)
    ends = plain["ends"]
    streams = [ends["tokens"]["embedding"][row] + ends["positions"]["embedding"] for row in np.asarray(tokens)]
    wanted = {name: [] for name in records.LAYER_COLUMNS if name not in ("update", "layer", "grad_norm")}
    for index in range(config.n_layer):
        one = reference.layer(plain["blocks"], index)
        wanted["residual_rms"].append(np.sqrt(np.mean(np.square(streams))))
        inputs = gpt.attention_input(config, gpt.layer(params, index), jnp.asarray(np.array(streams), jnp.float32))
        wanted["magnitude"].append(np.sqrt(np.mean(np.square(inputs), axis=-1).max()))
        passed = [reference.sublayers(config, one, x) for x in streams]
        for column, norm, place in (("a_attention", "norm_attention", 2), ("a_ffn", "norm_ffn", 3)):
            sigma = np.sqrt(np.array([sublayer[place].var(-1) for sublayer in passed]) + config.ln_eps)
            wanted[column].append(np.abs(one[norm]["scale"]).max() / sigma.min())
        for name in ("query", "key", "value", "out"):
            wanted[f"norm_{name}"].append(np.linalg.norm(one["attention"][name]["kernel"], 2))
        wanted["norm_product"].append(np.prod([wanted[f"norm_{name}"][-1] for name in layers.PROJECTIONS]))
        streams = [sublayer[1] for sublayer in passed]
    assert figures.keys() == wanted.keys()
    assert (wanted.pop("norm_width"), float(figures["norm_width"].max()) < 0.0101) == ([], True)
    for name, values in wanted.items():
        np.testing.assert_allclose(figures[name], values, rtol=1e-4, err_msg=name)

    lines = list(layers.record_layers(3, {"grad_norm": np.arange(config.n_layer), **jax.device_get(figures)}))
    records.append(tmp_path, "layers", lines)
    table = records.read_table(tmp_path, "layers")
    assert table["layer"].to_list() == list(range(config.n_layer))
    assert table["grad_norm"].to_list() == [0, 1, 2]
    np.testing.assert_allclose(table["a_ffn"], wanted["a_ffn"], rtol=2e-5)
