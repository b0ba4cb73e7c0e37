"""A published model opened: our configuration, and its parameters on demand, one block at a time."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import gpt
from models.config import ModelConfig
from models.pretrained import bert, gguf, glassllm, gpt2, hub, llama
from models.pretrained.source import ModelError, Source, Stored

FAMILIES = (gpt2, llama, bert)
SHOWN = 4
"""Tensors that an error lists of each kind."""


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model on disk. Nothing of its weights is in memory: `ends` and `block` read what they return."""

    path: Path
    config: ModelConfig
    tokenizer: Mapping[str, Any] | None
    """The tokenizer's metadata, if the model's own file holds it (GGUF)."""
    _source: Source = dataclasses.field(repr=False)
    _ends: Mapping[str, Stored] = dataclasses.field(repr=False)
    _block: Mapping[str, Stored] = dataclasses.field(repr=False)

    def ends(self) -> gpt.Params:
        """`params["ends"]`: embeddings, final norm and head, float32."""
        return self._read(self._ends, 0)

    def block(self, layer: int) -> gpt.Params:
        """The parameters of one block, float32, as `gpt.layer` would cut them out."""
        if not 0 <= layer < self.config.n_layer:
            raise ValueError(f"layer must be in [0, {self.config.n_layer}), got {layer}")
        return self._read(self._block, layer)

    def params(self) -> gpt.Params:
        """All parameters, float32, the blocks' stacked."""
        shapes = gpt.shapes(self.config)["blocks"]
        stacked = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), shapes)
        for layer in range(self.config.n_layer):
            jax.tree.map(lambda whole, part: whole.__setitem__(layer, part), stacked, self.block(layer))  # noqa: B023
        return {"ends": self.ends(), "blocks": jax.tree.map(jnp.asarray, stacked)}

    def _read(self, parameters: Mapping[str, Stored], layer: int) -> gpt.Params:
        tensors, tree = {}, {}
        for path, stored in parameters.items():
            name = stored.name.format(layer=layer)
            if name not in tensors:  # a tensor that holds three of ours is read once
                tensors[name] = self._source.read(name)
            *parents, leaf = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = jnp.asarray(stored.cut(tensors[name]))
        return tree


def open_model(path: Path | str) -> Pretrained:
    """Open a model directory in the hub's layout, a `.gguf` file, or glassllm's `.npz`.

    Names and shapes of all tensors are checked here, their numbers are read later. `ModelError` for whatever is not a
    model that can be computed exactly.
    """
    path = Path(path)
    source, tokenizer = _open(path)
    kind = source.want("model_type")
    family = next((family for family in FAMILIES if kind in family.TYPES), None)
    if family is None:
        supported = ", ".join(name for family in FAMILIES for name in family.TYPES)
        raise ModelError(f"{path}: architecture {kind!r} is not supported (want one of {supported})")
    files = {family.stored_name(name): name for name in source.shapes}
    shapes = {name: source.shapes[file] for name, file in files.items()}
    source = dataclasses.replace(source, shapes=shapes, read=lambda name, read=source.read: read(files[name]))
    try:
        config = family.config(source)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: a configuration that does not hold together: {error}") from error
    if config.n_layer > len(source.shapes):  # before anything is made of so many
        raise ModelError(f"{path}: {config.n_layer} layers are configured, and there are {len(source.shapes)} tensors")
    parts = _check(source, config, family.PARAMETERS, family.IGNORED)
    return Pretrained(path, config, tokenizer, source, *parts)


def _open(path: Path) -> tuple[Source, Mapping[str, Any] | None]:
    if path.is_dir():
        return hub.open_directory(path), None
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        return gguf.open_file(path)
    if path.suffix == ".npz":
        return glassllm.open_file(path), None
    if path.suffix in hub.PICKLED:
        raise hub.refuse_pickle(path)
    raise ModelError(f"{path}: want a model directory (config.json and safetensors), a .gguf file or glassllm's .npz")


def _check(source: Source, config: ModelConfig, parameters: Mapping[str, Stored], ignored: Any) -> tuple[dict, dict]:
    """The tensors of the ends and of a block, after making sure that all are there, with their shapes, and no other."""
    parts, wanted = {"ends": {}, "blocks": {}}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gpt.shapes(config)):
        part, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/", 1)
        stored = parameters[f"{part}/{name}"]
        parts[part][name] = stored
        shape = stored.shape(leaf.shape if part == "ends" else leaf.shape[1:])
        for layer in range(1 if part == "ends" else config.n_layer):
            wanted[stored.name.format(layer=layer)] = shape
    missing = [name for name in wanted if name not in source.shapes]
    extra = [name for name in source.shapes if name not in wanted and not ignored.fullmatch(name)]
    wrong = [
        f"{name} {source.shapes[name]} for {shape}"
        for name, shape in wanted.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    complaints = {"missing": missing, "superfluous": extra, "of another shape than the configuration's": wrong}
    pieces = [f"{kind}: {_list(names)}" for kind, names in complaints.items() if names]
    if pieces:
        raise ModelError(f"{source.path}: the weights do not fit the configuration. Tensors " + "; ".join(pieces))
    return parts["ends"], parts["blocks"]


def _list(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
