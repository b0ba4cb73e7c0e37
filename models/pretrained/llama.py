"""The Llama family (Llama, Mistral, Qwen2, SmolLM2): pre-norm with RMSNorm, RoPE, grouped key/value heads, SwiGLU."""

import re
from typing import Any

from models.config import ModelConfig
from models.pretrained import rope
from models.pretrained.source import ModelError, Source, Stored, linear, norm

TYPES = ("llama", "mistral", "qwen2")
IGNORED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_LAYER = "layers.{layer}."
PARAMETERS = {
    "ends/tokens/embedding": Stored("embed_tokens.weight"),
    "ends/head/embedding": Stored("lm_head.weight"),
    **norm("ends/norm_final", "norm"),
    **norm("blocks/norm_attention", _LAYER + "input_layernorm"),
    **norm("blocks/norm_ffn", _LAYER + "post_attention_layernorm"),
    **linear("blocks/attention/query", _LAYER + "self_attn.q_proj"),
    **linear("blocks/attention/key", _LAYER + "self_attn.k_proj"),
    **linear("blocks/attention/value", _LAYER + "self_attn.v_proj"),
    **linear("blocks/attention/out", _LAYER + "self_attn.o_proj"),
    **linear("blocks/ffn/gate", _LAYER + "mlp.gate_proj"),
    **linear("blocks/ffn/up", _LAYER + "mlp.up_proj"),
    **linear("blocks/ffn/down", _LAYER + "mlp.down_proj"),
}


def config(source: Source) -> ModelConfig:
    """The configuration of a model of the family; RoPE scaling becomes divisors of the angles and a temperature."""
    kind = source.want("model_type")
    source.refuse_unless("hidden_act", "silu")
    heads, d = source.whole("num_attention_heads"), source.whole("hidden_size")
    width = source.whole("head_dim", d // heads)
    theta, divisors, tau = rope.scaling(source, width)
    bias = kind == "qwen2" or source.flag("attention_bias")
    return ModelConfig(
        vocab_size=source.whole("vocab_size"),
        n_layer=source.whole("num_hidden_layers"),
        n_head=heads,
        n_kv_head=source.whole("num_key_value_heads", heads),
        head_width=width,
        d_model=d,
        d_ff=source.whole("intermediate_size"),
        context=source.whole("max_position_embeddings"),
        window=_window(source, kind),
        norm="rms",
        ln_eps=source.positive("rms_norm_eps", 1e-6),
        tau=tau,
        dropout=0.0,
        positions="rope",
        rope_theta=theta,
        rope_divisors=divisors,
        ffn="swiglu",
        qkv_bias=bias,
        out_bias=kind == "llama" and bias,
        ffn_bias=source.flag("mlp_bias"),
        head=_head(source),
    )


def _head(source: Source) -> Any:
    if source.flag("tie_word_embeddings"):
        return "tied"
    headless = "lm_head.weight" not in source.shapes and not any(
        "For" in name for name in source.get("architectures", [])
    )
    return "none" if headless else "untied"


def _window(source: Source, kind: str) -> int | None:
    """Tokens that a token sees; the same in all layers, or the model is refused."""
    layers = source.whole("num_hidden_layers")
    if source.hub.get("sliding_window") is None or (kind == "qwen2" and not source.flag("use_sliding_window")):
        return None
    window = source.whole("sliding_window")
    kinds = source.hub.get("layer_types")
    if kinds is None:
        full = min(layers, source.whole("max_window_layers", layers, least=0)) if kind == "qwen2" else 0
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if set(kinds) == {"full_attention"} or window >= source.whole("max_position_embeddings"):
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ModelError(f"{source.path}: layers with and without a sliding window together are not supported")
    return window


def stored_name(name: str) -> str:
    """The name by which `PARAMETERS` knows a tensor of a file."""
    return name.removeprefix("model.")
