"""A module's state as one device would have it, from ranks that hold parts of it, and back.

Names and shapes are those of the whole. Tensors are gathered, one at a time, or are the parts themselves. Any layout
reads what any other wrote: each rank takes its own part of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from lightning_parallel.checkpoint.stored import in_memory
from lightning_parallel.strategies.data.samplers import GLOBAL_BATCH
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.shards import local, shard_of


def whole_state_dict(module: nn.Module, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The module's state under its own names, with every tensor changed. All ranks must call.

    Args:
        module: of which this rank may hold a part; a pipeline's tree is local.
        change: of a tensor that may be a shard: gathers it, on all ranks, or leaves it as it is.
    """
    with torch.no_grad(), _united_metrics(module):
        return {
            name: change(value) if isinstance(value, Tensor) else value for name, value in module.state_dict().items()
        }


@contextmanager
def _united_metrics(module: nn.Module) -> Iterator[None]:
    """Inside, metrics that are saved hold what all ranks have seen."""
    metrics = [metric for metric in _saved_metrics(module) if dist.is_initialized() and not metric._is_synced]
    for metric in metrics:
        metric.sync(process_group=metric.process_group, distributed_available=lambda: True)
    try:
        yield
    finally:
        for metric in metrics:
            metric.unsync()


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
    """Loads whole tensors into a module whose parameters may be sharded, without communication."""
    tree = elsewhere.tree_of(module)
    others = {} if tree is None else tree.remote
    with torch.no_grad():
        own = dict(module.named_parameters(remove_duplicate=False))
        parts = {name: _part_for(own.get(name), value) for name, value in state.items() if name not in others}
        fitting = {id(own[name]) for name, value in state.items() if name in own and _fits(own[name], value)}
        with _held_plain(module, fitting):
            module.load_state_dict(parts, strict=strict)


def _part_for(parameter: nn.Parameter | None, value: Any) -> Any:
    if parameter is None:
        return in_memory(value)  # a metric keeps what it loads
    if not isinstance(parameter, DTensor) or not _fits(parameter, value):
        return value
    part = value if isinstance(value, DTensor) else shard_of(value, parameter)
    return local(part).to(parameter.dtype)  # only now: of what is on the disk only the part is read


def _fits(parameter: nn.Parameter, value: Any) -> bool:
    """Whether a value is for a shard; torch tells of one that has another shape."""
    return isinstance(parameter, DTensor) and isinstance(value, Tensor) and parameter.shape == value.shape


@contextmanager
def _held_plain(module: nn.Module, shards: Set[int]) -> Iterator[None]:
    """Inside, the module has what this rank holds in place of these shards: DTensor cannot copy lists of elements."""
    parts = [part for part in module.modules() if any(id(kept) in shards for kept in part._parameters.values())]
    before = [(part, dict(part._parameters)) for part in parts]
    plain: dict[int, nn.Parameter] = {}
    for part in parts:
        for name, kept in part._parameters.items():
            if kept is not None and id(kept) in shards:
                held = plain.setdefault(id(kept), nn.Parameter(local(kept), kept.requires_grad))
                part._parameters[name] = held
    try:
        yield
    finally:
        for part, parameters in before:
            part._parameters.update(parameters)


POSITIONS = "lightning_parallel_positions"
"""Where a checkpoint holds how far the divided loaders had come, by their number among the loaders with a state."""


def set_positions_aside(checkpoint: dict[str, Any]) -> None:
    """Moves the states of divided loaders out of the list that Lightning refuses where it has no such loaders."""
    fit_loop = lightnings.saved_fit_loop(checkpoint)
    states = fit_loop.pop("combined_loader", [])
    checkpoint[POSITIONS] = {index: state for index, state in enumerate(states) if _is_position(state)}
    if others := [state for state in states if not _is_position(state)]:
        fit_loop["combined_loader"] = others


def put_positions_back(checkpoint: dict[str, Any]) -> None:
    """Takes `set_positions_aside` back."""
    positions = checkpoint.pop(POSITIONS, {})
    fit_loop = lightnings.saved_fit_loop(checkpoint)
    for index in sorted(positions):
        fit_loop.setdefault("combined_loader", []).insert(index, positions[index])


def _is_position(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() - {GLOBAL_BATCH} in ({"consumed", "random"}, {"batches", "own"})
