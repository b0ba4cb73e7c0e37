"""The transformer of protocol.md in plain NumPy, float64, a sequence and a head at a time: what `models` must equal."""

import numpy as np
from scipy.special import erf

from models import ModelConfig


def layer_norm(params, x, eps):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return params["scale"] * (x - mean) / np.sqrt(variance + eps) + params["bias"]


def attention_rows(config: ModelConfig, params, u):
    """`A_h`, heads first, zero outside the causal support."""
    rows = np.zeros((config.n_head, len(u), len(u)))
    for h in range(config.n_head):
        columns = slice(h * config.d_head, (h + 1) * config.d_head)
        q, k = u @ params["query"]["kernel"][:, columns], u @ params["key"]["kernel"][:, columns]
        for i in range(len(u)):
            scores = q[i] @ k[: i + 1].T / np.sqrt(config.d_head)
            weights = np.exp((scores - scores.max()) / config.tau)
            rows[h, i, : i + 1] = weights / weights.sum()
    return rows


def attention(config: ModelConfig, params, u):
    values = np.split(u @ params["value"]["kernel"], config.n_head, axis=-1)
    heads = [a @ v for a, v in zip(attention_rows(config, params, u), values, strict=True)]
    return np.concatenate(heads, axis=-1) @ params["out"]["kernel"]


def ffn(params, u):
    hidden = u @ params["up"]["kernel"]
    return 0.5 * hidden * (1 + erf(hidden / np.sqrt(2))) @ params["down"]["kernel"]


def sublayers(config: ModelConfig, params, x):
    """The stream after the attention sublayer and after the FFN sublayer, and what the two LayerNorms acted on."""
    eps = config.ln_eps
    if config.placement == "pre":
        z = x + attention(config, params["attention"], layer_norm(params["norm_attention"], x, eps))
        return z, z + ffn(params["ffn"], layer_norm(params["norm_ffn"], z, eps)), x, z
    y = x + attention(config, params["attention"], x)
    z = layer_norm(params["norm_attention"], y, eps)
    w = z + ffn(params["ffn"], z)
    return z, layer_norm(params["norm_ffn"], w, eps), y, w


def layer(tree, index):
    """One layer of arrays stacked over layers."""
    return {name: layer(value, index) if isinstance(value, dict) else value[index] for name, value in tree.items()}


def logits(config: ModelConfig, params, tokens):
    """Of one sequence."""
    ends = params["ends"]
    x = ends["tokens"]["embedding"][tokens] + ends["positions"]["embedding"][: len(tokens)]
    for index in range(config.n_layer):
        _, x, _, _ = sublayers(config, layer(params["blocks"], index), x)
    if config.placement == "pre":
        x = layer_norm(ends["norm_final"], x, config.ln_eps)
    return x @ ends["tokens"]["embedding"].T
