"""Parameters whose objects were replaced. Whatever still holds an old object computes with what replaced it.

Ranks replace parameters by shards, by the parts of a tensor-parallel layer, or by nothing where another stage has them.
A local variable, a list, a closure or an optimizer of the user's may still hold the old object. That object gets a
class whose operations act on what stands at its place in the module now, and it holds no memory of its own, but for a
shard after the run. Only its `id` and its hash do not follow: read parameters from the module where these matter.
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
    """A place in a module at which there is a parameter."""

    owner: nn.Module
    name: str
    path: str

    def held(self) -> Any:
        """What stands there: absent tensors of other stages are attributes, and in no table."""
        held = self.owner._parameters.get(self.name)
        return vars(self.owner).get(self.name) if held is None else held

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter there."""
        self.owner._parameters[self.name] = parameter
        if isinstance(self.owner, nn.RNNBase):
            renew_weights(self.owner)


def renew_weights(module: nn.RNNBase) -> None:
    """Makes the list of its weights that a recurrent layer keeps."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


class Moved(nn.Parameter):
    """A parameter that was replaced."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only((Moved, MovedShard), current, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(current(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return current(self).__reduce_ex__(protocol)


class MovedShard(DTensor):
    """A sharded parameter that was replaced."""

    __torch_function__ = Moved.__torch_function__
    __deepcopy__ = Moved.__deepcopy__
    __reduce_ex__ = Moved.__reduce_ex__


def places(module: nn.Module) -> dict[Place, nn.Parameter]:
    """All parameters of a module by place; a tied parameter has several places."""
    found = dict[Place, nn.Parameter]()
    for path, owner in module.named_modules():
        if not isinstance(owner, torch.jit.ScriptModule):  # its tables are in C++, where nothing is replaced
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    found[Place(owner, name, f"{path}.{name}" if path else name)] = parameter
    return found


def tied(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of each tensor that has several of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def follow(old: Tensor, new: Tensor | Place, keeps_shard: bool = False) -> None:
    """Let an old parameter stand for another tensor, or for whatever is at a place of the module.

    `keeps_shard`: whether it keeps this rank's shard, as after a run, when optimizers whose state lies in the same
    parts may still be saved.
    """
    vars(old)[KEY] = new
    if is_moved(old):
        return
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if isinstance(old, DTensor):
            if not keeps_shard:
                old._local_tensor = old._local_tensor.new_empty(0)
            old.__class__ = MovedShard
        else:
            old.grad, old.data = None, old.data.new_empty(0)  # its memory is free
            old.__class__ = Moved


def stand_for(parameter: Tensor, tensor: Tensor) -> None:
    """Let a parameter stand for another tensor for a while, unless it was replaced for good."""
    if is_moved(parameter):
        return
    was = type(parameter)  # its shape and memory stay: `stand_again` gives the class back
    vars(parameter).update({KEY: tensor, WAS: was})
    parameter.__class__ = MovedShard if issubclass(was, DTensor) else Moved


def stand_again(parameter: Tensor) -> None:
    """Undo `stand_for`, where it was called."""
    was = vars(parameter).pop(WAS, None)
    if was is not None:
        del vars(parameter)[KEY]
        parameter.__class__ = was


def is_moved(tensor: object) -> bool:
    """Whether a tensor is a parameter that was replaced."""
    return isinstance(tensor, (Moved, MovedShard))


def current(tensor: Any) -> Any:
    """What stands for a tensor now: itself, unless it was replaced."""
    while is_moved(tensor):
        follows = vars(tensor)[KEY]
        tensor = follows.held() if isinstance(follows, Place) else follows
    return tensor
