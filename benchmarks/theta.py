"""How fast is the two-sided bracket, beside what gives one side only; how wide; and how good are its partitions?

    python benchmarks/theta.py [speed] [scaling] [tightness] [exact] [quality]

Every ratio is of interleaved runs in this one process (the least of each); peers that are not installed are left out.

Findings (2 cores of a server CPU with AVX-512, milliseconds by the wall clock, the least of 15 rounds; all rows of all
cases closed to 1e-6), 4096 x 1024. Times of one run; ratio: NumPy's prefix over the bracket, median (range) of seven:

| rows | bracket | NumPy's prefix | jnp.sort prefix | our prefix | ratio |
| --- | --- | --- | --- | --- | --- |
| s = 0.3 | 4.0 | 30.8 | 549 | 6.9 | 7.6 (6.8 to 8.3) |
| s = 1 | 4.2 | 31.2 | 557 | 5.8 | 7.4 (6.5 to 8.0) |
| s = 3 | 5.1 | 27.9 | 542 | 5.1 | 5.7 (4.6 to 6.3) |
| s = 6 | 4.9 | 28.0 | 555 | 5.3 | 5.7 (4.8 to 6.1) |
| causal | 5.2 | 28.9 | 417 | 5.6 | 5.1 (4.2 to 5.5) |

So 5 times is reached in all cases, for causal rows just. That is of a call that follows another like it. The first
call after NumPy's prefix, whose temporaries fill the caches, takes 5.6 to 6.6 (ratio 4.1 to 5.5), and more after half a
second of jnp.sort, in parentheses in the output. Of the first pass, 2.9, reading for validity takes 0.75; the pass of
mixtures 0.8 for the 130 to 170 rows that are left open, a later one 0.05 to 0.1 where no row is; three causal rows with
9 to 11 entries go through all four. Halves from two threads take 3.3 instead of 4.9, but a thread's start takes 0.9 and
cold caches the rest: not done. A CPU without AVX-512 took 3.4 to 4.7, 4.5 to 5.9 times less than NumPy, earlier
(torch's prefix there 64 to 104).

What made it fast: as few readers of a lane as possible, because XLA computes it again for each; blocks so small that
XLA splits no loop over them between threads, whose code for a part of a loop is two to ten times slower here than for
the whole; no slice of a block fused into fewer than sixteen steps, which costs ten times as much; partners in the
network by slices instead of a gather; the pass for clusters apart, which is the dearest; no pass at all where no row
is open. The prefix took 31 ms here when it materialised its masked rows for every sum, and bisected to the last bit.

By rows, length 1024: 1.6 (1024), 2.5, 5.0, 11.7 (8192). By length, 2^22 entries: 10.8 (256, where the network for 64
numbers a row weighs most), 4.7 (1024), 4.1 (4096), 4.4 (16384). Rows of at most 128 entries are sorted at once instead
of mixed by lanes: 32,768 softmax rows of 32 take 19 to 28 instead of 90 to 157. Temporary memory 0.04 to 0.52 of the
input. `theta_exact`: 0.2 ms at support 16, 0.2 at 24, 1.3 at 32, 22 at 40.
"""

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sens

SCALES = (0.3, 1.0, 3.0, 6.0)
LENGTHS = (32, 64, 128, 256, 1024, 4096)


