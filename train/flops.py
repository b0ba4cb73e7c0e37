"""What training costs in floating-point operations, and what share of a device's peak it reaches (MFU)."""

from models import ModelConfig

PEAK_TFLOPS = {
    # Dense bfloat16 products with float32 accumulation, as the makers state them; by the name that JAX gives a device.
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
}


def model_flops(model: ModelConfig, tokens: int) -> int:
    """Operations of the products of matrices in a forward and backward pass over `tokens` tokens.

    `6 tokens (kernels + head + 2 n_layer context n_head d_head)`: each entry of a kernel or of the head takes a
    multiplication and an addition forward and twice that backward; so do the scores and the mixture of values for
    every pair of positions, masked ones included, as is usual. What rematerialisation does again is not counted.
    """
    d, inner, shared = model.d_model, model.n_head * model.d_head, model.kv_heads * model.d_head
    ffn = (3 if model.ffn == "swiglu" else 2) * d * model.d_ff
    block = 2 * d * inner + 2 * d * shared + ffn + 2 * model.context * inner
    head = {"none": 0, "masked": (model.vocab_size + d) * d}.get(model.head, model.vocab_size * d)
    return 6 * tokens * (model.n_layer * block + head)


def peak_tflops(device_kind: str, compute_dtype: str) -> float | None:
    """The peak of a device where it is known, 10^12 operations a second."""
    return PEAK_TFLOPS.get(device_kind) if compute_dtype == "bfloat16" else None
