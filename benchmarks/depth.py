"""One depth profile of a 36-layer model, beside torch.func on the same weights: `python benchmarks/depth.py`.

Findings (2 cores of a server CPU with AVX-512, nothing else running; seconds by the wall clock, the least of 4 calls):

- a profile takes 0.86 s (1.5 core seconds), torch.func by the same algorithm 1.27 and 1.64 in two runs of this script
  (1.7 to 1.9 in three others with these two alone): ours is 1.5 to 2.2 times as fast. Both spend it in products.
- torch.func as one would first write it takes 20 and 25 s: 24 to 29 times ours. All agree to three digits at every
  depth.
- what made ours fast: the pulls of all eight probes, of total and bare, at once (one cotangent at a time 2.9 s, four
  1.05, eight 0.85, both terms together 0.83), since small products keep no two cores busy; and attention in the layout
  that products want, a causal row in halves (1.2 s instead of 1.05).

Scaling, in the same run as the second (time is linear in depth, 24 to 26 ms a block of two sublayers, and in probes;
compile time does not grow with depth, nor does memory but by the stored points):

    layers    probes    seconds    core seconds    seconds to compile    temporary MiB
         4         8       0.11            0.20                   5.2               42
        18         8       0.46            0.80                   5.7               45
        36         4       0.54            0.90                   5.7               30
        36         8       0.93            1.62                   5.7               50
        36        16       1.79            3.17                   5.8               63

A profile is the terms of the product from every depth to the output (total, identity, first order) on 8 random
cotangents, in float32: width 128, 4 heads, one sequence of 256 tokens. Three ways:

- ours: `analysis.depth.measure_column`, one scan over depth;
- torch.func, the same algorithm: `vjp` of each sublayer at its stored point, `vmap` over probes, terms carried down;
- torch.func, as one would first write it: `vjp` of the map from each depth to the output, for the total alone
  (measured at every twelfth depth, and scaled to all of them).
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from analysis import depth
from models import ModelConfig, gpt

try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise SystemExit("this benchmark compares with torch.func: install torch") from error

LENGTH, PROBES, EVERY = 256, 8, 12
KEY = jax.random.key(0)


def deep(layers: int = 36) -> ModelConfig:
    """The `deep` preset's model at a length of 256."""
    return ModelConfig(vocab_size=257, n_layer=layers, n_head=4, d_model=128, d_ff=512, context=LENGTH, dropout=0.0)


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float, Any]]:
    """Least seconds by the wall and of all cores, and the result, after a first call; a round makes every call once."""
    results = {name: call() for name, call in calls.items()}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cores: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start, busy = time.perf_counter(), time.process_time()
            results[name] = call()
            wall[name].append(time.perf_counter() - start)
            cores[name].append(time.process_time() - busy)
    return {name: (min(wall[name]), min(cores[name]), results[name]) for name in calls}


def compiled(model: ModelConfig, probes: int = PROBES) -> tuple[Any, gpt.Params, jax.Array]:
    """Our profile as one program, with parameters and tokens for it."""
    params = jax.jit(functools.partial(gpt.init, model))(KEY)
    tokens = jax.random.randint(jax.random.key(1), (1, LENGTH), 0, model.vocab_size)
    profile = jax.jit(functools.partial(depth.measure_column, model, probes=probes))
    return profile.lower(params, tokens, KEY, 2 * model.n_layer).compile(), params, tokens