def softmax_rows(scale: float, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """softmax of scale * N(0, 1), float32."""
    u = scale * np.random.default_rng(seed).standard_normal((rows, length), dtype=np.float32)
    e = np.exp(u - u.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def causal_rows(rows: int, length: int) -> np.ndarray:
    """Rows of every support from 1 to `length` and every scale: what a causal model's heads give."""
    rng = np.random.default_rng(1)
    u = rng.choice(SCALES, (rows, 1)) * rng.standard_normal((rows, length))
    u[np.arange(length) > np.arange(rows)[:, None] % length] = -np.inf
    e = np.exp(u - u.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(np.float32)


def numpy_prefix(p: np.ndarray) -> np.ndarray:
    c = np.cumsum(np.sort(p, axis=-1)[:, ::-1], axis=-1)
    nearest = np.take_along_axis(c, np.abs(c - 0.5).argmin(-1)[:, None], -1)[:, 0]
    return 4 * nearest * (1 - nearest)


@jax.jit
def jnp_prefix(p: jax.Array) -> jax.Array:
    c = jnp.cumsum(jnp.sort(p, axis=-1, descending=True), axis=-1)
    nearest = jnp.take_along_axis(c, jnp.abs(c - 0.5).argmin(-1)[:, None], -1)[:, 0]
    return 4 * nearest * (1 - nearest)


def torch_prefix() -> Callable[[np.ndarray], Any] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")

    def prefix(p: np.ndarray):
        c = torch.sort(torch.from_numpy(p), dim=-1, descending=True).values.cumsum(-1)
        nearest = c.gather(-1, (c - 0.5).abs().argmin(-1, keepdim=True))[:, 0]
        return 4 * nearest * (1 - nearest)

    return prefix


class Taken(NamedTuple):
    """Milliseconds: the least of calls that follow another of the same, and of those that follow somebody else's."""

    again: float
    after_others: float


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Taken]:
    """The least time of each call, which a round makes three times in a row; a round makes all calls, so that they
    share the weather. The first of the three finds the caches full of what the call before it worked on."""
    best = {name: [np.inf] * 3 for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            for turn in range(3):
                start = time.perf_counter()
                jax.block_until_ready(call())
                if i:  # the first round compiles
                    best[name][turn] = min(best[name][turn], 1e3 * (time.perf_counter() - start))
    return {name: Taken(min(turns[1:]), turns[0]) for name, turns in best.items()}


def speed() -> None:
    print("4096 x 1024 float32: milliseconds of a call repeated (after others'), NumPy's prefix over the bracket")
    bracket, prefix, torch = jax.jit(sens.theta_bracket), jax.jit(sens.theta_prefix), torch_prefix()
    cases = {f"s = {s:g}": softmax_rows(s, 4096, 1024) for s in SCALES} | {"causal": causal_rows(4096, 1024)}
    for name, p in cases.items():
        q = jnp.asarray(p)
        calls = {
            "bracket": lambda q=q: bracket(q),
            "our prefix": lambda q=q: prefix(q),
            "NumPy prefix": lambda p=p: numpy_prefix(p),
            "jnp.sort prefix": lambda q=q: jnp_prefix(q),
        }
        if torch:
            calls["torch prefix"] = lambda p=p: torch(p)
        times = interleaved(calls, rounds=15)
        lower, upper = bracket(q)
        listed = ", ".join(f"{key} {value.again:.1f} ({value.after_others:.1f})" for key, value in times.items())
        again, after_others = (peer / ours for peer, ours in zip(times["NumPy prefix"], times["bracket"], strict=True))
        closed = float(jnp.mean(upper - lower <= 1e-6))
        print(f"  {name:8s} {listed}; ratio {again:.1f} ({after_others:.1f}); closed {closed:.2%}", flush=True)


def scaling() -> None:
    print("bracket, s = 3: milliseconds by rows (length 1024) and by length (2^22 entries)")
    bracket = jax.jit(sens.theta_bracket)
    for rows, length in ((1024, 1024), (2048, 1024), (4096, 1024), (8192, 1024)):
        q = jnp.asarray(softmax_rows(3.0, rows, length))
        print(f"  {rows:6d} x {length}: {interleaved({'': lambda q=q: bracket(q)}, 7)[''].again:.1f}")
    for length in (256, 1024, 4096, 16384):
        q = jnp.asarray(softmax_rows(3.0, 2**22 // length, length))
        analysis = bracket.lower(q).compile().memory_analysis()
        memory = getattr(analysis, "temp_size_in_bytes", 0) / q.nbytes
        taken = interleaved({"": lambda q=q: bracket(q)}, 7)[""].again
        print(f"  {2**22 // length:6d} x {length}: {taken:.1f}; temporary memory {memory:.2f} of the input")


def tightness() -> None:
    print("share of rows closed to 1e-6 / largest width / largest shortfall of the prefix certificate")
    bracket, prefix = jax.jit(sens.theta_bracket), jax.jit(sens.theta_prefix)
    print("| length | " + " | ".join(f"s = {s:g}" for s in (*SCALES, 10.0)) + " |")
    print("| --- |" + " --- |" * 5)
    for length in LENGTHS:
        cells = []
        for s in (*SCALES, 10.0):
            q = jnp.asarray(softmax_rows(s, 4000 if length <= 1024 else 1000, length, seed=length))
            lower, upper = bracket(q)
            width = np.asarray(upper - lower)
            missed = float(jnp.max(lower - prefix(q)))
            cells.append(f"{np.mean(width <= 1e-6):.2%} / {width.max():.0e} / {max(missed, 0):.0e}")
        print(f"| {length} | " + " | ".join(cells) + " |", flush=True)


def exact() -> None:
    print("theta_exact: milliseconds a row")
    rng = np.random.default_rng(0)
    for n in (16, 24, 32, 40):
        p = rng.dirichlet(np.ones(n))
        print(f"  support {n}: {interleaved({'': lambda p=p: sens.theta_exact(p)}, 7)[''].again:.2f}")


def quality() -> None:
    if importlib.util.find_spec("numberpartitioning") is None:
        print("quality: numberpartitioning is not installed")
        return
    karmarkar_karp = importlib.import_module("numberpartitioning").karmarkar_karp
    print("1 - theta of the partition found, median over 50 rows: ours (lower end) and Karmarkar-Karp's")
    for s in (1.0, 3.0, 6.0):
        p = softmax_rows(s, 50, 256).astype(np.float64)
        p /= p.sum(-1, keepdims=True)
        theirs = []
        for row in p:
            sizes = karmarkar_karp([int(x) for x in row * 2.0**50], num_parts=2).sizes
            theirs.append((abs(sizes[0] - sizes[1]) / sum(sizes)) ** 2)
        with jax.enable_x64(True):
            lower = np.asarray(jax.jit(sens.theta_bracket)(p, None, 0.0).lower)
        print(f"  s = {s:g}: {np.median(1 - lower):.1e} and {np.median(theirs):.1e}; worst {np.max(1 - lower):.1e} "
              f"and {np.max(theirs):.1e}")  # fmt: skip


if __name__ == "__main__":
    parts = {f.__name__: f for f in (speed, scaling, tightness, exact, quality)}
    for name in sys.argv[1:] or parts:
        parts[name]()
