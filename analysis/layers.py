"""Per-layer figures cheap enough to record during training: the factors of the attention bounds, LayerNorm gains.

Spectral norms come from Lanczos steps with a bracket (`sens.spectral`) instead of a decomposition, always from the same
start: a start from the last record's singular vectors would save few of the (8 to 36) steps, make the figures depend on
what was recorded before, and could stay with a singular value that another has overtaken.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import ModelConfig, gpt
from sens.norms import norm_inf_rms
from sens.spectral import SpectralNorm, spectral_norm

PROJECTIONS = ("query", "key", "value", "out")


def spectral_norms(kernels: Float[Array, "n i o"]) -> SpectralNorm:
    """Spectral norm of each matrix, both ends."""

    def one(kernel: Float[Array, "i o"]) -> SpectralNorm:
        origin = jnp.zeros(kernel.shape[0], kernel.dtype)
        return spectral_norm(lambda x: x @ kernel, origin, key=jax.random.key(0))

    return jax.vmap(one)(kernels)


def _projection_norms(model: ModelConfig, projections: gpt.Params) -> dict[str, Float[Array, " n_layer"]]:
    """Norms of the four projections, their product, and the widest of the brackets they come from."""
    inner = model.n_head * model.d_head
    across = {name: projections[name]["kernel"] for name in PROJECTIONS}
    across["out"] = across["out"].mT
    # One program for all: fewer key/value heads make fewer columns, and columns of zeros change no norm.
    padded = [jnp.pad(kernel, ((0, 0), (0, 0), (0, inner - kernel.shape[2]))) for kernel in across.values()]
    found = spectral_norms(jnp.concatenate(padded))
    lower, upper = (end.reshape(len(PROJECTIONS), model.n_layer) for end in (found.lower, found.upper))
    return {
        **{f"norm_{name}": norms for name, norms in zip(PROJECTIONS, lower, strict=True)},
        "norm_product": jnp.prod(lower, axis=0),
        "norm_width": jnp.max(jnp.where(upper > lower, upper / lower - 1, 0), axis=0),
    }


def measure_layers(
    model: ModelConfig, params: gpt.Params, tokens: Int[Array, "b t"]
) -> dict[str, Float[Array, " n_layer"]]:
    """The columns of the layers table, `grad_norm` apart, for every block. Call it under `jax.jit`."""

    def collect(block_params, x):
        a_attention, a_ffn = gpt.norm_gains(model, block_params, x)
        return {
            "residual_rms": jnp.sqrt(jnp.mean(jnp.square(x))),
            "magnitude": jnp.max(norm_inf_rms(gpt.attention_input(model, block_params, x))),
            "a_attention": jnp.max(a_attention),
            "a_ffn": jnp.max(a_ffn),
        }

    _, figures = gpt.scan_blocks(model, params, gpt.embed(model, params, tokens), collect=collect)
    return {**figures, **_projection_norms(model, params["blocks"]["attention"])}


def record_layers(update: int, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the layers table from arrays over layers, `grad_norm` among them (of a skipped update: null)."""
    columns = {name: np.asarray(values, np.float64) for name, values in figures.items()}
    for layer in range(len(columns["grad_norm"])):
        figures = {name: float(values[layer]) for name, values in columns.items()}
        norm = figures["grad_norm"]
        yield {"update": update, "layer": layer, **figures, "grad_norm": norm if np.isfinite(norm) else None}
