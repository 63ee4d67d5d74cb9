"""Folders in the format of the Hugging Face hub: a model's configuration and weights.

    config.json                        the model's configuration
    model.safetensors                  its weights; or, if they are large,
    model-00001-of-00002.safetensors   a part of the weights,
    model.safetensors.index.json       and the file of each tensor

Such a folder has no hashes: sizes and headers are checked, but a changed number in a tensor is not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_parallel.checkpoint import commit
from lightning_parallel.checkpoint.files import (
    DTYPES,
    REMEDY,
    Damaged,
    HashedFile,
    TensorsFile,
    name_of,
    open_plain,
    reading,
    shortened,
    write_tensors,
)
from lightning_parallel.checkpoint.folder import FILE_NAME, MAX_BYTES
from lightning_parallel.checkpoint.lazy_tensor import LazyTensor, all_of, in_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST = 5 * 10**9  # bytes per file, as in transformers


class HubState(dict[str, Tensor]):
    """The weights of a hub folder by their names there; they stay on the disk until they are used.

    Args:
        weights: by name.
        path: of the folder.
        config: content of `config.json`; empty if there is none.
    """

    def __init__(self, weights: Mapping[str, Tensor], path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self.path, self.config = path, config


def is_hub_folder(path: Path) -> bool:
    """Return whether a path is a folder of this format."""
    return path.is_dir() and any((path / name).exists() for name in (WEIGHTS, INDEX))


def read(path: Path) -> HubState:
    """Return the weights of a folder, without reading them yet.

    Raises:
        Damaged: a file is missing, or has another format.
    """
    opened = lru_cache(None)(TensorsFile)  # each file is mapped once, for all its tensors
    if (path / INDEX).exists():
        places = _json(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise Damaged(f"{path / INDEX} does not say where weights are; {REMEDY}")
    else:
        places = dict.fromkeys(opened(path / WEIGHTS).entries, WEIGHTS)
    weights = {}
    for name, file in sorted(places.items()):
        if not FILE_NAME.fullmatch(file):
            raise Damaged(f"{path / INDEX} names {file!r}, which is not a plain file name")
        if not (path / file).is_file():
            raise Damaged(f"{path / file}, which holds {name}, is missing; {REMEDY}")
        entry = opened(path / file).entries.get(name)
        if entry is None:
            raise Damaged(f"{path / file} does not hold {name}, contrary to {INDEX}; {REMEDY}")
        weights[name] = LazyTensor(
            entry.dtype, entry.shape, all_of(entry.shape, partial(opened(path / file).tensor, name))
        )
    return HubState(weights, path, _json(path / CONFIG) if (path / CONFIG).exists() else {})


def _json(path: Path) -> dict[str, Any]:
    with open_plain(path) as file:
        data = file.read(MAX_BYTES)
    with reading(path):
        content = json.loads(data)
    if not isinstance(content, dict):
        raise Damaged(f"{path} holds a {type(content).__name__}, not a dict; {REMEDY}")
    return content


def write(path: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], largest: int = LARGEST) -> None:
    """Write a folder that appears complete or not at all; one tensor at a time is in memory.

    Args:
        path: of the folder, which must not exist.
        weights: by their names in the hub; they may be on the disk.
        config: the content of `config.json`.
        largest: bytes of tensors per file; a larger tensor gets a file of its own.
    """
    if path.exists():
        raise Damaged(f"{path} already exists; choose another name")
    parts: list[dict[str, Tensor]] = [{}]  # [files]: the tensors of each, in the order of the model
    bytes_left = largest
    for name, tensor in weights.items():
        if name_of(tensor.dtype) is None:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors does not support; it supports {[*DTYPES]}")
        if parts[-1] and tensor.nbytes > bytes_left:
            parts.append({})
            bytes_left = largest
        parts[-1][name] = tensor
        bytes_left -= tensor.nbytes
    files = {f"model-{n:05}-of-{len(parts):05}.safetensors": part for n, part in enumerate(parts, 1)}
    with commit.writing(path) as temporary:
        temporary.mkdir()
        for file, part in files.items() if len(parts) > 1 else [(WEIGHTS, parts[0])]:
            write_tensors(temporary / file, part)
        if len(parts) > 1:
            places = {name: file for file, part in files.items() for name in part}
            size = sum(tensor.nbytes for tensor in weights.values())
            _write_json(temporary / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
        _write_json(temporary / CONFIG, config)
        commit.commit(temporary, path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with HashedFile(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def weights_of(content: Mapping[str, Any], prefix: str | None = None) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, by their names in the model that its module wraps.

    Args:
        content: of the checkpoint.
        prefix: of the model's weights in the module, such as `model.`; None for the prefix that all names share.
    """
    state_dict = content.get("state_dict")
    if not isinstance(state_dict, Mapping):
        raise Damaged(f"the checkpoint holds {shortened(sorted(map(str, content)))}, but no state_dict of a module")
    state = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    if prefix is None:
        above = zip(*(name.split(".")[:-1] for name in state), strict=False)
        prefix = "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, above))
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not weights:
        raise Damaged(f"no name in the checkpoint begins with {prefix!r}: it holds {shortened(sorted(state))}")
    return weights


