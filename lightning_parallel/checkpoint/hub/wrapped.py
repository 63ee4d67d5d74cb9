"""Weights of the hub under the names of a model of transformers, renamed and put together as transformers itself does.

Here nothing is read: a tensor that is put together of several has them as its pieces, and each rank reads its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_parallel.checkpoint.damage import REMEDY, Damaged
from lightning_parallel.checkpoint.hub.folder import HubState
from lightning_parallel.checkpoint.stored import StoredTensor, in_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]
Sources = dict[str, list[Tensor]]
"""Of each pattern of a rule, the tensors that it has found, by their numbers."""


def under_own_names(model: PreTrainedModel, state: HubState) -> dict[str, Tensor]:
    """The weights of a folder as the model has them.

    Args:
        model: its parameters may be on meta.
        state: what was read.

    Raises:
        Damaged: transformers makes a tensor in a way that is not known here.
    """
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules: list[Any] = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    whole: dict[str, Tensor] = {}
    parts: dict[str, Sources] = defaultdict(lambda: defaultdict(list))
    for name in sorted(state, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if renamed not in own and name in own:  # written under the model's own names
            renamed, pattern = name, None
        if pattern is None:
            whole[renamed] = state[name]
        else:
            parts[renamed][pattern].append(state[name])
    for name, sources in parts.items():
        whole[name] = _made(name, by_pattern[next(iter(sources))], sources, state)
    return whole


def _made(name: str, rule: Any, sources: Sources, state: HubState) -> Tensor:
    operations = [(type(it).__name__, vars(it).get("dim")) for it in rule.operations]
    listed = operations[:1] == [("MergeModulelist", 0)]
    joins = operations[int(listed) :]
    if joins and (len(joins) > 1 or joins[0][0] != "Concatenate"):
        raise Damaged(
            f"{state.path}: transformers makes {name} of {', '.join(rule.source_patterns)} in a way that is not known "
            f"here ({', '.join(kind for kind, _ in operations)}); load the folder with from_pretrained in one process, "
            "save the model's state_dict() with safetensors beside its config.json, and start from that"
        )
    lists = [sources[pattern] for pattern in rule.source_patterns]
    if not all(lists) or len({len(found) for found in lists}) > 1 or not (listed or len(lists[0]) == 1):
        raise Damaged(f"{state.path} holds only a part of what {name} is made of: {', '.join(rule.source_patterns)}")
    return _joined(name, lists, listed, joins[0][1] if joins else 0)


def _joined(name: str, lists: Sequence[Sequence[Tensor]], listed: bool, dim: int) -> StoredTensor:
    """One of several: the lists lie one behind the other along `dim`, and the numbers in them are rows if `listed`."""
    parts: list[tuple[Shape, Shape, Tensor]] = []
    at = 0
    for tensors in lists:
        for number, tensor in enumerate(tensors):
            shape = ((1,) if listed else ()) + tuple(tensor.shape)
            offset = [0] * len(shape)
            offset[dim] += at
            if listed:
                offset[0] = number
            parts.append((tuple(offset), shape, tensor))
        at += parts[-1][1][dim]
    whole = [*parts[0][1]]
    whole[dim] = at
    if listed:
        whole[0] = len(lists[0])
    return joined(name, tuple(whole), parts)


def joined(name: str, shape: Shape, parts: Sequence[tuple[Shape, Shape, Tensor]]) -> StoredTensor:
    """Put several tensors of the hub together to one, which is read when it is used.

    Args:
        name: of the tensor that is made.
        shape: of it.
        parts: where each begins in it, the shape that each has there, and its values; they do not overlap.

    Raises:
        Damaged: they do not fill it, or have different dtypes.
    """
    ends = [first + size for offset, part, _ in parts for first, size in zip(offset, part, strict=True)]
    inside = all(end <= whole for end, whole in zip(ends, shape * len(parts), strict=True))
    if not inside or sum(prod(part) for _, part, _ in parts) != prod(shape):
        raise Damaged(f"the {len(parts)} tensors that {name} is made of do not fill {shape}; {REMEDY}")
    dtypes = {tensor.dtype for *_, tensor in parts}
    if len(dtypes) > 1:
        raise Damaged(
            f"the {len(parts)} tensors that {name} is made of have different dtypes: {sorted(map(str, dtypes))}; write "
            "the folder in one, as from_pretrained(…, dtype=…).save_pretrained(…) does"
        )
    pieces = [(offset, part, partial(_read, tensor, part)) for offset, part, tensor in parts]
    return StoredTensor(dtypes.pop(), shape, pieces)


def _read(tensor: Tensor, shape: Shape) -> Tensor:
    read: Tensor = in_memory(tensor)
    return read.reshape(shape)


def is_computed(model: PreTrainedModel, name: str) -> bool:
    """Whether folders do not have a tensor of the model, because it follows from the configuration."""
    kinds: tuple[Any, ...] = (model._keys_to_ignore_on_load_missing, model._keys_to_ignore_on_save)
    return any(re.search(pattern, name) for kind in kinds for pattern in kind or ())
