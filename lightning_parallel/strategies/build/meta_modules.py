"""Tensors that the user built on meta: their modules make the values themselves, by `reset_parameters`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Writes(TorchDispatchMode):
    """Notes which storages are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formal = kwargs or {}, func._schema.arguments
        actual = [*zip(formal, args, strict=False), *((each, kwargs.get(each.name)) for each in formal)]
        written = [value for each, value in actual if each.alias_info is not None and each.alias_info.is_write]
        self.storages.update(_storage(each) for each in tree_leaves(written) if isinstance(each, Tensor))
        return func(*args, **kwargs)


class Entry(NamedTuple):
    """A place in which a module holds a tensor on meta."""

    owner: nn.Module
    name: str
    path: str
    meta: Tensor
    is_parameter: bool

    def swap(self, tensor: Tensor | None) -> Tensor | None:
        """Put a tensor there; returns what was there."""
        table: dict[str, Any] = self.owner._parameters if self.is_parameter else self.owner._buffers
        before: Tensor | None = table.get(self.name)
        table[self.name] = tensor
        return before


class MetaModules:
    """Modules with tensors on meta; `reset_parameters()` makes them, one module at a time.

    A module that holds such tensors itself is made together with its submodules, these first, for it may have the
    last word on theirs (as `nn.MultiheadAttention` has).

    Args:
        module: the model, before techniques divide it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.entries = [
            Entry(owner, name, f"{path}.{name}" if path else name, tensor, table is owner._parameters)
            for path, owner in module.named_modules(remove_duplicate=False)
            for table in (owner._parameters, owner._buffers)
            for name, tensor in table.items()
            if tensor is not None and tensor.is_meta
        ]
        self._units = [list(_children_first(unit)) for unit in _units(module, {each.owner for each in self.entries})]

    @torch.no_grad()
    def reset(self, device: torch.device) -> Iterator[tuple[list[Entry], Tensor]]:
        """Make the tensors full, on a device. Modules meanwhile may hold shards, and keep what they hold.

        Returns:
            Each tensor with all its places; several for a tied one.

        Raises:
            TypeError: a module leaves one of its tensors without a value.
        """
        made = set[int]()
        for modules in self._units:
            entries = [entry for entry in self.entries if entry.owner in modules]
            values = _reset(modules, entries, device)
            for entry in entries:
                if id(entry.meta) not in made:
                    made.add(id(entry.meta))
                    yield [each for each in self.entries if each.meta is entry.meta], values.pop(id(entry.meta))


def _reset(modules: list[nn.Module], entries: list[Entry], device: torch.device) -> dict[int, Tensor]:
    """The values of tensors on meta, by the `id` of each."""
    empty: dict[int, Tensor] = {}
    for entry in entries:
        value = torch.empty_like(entry.meta, device=device)
        learns = entry.meta.requires_grad
        empty.setdefault(id(entry.meta), nn.Parameter(value, learns) if entry.is_parameter else value)
    before = [entry.swap(empty[id(entry.meta)]) for entry in entries]
    try:
        with _Writes() as writes:
            for module in modules:
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
    finally:
        after = [entry.swap(tensor) for entry, tensor in zip(entries, before, strict=True)]
    unset = {_storage(value) for value in empty.values()} - writes.storages
    found: dict[int, Tensor] = {}
    for entry, tensor in zip(entries, after, strict=True):
        if tensor is None or _storage(tensor) in unset:
            owner = entry.path.rpartition(".")[0] or "the model itself"
            raise TypeError(
                f"{entry.path!r} is on meta, and {owner} ({type(entry.owner).__name__}) has no reset_parameters() "
                "that sets it; give it one that sets every parameter and buffer it holds, or build it in "
                "configure_model() without torch.device('meta')"
            )
        found[id(entry.meta)] = tensor.detach()
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _units(module: nn.Module, owners: set[nn.Module]) -> Iterator[nn.Module]:
    if module in owners:
        yield module
    else:
        for child in module.children():
            yield from _units(child, owners)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
