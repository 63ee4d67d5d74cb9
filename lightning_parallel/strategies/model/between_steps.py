"""What a model's shards are between steps, where user code runs, and what they are inside a step.

Between steps a sharded parameter and its gradient are of the class `GlobalShard`, which computes as the whole tensor,
and the modules' forwards are the user's own: a hook that calls one computes it on this rank alone, on wholes. Inside a
step and its backward pass both are what the techniques need: plain DTensors, and forwards led through the techniques.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.lightning_package import Callback, WeightAveraging
from lightning_parallel.techniques.tools.elsewhere import tree_of
from lightning_parallel.techniques.tools.global_shard import GlobalShard, global_of, local_of, whole_of
from lightning_parallel.techniques.tools.redirect import Redirected, original_of
from lightning_parallel.techniques.tools.shards import as_shard
from lightning_parallel.techniques.tools.staged import Staged, full


class BetweenSteps:
    """Switches parameters, gradients and forwards at both ends of a step. No message.

    Args:
        module: the divided module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters: list[Any] = [each for each in module.parameters() if isinstance(each, DTensor)]
        self._forwards: list[tuple[dict[str, Any], str, Redirected, Any]] = []
        for part in module.modules() if self._parameters or tree_of(module) is not None else ():
            for entry in ("forward", "_compiled_call_impl"):
                if isinstance(redirected := vars(part).get(entry), Redirected):
                    own = original_of(redirected)
                    plain = getattr(own, "__func__", None) in (
                        getattr(type(part), "forward", None),
                        type(part)._call_impl,
                    )
                    self._forwards.append((vars(part), entry, redirected, None if plain else own))
        self._places = [
            (part._parameters, name, parameter, f"{prefix}.{name}" if prefix else name)
            for prefix, part in module.named_modules()
            for name, parameter in part._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        self._locals: list[Tensor] = []
        self._inside = True
        self.leave_step()

    def leave_step(self) -> None:
        """Let user code see wholes from now on."""
        self._inside = False
        for parameter in self._parameters:
            global_of(parameter)
        self._locals = [parameter._local_tensor for parameter in self._parameters]
        for table, entry, _, own in self._forwards:
            if own is None:
                table.pop(entry, None)
            else:
                table[entry] = own

    def enter_step(self) -> None:
        """Let techniques see what they need from now on."""
        self._inside = True
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, local in zip(self._parameters, self._locals, strict=True):
                now = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                if now is not local:
                    # `module.double().float()` gave the shard other memory; techniques and optimizers hold `local`
                    if (now.shape, now.dtype, now.device) != (local.shape, local.dtype, local.device):
                        raise RuntimeError(
                            f"a hook turned a sharded parameter of {local.dtype} on {local.device} into one of "
                            f"{now.dtype} on {now.device}: ranks hold parts of what the model had when the run began; "
                            "convert and move the model before the run, or a copy of it"
                        )
                    with torch.no_grad():
                        local.copy_(now)
                    parameter._local_tensor = local
                # the object stays, so optimizers and closures hold the same one; only its class changes
                for tensor in (parameter.grad, parameter):
                    if type(tensor) is GlobalShard:
                        tensor.__class__ = DTensor  # type: ignore[assignment]
        for table, entry, redirected, _ in self._forwards:
            table[entry] = redirected

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside a step runs, or a backward pass. Manual optimization runs backward passes within its step."""
        if self._inside:
            yield
            return
        for table, name, parameter, path in self._places:
            if table.get(name) is not parameter:  # tied, replaced or parametrized: optimizers and ranks do not know it
                raise ValueError(
                    f"a hook put something else in the place of the parameter {path}, of which ranks hold parts since "
                    "the run began; write into it (copy_), or tie, replace and parametrize before the run"
                )
        self.enter_step()
        try:
            yield
        finally:
            self.leave_step()


@contextmanager
def full_parameters(modules: Iterable[nn.Module], gradients: bool, writable: bool) -> Iterator[None]:
    """Put plain whole parameters in the place of shards; see `MeshStrategy.full_parameters`. Collective."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    wholes: dict[int, tuple[Any, nn.Parameter]] = {}
    for module in modules:
        table: dict[str, Any] = module._parameters
        for name, parameter in table.items():
            shared = parameter is not None and isinstance(parameter.grad, GlobalShard)  # under ZeRO 1 and 2
            if isinstance(parameter, (GlobalShard, Staged)) or (gradients and shared):
                if id(parameter) not in wholes:
                    made = nn.Parameter(_whole(parameter), parameter.requires_grad)
                    made.grad = _whole(parameter.grad) if gradients else None
                    wholes[id(parameter)] = parameter, made
                places.append((table, name, parameter))
    for table, name, parameter in places:
        table[name] = wholes[id(parameter)][1]
    try:
        yield
    finally:
        for table, name, parameter in places:
            table[name] = parameter
        for parameter, whole in wholes.values() if writable else ():
            _take_back(parameter, whole, gradients)


@torch.no_grad()
def _whole(tensor: Any) -> Any:
    if isinstance(tensor, Staged):
        return full(tensor.detach())
    if isinstance(tensor, DTensor):
        detached: Any = tensor.detach()
        return whole_of(detached)
    return None if tensor is None else tensor.detach()


@torch.no_grad()
def _take_back(parameter: Any, whole: Tensor, gradients: bool) -> None:
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
    """Let averages that callbacks made before the module was divided keep shards cut as its own. No message."""
    named = module.named_parameters(remove_duplicate=False)
    like = {name: each for name, each in named if isinstance(each, GlobalShard)}
    for callback in callbacks:
        average = callback._average_model if isinstance(callback, WeightAveraging) else None
        made: dict[int, nn.Parameter] = {}
        for prefix, part in () if average is None else average.module.named_modules():
            for name, parameter in part._parameters.items():
                shard = like.get(f"{prefix}.{name}" if prefix else name)
                if parameter is None or shard is None or isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in made:
                    # the same rows as the parameter has here; the whole average is freed
                    own = local_of(parameter, shard).to(shard.device, copy=True)
                    as_average = nn.Parameter(as_shard(own.to(parameter.dtype), shard), parameter.requires_grad)
                    made[id(parameter)] = global_of(as_average)
                part._parameters[name] = made[id(parameter)]
