"""Checkpoints in their first form: a plain Lightning file with full names and whole tensors, written atomically.

Every rank takes part in gathering, one tensor at a time; only rank 0 keeps values and writes. Any layout reads the
file: each rank takes its own part of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.shards import gathered, shard_of


def whole_state_dict(module: nn.Module, keep: bool) -> dict[str, Any]:
    """The module's state as one device would have it; without values where not `keep`. All ranks must call.

    The other ranks get the same names too, because users' `on_save_checkpoint` hooks look them up everywhere.
    """
    with torch.no_grad(), elsewhere.unshown(module), _united_metrics(module):
        return {
            name: gathered(value, keep) if isinstance(value, Tensor) else value
            for name, value in module.state_dict().items()
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
    others = elsewhere.hidden_tensors(module)
    with torch.no_grad(), elsewhere.unshown(module):
        own = dict(module.named_parameters(remove_duplicate=False))
        parts = {name: _part_for(own.get(name), value) for name, value in state.items() if name not in others}
        module.load_state_dict(parts, strict=strict)


def _part_for(parameter: nn.Parameter | None, value: Any) -> Any:
    sharded = isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor)
    same = sharded and parameter is not None and parameter.shape == value.shape
    return shard_of(value.to(parameter.dtype), parameter) if same and isinstance(parameter, DTensor) else value


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
    return isinstance(state, dict) and state.keys() == {"consumed", "random"}
