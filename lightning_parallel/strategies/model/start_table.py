"""Prints a table at the start of a fit: coordinates, blocks, and memory between steps of each rank.

Bytes are counted from the tensors that each rank holds, so they are right for any set of techniques.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_parallel.mesh import AXES, Axis
from lightning_parallel.strategies.lightning_internals import combined_of
from lightning_parallel.strategies.lightning_package import Trainer, rank_zero_info
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.shards import local

MOST_ROWS = 16
"""With more ranks than these, the table has one row per pipeline stage instead of one per rank."""


@dataclass(frozen=True)
class Row:
    """Position of one rank, and its memory between steps.

    Attributes:
        place: its coordinate on each axis of `AXES`.
        machine: name of its host.
        blocks: names of its blocks.
        parameters: bytes of its parameters, including frozen ones.
        gradients: bytes of its gradients while they accumulate.
        states: bytes of its optimizer states; None if they do not exist before the first step.
    """

    place: tuple[int, ...]
    machine: str
    blocks: tuple[str, ...]
    parameters: int
    gradients: int
    states: int | None


def print_table(trainer: Trainer, whole: DividedModel, step: Step, host: dist.ProcessGroup) -> None:
    """Print the table on rank 0, and the global batch size if a single loader has one. Collective over all ranks."""
    parameters = whole.held()
    stored = {parameter: step.stored(parameter) for parameter in parameters}
    # shards that ZeRO keeps on the host in addition to the parameters on the device
    copies = [rows for parameter, rows in stored.items() if local(rows).device != local(parameter).device]
    accumulates = trainer.accumulate_grad_batches > 1
    states = [leaf for optimizer in trainer.optimizers for leaf in pytree.tree_leaves(list(optimizer.state.values()))]
    row = Row(
        tuple(whole.mesh.device_mesh.get_coordinate() or ()),
        gethostname(),
        tuple(whole.plan.find_blocks(whole.module)),
        sum(local(tensor).nbytes for tensor in [*parameters, *copies]),
        sum(local(step.accumulated(p) if accumulates else stored[p]).nbytes for p in parameters if p.requires_grad),
        sum(local(state).nbytes for state in states if isinstance(state, Tensor)) if states else None,
    )
    rows = gather_objects(row, host)
    lines, readers, accumulated = table(whole.mesh.sizes, rows), whole.mesh.data.size(), trainer.accumulate_grad_batches
    combined = combined_of(trainer.fit_loop)
    loaders = [] if combined is None else combined.flattened
    if len(loaders) == 1 and isinstance(loaders[0], DataLoader):
        size = loaders[0].batch_size or getattr(loaders[0].batch_sampler, "batch_size", None)
        product = f"{size} per batch x {accumulated} accumulated x {readers} data-parallel ranks"
        lines += [] if size is None else [f"Global batch: {size * accumulated * readers} samples = {product}"]
    rank_zero_info("\n".join(lines))


# ---------------------------------------------------------------- the table


def table(sizes: Mapping[Axis, int], rows: Sequence[Row]) -> list[str]:
    """Return the table's lines: one per rank, or with many ranks one per stage with the maximum over its ranks."""
    used = [axis for axis in AXES if sizes[axis] > 1]
    by_rank = len(rows) <= MOST_ROWS
    shown = [axis for axis in used if by_rank or axis == "pp"]
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, row in enumerate(rows):
        groups[row.place if by_rank else row.place[:1]].append(rank)
    columns: dict[str, list[str]] = defaultdict(list)
    for ranks in groups.values():
        of_group = [rows[rank] for rank in ranks]
        machines = list(dict.fromkeys(row.machine for row in of_group))
        states = [row.states for row in of_group if row.states is not None]
        columns["rank"].append(format_ranges(ranks))
        for axis in shown:
            columns[axis].append(str(of_group[0].place[AXES.index(axis)]))
        columns["host"].append(machines[0] + f" and {len(machines) - 1} more" * (len(machines) > 1))
        columns["blocks"].append(format_names(of_group[0].blocks))
        columns["parameters"].append(format_bytes(max(row.parameters for row in of_group)))
        columns["gradients"].append(format_bytes(max(row.gradients for row in of_group)))
        columns["optimizer states"].append(
            format_bytes(max(states)) if len(states) == len(of_group) else "after step 1"
        )
    if len({row.machine for row in rows}) == 1:
        del columns["host"]
    if sizes["pp"] == 1:
        del columns["blocks"]
    padded = []
    for name, cells in columns.items():
        width = max(map(len, [name, *cells]))
        padded.append([f"{cell:>{width}}" for cell in [name, *cells]])
    product = " x ".join(f"{axis}={sizes[axis]}" for axis in used) or "no axis"
    return [f"Layout of {len(rows)} ranks: {product}", *map("  ".join, zip(*padded, strict=True))]


def format_names(names: Sequence[str]) -> str:
    """Return names as text; names that differ only in a number become one: model.layers 0-3."""
    lists: dict[str, list[int]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        places = [place for place, part in enumerate(parts) if part.isdigit()]
        # "model.layers.3" -> "model.layers" and 3
        numbers = [int(parts.pop(places[-1]))] if places else []
        lists[".".join(parts)].extend(numbers)
    return "; ".join(f"{name} {format_ranges(numbers)}".strip() for name, numbers in lists.items())


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: [0, 1, 2, 3, 8] -> "0-3, 8"."""
    # [0, 1, 2, 3, 8]: starts [0, 8], ends [3, 8]
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def format_bytes(size: int) -> str:
    """Return a number of bytes as text: 1536 -> "1.5 KiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} B"