# ---------------------------------------------------------------- names in a model of transformers


Shape = tuple[int, ...]
Sources = dict[str, list[Tensor]]
"""For each pattern of a rule, the tensors that match it, in order of the numbers in their names."""


def to_model_names(model: PreTrainedModel, state: HubState) -> dict[str, Tensor]:
    """Return the weights of a folder by their names in a model of transformers.

    Args:
        model: its parameters may be on meta.
        state: the weights of the folder.

    Raises:
        Damaged: transformers converts a tensor in a way that is not supported here.
    """
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules: list[Any] = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    model_state: dict[str, Any] = model.state_dict(keep_vars=True)
    weights: dict[str, Tensor] = {}
    parts: dict[str, Sources] = {}
    for name in sorted(state, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model_state)
        if renamed not in model_state and name in model_state:  # the folder has the model's own names
            renamed, pattern = name, None
        if pattern is None:
            weights[renamed] = state[name]
        else:
            parts.setdefault(renamed, {}).setdefault(pattern, []).append(state[name])
    for name, sources in parts.items():
        weights[name] = _made(name, by_pattern[next(iter(sources))], sources, state.path)
    return weights


def _made(name: str, rule: Any, sources: Sources, path: Path) -> LazyTensor:
    """Combine tensors: those of each list are stacked if the rule says so; lists are concatenated along its `dim`.

    E.g. for experts, whose gate and up projections are two lists: [experts, 2 x features, width].
    """
    operations = [(type(operation).__name__, vars(operation).get("dim")) for operation in rule.operations]
    stacked = operations[:1] == [("MergeModulelist", 0)]
    joins = operations[int(stacked) :]
    if joins and (len(joins) > 1 or joins[0][0] != "Concatenate"):
        raise Damaged(
            f"{path}: transformers builds {name} from {', '.join(rule.source_patterns)} in an unsupported way "
            f"({', '.join(kind for kind, _ in operations)}). Load the folder with from_pretrained in one process, save "
            "the model's state_dict() with safetensors beside its config.json, and start from that"
        )
    # for each pattern its tensors: one, or one for each expert
    lists = [sources.get(pattern, []) for pattern in rule.source_patterns]
    if not all(lists) or len({len(tensors) for tensors in lists}) > 1 or not (stacked or len(lists[0]) == 1):
        raise Damaged(f"{path} holds only some of {', '.join(rule.source_patterns)}, which make up {name}")
    parts: list[tuple[Shape, Shape, Tensor]] = []
    end, dim = 0, joins[0][1] if joins else 0
    for tensors in lists:
        for number, tensor in enumerate(tensors):
            shape = ((1,) if stacked else ()) + tuple(tensor.shape)
            offset = [0] * len(shape)
            offset[dim] += end
            if stacked:
                offset[0] = number
            parts.append((tuple(offset), shape, tensor))
        end += parts[-1][1][dim]
    full_shape = [*parts[0][1]]
    full_shape[dim] = end
    if stacked:
        full_shape[0] = len(lists[0])
    return joined(name, tuple(full_shape), parts)


def joined(name: str, shape: Shape, parts: Sequence[tuple[Shape, Shape, Tensor]]) -> LazyTensor:
    """Combine several tensors of the hub into one, which is read when it is used.

    Args:
        name: of the combined tensor.
        shape: of the combined tensor.
        parts: for each tensor its first element in the combined one, its shape there, and its values; no overlap.

    Raises:
        Damaged: the parts do not fill the shape, or have different dtypes.
    """
    ends = [first + size for offset, part, _ in parts for first, size in zip(offset, part, strict=True)]
    inside = all(end <= limit for end, limit in zip(ends, shape * len(parts), strict=True))
    if not inside or sum(prod(part) for _, part, _ in parts) != prod(shape):
        raise Damaged(f"the {len(parts)} tensors that make up {name} do not fill {shape}; {REMEDY}")
    dtypes = {tensor.dtype for *_, tensor in parts}
    if len(dtypes) > 1:
        raise Damaged(
            f"the {len(parts)} tensors that make up {name} have different dtypes: {sorted(map(str, dtypes))}; write "
            "the folder in one dtype, as from_pretrained(…, dtype=…).save_pretrained(…) does"
        )

    def read_part(tensor: Tensor, part: Shape) -> Tensor:
        values: Tensor = in_memory(tensor)
        return values.reshape(part)

    pieces = [(offset, part, partial(read_part, tensor, part)) for offset, part, tensor in parts]
    return LazyTensor(dtypes.pop(), shape, pieces)


def is_computed(model: PreTrainedModel, name: str) -> bool:
    """Return whether folders omit a tensor of the model, because it follows from the configuration."""
    kinds: tuple[Any, ...] = (model._keys_to_ignore_on_load_missing, model._keys_to_ignore_on_save)
    return any(re.search(pattern, name) for kind in kinds for pattern in kind or ())
