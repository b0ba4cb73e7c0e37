"""A model directory in the hub's layout: `config.json` and safetensors, in one file or several with an index."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from models.pretrained.source import ModelError, Source

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = ("F32", "F16", "BF16", "F64")
"""Tensors that hold the numbers themselves, and not codes that want scales kept elsewhere."""


def refuse_pickle(path: Path) -> ModelError:
    """The error for weights that are a pickle."""
    return ModelError(
        f"{path}: a pickle, and unpickling runs whatever code it holds. Convert it where you trust it: "
        "transformers' AutoModel.from_pretrained(DIRECTORY).save_pretrained(OTHER) writes safetensors"
    )


def open_directory(directory: Path) -> Source:
    """The source of a directory; the files are mapped into memory and a tensor is read when it is asked for."""
    hub = read_json(directory / "config.json", "not a model directory")
    if hub.get("quantization_config") is not None:
        raise ModelError(f"{directory}: quantised weights are only read from GGUF")
    handles, owner = {}, {}
    for name, file in _weight_files(directory).items():
        if file not in handles:
            handles[file] = _open(file)
        owner.update(dict.fromkeys(handles[file].keys() if name is None else [name], file))
    shapes = {}
    for name, file in owner.items():
        if name not in handles[file].keys():  # noqa: SIM118 (a handle is no mapping)
            raise ModelError(f"{file}: lacks {name!r}, which the index says it holds")
        shapes[name] = tuple(handles[file].get_slice(name).get_shape())

    def read(name: str) -> np.ndarray:
        handle = handles[owner[name]]
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ModelError(f"{owner[name]}: {name} holds {dtype} (want one of {', '.join(DTYPES)})")
        return handle.get_tensor(name).astype(np.float32, copy=False)

    return Source(directory, hub, shapes, read)


def _weight_files(directory: Path) -> dict[str | None, Path]:
    """The file of each tensor, or under None the one file of all."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return {None: single}
    if index.is_file():
        names = read_json(index, "not an index").get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ModelError(f"{index}: lacks a 'weight_map' of names to files")
        strange = sorted({file for file in names.values() if Path(file).name != file})
        if strange:
            raise ModelError(f"{index}: names files outside the directory: {strange[0]!r}")
        return {name: directory / file for name, file in names.items()}
    pickled = sorted(file for file in directory.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise refuse_pickle(pickled[0])
    raise ModelError(f"{directory}: no weights (want model.safetensors, or model.safetensors.index.json and its files)")


def _open(file: Path) -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ModelError(f"{file}: reading safetensors wants a package: pip install safetensors") from error
    try:
        return safetensors.safe_open(str(file), framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{file}: missing, truncated or not safetensors ({error})") from error


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """An object from a JSON file; `otherwise` says what its absence means."""
    if not path.is_file():
        raise ModelError(f"{path.parent}: {otherwise} (no {path.name})")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
