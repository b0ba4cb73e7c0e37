"""Operator norms against their peers, side by side in one process: `python benchmarks/operator_norm.py`.

Spectral norm of a causal attention block (float32, two idle cores with AVX-512; least of 40 calls in turn; every method
stops where its own tolerance of 1e-2 says, matfree after the steps it is told):

    time over that of sens              L 32, d 32   L 256, d 128   error
    sens (bracket of 0.7 % and 0.5 %)      1.0           1.0        1e-7 from a converged bracket
    matfree bidiag, 16 steps               0.8           1.1        9e-5
    matfree bidiag, 8 steps                0.6           0.5        9e-3, untold
    optax power iteration                  1.0           1.4        3e-4
    scipy svds, a host call a product      3.1           1.6        9e-5
    PyTorch jvp/vjp power iteration       28             2.3        3e-4
    dense jacfwd + SVD                   196          no memory

Of many matrices at once the search for the bracket's ends was most of the time: on 32 points at a time, with more
passes, 144 matrices of width 64 take 18 ms instead of 115 on 512.

A step costs what one of matfree's costs; sens takes a few more, because it stops when a bound, not an estimate, is
within 1e-2, and it keeps no basis. matfree as a dependency would bring neither a status nor a bound.

Block norm, CPU time: 4.5, 7.7, 14.5 ms for 1, 2, 4 rows (L 64, d 32): linear in rows, and so in probes; twice for twice
the width; seven times for twice the length, more than the four of the attention block's own L^2 (caches are shared).
Brackets at rtol 1e-2:

    L 32, d 32, all rows            upper/lower 1.0001    0.03 CPU s     1 MiB
    L 64, d 64, all rows                        1.0016     1.1 CPU s     5 MiB
    L 256, d 128, rows 0 1 8 255                1.0002     2.0 CPU s    72 MiB
    L 256, d 128, all rows                      1.0021      83 CPU s    74 MiB

where the dense Jacobian of the last has 4 GiB. That one is 32768 pulls, 2 ms each, which no proof about an
arbitrary map can spare: 71 rows are certified to rtol, the others dropped after their first certificate. The covariance
bound as `row_upper` spares one of 256 here: on random blocks of that size it is 2.3 to 4.4 times the truth, and the
largest row is only 1.8 times the median one.
"""

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse.linalg

from sens.operators import block_operator_norm, linearise
from sens.spectral import spectral_norm

