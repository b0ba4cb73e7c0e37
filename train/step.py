"""One update as a pure function of (state, batch): accumulation by scan, AdamW, schedule, clip, precision policy."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models import ModelConfig, gpt
from models.sharding import as_stored, batch_parts
from train.config import TrainConfig

State = dict[str, Any]
"""`params`, `opt` (optax state), `update` (how many were made, int32) and `key` (the base of every dropout key)."""

Metrics = dict[str, Array]

CHUNK_LOGITS = 2**26
"""Most logits that the loss holds at a time on a device: 256 MB in float32, 1,024 positions of GPT-2's vocabulary."""


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Rate of update u = 1, 2, ...: linear to the peak at `warmup`, then a cosine to `final_lr` of it at `updates`.

    As an optax schedule its argument is the number of updates already made, u - 1: the first update has a rate above 0.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.lr,
        warmup_steps=config.warmup,
        decay_steps=config.updates,
        end_value=config.lr * config.final_lr,
    )
    return lambda count: schedule(jnp.asarray(count + 1, jnp.float32))


def decays(params: gpt.Params) -> Any:
    """Which parameters weight decay applies to: matrices (kernels and embeddings), by name, as layers are stacked."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW with decay on matrices only."""
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        with jax.numpy_dtype_promotion("standard"):  # optax promotes implicitly, which a strict caller refuses
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)


def init_state(model: ModelConfig, config: TrainConfig, seed: int | Int[Array, ""]) -> State:
    """The state before the first update, decided by the seed. Call it under `jax.jit`."""
    root = jax.random.key(seed)
    params = gpt.init(model, jax.random.fold_in(root, 0))
    return {
        "params": params,
        "opt": optimizer(config).init(params),
        "update": jnp.zeros((), jnp.int32),
        "key": jax.random.fold_in(root, 1),
    }


def cast(params: gpt.Params, dtype: str) -> gpt.Params:
    """Parameters in the compute dtype; gradients flow back to the float32 masters through the cast."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def loss(
    model: ModelConfig,
    params: gpt.Params,
    tokens: Int[Array, "b t_plus_1"],
    key: PRNGKeyArray | None = None,
    *,
    compute_dtype: str = "float32",
    remat: gpt.Remat = "none",
    flash: bool = False,
) -> Float[Array, ""]:
    """Mean cross-entropy per token in nats, of predicting `tokens[:, 1:]` from `tokens[:, :-1]`."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = gpt.stream(model, cast(params, compute_dtype), inputs, key, remat=remat, flash=flash)
    return _cross_entropy(model, compute_dtype, params["ends"], x, targets)


def chunk_positions(vocab_size: int, sequences: int) -> int:
    """Positions of some sequences whose logits stand at a time on a device: a power of two, as contexts mostly are."""
    return 2 ** (max(1, CHUNK_LOGITS // (vocab_size * sequences)).bit_length() - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    model: ModelConfig, compute_dtype: str, ends: gpt.Params, x: Float[Array, "b t d"], targets: Int[Array, "b t"]
) -> Float[Array, ""]:
    """Mean cross-entropy of the head on the stream that leaves the last block, a chunk of positions at a time.

    The `b t v` float32 logits, the largest array of the program where attention is not, never stand whole. A chunk's
    gradient is taken along with its loss, while its logits are there, and waits, as large as the stream and the head,
    to be scaled by the cotangent. The head is cast to the compute dtype inside the chunk, so that the chunks' gradients
    of it are added in float32.
    """
    return _cross_entropy_forward(model, compute_dtype, ends, x, targets)[0]


def _cross_entropy_forward(model, compute_dtype, ends, x, targets):
    b, t = targets.shape
    size = min(t, chunk_positions(model.vocab_size, -(-b // batch_parts())))

    def chunk_loss(ends, x, targets):
        logits = gpt.logits(model, {"ends": cast(ends, compute_dtype)}, x)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets)) / (b * t)

    def add(so_far, chunk):
        value, (d_ends, d_x) = jax.value_and_grad(chunk_loss, argnums=(0, 1))(ends, *chunk)
        return jax.tree.map(jnp.add, so_far, (value, d_ends)), d_x

    def chunks(array):
        parts = array[:, : t - t % size].reshape(b, t // size, size, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    so_far = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, ends))
    so_far, d_chunks = jax.lax.scan(add, so_far, (chunks(x), chunks(targets)))
    d_x = jnp.moveaxis(d_chunks, 0, 1).reshape(b, t - t % size, -1)
    if t % size:
        so_far, d_rest = add(so_far, (x[:, -(t % size) :], targets[:, -(t % size) :]))
        d_x = jnp.concatenate([d_x, d_rest], axis=1)
    value, d_ends = so_far
    return value, (d_ends, d_x)


def _cross_entropy_backward(_model, _compute_dtype, gradients, cotangent):
    d_ends, d_x = jax.tree.map(lambda leaf: leaf * cotangent.astype(leaf.dtype), gradients)
    return d_ends, d_x, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def block_norms(grads: gpt.Params) -> Float[Array, " n_layer"]:
    """Norm of each block's gradient."""
    squares = [jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(grads["blocks"])]
    return jnp.sqrt(sum(squares))


def _where(finite: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The new state of an update that is finite, else the old one (the schedule goes on)."""

    def choose(new, old):
        return new if isinstance(new, optax.ScaleByScheduleState) else jnp.where(finite, new, old)

    return jax.tree.map(choose, new, old, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))


def make_update(
    model: ModelConfig, config: TrainConfig
) -> Callable[[State, Int[Array, "a b t_plus_1"]], tuple[State, Metrics]]:
    """The function `(state, tokens) -> (state, metrics)` of one update over `a` micro-batches.

    Loss and gradient are means over all tokens of the update; `grad_norm` (global) and `block_grad_norms` are those of
    the accumulated gradient before clipping. The state is a function of the previous state and the tokens, bit for bit.
    If loss or gradient are not finite, parameters and moments stay as they were; the update counts, also for the
    schedule of the learning rate.
    """
    transform = optimizer(config)

    def micro_batch(params, accumulated, tokens_and_key):
        tokens, key = tokens_and_key
        value, grads = jax.value_and_grad(loss, argnums=1)(
            model,
            params,
            tokens,
            key if model.dropout else None,
            compute_dtype=config.compute_dtype,
            remat=config.remat,
            flash=config.flash,
        )
        return jax.tree.map(jnp.add, accumulated, (value, as_stored(grads))), None

    def update(state: State, tokens: Int[Array, "a b t_plus_1"]) -> tuple[State, Metrics]:
        params = state["params"]
        keys = jax.random.split(jax.random.fold_in(state["key"], state["update"]), tokens.shape[0])
        zero = (jnp.zeros((), jnp.float32), as_stored(jax.tree.map(jnp.zeros_like, params)))
        total, _ = jax.lax.scan(lambda acc, x: micro_batch(params, acc, x), zero, (tokens, keys))
        mean_loss, grads = jax.tree.map(lambda leaf: leaf / tokens.shape[0], total)
        updates, opt = transform.update(grads, state["opt"], params)
        metrics = {
            "loss": mean_loss,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(learning_rate(config)(state["update"]), jnp.float32),
            "block_grad_norms": block_norms(grads),
        }
        finite = jnp.isfinite(mean_loss) & jnp.isfinite(metrics["grad_norm"])
        new = {
            **state,
            "params": _where(finite, optax.apply_updates(params, updates), params),
            "opt": _where(finite, opt, state["opt"]),
            "update": state["update"] + 1,
        }
        return new, metrics

    return update
