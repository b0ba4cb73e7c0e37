"""Exact attention sensitivity: theta, the softmax's norms, certified operator norms. Pure functions on jax arrays."""

from sens import apjn, bounds, products
from sens.attention import AttentionStats, Sinks, attention_sinks, attention_stats
from sens.bracket import Bracket, theta_bracket
from sens.norms import norm_inf_rms, norm_inf_two
from sens.operators import BlockNorm, block_operator_norm
from sens.softmax import (
    g_1,
    lambda_max,
    norm_inf_to_one,
    norm_one_to_one,
    normalised_entropy,
    softmax,
    softmax_jacobian,
)
from sens.spectral import SpectralNorm, spectral_norm
from sens.subset import bisect, theta_of_subset
from sens.theta import theta_bounds_from_p_max, theta_exact, theta_prefix, theta_uniform, theta_within
from sens.verify import IdentityCheck, verify_identity

__all__ = [
    "AttentionStats",
    "BlockNorm",
    "Bracket",
    "IdentityCheck",
    "Sinks",
    "SpectralNorm",
    "apjn",
    "attention_sinks",
    "attention_stats",
    "bisect",
    "block_operator_norm",
    "bounds",
    "g_1",
    "lambda_max",
    "norm_inf_rms",
    "norm_inf_to_one",
    "norm_inf_two",
    "norm_one_to_one",
    "normalised_entropy",
    "products",
    "softmax",
    "softmax_jacobian",
    "spectral_norm",
    "theta_bounds_from_p_max",
    "theta_bracket",
    "theta_exact",
    "theta_of_subset",
    "theta_prefix",
    "theta_uniform",
    "theta_within",
    "verify_identity",
]
