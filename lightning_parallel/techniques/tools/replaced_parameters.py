"""Parameters that were replaced in their module: the old objects compute as their replacements.

A rank replaces parameters by shards (ZeRO, tensor parallelism), or removes them if another stage holds them. A local
variable, a list, a closure or an optimizer of the user's may still refer to the old object. Therefore the class of the
old object is changed to one whose operations act on the tensor that its module has now, and its memory is freed, except
that of a shard after the run. Its `id` and its hash stay: where these matter, read parameters from the module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

KEY, WAS = "_lightning_parallel_moved", "_lightning_parallel_class"


class Place(NamedTuple):
    """Place of a parameter in a module tree."""

    owner: nn.Module
    name: str  # in `owner`
    path: str  # the FQN

    def held(self) -> Any:
        """Return the tensor at this place. An absent one, of another stage, is an attribute of `owner`, in no table."""
        held = self.owner._parameters.get(self.name)
        return vars(self.owner).get(self.name) if held is None else held

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter at this place."""
        self.owner._parameters[self.name] = parameter
        if isinstance(self.owner, nn.RNNBase):
            renew_weights(self.owner)


def renew_weights(module: nn.RNNBase) -> None:
    """Update the list of weights that a recurrent layer keeps beside its parameters."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


class ReplacedParameter(nn.Parameter):
    """Old object of a plain parameter that was replaced."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only((ReplacedParameter, ReplacedShard), current, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(current(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return current(self).__reduce_ex__(protocol)


class ReplacedShard(DTensor):
    """Old object of a DTensor parameter that was replaced."""

    __torch_function__ = ReplacedParameter.__torch_function__
    __deepcopy__ = ReplacedParameter.__deepcopy__
    __reduce_ex__ = ReplacedParameter.__reduce_ex__


def places(module: nn.Module, scripted: bool = False) -> dict[Place, nn.Parameter]:
    """Return all parameters of a module by place; a tied parameter has several places.

    `scripted`: whether to include those of TorchScript modules, which are in C++ and which techniques never replace.
    """
    parameters = dict[Place, nn.Parameter]()
    for path, owner in module.named_modules():
        if scripted or not isinstance(owner, torch.jit.ScriptModule):
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    parameters[Place(owner, name, f"{path}.{name}" if path else name)] = parameter
    return parameters


def tied(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """Return the names of each tied tensor: [["embedding.weight", "head.weight"]]."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def replace_by(old: Tensor, new: Tensor | Place, keeps_shard: bool = False) -> None:
    """Let an old parameter compute for good as another tensor, or as the tensor that is at a place at the time.

    `keeps_shard`: whether it keeps its local shard, as after a run, when an optimizer with equally sharded state may
    still be saved.
    """
    vars(old)[KEY] = new
    if is_replaced(old):
        return
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if isinstance(old, DTensor):
            if not keeps_shard:
                old._local_tensor = old._local_tensor.new_empty(0)
            old.__class__ = ReplacedShard
        else:
            old.grad, old.data = None, old.data.new_empty(0)  # free its memory
            old.__class__ = ReplacedParameter


def redirect_to(parameter: Tensor, tensor: Tensor) -> None:
    """Let a parameter compute as another tensor until `stop_redirect`, unless it was replaced for good."""
    if is_replaced(parameter):
        return
    original = type(parameter)  # shape and memory stay, and `stop_redirect` restores the class
    vars(parameter).update({KEY: tensor, WAS: original})
    parameter.__class__ = ReplacedShard if issubclass(original, DTensor) else ReplacedParameter


def stop_redirect(parameter: Tensor) -> None:
    """Undo `redirect_to` if it was called."""
    original = vars(parameter).pop(WAS, None)
    if original is not None:
        del vars(parameter)[KEY]
        parameter.__class__ = original


def is_replaced(tensor: object) -> bool:
    """Return whether a tensor is the old object of a parameter that was replaced."""
    return isinstance(tensor, (ReplacedParameter, ReplacedShard))


def current(tensor: Any) -> Any:
    """Return the current replacement of a tensor; the tensor itself if it was not replaced."""
    while is_replaced(tensor):  # a replacement may have been replaced, too
        target = vars(tensor)[KEY]
        tensor = target.held() if isinstance(target, Place) else target
    return tensor
