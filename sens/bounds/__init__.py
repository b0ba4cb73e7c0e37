"""Upper bounds on sensitivity: each a pure function of weights and statistics, named after its source.

A bound on a map says in its docstring what it bounds, in which geometry, and on what domain. Bounds in different
geometries are not comparable: report each against the true norm of its own geometry (`sens.operators`).

Weights act on rows, ``x @ W``. Per-head weights have the head first: ``W_query`` (H, d, e), ``W_key`` (G, d, e),
``W_value`` (G, d, v), ``W_out`` (H, v, m). With G < H (grouped-query attention) G divides H and key/value head g serves
the query heads gH/G .. (g+1)H/G - 1. Theta enters as an upper end, so that a bound stays a bound.
"""

from sens.bounds.attention import (
    Pathways,
    attention_bounded,
    attention_covariance,
    attention_local,
    attention_pathways,
    attention_refined,
)
from sens.bounds.layers import (
    activation_lipschitz,
    derf_lipschitz,
    dyt_lipschitz,
    ffn,
    ffn_gated,
    norm_lipschitz,
    norm_local,
    norm_magnitude,
    post_ln_layer,
    pre_ln_layer,
)
from sens.bounds.published import (
    castin_bounded,
    nair_softmax,
    newhouse_attention,
    newhouse_residual,
    softmax_same_norm,
    yudin_local,
    zhai_entropy,
)

__all__ = [
    "Pathways",
    "activation_lipschitz",
    "attention_bounded",
    "attention_covariance",
    "attention_local",
    "attention_pathways",
    "attention_refined",
    "castin_bounded",
    "derf_lipschitz",
    "dyt_lipschitz",
    "ffn",
    "ffn_gated",
    "nair_softmax",
    "newhouse_attention",
    "newhouse_residual",
    "norm_lipschitz",
    "norm_local",
    "norm_magnitude",
    "post_ln_layer",
    "pre_ln_layer",
    "softmax_same_norm",
    "yudin_local",
    "zhai_entropy",
]
