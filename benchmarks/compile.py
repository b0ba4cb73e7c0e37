"""Compile time must not grow with depth, and scanning the blocks must not cost much a step: the scan against a loop.

One update (forward, backward, AdamW) of the same blocks at 4 and 36 layers, once scanned as `models.gpt` does it and
once unrolled; both compute the same loss. Run it on an idle machine:

    python benchmarks/compile.py

Found on 2 cores that were not idle, mini's width, batch and context: scanned, 4 layers compile in 8.6 s (the first
program of the process, which pays for start-up) and 36 layers in 5.3 s; a step takes 110 and 462 ms. Unrolled, 4
layers compile in 6.6 s and step in 88 ms; 36 layers were not waited for. So compile time does not grow with depth,
and a step costs about a quarter more than unrolled.
"""

import dataclasses
import functools
import statistics
import time

import jax
import numpy as np

from models import gpt
from train import step
from train.presets import PRESETS

DEPTHS = (4, 36)
STEPS = 10


def unrolled(config, params, x, key=None, *, where=None, remat=False):
    """`gpt.scan_blocks` as a Python loop."""
    keys = [None] * config.n_layer if key is None else jax.random.split(key, config.n_layer)
    one = functools.partial(gpt.block, config, where=where)
    for index in range(config.n_layer):
        x = (jax.checkpoint(one) if remat else one)(gpt.layer(params, index), x, keys[index])
    return x, None


def measure(n_layer: int, scan_blocks) -> tuple[float, float, float]:
    """Seconds to trace and compile, median seconds a step, and the last loss."""
    preset = PRESETS["mini"]
    model = dataclasses.replace(preset.model, n_layer=n_layer)
    tokens = (
        np.random.default_rng(0).integers(0, 256, (1, preset.train.micro_batch, model.context + 1)).astype(np.int32)
    )
    state = jax.jit(functools.partial(step.init_state, model, preset.train))(0)
    original, gpt.scan_blocks = gpt.scan_blocks, scan_blocks
    try:
        began = time.perf_counter()
        update = jax.jit(step.make_update(model, preset.train), donate_argnums=0).lower(state, tokens).compile()
        compiling = time.perf_counter() - began
    finally:
        gpt.scan_blocks = original
    times = []
    metrics = {}
    for _ in range(STEPS):
        began = time.perf_counter()
        state, metrics = update(state, tokens)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - began)
    return compiling, statistics.median(times), float(metrics["loss"])


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"{'blocks':>9} {'layers':>6} {'compile s':>10} {'step ms':>8} {'loss':>8}")
    found = {}
    for name, scan_blocks in (("scanned", gpt.scan_blocks), ("unrolled", unrolled)):
        for n_layer in DEPTHS:
            compiling, stepping, loss = found[name, n_layer] = measure(n_layer, scan_blocks)
            print(f"{name:>9} {n_layer:6d} {compiling:10.2f} {1000 * stepping:8.1f} {loss:8.4f}", flush=True)
    shallow, deep = DEPTHS
    for name in ("scanned", "unrolled"):
        growth = found[name, deep][0] / found[name, shallow][0]
        print(f"{name}: compile time times {growth:.1f} from {shallow} to {deep} layers")
    ratio = found["scanned", deep][1] / found["unrolled", deep][1]
    print(f"a step of {deep} scanned layers takes {ratio:.2f} of the unrolled one's time")
    np.testing.assert_allclose(found["scanned", deep][2], found["unrolled", deep][2], rtol=1e-3)
    assert found["scanned", deep][0] < 1.5 * found["scanned", shallow][0], "compile time grows with depth"


if __name__ == "__main__":
    main()
