"""Rows of attention times values, without the rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_jvp
def mix(scores: Float[Array, "*b q k"], values: Float[Array, "*b k c"]) -> Float[Array, "*b q c"]:
    """`softmax(scores) values`, divided by the rows' sums after the product, which has fewer entries than the rows.

    The derivative is that of the softmax, `dp = p (ds - sum p ds)`: left to itself the derivative of the quotient
    takes up to twice as long.
    """
    powers = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    product = jnp.einsum("...qk,...kc->...qc", powers.astype(values.dtype), values, preferred_element_type=scores.dtype)
    return (product / jnp.sum(powers, axis=-1, keepdims=True)).astype(values.dtype)


@mix.defjvp
def _(primals, tangents):
    (scores, values), (d_scores, d_values) = primals, tangents
    p = jax.nn.softmax(scores, axis=-1)
    d_p = p * (d_scores - jnp.sum(p * d_scores, axis=-1, keepdims=True))
    d_product = jnp.einsum("...qk,...kc->...qc", d_p.astype(values.dtype), values)
    return mix(scores, values), d_product + jnp.einsum("...qk,...kc->...qc", p.astype(values.dtype), d_values)