KEY = jax.random.key(0)
RTOL = 1e-2


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def block(length: int, width: int, heads: int) -> tuple[Callable[[jax.Array], jax.Array], jax.Array, Any]:
    """A random causal attention block in float32, a point, and its weights."""
    rng = np.random.default_rng(0)
    shape = (heads, width, width // heads)
    query, key, value = (rng.normal(size=shape).astype(np.float32) / np.float32(width**0.5) for _ in range(3))
    out = rng.normal(size=(width, width)).astype(np.float32) / np.float32(width**0.5)
    point = rng.normal(size=(length, width)).astype(np.float32)
    mask = np.tril(np.ones((length, length), bool))

    def f(u: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("ld,hde->hle", u, w) for w in (query, key, value))
        logits = jnp.einsum("hie,hje->hij", q, k) / (width // heads) ** 0.5
        p = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
        return jnp.einsum("hij,hje->ihe", p, v).reshape(length, width) @ out

    return f, jnp.asarray(point), (query, key, value, out, mask)


def timed(
    calls: dict[str, Callable[[], Any]],
    rounds: int = 40,
    budget: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, tuple[float, Any]]:
    """Least seconds and the result of each call. Every round makes every call once, but none for more than `budget`."""
    results = {name: call() for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if sum(seconds[name]) < budget:
                start = clock()
                call()
                seconds[name].append(clock() - start)
    return {name: (min(seconds[name]), results[name]) for name in calls}


def ours(f: Callable, x: jax.Array) -> Callable[[], float]:
    norm = jax.jit(lambda x: spectral_norm(f, x, key=KEY, rtol=RTOL))
    return lambda: float(norm(x).lower)


def by_optax(f: Callable, x: jax.Array) -> Callable[[], float]:
    @jax.jit
    def norm(x):
        df = linearise(f, x)
        gram: Any = lambda v: df.pull(df.push(v))  # noqa: E731
        start = jax.random.normal(KEY, x.shape)
        return jnp.sqrt(optax.power_iteration(gram, v0=start, num_iters=500, error_tolerance=RTOL)[0])

    return lambda: float(norm(x))


def by_matfree(f: Callable, x: jax.Array, steps: int) -> Callable[[], float]:
    from matfree import decomp, eig  # pyright: ignore[reportMissingImports]

    svd = eig.svd_partial(decomp.bidiag(steps))

    @jax.jit
    def norm(x):
        _, push = jax.linearize(f, x)
        return svd(push, jax.random.normal(KEY, x.shape))[1].max()

    return lambda: float(norm(x))


def by_scipy(f: Callable, x: jax.Array) -> Callable[[], float]:
    _, push = jax.linearize(f, x)
    transpose = jax.linear_transpose(push, x)
    push, pull = jax.jit(push), jax.jit(lambda u: transpose(u)[0])
    linear_operator: Any = scipy.sparse.linalg.LinearOperator
    operator = linear_operator(
        shape=(x.size, x.size),
        matvec=lambda v: np.asarray(push(v.reshape(x.shape).astype(np.float32))).ravel(),
        rmatvec=lambda u: np.asarray(pull(u.reshape(x.shape).astype(np.float32))).ravel(),
        dtype=np.float32,
    )
    start = np.random.default_rng(0).normal(size=x.size).astype(np.float32)
    svds: Any = scipy.sparse.linalg.svds
    return lambda: float(svds(operator, k=1, tol=RTOL, v0=start, return_singular_vectors=False)[0])


def by_dense(f: Callable, x: jax.Array) -> Callable[[], float]:
    jacobian = jax.jit(jax.jacfwd(f))
    return lambda: float(np.linalg.norm(np.asarray(jacobian(x)).reshape(x.size, x.size), 2))


def by_torch(weights: Any, x: jax.Array) -> Callable[[], float]:
    import torch  # pyright: ignore[reportMissingImports]

    query, key, value, out = (torch.from_numpy(w) for w in weights[:4])
    mask = torch.from_numpy(weights[4])
    point = torch.from_numpy(np.asarray(x).copy())

    def f(u):
        q, k, v = (torch.einsum("ld,hde->hle", u, w) for w in (query, key, value))
        logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        return (torch.softmax(logits, -1) @ v).transpose(0, 1).reshape(u.shape) @ out

    def norm() -> float:
        v = torch.from_numpy(np.random.default_rng(0).normal(size=x.shape).astype(np.float32))
        pull: Any = torch.func.vjp(f, point)[1]
        previous, sigma = 0.0, 1e-30
        while sigma > previous * (1 + RTOL / 100):
            previous = sigma
            image: Any = torch.func.jvp(f, (point,), (v / v.norm(),))[1]
            (v,) = pull(image)
            sigma = float(image.norm())
        return sigma

    return norm


def compare_spectral(length: int, width: int, heads: int, *, dense: bool) -> None:
    f, x, weights = block(length, width, heads)
    calls = {"sens": ours(f, x), "optax power iteration": by_optax(f, x), "scipy svds": by_scipy(f, x)}
    if installed("matfree"):
        calls |= {f"matfree bidiag({steps})": by_matfree(f, x, steps) for steps in (8, 16, 24)}
    if installed("torch"):
        calls["torch jvp/vjp power iteration"] = by_torch(weights, x)
    if dense:
        calls["dense jacfwd + SVD"] = by_dense(f, x)
    exact = float(jax.jit(lambda x: spectral_norm(f, x, key=jax.random.key(1), rtol=1e-4, steps=400))(x).lower)
    norm = jax.jit(lambda x: spectral_norm(f, x, key=KEY, rtol=RTOL))(x)
    print(f"\nspectral norm, L {length}, d {width}, {heads} heads, float32")
    print(f"  sens: {norm.steps} steps, bracket [{norm.lower:.4f}, {norm.upper:.4f}]")
    results = timed(calls)
    first = results["sens"][0]
    for name, (seconds, value) in results.items():
        error = abs(value / exact - 1)
        print(f"  {name:32s} {seconds * 1e3:9.2f} ms  {seconds / first:7.2f} x sens  error {error:.1e}", flush=True)


def scaling() -> None:
    print("\nblock norm, one certificate a row: CPU time against rows, then against L and d")
    calls: dict[str, Callable[[], Any]] = {}
    for length, width, rows in [(64, 32, 1), (64, 32, 2), (64, 32, 4), (64, 64, 1), (128, 32, 1), (128, 64, 1)]:
        f, x, _ = block(length, width, 4)
        last = list(range(length - rows, length))
        norm = jax.jit(functools.partial(block_operator_norm, f, rows=last, key=KEY, rounds=1, rtol=1e-6))
        calls[f"L {length:4d}  d {width:3d}  rows {rows}"] = lambda norm=norm, x=x: jax.block_until_ready(norm(x))
    for name, (seconds, _) in timed(calls, rounds=10, clock=time.process_time).items():
        print(f"  {name}  {seconds * 1e3:8.1f} ms", flush=True)


def certificates() -> None:
    print("\nblock norm, bracket at rtol = 1e-2")
    for length, width, rows in [(32, 32, None), (64, 64, None), (256, 128, [0, 1, 8, 255]), (256, 128, None)]:
        f, x, _ = block(length, width, 4)
        compiled = jax.jit(functools.partial(block_operator_norm, f, rows=rows, key=KEY)).lower(x).compile()
        call = lambda compiled=compiled, x=x: jax.block_until_ready(compiled(x))  # noqa: E731
        (seconds, norm), *_ = timed({"": call}, rounds=1, clock=time.process_time).values()
        memory: Any = compiled.memory_analysis()
        print(
            f"  L {length:4d}  d {width:3d}  rows {rows or 'all'}  [{norm.lower:.4f}, {norm.upper:.4f}]"
            f"  upper/lower {norm.upper / norm.lower:.4f}  {seconds:.2f} CPU s"
            f"  {memory.temp_size_in_bytes / 2**20:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    compare_spectral(32, 32, 4, dense=True)
    compare_spectral(256, 128, 4, dense=False)
    scaling()
    certificates()
