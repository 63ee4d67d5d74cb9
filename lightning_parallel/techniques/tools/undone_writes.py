"""Takes back what a step has written into tensors that existed before it, whoever holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing import reductions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_parallel.techniques.tools.absent import Absent
from lightning_parallel.values import tensors_of

StorageWeakRef: Any = reductions.StorageWeakRef  # without types
BY_TECHNIQUES = frozenset(("c10d", "_c10d_functional", "fsdp", "inductor"))
"""Namespaces of operations that techniques call: parameters that arrive stay."""


class UndoneWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a copy of each tensor's memory before an operation writes into it; `undo` puts all of them back.

    Memory that was made inside the mode is left alone. What `tensor.data = other` replaced is put back too. Kernels
    that PyTorch's dispatcher does not see, and writes through numpy, are not noticed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # by its memory's address, what was other when it was put back, and how often; "" for integers
        self.changed: dict[int, tuple[str, int]] = {}
        self._made, self._before = set[Any](), dict[Any, tuple[Tensor, UntypedStorage]]()
        self._data: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def entered(self) -> Iterator[UndoneWrites]:
        """Enter the mode, and notice inside what `tensor.data = other` replaces."""
        with _Assignments(self), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and keep before what it writes into."""
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable and func.namespace not in BY_TECHNIQUES:
            given = dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs
            for tensor in _parts_of([given.get(each.name) for each in schema.arguments if each.is_write]):
                storage = tensor.untyped_storage()
                key = StorageWeakRef(storage)
                if key not in self._made and key not in self._before and not tensor.is_meta:
                    self._before[key] = tensor, storage.clone()  # type: ignore[no-untyped-call]
        made = func(*args, **kwargs)
        # memory that is new: results that share none with the arguments
        if new := {StorageWeakRef(storage) for storage in _storages(made)} - self._made:
            self._made |= new - {StorageWeakRef(storage) for storage in _storages((args, kwargs))}
        return made

    def _note(self, tensor: Tensor) -> None:
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}" if tensor.is_floating_point() else ""
        address = tensor.untyped_storage().data_ptr()
        self.changed[address] = what, self.changed.get(address, ("", 0))[1] + 1

    def kept_by(self, model: nn.Module, times: int) -> str | None:
        """Describe a tensor that a step keeps and changed in place more often than so; None if there is none.

        Buffers and plain tensors that are attributes of modules are not meant, nor integers.
        """
        names = {each.data_ptr(): name for name, p in model.named_parameters() for each in _storages(p)}
        attributes = [each for part in model.modules() for each in vars(part).values() if type(each) is Tensor]
        counted = {each.data_ptr() for each in _storages([*model.buffers(), *attributes])}
        for address, (what, often) in self.changed.items():
            if what and often > times and address not in counted:
                return f"the parameter {names[address]}" if address in names else what
        return None

    def undo(self, transient: Iterable[Tensor] = ()) -> None:
        """Put back what was written since the last call, but for tensors whose memory is filled in a step anyway."""
        left = {storage.data_ptr() for storage in _storages(list(transient))}
        for tensor, data in self._data.values():
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
                self._note(tensor)
        for tensor, before in self._before.values():
            storage = tensor.untyped_storage()
            if storage.nbytes() != before.nbytes() or storage.data_ptr() in left:  # or it was freed
                continue
            now, then = (torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in (storage, before))
            if not torch.equal(now, then):
                storage.copy_(before)
                self._note(tensor)
        self._before.clear()
        self._data.clear()


class _Assignments(TorchFunctionMode):
    def __init__(self, writes: UndoneWrites) -> None:
        super().__init__()
        self._writes = writes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__ and type(args[0]) in (Tensor, nn.Parameter):  # type: ignore[attr-defined]
            self._writes._data.setdefault(id(args[0]), (args[0], args[0].data))
        return func(*args, **(kwargs or {}))


def _storages(values: Any) -> list[UntypedStorage]:
    return [tensor.untyped_storage() for tensor in _parts_of(values)]


def _parts_of(values: Any) -> list[Tensor]:
    """The tensors with memory in arguments or results of an operation, also those within tensors of other classes."""
    found = list[Tensor]()
    for tensor in tensors_of(values):
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            found += _parts_of([getattr(tensor, name) for name in names])
        elif tensor.layout == torch.strided and not isinstance(tensor, Absent):
            found.append(tensor)
    return found
