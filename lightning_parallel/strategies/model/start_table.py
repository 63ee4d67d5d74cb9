"""The table at the start of a fit: where ranks lie, which blocks they hold, and how many bytes they keep between steps.

Bytes are counted from what each rank really holds, so they are right for any set of techniques. Optimizers make their
states in the first step; until then torch's own are asked on tensors without memory.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_parallel.mesh import AXES, Axis
from lightning_parallel.strategies.lightning_package import Trainer, rank_zero_info
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.trainer.lightnings import combined_of
from lightning_parallel.techniques.gradients.elementwise import is_elementwise
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.shards import local

MOST_ROWS = 16
"""With more ranks than these a row stands for all ranks of a stage."""


@dataclass(frozen=True)
class Row:
    """One rank: where it lies, and what it keeps between steps.

    Attributes:
        place: its coordinate on every axis.
        machine: the name of its host.
        blocks: the names of those that it holds.
        parameters: bytes of them, frozen ones too.
        gradients: bytes, while they accumulate.
        states: bytes of optimizer states; None where they are not known before the first step.
    """

    place: tuple[int, ...]
    machine: str
    blocks: tuple[str, ...]
    parameters: int
    gradients: int
    states: int | None


def tell(trainer: Trainer, whole: DividedModel, step: Step, host: dist.ProcessGroup) -> None:
    """Prints the table once for all ranks, all of which take part."""
    rows = gather_objects(own_row(trainer, whole, step), host)
    rank_zero_info("\n".join([*table(whole.mesh.sizes, rows), *global_batch(trainer, whole.mesh.data.size())]))


# ---------------------------------------------------------------- what this rank keeps


def own_row(trainer: Trainer, whole: DividedModel, step: Step) -> Row:
    """Counts what this rank holds of the divided model, and what `step` says that optimizers step for it."""
    held = whole.held()
    stored = {parameter: step.stored(parameter) for parameter in held}
    states = [state_bytes(optimizer, stored) for optimizer in trainer.optimizers]
    copies = [rows for parameter, rows in stored.items() if local(rows).device != local(parameter).device]
    accumulates = trainer.accumulate_grad_batches > 1
    return Row(
        tuple(whole.mesh.device_mesh.get_coordinate() or ()),
        gethostname(),
        tuple(whole.plan.find_blocks(whole.module)),
        sum(local(tensor).nbytes for tensor in [*held, *copies]),
        sum(local(step.accumulated(p) if accumulates else stored[p]).nbytes for p in held if p.requires_grad),
        None if None in states else sum(filter(None, states)),
    )


def state_bytes(optimizer: Optimizer, stored: Mapping[nn.Parameter, Tensor]) -> int | None:
    """Bytes that an optimizer keeps for the parameters that this rank holds, or will keep after its first step."""
    if optimizer.state:
        return _bytes_in(list(optimizer.state.values()))
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None  # the `step` of others may do more than step
    try:
        return sum(_made_for(optimizer, group, stored) for group in optimizer.param_groups)
    except (RuntimeError, TypeError, ValueError):  # it needs a closure, or looks at values
        return None


def _made_for(optimizer: Optimizer, group: dict[str, Any], stored: Mapping[nn.Parameter, Tensor]) -> int:
    """Bytes of the states of a group; parameters of one shape are asked for once."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for rows in (stored[p] for p in group["params"] if p in stored and p.requires_grad):
        alike[rows.shape, local(rows).shape, rows.dtype].append(rows)
    return sum(len(tensors) * _made_by(optimizer, group, tensors[0]) for tensors in alike.values())


def _made_by(optimizer: Optimizer, group: dict[str, Any], stored: Tensor) -> int:
    """Bytes of the state that a step makes for one parameter: a copy of the optimizer steps a tensor without memory."""
    shape = local(stored).shape if is_elementwise(optimizer) else stored.shape
    probe = nn.Parameter(torch.empty(shape, dtype=stored.dtype, device="meta"))
    probe.grad = torch.empty_like(probe)
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    kernels = dict.fromkeys({"fused", "foreach"} & group.keys(), False)
    other.param_groups = [{**group, **kernels, "params": [probe]}]
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(other)  # without hooks for all optimizers
    kept = list(other.state.values())
    return _bytes_in(pytree.tree_map_only(Tensor, lambda t: local(stored) if t.shape == stored.shape else t, kept))


def _bytes_in(states: list[Any]) -> int:
    return sum(local(leaf).nbytes for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor))


# ---------------------------------------------------------------- the table


def table(sizes: Mapping[Axis, int], rows: Sequence[Row]) -> list[str]:
    """A line for each rank, or for all ranks of a stage where there are many; then the largest of each is told."""
    used = [axis for axis in AXES if sizes[axis] > 1]
    few = len(rows) <= MOST_ROWS
    shown = [axis for axis in used if few or axis == "pp"]
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, row in enumerate(rows):
        groups[row.place if few else row.place[:1]].append(rank)
    head = ["rank", *shown, "host", "blocks", "parameters", "gradients", "optimizer states"]
    cells = [_cells(ranks, [rows[rank] for rank in ranks], shown) for ranks in groups.values()]
    kept = [i for i, name in enumerate(head) if name not in _same(sizes, rows)]
    lines = [[line[i] for i in kept] for line in [head, *cells]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    product = " x ".join(f"{axis}={sizes[axis]}" for axis in used) or "no axis"
    return [
        f"Layout of {len(rows)} ranks: {product}",
        *("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines),
    ]


def _cells(ranks: list[int], rows: list[Row], shown: Sequence[Axis]) -> list[str]:
    machines = list(dict.fromkeys(row.machine for row in rows))
    states = [row.states for row in rows if row.states is not None]
    return [
        spans(ranks),
        *(str(rows[0].place[AXES.index(axis)]) for axis in shown),
        machines[0] + f" and {len(machines) - 1} more" * (len(machines) > 1),
        numbered(rows[0].blocks),
        amount(max(row.parameters for row in rows)),
        amount(max(row.gradients for row in rows)),
        amount(max(states)) if len(states) == len(rows) else "after step 1",
    ]


def _same(sizes: Mapping[Axis, int], rows: Sequence[Row]) -> set[str]:
    """The columns that would tell nothing."""
    one_machine = len({row.machine for row in rows}) == 1
    return ({"host"} if one_machine else set()) | ({"blocks"} if sizes["pp"] == 1 else set())


def numbered(names: Sequence[str]) -> str:
    """Names that differ in a number only as one: model.layers 0-3."""
    lists: dict[str, list[int]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        places = [place for place, part in enumerate(parts) if part.isdigit()]
        numbers = [int(parts.pop(places[-1]))] if places else []
        lists[".".join(parts)].extend(numbers)
    return "; ".join(f"{name} {spans(numbers)}".strip() for name, numbers in lists.items())


def spans(numbers: Sequence[int]) -> str:
    """Numbers in ascending order as text: 0-3, 8."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def amount(size: int) -> str:
    """Bytes as text."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} B"


def global_batch(trainer: Trainer, readers: int) -> list[str]:
    """The global batch size, where there is one loader and it knows its batch size."""
    combined = combined_of(trainer.fit_loop)
    loaders = [] if combined is None else combined.flattened
    if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
        return []
    size = loaders[0].batch_size or getattr(loaders[0].batch_sampler, "batch_size", None)
    accumulated = trainer.accumulate_grad_batches
    product = f"{size} a batch x {accumulated} accumulated x {readers} readers"
    return [] if size is None else [f"Global batch: {size * accumulated * readers} samples = {product}"]
