"""A module's state as one device would have it, from ranks that hold parts of it, and back.

Names and shapes are those of the whole. Tensors are gathered, one at a time, or are the parts themselves. Any layout
reads what any other wrote: each rank takes its own part of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from lightning_parallel.checkpoint.stored import in_memory
from lightning_parallel.techniques.tools.elsewhere import tree_of
from lightning_parallel.techniques.tools.shards import local, shard_of


def whole_state_dict(module: nn.Module, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The module's state under its own names, with every tensor changed. All ranks must call.

    Args:
        module: of which this rank may hold a part; a pipeline's tree is local.
        change: of a tensor that may be a shard: gathers it, on all ranks, or leaves it as it is.
    """
    with torch.no_grad(), ExitStack() as after:
        for metric in _saved_metrics(module):  # which are saved as what all ranks have seen
            if dist.is_initialized() and not metric._is_synced:
                metric.sync(process_group=metric.process_group, distributed_available=dist.is_initialized)
                after.callback(metric.unsync)
        state = module.state_dict()
        return {name: change(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def _saved_metrics(module: nn.Module) -> list[Metric]:
    metrics = (part for part in module.modules() if isinstance(part, Metric))
    return [metric for metric in metrics if any(metric._persistent.values())]


def keep_sums_on_first(module: nn.Module, first: bool) -> None:
    """After loading, only the first of the ranks that see different data starts from what all had summed or listed."""
    for metric in [] if first else _saved_metrics(module):
        for name, saved in metric._persistent.items():
            if saved and metric._reductions[name] in (dim_zero_sum, dim_zero_cat):
                default = metric._defaults[name]
                fresh = default.clone().to(metric.device) if isinstance(default, Tensor) else list(default)
                setattr(metric, name, fresh)


def load_whole_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors into a module whose parameters may be sharded, without communication.

    A sharded parameter is a plain one of this rank's part meanwhile: DTensor cannot copy lists of elements, and of what
    is on the disk only the part is read.
    """
    tree, parts, plain = tree_of(module), dict[str, Any](), dict[int, nn.Parameter]()
    own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad(), ExitStack() as after:
        for name, value in state.items():
            parameter = own.get(name)
            if tree is not None and name in tree.remote:
                continue
            parts[name] = in_memory(value) if parameter is None else value  # a metric keeps what it loads
            # torch tells of a value that has another shape
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and parameter.shape == value.shape:
                parts[name] = local(value if isinstance(value, DTensor) else shard_of(value, parameter))
                parts[name] = parts[name].to(parameter.dtype)
                plain[id(parameter)] = nn.Parameter(local(parameter), parameter.requires_grad)
        for part in module.modules():
            if held := {name: plain[id(each)] for name, each in part._parameters.items() if id(each) in plain}:
                after.callback(part._parameters.update, {name: part._parameters[name] for name in held})
                part._parameters.update(held)
        module.load_state_dict(parts, strict=strict)
