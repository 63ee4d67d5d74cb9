"""Switches sharded parameters between their form inside a step and their form between steps, where user code runs.

Between steps a sharded parameter and its gradient are `GlobalShard`s, which compute as the full tensors, and modules
have the user's own forwards: a hook that calls one computes it on this rank alone, with full tensors. Inside a step and
its backward pass the techniques need plain DTensors, and forwards that they have wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.lightning_package import Callback, WeightAveraging
from lightning_parallel.techniques.tools.global_shard import GlobalShard, as_global_shard, gather_full, local_of
from lightning_parallel.techniques.tools.redirect import Redirected, original_of
from lightning_parallel.techniques.tools.replaced_parameters import Place, places
from lightning_parallel.techniques.tools.shards import as_shard
from lightning_parallel.techniques.tools.stage_tree import tree_of
from lightning_parallel.techniques.tools.staged import Staged, full


class BetweenSteps:
    """Switches parameters, gradients and forwards at both ends of a step. No communication.

    Args:
        module: the divided module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters: list[Any] = [each for each in module.parameters() if isinstance(each, DTensor)]
        self._forwards: list[tuple[dict[str, Any], str, Redirected, Any]] = []
        for part in module.modules() if self._parameters or tree_of(module) is not None else ():
            for entry in ("forward", "_compiled_call_impl"):
                if isinstance(redirected := vars(part).get(entry), Redirected):
                    original = original_of(redirected)
                    is_class_method = getattr(original, "__func__", None) in (
                        getattr(type(part), "forward", None),
                        type(part)._call_impl,
                    )
                    self._forwards.append((vars(part), entry, redirected, None if is_class_method else original))
        self._places = [(place, each) for place, each in places(module).items() if isinstance(each, DTensor)]
        self._locals: list[Tensor] = []
        self._inside = True
        self.leave_step()

    def leave_step(self) -> None:
        """Switch to the form between steps: user code gets full tensors."""
        self._inside = False
        for parameter in self._parameters:
            as_global_shard(parameter)
        self._locals = [parameter._local_tensor for parameter in self._parameters]
        for table, entry, _, original in self._forwards:
            if original is None:  # the class has it
                table.pop(entry, None)
            else:
                table[entry] = original

    def enter_step(self) -> None:
        """Switch to the form inside a step: techniques get DTensors and the wrapped forwards."""
        self._inside = True
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, local in zip(self._parameters, self._locals, strict=True):
                now = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                if now is not local:
                    # `module.double().float()` gave the shard new memory; techniques and optimizers refer to `local`
                    if (now.shape, now.dtype, now.device) != (local.shape, local.dtype, local.device):
                        raise RuntimeError(
                            f"a hook changed a sharded parameter from {local.dtype} on {local.device} to {now.dtype} "
                            f"on {now.device}, but ranks hold shards of the original since the run began; convert and "
                            "move the model before the run, or a copy of it"
                        )
                    with torch.no_grad():
                        local.copy_(now)
                    parameter._local_tensor = local
                # only the class changes: optimizers and closures refer to the same object
                for tensor in (parameter.grad, parameter):
                    if type(tensor) is GlobalShard:
                        tensor.__class__ = DTensor  # type: ignore[assignment]
        for table, entry, redirected, _ in self._forwards:
            table[entry] = redirected

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Surround a step or a backward pass. Nested uses do nothing: a step may run backward by hand."""
        if self._inside:
            yield
            return
        for (owner, name, path), parameter in self._places:
            # tied, replaced or parametrized: optimizers and ranks do not know it
            if owner._parameters.get(name) is not parameter:
                raise ValueError(
                    f"a hook replaced the parameter {path}, but ranks hold shards of the original since the run began; "
                    "change it in place with copy_(), or tie, replace and parametrize it before the run"
                )
        self.enter_step()
        try:
            yield
        finally:
            self.leave_step()


@contextmanager
def full_parameters(module: nn.Module, gradients: bool, writable: bool) -> Iterator[None]:
    """Replace shards by plain full parameters inside; see `MeshStrategy.full_parameters`. Collective over all ranks."""
    sharded: list[tuple[Place, nn.Parameter]] = []
    full_of: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the id of a parameter
    for place, parameter in places(module, scripted=True).items():
        shards_gradient = isinstance(parameter.grad, GlobalShard)  # under ZeRO 1 and 2
        if isinstance(parameter, (GlobalShard, Staged)) or (gradients and shards_gradient):
            if id(parameter) not in full_of:
                gathered = nn.Parameter(_whole(parameter), parameter.requires_grad)
                gathered.grad = _whole(parameter.grad) if gradients else None
                full_of[id(parameter)] = parameter, gathered
            sharded.append((place, parameter))
    for place, parameter in sharded:
        place.put(full_of[id(parameter)][1])
    try:
        yield
    finally:
        for place, parameter in sharded:
            place.put(parameter)
        for parameter, written in full_of.values() if writable else ():
            _take_back(parameter, written, gradients)


@torch.no_grad()
def _whole(tensor: Any) -> Any:
    """Return the full tensor of a parameter or gradient, plain and detached. Collective over its ranks."""
    if isinstance(tensor, Staged):
        return full(tensor.detach())
    if isinstance(tensor, DTensor):
        detached: Any = tensor.detach()
        return gather_full(detached)
    return None if tensor is None else tensor.detach()


@torch.no_grad()
def _take_back(parameter: Any, whole: Tensor, gradients: bool) -> None:
    """Write a full parameter, and its gradient, back to the shard."""
    if isinstance(parameter, (GlobalShard, Staged)):
        parameter.copy_(whole)
    gradient, before = whole.grad, parameter.grad
    if not gradients:
        return
    if gradient is None or before is None:
        parameter.grad = gradient
    elif isinstance(before, Staged):
        before.copy_(gradient)
    elif isinstance(before, DTensor):
        before._local_tensor.copy_(local_of(gradient, before))


def shard_averages(module: nn.Module, callbacks: Iterable[Callback]) -> None:
    """Shard the averages that `WeightAveraging` callbacks made of the undivided module. No communication."""
    named = module.named_parameters(remove_duplicate=False)
    shards = {name: parameter for name, parameter in named if isinstance(parameter, GlobalShard)}
    for callback in callbacks:
        average = callback._average_model if isinstance(callback, WeightAveraging) else None
        averages: dict[int, nn.Parameter] = {}  # by the id of the full average
        for place, parameter in () if average is None else places(average.module).items():
            shard = shards.get(place.path)
            if shard is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in averages:
                # the same rows as the parameter's local shard; copied, so that the full average is freed
                rows = local_of(parameter, shard).to(shard.device, copy=True)
                sharded = nn.Parameter(as_shard(rows.to(parameter.dtype), shard), parameter.requires_grad)
                averages[id(parameter)] = as_global_shard(sharded)
            place.put(averages[id(parameter)])
