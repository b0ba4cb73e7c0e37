"""Per-layer figures cheap enough to record during training: norms of projections and stream, LayerNorm gains."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import ModelConfig, gpt


def spectral_norms(kernels: Float[Array, "n i o"]) -> Float[Array, " n"]:
    """Largest singular value of each matrix, through the eigenvalues of the smaller Gram matrix.

    Squaring costs half the digits of small singular values and none of the largest.
    """
    gram = jnp.einsum("nio,njo->nij" if kernels.shape[1] <= kernels.shape[2] else "nio,nip->nop", kernels, kernels)
    return jnp.sqrt(jnp.linalg.eigvalsh(gram)[..., -1])


def measure_layers(
    model: ModelConfig, params: gpt.Params, tokens: Int[Array, "b t"]
) -> dict[str, Float[Array, " n_layer"]]:
    """The columns of the layers table, `grad_norm` apart, for every block. Call it under `jax.jit`."""

    def collect(block_params, x):
        a_attention, a_ffn = gpt.norm_gains(model, block_params, x)
        return {
            "residual_rms": jnp.sqrt(jnp.mean(jnp.square(x))),
            "a_attention": jnp.max(a_attention),
            "a_ffn": jnp.max(a_ffn),
        }

    _, figures = gpt.scan_blocks(model, params, gpt.embed(model, params, tokens), collect=collect)
    projections = params["blocks"]["attention"]
    # One matrix at a time: a batched eigenvalue solve of all layers is no faster and holds them all.
    norms = {
        f"norm_{name}": jax.lax.map(lambda kernel: spectral_norms(kernel[None])[0], projections[name]["kernel"])
        for name in ("query", "key", "value", "out")
    }
    return {**figures, **norms}


def record_layers(update: int, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the layers table from arrays over layers, `grad_norm` among them."""
    columns = {name: np.asarray(values, np.float64) for name, values in figures.items()}
    for layer in range(len(columns["grad_norm"])):
        yield {"update": update, "layer": layer, **{name: float(values[layer]) for name, values in columns.items()}}
