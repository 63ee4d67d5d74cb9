"""What `fully_shard` keeps of modules in private fields, which differ between versions of torch, and how it sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lightning_parallel.collectives.functional import all_gather, reduce_scatter
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


class OwnAllGather(AllGather):
    """How `fully_shard` gathers where processes exchange messages by themselves."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: D102
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # noqa: D102
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather(output_tensor, input_tensor, group).wait()


class OwnReduceScatter(ReduceScatter):
    """How it reduces gradients there."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: D102
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # noqa: D102
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        reduce_scatter(output_tensor, input_tensor, group).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
