"""Tokens a second of an update beside PyTorch's trainers: same model, batch and optimizer, float32, two threads.

Every contender is a process of its own; they take turns, a few updates each, and the medians over the rounds are
compared. Wall time needs an idle machine; CPU time, printed beside it, does not quite. Compilation is apart: it is in
the first update.

    python benchmarks/training.py --peers PYTHON [--shapes mini twelve] [--rounds 7] [--devices 2]

PYTHON is an interpreter with torch, transformers and x-transformers; without it only ours is timed. (Not called
train.py: a script's folder comes first among what it imports, and it would stand in the way of the package.)

Two idle cores without AVX-512, two threads, 3 rounds of 3 updates, tokens a second by wall time (and CPU
milliseconds an update):

| | sens pre-LN | sens post-LN | GPT-2 eager | GPT-2 sdpa | x-transformers pre-LN | post-LN |
| --- | --- | --- | --- | --- | --- | --- |
| `mini` | 6,888 (241) | 6,537 (257) | 7,416 (274) | 6,748 (299) | 6,158 (329) | 6,047 (335) |
| `twelve` | 2,642 (1,294) | 2,536 (1,354) | 2,339 (1,738) | 2,350 (1,725) | 2,309 (1,763) | 2,231 (1,813) |

So 0.93 times the best peer at `mini` and 1.12 times at `twelve`, short of the 1.5 that is wanted: by CPU time 1.14 and
1.33. XLA leaves the second core idle for much of an update: with one thread each, by CPU time, `mini` is 1.61 times
GPT-2 sdpa (156 and 251 ms) and `twelve` 1.35 times (1,351 and 1,822 ms).

Two idle cores of a server CPU with AVX-512 and AMX, 3 rounds of 3 updates: `mini` 5,141 pre-LN and 4,844 post-LN
against 6,415 (GPT-2 sdpa), 0.80 times the best; `twelve` 2,169 and 2,076 against 2,854, 0.76 times (on another day
4,215 against 4,683, 0.90, and 1,826 against 2,106, 0.87: the same program on a slower machine). It was 0.84 and 0.53
before attention was put in the layout that products want there: jax 0.10.2 gives products to YNNPACK on such CPUs,
which takes five times as long for the heads' products when positions stand before heads, and takes the softmax's
division into them. With rows normalised after the product, a derivative written out, and a causal model's queries in
halves (a quarter less work) `twelve` takes 1.06 s instead of 1.37, old and new in turn.

**1.5 times the best peer is out of reach there in float32.** An update of `twelve` is 148 GFLOP, 190 with what is
computed again; jax's best product on the two cores reaches 345 GFLOP/s. 1.5 times 2,854 tokens/s would be 0.48 s an
update, 0.43 of them products at that peak: 0.05 s for all else, which takes 0.2. What was tried, seconds an update of
`twelve`:

- `remat` "full" 0.96 to 1.01, "dots" 0.98, "none" 1.19, of which 0.4 the system's, for 250,000 page faults; unrolled
  instead of scanned 1.16, 1.10, 1.09. With GLIBC_TUNABLES=glibc.malloc.hugetlb=1 0.89 to 0.94, 0.87 and 0.99.
- bfloat16 products with float32 results run at 1.2 to 1.7 TFLOP/s (AMX), but YNNPACK takes no transposed left side,
  which every gradient of a kernel has, and XLA's transposes are slow: with derivatives written out for it 0.72
  instead of 0.94; `mini` 0.20, as in float32. The same products three times, for float32's digits, are as slow as
  float32's.
- Four parts instead of halves, GELU with its own derivative, YNNPACK switched off
  (`--xla_cpu_experimental_ynn_fusion_type=`, 1.16): nothing gained.
- Two devices (`--devices 2`): 0.19 instead of 0.22 at `mini`, 1.15 instead of 1.06 at `twelve`.
- Three seeds in one program (vmap) at `mini`: 0.80 to 0.87 against 0.81 to 0.85 one after the other.

Where the time goes (`mini`, one thread, about 170 ms; each piece timed alone, then counted): products about 62 at the
core's peak, attention's own 22, GELU 19, softmax 17, LayerNorms 7, the optimizer 3. GELU through erf instead of erfc,
and a softmax whose mask is not applied again in the backward pass, took `mini` from 201 to 169 ms and `twelve` from
1,373 to 1,228 ms, old and new in turn. Keeping more than the stream between blocks does not help (`mini`: `remat`
"none" 360 ms, "dots" 200, "full" 157; a scan copies what it keeps). Heads before positions, and queries in two parts
that skip masked keys, take 4 to 6 % off attention: not done.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from models import ModelConfig, gpt
from train.config import TrainConfig
from train.presets import PRESETS, RunConfig

TWELVE = RunConfig(
    ModelConfig(vocab_size=4096, n_layer=12, n_head=4, d_model=256, d_ff=1024, context=256, dropout=0.0),
    TrainConfig(micro_batch=8, accumulation=1),
)
SHAPES = {"mini": PRESETS["mini"], "twelve": TWELVE}
PEERS = ("gpt2-eager", "gpt2-sdpa", "x-pre", "x-post")
OURS = ("sens-pre", "sens-post")


def configuration(shape: str, placement: str) -> RunConfig:
    config = SHAPES[shape]
    return RunConfig(dataclasses.replace(config.model, placement=placement), config.train)


def contend(name: str, shape: str) -> None:
    """A contender of ours: answers as `training_peer.py` does."""
    import jax
    import numpy as np

    from train import loop, sharding

    config = configuration(shape, name.removeprefix("sens-"))
    rng = np.random.default_rng(0)
    size = (1, config.train.micro_batch, config.model.context + 1)
    tokens = rng.integers(0, config.model.vocab_size, size).astype(np.int32)
    mesh = sharding.make(sharding.MeshShape(data=jax.local_device_count()))
    state = loop.init_state(config, mesh)
    update = loop._jitted_update(config.model, dataclasses.replace(config.train, seed=0), mesh)
    began = time.perf_counter()
    state, metrics = update(state, sharding.place(mesh, tokens, config.train.micro_batch))
    first = {"loss": float(metrics["loss"]), "parameters": gpt.count_parameters(config.model)}
    print(json.dumps({"first": time.perf_counter() - began, **first}), flush=True)
    for line in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            state, metrics = update(state, sharding.place(mesh, tokens, config.train.micro_batch))
        loss = float(jax.device_get(metrics["loss"]))
        took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "loss": loss}
        print(json.dumps(took), flush=True)


def start(name: str, shape: str, peers: str | None, threads: int, devices: int) -> subprocess.Popen[str]:
    here = Path(__file__).resolve()
    if name in OURS:
        command = [sys.executable, str(here), "--contend", name, shape]
    else:
        config = SHAPES[shape]
        about = {**dataclasses.asdict(config.model), "batch": config.train.micro_batch, "threads": threads}
        command = [str(peers), str(here.with_name("training_peer.py")), name, json.dumps(about)]
    pin = functools.partial(os.sched_setaffinity, 0, range(threads))  # XLA counts the cores that it may use
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=pin, env=environment
    )


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a contender ended: {process.args}")
    return json.loads(line)


def ask(process: subprocess.Popen[str], updates: int) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write(f"{updates}\n")
    process.stdin.flush()
    return answer(process)


def race(shape: str, peers: str | None, rounds: int, updates: int, threads: int, devices: int) -> None:
    config = SHAPES[shape]
    tokens = config.train.micro_batch * config.model.context
    names = (*OURS, *(PEERS if peers else ()))
    processes = {name: start(name, shape, peers, threads, devices) for name in names}
    firsts = {name: answer(process) for name, process in processes.items()}
    took: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for name in names:
        ask(processes[name], 2)
    for _ in range(rounds):
        for name in names:
            took[name].append(ask(processes[name], updates))
    for process in processes.values():
        process.communicate()
    print(f"\n{shape}: {config.model.n_layer} layers, {tokens} tokens an update, {threads} threads, {devices} devices")
    print(f"{'':>12} {'parameters':>11} {'first s':>8} {'ms':>8} {'cpu ms':>8} {'tokens/s':>9} {'loss':>7}")
    median = {
        name: {key: statistics.median(one[key] for one in took[name]) / updates for key in ("seconds", "cpu")}
        for name in names
    }
    for name in names:
        ms = {key: 1000 * value for key, value in median[name].items()}
        print(
            f"{name:>12} {firsts[name]['parameters']:11,.0f} {firsts[name]['first']:8.1f} {ms['seconds']:8.1f}"
            f" {ms['cpu']:8.1f} {tokens / median[name]['seconds']:9,.0f} {took[name][-1]['loss']:7.3f}"
        )
    for key, what in (("seconds", "wall"), ("cpu", "CPU")):
        for ours in OURS if peers else ():
            best = min(PEERS, key=lambda name: median[name][key])
            print(f"{ours}: {median[best][key] / median[ours][key]:.2f} times {best} by {what} time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="an interpreter with torch, transformers and x-transformers")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=4, help="a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="of ours, along data: each computes a part of the batch")
    parser.add_argument("--contend", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contend:
        contend(*options.contend)
        return
    for shape in options.shapes:
        race(shape, options.peers, options.rounds, options.updates, options.threads, options.devices)


if __name__ == "__main__":
    main()
