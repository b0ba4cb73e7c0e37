"""GPT-2: pre-LN, learned positions, biases everywhere; dense layers stored (in, out), queries, keys, values in one."""

import re
from typing import Any

from models.config import ModelConfig
from models.pretrained.source import ModelError, Source, Stored, norm

TYPES = ("gpt2",)
PREFIX = "transformer."
# Causal masks that old files carry, and the tied head's copy of the token embedding.
IGNORED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")

_H = "h.{layer}."
PARAMETERS = {
    "ends/tokens/embedding": Stored("wte.weight"),
    "ends/positions/embedding": Stored("wpe.weight"),
    **norm("ends/norm_final", "ln_f"),
    **norm("blocks/norm_attention", _H + "ln_1"),
    **norm("blocks/norm_ffn", _H + "ln_2"),
    "blocks/attention/out/kernel": Stored(_H + "attn.c_proj.weight"),
    "blocks/attention/out/bias": Stored(_H + "attn.c_proj.bias"),
    "blocks/ffn/up/kernel": Stored(_H + "mlp.c_fc.weight"),
    "blocks/ffn/up/bias": Stored(_H + "mlp.c_fc.bias"),
    "blocks/ffn/down/kernel": Stored(_H + "mlp.c_proj.weight"),
    "blocks/ffn/down/bias": Stored(_H + "mlp.c_proj.bias"),
    **{
        f"blocks/attention/{name}/{kind}": Stored(_H + f"attn.c_attn.{stored}", third=third)
        for third, name in enumerate(("query", "key", "value"))
        for kind, stored in (("kernel", "weight"), ("bias", "bias"))
    },
}


def config(source: Source) -> ModelConfig:
    """The configuration of a GPT-2."""
    source.refuse_unless("scale_attn_weights", True)
    source.refuse_unless("scale_attn_by_inverse_layer_idx", False)
    source.refuse_unless("add_cross_attention", False)
    source.refuse_unless("tie_word_embeddings", True)
    activations: dict[str, Any] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    activation = source.get("activation_function", "gelu_new")
    if activation not in activations:
        raise ModelError(
            f"{source.path}: activation_function {activation!r} is not supported (want {', '.join(activations)})"
        )
    d = source.whole("n_embd")
    return ModelConfig(
        vocab_size=source.whole("vocab_size"),
        n_layer=source.whole("n_layer"),
        n_head=source.whole("n_head"),
        d_model=d,
        d_ff=source.whole("n_inner", 4 * d),
        context=source.whole("n_positions"),
        ln_eps=source.positive("layer_norm_epsilon", 1e-5),
        dropout=0.0,
        ffn=activations[activation],
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    )


def stored_name(name: str) -> str:
    """The name by which `PARAMETERS` knows a tensor of a file."""
    return name.removeprefix(PREFIX)
