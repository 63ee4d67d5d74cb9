"""Undoing of a step's writes into tensors that existed before the step, wherever user code keeps them."""

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
"""Namespaces of operations that techniques call: what these write, such as gathered parameters, is not undone."""


class UndoneWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies the memory of each tensor before an operation writes into it; `undo` restores all of them.

    Memory allocated inside the mode is not restored. Data that `tensor.data = other` replaced are restored, too. Writes
    of kernels that bypass PyTorch's dispatcher, and writes through numpy, are not noticed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # address of the memory -> description of the tensor ("" for integers), number of times that `undo` restored it
        self.changed: dict[int, tuple[str, int]] = {}
        # storages allocated inside the mode; storage -> a tensor on it, copy of the storage
        self._made, self._before = set[Any](), dict[Any, tuple[Tensor, UntypedStorage]]()
        self._data: dict[int, tuple[Tensor, Tensor]] = {}  # id -> tensor, its original `data`

    @contextmanager
    def entered(self) -> Iterator[UndoneWrites]:
        """Context manager: enter the mode, and also record the data that `tensor.data = other` replaces."""
        with _Assignments(self), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the memory into which the operation writes, then run the operation."""
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable and func.namespace not in BY_TECHNIQUES:
            arguments = dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs
            for tensor in _parts_of([arguments.get(each.name) for each in schema.arguments if each.is_write]):
                storage = tensor.untyped_storage()
                key = StorageWeakRef(storage)
                if key not in self._made and key not in self._before and not tensor.is_meta:
                    self._before[key] = tensor, storage.clone()  # type: ignore[no-untyped-call]
        result = func(*args, **kwargs)
        # memory is new if a result has it and no argument
        if new := {StorageWeakRef(storage) for storage in _storages(result)} - self._made:
            self._made |= new - {StorageWeakRef(storage) for storage in _storages((args, kwargs))}
        return result

    def _note(self, tensor: Tensor) -> None:
        """Count that `undo` restored a tensor."""
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}" if tensor.is_floating_point() else ""
        address = tensor.untyped_storage().data_ptr()
        self.changed[address] = what, self.changed.get(address, ("", 0))[1] + 1

    def kept_by(self, model: nn.Module, times: int) -> str | None:
        """Describe a tensor that `undo` restored more than `times` times; None if there is none.

        Integers, buffers and plain tensors that are attributes of modules do not count.
        """
        names = {storage.data_ptr(): name for name, p in model.named_parameters() for storage in _storages(p)}
        attributes = [value for part in model.modules() for value in vars(part).values() if type(value) is Tensor]
        excluded = {storage.data_ptr() for storage in _storages([*model.buffers(), *attributes])}
        for address, (what, count) in self.changed.items():
            if what and count > times and address not in excluded:
                return f"the parameter {names[address]}" if address in names else what
        return None

    def undo(self, transient: Iterable[Tensor] = ()) -> None:
        """Restore all memory written since the last call, except that of `transient`, which every step fills anyway."""
        skipped = {storage.data_ptr() for storage in _storages(list(transient))}
        for tensor, data in self._data.values():
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
                self._note(tensor)
        for tensor, before in self._before.values():
            storage = tensor.untyped_storage()
            if storage.nbytes() != before.nbytes() or storage.data_ptr() in skipped:  # or it was freed
                continue
            now, then = (torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in (storage, before))
            if not torch.equal(now, then):
                storage.copy_(before)
                self._note(tensor)
        self._before.clear()
        self._data.clear()


class _Assignments(TorchFunctionMode):  # notes assignments to `tensor.data`, which the dispatcher does not see
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
    """Return the tensors with memory in arguments or results of an operation, also those inside tensor subclasses."""
    parts = list[Tensor]()
    for tensor in tensors_of(values):
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts += _parts_of([getattr(tensor, name) for name in names])
        elif tensor.layout == torch.strided and not isinstance(tensor, Absent):
            parts.append(tensor)
    return parts
