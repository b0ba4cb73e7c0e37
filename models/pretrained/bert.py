"""BERT and MiniLM: post-LN, bidirectional, token types, a LayerNorm on the embeddings, biases everywhere."""

import re

from models.config import ModelConfig
from models.pretrained.source import Source, Stored, linear, norm

TYPES = ("bert",)
# Position numbers, the pooler and the next-sentence head, which no hidden state depends on, and copies of tied tensors.
IGNORED = re.compile(
    r"embeddings\.position_ids|pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
    r"|cls\.predictions\.decoder\.(weight|bias)"
)

_LAYER = "encoder.layer.{layer}."
PARAMETERS = {
    "ends/tokens/embedding": Stored("embeddings.word_embeddings.weight"),
    "ends/positions/embedding": Stored("embeddings.position_embeddings.weight"),
    "ends/token_types/embedding": Stored("embeddings.token_type_embeddings.weight"),
    **norm("ends/norm_embedding", "embeddings.LayerNorm"),
    **linear("ends/transform", "cls.predictions.transform.dense"),
    **norm("ends/norm_head", "cls.predictions.transform.LayerNorm"),
    "ends/head_bias": Stored("cls.predictions.bias"),
    **linear("blocks/attention/query", _LAYER + "attention.self.query"),
    **linear("blocks/attention/key", _LAYER + "attention.self.key"),
    **linear("blocks/attention/value", _LAYER + "attention.self.value"),
    **linear("blocks/attention/out", _LAYER + "attention.output.dense"),
    **norm("blocks/norm_attention", _LAYER + "attention.output.LayerNorm"),
    **linear("blocks/ffn/up", _LAYER + "intermediate.dense"),
    **linear("blocks/ffn/down", _LAYER + "output.dense"),
    **norm("blocks/norm_ffn", _LAYER + "output.LayerNorm"),
}


def config(source: Source) -> ModelConfig:
    """The configuration of a BERT, with the masked language model's head where the file has one."""
    source.refuse_unless("position_embedding_type", "absolute")
    source.refuse_unless("is_decoder", False)
    source.refuse_unless("hidden_act", "gelu", "gelu_new")
    return ModelConfig(
        vocab_size=source.whole("vocab_size"),
        n_layer=source.whole("num_hidden_layers"),
        n_head=source.whole("num_attention_heads"),
        d_model=source.whole("hidden_size"),
        d_ff=source.whole("intermediate_size"),
        context=source.whole("max_position_embeddings"),
        placement="post",
        causal=False,
        ln_eps=source.positive("layer_norm_eps", 1e-12),
        dropout=0.0,
        ffn="gelu_tanh" if source.hub.get("hidden_act") == "gelu_new" else "gelu",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        token_types=source.whole("type_vocab_size", 2),
        embedding_norm=True,
        head="masked" if "cls.predictions.bias" in source.shapes else "none",
    )


def stored_name(name: str) -> str:
    """The name by which `PARAMETERS` knows a tensor of a file; old files say gamma and beta."""
    name = name.removeprefix("bert.")
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
