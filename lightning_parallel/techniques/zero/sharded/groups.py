"""What `fully_shard` keeps of modules in private fields, which differ between versions of torch, and how it sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel.techniques.divided.parts import Part, is_part
from lightning_parallel.techniques.tools.shards import bear


def states_of(root: nn.Module) -> Iterator[Any]:
    """The states that `fully_shard` keeps, the root's first; modules sharded together share one."""
    seen: set[int] = set()
    for module in root.modules():
        if isinstance(module, FSDPModule) and id(state := module._get_fsdp_state()) not in seen:
            seen.add(id(state))
            yield state


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters of a state of `fully_shard`."""
    if "_fsdp_param_groups" in vars(state):  # torch 2.13
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def has_begun(group: Any) -> bool:
    """Whether a group knows its shards: in its first step it takes what is in the tables of modules."""
    begun: bool = group._reset_sharded_params
    return begun


def is_known(parameter: Any) -> bool:
    """Whether a parameter was ever whole."""
    return "_unsharded_param" in vars(parameter)


def whole_of(parameter: Any) -> Any:
    """The whole of a parameter, as it was when it was last whole; None if it never was."""
    return vars(parameter).get("_unsharded_param")


def parameters_of(root: nn.Module) -> Iterator[Any]:
    """What `fully_shard` keeps of each parameter."""
    for state in states_of(root):
        for group in groups_of(state):
            yield from group.fsdp_params


def put_in_tables(modules: Iterable[Any], whole: bool) -> None:
    """Lets modules have the wholes, or the shards, of parameters that are whole; what is gathered stays."""
    for module in modules:
        for group in groups_of(module._get_fsdp_state()):
            for parameter in group.fsdp_params if group.is_unsharded else ():
                parameter._setattr_on_modules(parameter.unsharded_param if whole else parameter.sharded_param)


def slots_of(parameter: Any) -> Iterator[tuple[nn.Module, str]]:
    """The modules that have a parameter, and the name that each gives it."""
    info = parameter._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def shards_of(root: nn.Module) -> list[tuple[Any, Any]]:
    """The wholes of parameters, of those that were ever whole, each with its shard."""
    known = filter(is_known, parameters_of(root))
    return [(whole_of(parameter), parameter.sharded_param) for parameter in known]


def bear_when_whole(root: nn.Module) -> None:
    """Has wholes bear the attributes that users gave parameters, from when they are made."""
    for parameter in parameters_of(root):
        vars(parameter)["init_unsharded_param"] = partial(_make_whole, parameter)


def _make_whole(parameter: Any) -> None:
    """Makes the whole as `fully_shard` does, which keeps it from the first time on."""
    parameter.__class__.init_unsharded_param(parameter)
    del vars(parameter)["init_unsharded_param"]
    bear(parameter._unsharded_param, parameter.sharded_param)
    if is_part(parameter._unsharded_param):  # within steps only is it ever seen
        parameter._unsharded_param.__class__ = Part
