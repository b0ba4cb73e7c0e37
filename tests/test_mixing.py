"""Attention normalised after its product and in halves is the attention of the rows that are measured."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt
from models.mixing import mix
from tests.test_gpt import SMALL, random_params, stream

PLAIN = dataclasses.replace(SMALL, n_layer=1, placement="post")  # attention sees the stream as it is
VARIANTS = {
    "whole": {"context": 127},
    "halves": {"context": 128},
    "odd halves": {"context": 131, "n_kv_head": 1},
    "window": {"context": 130, "window": 20},
    "bidirectional": {"context": 130, "causal": False},
}


def by_rows(config, block, x, where):
    """The rows as `attention_weights` gives them, times the values, through the output projection."""
    rows = gpt.attention_weights(config, block, x, where=where)
    values = gpt.queries_keys_values(config, block, x)[2]
    mixed = jnp.einsum("bhqk,bkhc->bqhc", rows, values)
    return mixed.reshape(*x.shape[:-1], -1) @ block["attention"]["out"]["kernel"][None]


@pytest.mark.float32
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_is_rows_times_values_with_all_its_derivatives(variant, dtype, rng):
    config = dataclasses.replace(PLAIN, **VARIANTS[variant])
    block = gpt.layer(random_params(config, dtype), 0)
    x, v, u = (stream(config, dtype, 2, seed=seed) for seed in (1, 2, 3))
    where = jnp.asarray(rng.random((2, config.context)) < 0.8)

    def measured(f):
        map_of_x = lambda x: f(config, block, x, where)  # noqa: E731
        y, push = jax.jvp(map_of_x, (x,), (v,))
        pull = lambda x: jax.vjp(map_of_x, x)[1](u)[0]  # noqa: E731
        return y, push, *jax.jvp(pull, (x,), (v,))

    found = jax.jit(lambda: measured(lambda config, block, x, where: gpt.attention(config, block, x, where=where)))()
    wanted = jax.jit(lambda: measured(by_rows))()
    for one, other in zip(found, wanted, strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=scale * (1e-12 if dtype == np.float64 else 1e-5))


@pytest.mark.float32
def test_mixing_in_half_precision_keeps_the_dtype_of_the_values(rng):
    scores = jnp.asarray(4 * rng.standard_normal((3, 5, 6)), jnp.float32)
    values = jnp.asarray(rng.standard_normal((3, 6, 2)), jnp.bfloat16)
    mixed, push = jax.jvp(mix, (scores, values), (scores, values))
    assert mixed.dtype == push.dtype == jnp.bfloat16
    wanted = jax.nn.softmax(scores, axis=-1) @ values.astype(jnp.float32)
    np.testing.assert_allclose(mixed.astype(jnp.float32), wanted, atol=0.03)


@pytest.mark.float32
def test_scores_of_any_size_neither_overflow_nor_vanish(dtype):
    scores = jnp.asarray([[1e4, -1e4, -np.inf], [-1e4, -1e4, -np.inf]], dtype)
    values = jnp.asarray([[1.0], [3.0], [7.0]], dtype)
    np.testing.assert_array_equal(mix(scores, values), np.asarray([[1.0], [2.0]], dtype))
    np.testing.assert_array_equal(jax.jvp(mix, (scores, values), (jnp.zeros_like(scores), values))[1], [[1.0], [2.0]])


@pytest.mark.parametrize("where", [np.ones((2, 7), int), np.ones((2, 7), np.float32), np.ones((2, 6), bool)])
def test_a_mask_of_another_dtype_or_length_is_refused(where):
    block = gpt.layer(random_params(PLAIN), 0)
    with pytest.raises(ValueError, match=r"bool, True for real tokens, ending in \(7,\) is wanted"):
        gpt.attention(PLAIN, block, stream(PLAIN, np.float32, 2), where=where)
