"""The bytes of storages that are alive while something runs, and what runs with no collection of garbage."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.tools.absent import Absent


def stepped(optimizer: Optimizer) -> list[Tensor]:
    """What this rank keeps of the parameters of an optimizer, in hooks too."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class LiveBytes(TorchDispatchMode):
    """The most bytes that were real at one time, of these tensors and of all that are made within."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._live: dict[int, StorageWeakRef] = {}
        for tensor in held:
            self._follow(tensor)
        self.peak = self.now()

    def now(self) -> int:
        alive = {key: torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for key, reference in self._live.items()}
        self._live = {key: self._live[key] for key, storage in alive.items() if storage is not None}
        return sum(storage.nbytes() for storage in alive.values() if storage is not None)

    def _follow(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # else another rank would be asked for a staged tensor
            own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if not own.is_meta and not isinstance(own, Absent):  # which has a size, but no memory
                storage = own.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        for _ in range(10):  # gloo's threads let go of a message's tensors a moment after it arrived
            if self.now() <= self.peak:
                return out
            time.sleep(0.002)
        self.peak = max(self.peak, self.now())
        return out


def kept_for_backward(run: Callable[[], Any], parameters: Iterable[Tensor] = ()) -> int:
    """Bytes of what `run` keeps for its backward, each storage once, but for those of parameters."""
    own = {each.untyped_storage().data_ptr() for each in parameters}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (start := tensor.untyped_storage().data_ptr()) not in own:
            storages[start] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in storages.values())


def reachable() -> list[Tensor]:
    """All tensors that Python can reach, gradients among them."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return tensors + [each.grad for each in tensors if each.is_leaf and each.grad is not None]


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing collects garbage within: what earlier tests left in cycles would run its finalizers there."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
