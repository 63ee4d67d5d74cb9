"""What `fully_shard` keeps of modules that it was given, in private fields that differ between versions of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


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


def is_known(parameter: Any) -> bool:
    """Whether a parameter was ever whole."""
    return "_unsharded_param" in vars(parameter)


def shards_of(root: nn.Module) -> dict[int, Any]:
    """The shards of parameters that were ever whole, by the `id` of the whole and by their own."""
    groups = [group for state in states_of(root) for group in groups_of(state)]
    known = [parameter for group in groups for parameter in group.fsdp_params if is_known(parameter)]
    wholes = {id(parameter._unsharded_param): parameter.sharded_param for parameter in known}
    return wholes | {id(parameter.sharded_param): parameter.sharded_param for parameter in known}
