"""Tensors that modules keep beside their parameters and buffers, as metrics keep their states."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

REGISTERED = ("_parameters", "_buffers", "_modules")


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors in plain attributes of the module and its parts, or in lists and dicts there, by the place of each."""
    return {
        f"{where}.{key}[{number}]": leaf
        for where, part in module.named_modules()
        for key, value in _attributes(part)
        for number, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
    }


def replace_kept_tensors(module: nn.Module, by: Mapping[int, Tensor]) -> None:
    """Puts other tensors in the place of those whose `id` is a key."""
    for part in module.modules():
        for key, value in _attributes(part):
            if any(id(leaf) in by for leaf in tree_leaves(value)):
                vars(part)[key] = tree_map_only(Tensor, lambda leaf: by.get(id(leaf), leaf), value)


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in list(vars(part).items()) if key not in REGISTERED)