def in_torch(model: ModelConfig, params: gpt.Params, tokens: jax.Array) -> tuple[list[Callable], list[Any]]:
    """Every sublayer's branch as a torch function, and the points of the forward pass."""
    blocks = jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)), params["blocks"])
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    heads, width = model.n_head, model.d_head

    def attention(k: int, x):
        u = torch.nn.functional.layer_norm(
            x, (model.d_model,), blocks["norm_attention"]["scale"][k], blocks["norm_attention"]["bias"][k], model.ln_eps
        )
        weights = blocks["attention"]
        q, key, v = (
            (u @ weights[name]["kernel"][k]).view(LENGTH, heads, width).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = (q @ key.transpose(1, 2)) / math.sqrt(width)
        mixed = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        return mixed.transpose(0, 1).reshape(LENGTH, -1) @ weights["out"]["kernel"][k]

    def ffn(k: int, x):
        u = torch.nn.functional.layer_norm(
            x, (model.d_model,), blocks["norm_ffn"]["scale"][k], blocks["norm_ffn"]["bias"][k], model.ln_eps
        )
        return torch.nn.functional.gelu(u @ blocks["ffn"]["up"]["kernel"][k]) @ blocks["ffn"]["down"]["kernel"][k]

    branches = [functools.partial(f, k) for k in range(model.n_layer) for f in (attention, ffn)]
    x = torch.from_numpy(np.array(gpt.embed(model, params, tokens)[0]))
    points = [x]
    for branch in branches:
        points.append(points[-1] + branch(points[-1]))
    return branches, points


def same_algorithm(branches: list[Callable], points: list[Any], signs: Any) -> Callable[[], np.ndarray]:
    """Squared gains of total, bare and first at every depth, by one vjp of each sublayer for all probes."""

    def call() -> np.ndarray:
        total, first, found = signs, torch.zeros_like(signs), []
        for branch, x in zip(reversed(branches), reversed(points[:-1]), strict=True):
            pull = torch.func.vjp(branch, x)[1]
            pulled = torch.func.vmap(lambda u, pull=pull: pull(u)[0])(torch.cat([total, signs]))
            total, first = total + pulled[: len(signs)], first + pulled[len(signs) :]
            found.append([float((part**2).mean()) for part in (total, signs, first)])
        return np.asarray(found[::-1])

    return call


def from_each_depth(branches: list[Callable], points: list[Any], signs: Any) -> Callable[[], np.ndarray]:
    """Squared gain of the total by a vjp of the whole rest of the network, at every `EVERY`-th depth."""

    def call() -> np.ndarray:
        found = []
        for start in range(0, len(branches), EVERY):

            def above(x, start=start):
                for branch in branches[start:]:
                    x = x + branch(x)
                return x

            pull = torch.func.vjp(above, points[start])[1]
            found.append(float((torch.func.vmap(lambda u, pull=pull: pull(u)[0])(signs) ** 2).mean()))
        return np.asarray(found)

    return call


def beside_torch(repeats: int = 2) -> None:
    """The claim, with the same numbers at every depth."""
    model = deep()
    torch.set_grad_enabled(False)
    profile, params, tokens = compiled(model)
    branches, points = in_torch(model, params, tokens)
    # The probes that ours draws: one sequence, so its axis is dropped.
    signs = depth.probe_signs(KEY, PROBES, (1, LENGTH, model.d_model))
    signs = torch.from_numpy(np.array(signs[:, 0]))
    names = ("ours", "torch.func, the same algorithm", "torch.func, from each depth")
    results = timed(
        {
            names[0]: lambda: jax.block_until_ready(profile(params, tokens, KEY, 2 * model.n_layer)),
            names[1]: same_algorithm(branches, points, signs),
            names[2]: from_each_depth(branches, points, signs),
        },
        repeats,
    )
    # Its cost is that of the sublayers it crosses, summed over starts.
    crossed = [len(branches) - start for start in range(len(branches))]
    whole = dict.fromkeys(names, 1.0) | {names[2]: sum(crossed) / sum(crossed[::EVERY])}
    ours_wall, ours_cores, _ = results[names[0]]
    print(f"{'':<34}{'seconds':>9}{'of ours':>9}{'core seconds':>14}{'of ours':>9}")
    for name, (wall, cores, _) in results.items():
        wall, cores = whole[name] * wall, whole[name] * cores
        print(f"{name:<34}{wall:>9.2f}{wall / ours_wall:>9.1f}{cores:>14.2f}{cores / ours_cores:>9.1f}", flush=True)
    ours, same, totals = (results[name][-1] for name in names)
    for column, name in enumerate(("gain", "bare", "first")):
        np.testing.assert_allclose(np.square(ours[name]), same[:, column], rtol=1e-3)
    np.testing.assert_allclose(np.square(ours["gain"])[::EVERY], totals, rtol=1e-3)
    print("the same numbers, to three digits, at every depth")


def scaling() -> None:
    """Time linear in depth and probes; compile time and memory that do not grow with depth."""
    print(f"{'layers':>7}{'probes':>8}{'seconds':>9}{'core seconds':>14}{'to compile':>12}{'temporary MiB':>15}")
    for layers, probes in ((4, 8), (18, 8), (36, 4), (36, 8), (36, 16)):
        start = time.process_time()
        program, params, tokens = compiled(deep(layers), probes)
        spent = time.process_time() - start
        call = functools.partial(program, params, tokens, KEY, 2 * layers)
        wall, cores, _ = timed({"": lambda call=call: jax.block_until_ready(call())}, repeats=2)[""]
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{layers:>7}{probes:>8}{wall:>9.2f}{cores:>14.2f}{spent:>12.1f}{memory:>15.0f}", flush=True)


if __name__ == "__main__":
    beside_torch()
    scaling()
