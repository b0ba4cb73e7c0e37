"""A first look through depth: what each sublayer's Jacobian shares with the identity, and how far its LayerNorm shrinks.

For a sublayer with Jacobian `P` on `n` coordinates, `tr(P)/n` is the coefficient of the best approximation of `P` by a
multiple of the identity, and

    identity share = tr(P)^2 / (n ||P||_F^2)   in [0, 1]

is the part of its squared Frobenius norm which that multiple carries (the squared cosine between `P` and `I`). A pre-LN
sublayer `I + J_k` has an identity term by construction, a post-LN sublayer `J_LN (I + J_F)` has none (theory.md,
section 4): the same figure can be read from both. Trace and norm are estimated without forming `P`, from Gaussian probes
`v`: `E <v, P v> = tr(P)` and `E ||P v||^2 = ||P||_F^2`.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models import ModelConfig, gpt

DEPTH_COLUMNS = ("update", "sublayer", "kind", "identity_share", "trace", "a_max", "a_mean")


def measure_depth(
    model: ModelConfig, params: gpt.Params, tokens: Int[Array, "b t"], key: PRNGKeyArray, *, probes: int = 8
) -> dict[str, Float[Array, "n_layer 2"]]:
    """Identity share, `tr(P)/n`, and the largest and mean `a_{k,i}` of every sublayer, attention then FFN.

    Memory: one stream a probe at a time. Call it under `jax.jit`.
    """

    def of_sublayer(sublayer, gain, x):
        def probe(probe_key):
            v = jax.random.normal(probe_key, x.shape, x.dtype)
            _, pv = jax.jvp(sublayer, (x,), (v,))
            return jnp.sum(v * v), jnp.sum(v * pv), jnp.sum(pv * pv)

        square, trace, frobenius = (jnp.mean(part) for part in jax.lax.map(probe, jax.random.split(key, probes)))
        return {
            "identity_share": trace**2 / (square * frobenius),
            "trace": trace / square,
            "a_max": jnp.max(gain),
            "a_mean": jnp.mean(gain),
        }

    def collect(block_params, x):
        gain_attention, gain_ffn = gpt.norm_gains(model, block_params, x)
        z = gpt.attention_sublayer(model, block_params, x)
        attention = of_sublayer(lambda x: gpt.attention_sublayer(model, block_params, x), gain_attention, x)
        ffn = of_sublayer(lambda z: gpt.ffn_sublayer(model, block_params, z), gain_ffn, z)
        return jax.tree.map(lambda a, b: jnp.stack([a, b]), attention, ffn)

    _, figures = gpt.scan_blocks(model, params, gpt.embed(model, params, tokens), collect=collect)
    return figures


def record_depth(update: int, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line a sublayer, in the order in which the stream passes them."""
    columns = {name: np.asarray(values, np.float64).ravel() for name, values in figures.items()}
    for sublayer in range(len(columns["trace"])):
        kind = "ffn" if sublayer % 2 else "attention"
        numbers = {name: float(values[sublayer]) for name, values in columns.items()}
        yield {"update": update, "sublayer": sublayer, "kind": kind, **numbers}
