"""A peer of `benchmarks/training.py`: the same model, batch and update in PyTorch on the CPU, in a process of its own.

Started by that script with an interpreter that has torch, transformers and x-transformers; nothing of ours is imported.
Answers on standard output: once when the first update is done, then for every line with a number of updates.
"""

import json
import sys
import time

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # noqa: N812  # pyright: ignore[reportMissingImports]


def gpt2(shape: dict, attention: str) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    config = GPT2Config(
        vocab_size=shape["vocab_size"],
        n_positions=shape["context"],
        n_embd=shape["d_model"],
        n_layer=shape["n_layer"],
        n_head=shape["n_head"],
        n_inner=shape["d_ff"],
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    config._attn_implementation = attention
    model = GPT2LMHeadModel(config)
    assert model.config._attn_implementation == attention
    return model


def x_transformer(shape: dict, placement: str) -> torch.nn.Module:
    from x_transformers import Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

    return TransformerWrapper(
        num_tokens=shape["vocab_size"],
        max_seq_len=shape["context"],
        tie_embedding=True,
        attn_layers=Decoder(
            dim=shape["d_model"],
            depth=shape["n_layer"],
            heads=shape["n_head"],
            attn_dim_head=shape["d_model"] // shape["n_head"],
            ff_mult=shape["d_ff"] // shape["d_model"],
            attn_flash=True,
            pre_norm=placement == "pre",
        ),
    )


PEERS = {
    "gpt2-eager": lambda shape: gpt2(shape, "eager"),
    "gpt2-sdpa": lambda shape: gpt2(shape, "sdpa"),
    "x-pre": lambda shape: x_transformer(shape, "pre"),
    "x-post": lambda shape: x_transformer(shape, "post"),
}


def main() -> None:
    name, shape = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(shape["threads"])
    torch.manual_seed(0)
    model = PEERS[name](shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, shape["vocab_size"], (shape["batch"], shape["context"] + 1)))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)

    def update() -> float:
        out = model(inputs)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        loss = F.cross_entropy(logits.reshape(-1, shape["vocab_size"]), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    began = time.perf_counter()
    loss = update()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"first": time.perf_counter() - began, "loss": loss, "parameters": parameters}), flush=True)
    for line in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            loss = update()
        took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "loss": loss}
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
