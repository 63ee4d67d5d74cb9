"""Tensors on meta that nobody recorded: their modules make the values themselves, by `reset_parameters`."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel.strategies.build.tape import Sink, storage_key, written

PRETRAINED = (
    "in place of a Hugging Face model's from_pretrained() in configure_model(), call from_config() there and pass "
    "fit(ckpt_path=FOLDER), from which each rank reads its part"
)


class _Writes(TorchDispatchMode):
    """Notes which storages are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages.update(map(storage_key, written(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


class _Entry(NamedTuple):
    """A place in which a module holds a tensor."""

    name: str
    owner: nn.Module
    table: dict[str, Any]
    key: str
    meta: Tensor

    def swap(self, tensor: Tensor | None) -> Tensor | None:
        before: Tensor | None = self.table.get(self.key)
        self.table[self.key] = tensor
        return before


class OrphanModules:
    """Modules with meta tensors that no build recorded; ``reset_parameters()`` makes them, one module at a time.

    A module that holds such tensors itself is made together with its submodules, these first, for it may have the
    last word on theirs (as ``nn.MultiheadAttention`` has).

    Args:
        module: the model, whole and not yet sharded.
        names: parameters and buffers of it that are to be made.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        entries = [entry for entry in _entries(module) if entry.name in names]
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        for entry in entries:
            self._names[id(entry.meta)].append(entry.name)
        self._units = [
            (order, [entry for entry in entries if entry.owner in order])
            for order in _units(module, {entry.owner for entry in entries})
        ]

    @torch.no_grad()
    def reset(self, device: torch.device, sink: Sink) -> None:
        """Makes the tensors on ``device``. The modules meanwhile may hold shards, and keep what they hold.

        Args:
            device: where the tensors are made.
            sink: called once per name with the whole tensor, which is freed afterwards unless the sink keeps it.

        Raises:
            TypeError: if a module leaves one of its tensors without a value.
        """
        made: set[int] = set()
        for modules, entries in self._units:
            for entry, tensor in _reset(modules, entries, device):
                names = [] if id(entry.meta) in made else self._names[id(entry.meta)]
                made.add(id(entry.meta))
                for name in names:
                    sink(name, tensor)


def _reset(modules: list[nn.Module], entries: list[_Entry], device: torch.device) -> list[tuple[_Entry, Tensor]]:
    empty = {id(entry.meta): _empty(entry.meta, device) for entry in entries}
    before = [entry.swap(empty[id(entry.meta)]) for entry in entries]
    try:
        with _Writes() as writes:
            for module in modules:
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
    finally:
        after = [entry.swap(tensor) for entry, tensor in zip(entries, before, strict=True)]
    unset = set(map(storage_key, empty.values())) - writes.storages
    for entry, tensor in zip(entries, after, strict=True):
        if tensor is None or storage_key(tensor) in unset:
            raise _no_value(entry)
    return [(entry, tensor.detach()) for entry, tensor in zip(entries, after, strict=True) if tensor is not None]


def _empty(meta: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_like(meta, device=device)
    return nn.Parameter(tensor, meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor


def _no_value(entry: _Entry) -> TypeError:
    owner = entry.name.rpartition(".")[0] or "the model itself"
    return TypeError(
        f"{entry.name!r} is on meta, and {owner} ({type(entry.owner).__name__}) has no reset_parameters() that sets "
        f"it; give it one that sets every parameter and buffer it holds, or build it in configure_model(); {PRETRAINED}"
    )


def _entries(module: nn.Module) -> Iterator[_Entry]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield _Entry(f"{prefix}.{key}" if prefix else key, owner, table, key, tensor)


def _units(module: nn.Module, owners: set[nn.Module]) -> Iterator[list[nn.Module]]:
    if module in owners:
        yield list(_children_first(module))
    else:
        for child in module.children():
            yield from _units(child, owners)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
