"""LayerNorm and RMSNorm as they are written down: what the bounds on them are tested with."""

import jax.numpy as jnp


def layer_norm(x, gamma, eps=1e-2):
    centred = x - x.mean(axis=-1, keepdims=True)
    return jnp.broadcast_to(gamma, x.shape) * centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + eps)


def rms_norm(x, gamma, eps=1e-2):
    return jnp.broadcast_to(gamma, x.shape) * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)
