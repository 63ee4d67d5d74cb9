"""Folders as the Hugging Face hub has them, of a model's configuration and weights.

    config.json                        what the model is
    model.safetensors                  its weights; or, where they are many,
    model-00001-of-00002.safetensors   parts of them
    model.safetensors.index.json       and in which file each tensor lies

Such a folder has no hashes: sizes and headers are looked at, and a changed number in a tensor is not found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_parallel.checkpoint import commit
from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.hashed import HashedFile, open_plain
from lightning_parallel.checkpoint.manifest import FILE_NAME, MAX_BYTES
from lightning_parallel.checkpoint.stored import StoredTensor, all_of
from lightning_parallel.checkpoint.tensors_file import DTYPES, TensorsFile, name_of, write_tensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST = 5 * 10**9  # bytes of a file, as transformers has it


class HubState(dict[str, Tensor]):
    """The weights of such a folder under their names there; they stay on the disk until they are used.

    Args:
        weights: by name.
        path: of the folder.
        config: what `config.json` says; nothing where there is none.
    """

    def __init__(self, weights: Mapping[str, Tensor], path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self.path, self.config = path, config


def is_hub_folder(path: Path) -> bool:
    """Return whether a path is such a folder."""
    return path.is_dir() and any((path / name).exists() for name in (WEIGHTS, INDEX))


def read(path: Path) -> HubState:
    """Return the weights of a folder, none of which has been read yet.

    Raises:
        Damaged: a file is missing, or is none of its kind.
    """
    opened = lru_cache(None)(TensorsFile)
    if (path / INDEX).exists():
        places = _json(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise Damaged(f"{path / INDEX} does not say where weights are; {REMEDY}")
    else:
        places = dict.fromkeys(opened(path / WEIGHTS).entries, WEIGHTS)
    weights = {}
    for name, file in sorted(places.items()):
        if not FILE_NAME.fullmatch(file):
            raise Damaged(f"{path / INDEX} names {file!r}, which is no plain name of a file in the folder")
        if not (path / file).is_file():
            raise Damaged(f"{path / file} is missing, which holds {name}; {REMEDY}")
        entry = opened(path / file).entries.get(name)
        if entry is None:
            raise Damaged(f"{path / file} does not hold {name}, as {INDEX} says; {REMEDY}")
        pieces = all_of(entry.shape, partial(opened(path / file).tensor, name))
        weights[name] = StoredTensor(entry.dtype, entry.shape, pieces)
    return HubState(weights, path, _json(path / CONFIG) if (path / CONFIG).exists() else {})


def _json(path: Path) -> dict[str, Any]:
    with open_plain(path) as file:
        data = file.read(MAX_BYTES)
    with reading(path):
        found = json.loads(data)
    if not isinstance(found, dict):
        raise Damaged(f"{path} holds a {type(found).__name__}, and no table; {REMEDY}")
    return found


def write(path: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], largest: int = LARGEST) -> None:
    """Write a folder that appears complete or not at all; one tensor at a time is in memory.

    Args:
        path: of the folder, which must not be there yet.
        weights: by their names in the hub; they may be on the disk.
        config: the content of `config.json`.
        largest: bytes of tensors in a file; a tensor that is larger has a file of its own.
    """
    if path.exists():
        raise Damaged(f"{path} is there already; choose another name")
    parts: list[dict[str, Tensor]] = [{}]
    room = largest
    for name, tensor in weights.items():
        if name_of(tensor.dtype) is None:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors does not have; known are {[*DTYPES]}")
        if parts[-1] and tensor.nbytes > room:
            parts.append({})
            room = largest
        parts[-1][name] = tensor
        room -= tensor.nbytes
    files = {f"model-{n:05}-of-{len(parts):05}.safetensors": part for n, part in enumerate(parts, 1)}
    with commit.writing(path) as made:
        made.mkdir()
        for file, part in files.items() if len(parts) > 1 else [(WEIGHTS, parts[0])]:
            write_tensors(made / file, part)
        if len(parts) > 1:
            places = {name: file for file, part in files.items() for name in part}
            size = sum(tensor.nbytes for tensor in weights.values())
            _write_json(made / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
        _write_json(made / CONFIG, config)
        commit.commit(made, path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with HashedFile(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
