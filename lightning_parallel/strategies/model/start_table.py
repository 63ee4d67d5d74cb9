"""The table at the start of a fit: where ranks lie, which blocks they hold, and how many bytes they keep between steps.

Bytes are counted from what each rank really holds, so they are right for any set of techniques.
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
    """Print the table once for all ranks, and the global batch size where one loader knows its own. Collective."""
    held = whole.held()
    stored = {parameter: step.stored(parameter) for parameter in held}
    # shards that ZeRO keeps on the host, beside the parameters on the device
    copies = [rows for parameter, rows in stored.items() if local(rows).device != local(parameter).device]
    accumulates = trainer.accumulate_grad_batches > 1
    states = [leaf for optimizer in trainer.optimizers for leaf in pytree.tree_leaves(list(optimizer.state.values()))]
    row = Row(
        tuple(whole.mesh.device_mesh.get_coordinate() or ()),
        gethostname(),
        tuple(whole.plan.find_blocks(whole.module)),
        sum(local(tensor).nbytes for tensor in [*held, *copies]),
        sum(local(step.accumulated(p) if accumulates else stored[p]).nbytes for p in held if p.requires_grad),
        sum(local(state).nbytes for state in states if isinstance(state, Tensor)) if states else None,
    )
    rows = gather_objects(row, host)
    lines, readers, accumulated = table(whole.mesh.sizes, rows), whole.mesh.data.size(), trainer.accumulate_grad_batches
    combined = combined_of(trainer.fit_loop)
    loaders = [] if combined is None else combined.flattened
    if len(loaders) == 1 and isinstance(loaders[0], DataLoader):
        size = loaders[0].batch_size or getattr(loaders[0].batch_sampler, "batch_size", None)
        product = f"{size} a batch x {accumulated} accumulated x {readers} readers"
        lines += [] if size is None else [f"Global batch: {size * accumulated * readers} samples = {product}"]
    rank_zero_info("\n".join(lines))


# ---------------------------------------------------------------- the table


def table(sizes: Mapping[Axis, int], rows: Sequence[Row]) -> list[str]:
    """A line for each rank, or for all ranks of a stage where there are many; then with the largest numbers of each."""
    used = [axis for axis in AXES if sizes[axis] > 1]
    few = len(rows) <= MOST_ROWS
    shown = [axis for axis in used if few or axis == "pp"]
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, row in enumerate(rows):
        groups[row.place if few else row.place[:1]].append(rank)
    columns: dict[str, list[str]] = defaultdict(list)
    for ranks in groups.values():
        of_group = [rows[rank] for rank in ranks]
        machines = list(dict.fromkeys(row.machine for row in of_group))
        states = [row.states for row in of_group if row.states is not None]
        columns["rank"].append(spans(ranks))
        for axis in shown:
            columns[axis].append(str(of_group[0].place[AXES.index(axis)]))
        columns["host"].append(machines[0] + f" and {len(machines) - 1} more" * (len(machines) > 1))
        columns["blocks"].append(numbered(of_group[0].blocks))
        columns["parameters"].append(amount(max(row.parameters for row in of_group)))
        columns["gradients"].append(amount(max(row.gradients for row in of_group)))
        columns["optimizer states"].append(amount(max(states)) if len(states) == len(of_group) else "after step 1")
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


def numbered(names: Sequence[str]) -> str:
    """Names that differ in a number only as one: model.layers 0-3."""
    lists: dict[str, list[int]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        places = [place for place, part in enumerate(parts) if part.isdigit()]
        # "model.layers.3" -> "model.layers" and 3
        numbers = [int(parts.pop(places[-1]))] if places else []
        lists[".".join(parts)].extend(numbers)
    return "; ".join(f"{name} {spans(numbers)}".strip() for name, numbers in lists.items())


def spans(numbers: Sequence[int]) -> str:
    """Numbers in ascending order as text: 0-3, 8."""
    # 0, 1, 2, 3, 8: starts 0 and 8, ends 3 and 8
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def amount(size: int) -> str:
    """Bytes as text."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} B"
