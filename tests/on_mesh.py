"""What `test_sharding` measures on eight devices: run as a module, writes its figures as JSON."""

import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.test_sharding import CASES, CONFIG
from tests.trained import is_key
from train import checkpoint, sharding, step, telemetry
from train.presets import RunConfig


def measure(config: RunConfig, mesh: Any, start: Any, tokens: np.ndarray) -> tuple[dict[str, Any], Any, Any]:
    """Figures of three updates from a state, the gradient of the first (from Adam's moment), and the last state."""
    shardings = sharding.state_shardings(mesh, config)
    update = jax.jit(step.make_update(config.model, config.train), out_shardings=(shardings, sharding.replicated(mesh)))
    state, batch = jax.device_put(start, shardings), sharding.place(mesh, tokens, tokens.shape[1])
    with jax.set_mesh(mesh):
        compiled = update.lower(state, batch).compile()
    text, first = str(compiled.as_text()), jax.local_devices()[0]
    held = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards if shard.device == first]
    figures: dict[str, Any] = {
        "state_bytes": sum(shard.data.size * 4 for shard in held),
        "shapes": {shape: shape in text for shape in ("[2,2,16,16]", "[8,4,16,16]", "[2,16,16]", "[8,16,32]")},
        "losses": [],
        "grad_norms": [],
    }
    gradient = None
    for _ in range(3):
        state, metrics = compiled(state, batch)
        figures["losses"].append(float(metrics["loss"]))
        figures["grad_norms"].append(float(metrics["grad_norm"]))
        gradient = gradient or jax.tree.map(np.asarray, state["opt"][1][0].mu)
    return figures, gradient, state


def errors(found: Any, wanted: Any) -> dict[str, float]:
    """Largest difference of each gradient, relative to its largest entry."""
    one = dict(jax.tree_util.tree_leaves_with_path(wanted))
    return {
        jax.tree_util.keystr(path): float(np.abs(leaf - one[path]).max() / np.abs(one[path]).max())
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
    }


def plain(state: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), state)


def restored(config: RunConfig, state: Any, directory: Path) -> dict[str, bool]:
    """Whether a state saved on one mesh comes back on others, bit for bit and laid out for them."""
    with checkpoint.open_checkpoints(directory, 1) as checkpointer:
        checkpoint.save(checkpointer, state, 3, {"next_index": 3})
    same = {}
    for name in ("fsdp=8", "data=2,tensor=4", "one device"):
        mesh = sharding.one_device() if name == "one device" else sharding.make(sharding.parse(name))
        like = sharding.laid_out(sharding.state_shapes(config), sharding.state_shardings(mesh, config))
        with checkpoint.reading(directory) as checkpointer:
            found = checkpoint.restore(checkpointer, like)
        assert found is not None
        equal = jax.tree.map(lambda a, b: bool((a == b).all()), plain(found[0]), plain(state))
        placed = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), found[0], like)
        same[name] = all(jax.tree.leaves((equal, placed)))
    return same


def telemetry_errors(config: RunConfig, state: Any, mesh: Any) -> dict[str, float]:
    """Largest differences between what telemetry measures on a mesh, of four of eight sequences, and on one device."""
    params = sharding.gathered(mesh, state["params"])
    sequences = np.random.default_rng(1).integers(0, config.model.vocab_size, (8, 17)).astype(np.int32)
    one = sharding.one_device()
    found = telemetry.start(config, mesh, 1, state["params"], sequences)["attention"]
    measured = sharding.place(one, sequences[::2, :-1], 4)
    wanted = telemetry.jitted_rows(config.model, (0, 1), one)(params, measured)
    assert found["p_max"].shape == wanted["p_max"].shape
    return {name: float(np.nanmax(np.abs(np.asarray(found[name]) - np.asarray(wanted[name])))) for name in wanted}


def main(out: Path) -> None:
    step.CHUNK_LOGITS = 2 * 4 * CONFIG.model.vocab_size  # the loss by 4 positions at a time where a batch is split by 4
    tokens = np.random.default_rng(0).integers(0, CONFIG.model.vocab_size, (2, 8, 17)).astype(np.int32)
    results: dict[str, Any] = {}
    config, state = CONFIG, None
    for placement in ("pre", "post"):
        config = RunConfig(dataclasses.replace(CONFIG.model, placement=placement), CONFIG.train)
        start = jax.jit(functools.partial(step.init_state, config.model, config.train))(jnp.int32(0))
        results[placement], wanted, _ = measure(config, sharding.one_device(), start, tokens)
        results[placement]["gradient_errors"] = errors(wanted, wanted)
        for case in (case for case in CASES if case.startswith(placement)):
            figures, found, state = measure(config, sharding.make(sharding.parse(case.split()[1])), start, tokens)
            results[case] = {**figures, "gradient_errors": errors(found, wanted)}
    results["telemetry"] = telemetry_errors(config, state, sharding.make(sharding.parse(CASES[-1].split()[1])))
    with tempfile.TemporaryDirectory() as directory:
        results["restored"] = restored(config, state, Path(directory))
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
