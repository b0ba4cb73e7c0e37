"""How a model lies on a mesh of devices: one table by role, for parameters and for activations.

The mesh has three axes. `data` and `fsdp` both split the batch; `fsdp` also splits what is stored (parameters, and with
them the optimizer's state), and a parameter is gathered over it just before use; `tensor` splits attention heads and
the FFN's hidden width. The program is one for all devices: JAX's partitioner puts in the communication.

A program traced under `jax.set_mesh` of such a mesh is laid out by the table; under none, or another one's, nothing
here does anything.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
BATCH = (DATA, FSDP)

Axes = tuple[str | tuple[str, ...] | None, ...]
"""What splits each dimension."""

PARAMETERS: dict[str, Axes] = {
    # The last two names of a parameter's path; the layer axis of stacked blocks, which nothing splits, apart.
    **{f"{name}/kernel": (FSDP, TENSOR) for name in ("query", "key", "value", "up", "gate")},
    **{f"{name}/bias": (TENSOR,) for name in ("query", "key", "value", "up", "gate")},
    **{f"{name}/kernel": (TENSOR, FSDP) for name in ("out", "down")},
    **{f"{name}/bias": (None,) for name in ("out", "down")},
    # By width: a vocabulary (50,257 = 29 * 1733) does not divide.
    **{f"{name}/embedding": (None, (FSDP, TENSOR)) for name in ("tokens", "positions", "token_types", "head")},
    "transform/kernel": (FSDP, TENSOR),
    "transform/bias": (TENSOR,),
    "ends/head_bias": (None,),
    **{
        f"norm_{place}/{name}": (None,)
        for place in ("attention", "ffn", "embedding", "final", "head")
        for name in ("scale", "bias")
    },
}

ACTIVATIONS: dict[str, Axes] = {
    "stream": (BATCH, None, None),  # (sequence, position, width)
    "heads": (BATCH, None, TENSOR, None),  # (sequence, position, head, width)
    "rows": (BATCH, TENSOR, None, None),  # (sequence, head, query, key)
    "hidden": (BATCH, None, TENSOR),  # (sequence, position, hidden width)
    # What enters the head, and its logits, (sequence, position, width or vocabulary): the vocabulary does not divide.
    "head": (BATCH, TENSOR, None),
}


def stored(path: tuple[Any, ...]) -> PartitionSpec:
    """How the parameter at a path of the whole tree is stored; `KeyError` for one that is not in the table."""
    axes = PARAMETERS[_role(path)]
    return PartitionSpec(None, *axes) if path[0].key == "blocks" else PartitionSpec(*axes)


def gathered(params: dict[str, Any], place: str) -> dict[str, Any]:
    """Parameters of one block, or of the ends (`place`), as they are used: whole over `fsdp`.

    Blocks stay split over `tensor`. The ends do not: their activations are split by sequence alone.
    """
    if not on_mesh():
        return params
    used = {TENSOR} if place == "blocks" else set()

    def gather(path: tuple[Any, ...], leaf: Float[Array, "..."]) -> Float[Array, "..."]:
        axes = PARAMETERS[_role((jax.tree_util.DictKey(place), *path))]
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*(a if a in used else None for a in axes)))

    return jax.tree_util.tree_map_with_path(gather, params)


def as_stored(params: dict[str, Any]) -> dict[str, Any]:
    """A tree like the parameters (gradients, say), laid out as they are stored."""
    if not on_mesh():
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(leaf, stored(path)), params
    )


def constrain(x: Float[Array, "..."], role: str) -> Float[Array, "..."]:
    """The same array, laid out as the table says, but that what does not divide an axis stays whole over it.

    Without its batch axis an array is laid out by the others.
    """
    if not on_mesh():
        return x
    sizes = jax.sharding.get_abstract_mesh().shape
    pieces = {None: 1, BATCH: batch_parts(), TENSOR: sizes[TENSOR]}
    axes = zip(x.shape, ACTIVATIONS[role][-x.ndim :], strict=True)
    return jax.lax.with_sharding_constraint(
        x, PartitionSpec(*(axis if size % pieces[axis] == 0 else None for size, axis in axes))
    )


def batch_parts() -> int:
    """Into how many parts a batch is split."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return sizes[DATA] * sizes[FSDP] if on_mesh() else 1


def on_mesh() -> bool:
    """Whether the program that is being traced runs on a mesh of ours."""
    return jax.sharding.get_abstract_mesh().axis_names == AXES


def _role(path: tuple[Any, ...]) -> str:
    return "/".join(key.key for key in path[-2:])
