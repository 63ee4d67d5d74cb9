"""Checkpoints to which every rank writes what it holds: their saving, in two halves of which the second may wait."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.hashed import Content
from lightning_parallel.checkpoint.manifest import Manifest
from lightning_parallel.checkpoint.plain import TENSORS, NotPlain, encoded, joined
from lightning_parallel.checkpoint.shares import Offer, Shares, shared_out
from lightning_parallel.checkpoint.tensors_file import name_of
from lightning_parallel.mesh import Axis
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.shards import boxes, local

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"


def is_divided(name: str) -> bool:
    """Whether ranks may hold different parts of a tensor: the model's, and the states of optimizers."""
    return name.startswith(f"{MODEL}/") or (name.startswith(f"{OPTIMIZERS}/") and "/state/" in name)


@dataclass(frozen=True)
class Source:
    """Facts about a save that the checkpoint itself does not tell.

    Attributes:
        layout: the sizes of the mesh's axes.
        tied: of names of parameters that are another one, the name of that.
        model: the model's tensors as they were before hooks saw them.
    """

    layout: Mapping[Axis, int]
    tied: Mapping[str, str]
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """One rank's part of a save. Nothing in it changes while training goes on.

    Attributes:
        target: where the checkpoint is to lie.
        rank: this one.
        own: the boxes that it writes.
        shares: what all ranks write.
        values: everything that is no tensor.
        head: the manifest as far as it is known.
    """

    target: Path
    rank: int
    own: Mapping[str, Tensor]
    shares: Shares
    values: Any
    head: Manifest

    def run(self, group: dist.ProcessGroup) -> None:
        """Writes, and commits when all ranks have written. Where one fails nothing is left but what was there."""
        with ExitStack() as stack:  # removes what a failure leaves
            begin = partial(self._begin, stack)
            made = gather_objects(run_or_raise_on_all(begin, f"make a folder for {self.target}", group), group)[0]
            assert made is not None
            write = partial(folder.write_share, made, self.rank, self.own)
            written = run_or_raise_on_all(write, f"write its part of {self.target}", group)
            files = {name: content for each in gather_objects(written, group) for name, content in each.items()}
            run_or_raise_on_all(partial(self._commit, made, files), f"commit {self.target}", group)

    def _begin(self, stack: ExitStack) -> Path | None:
        if self.rank != 0:
            return None
        made = stack.enter_context(commit.writing(self.target))
        made.mkdir()
        needed, free = sum(table.nbytes for table in self.shares.tensors.values()), shutil.disk_usage(made).free
        if free < needed:
            raise OSError(f"{self.target} needs {needed:,} bytes, and {free:,} are free there; make room for it")
        return made

    def _commit(self, made: Path, files: Mapping[str, Content]) -> None:
        if self.rank == 0:
            folder.finish(made, self.values, self.head, files)
            commit.commit(made, self.target)


def prepared(
    checkpoint: Mapping[str, Any], target: Path, source: Source, group: dist.ProcessGroup, copies: bool
) -> Save:
    """This rank's part of a save. All ranks must call.

    Args:
        checkpoint: what Lightning made of what each rank holds; hooks may have changed it.
        target: the same on all ranks.
        source: where it comes from.
        group: all ranks.
        copies: whether what is written is copied to the host's memory now, because training goes on.

    Raises:
        TypeError: a value that is no plain data, named by the keys that lead to it.
    """
    rank = group.rank()
    values, tensors = run_or_raise_on_all(partial(_encoded, checkpoint), f"write down the checkpoint {target}", group)
    model = {*map(id, source.model.values())}  # a hook may have put it elsewhere, as Lightning's `WeightAveraging` does
    tables = [(key, table) for key, table in checkpoint.items() if isinstance(table, Mapping)]
    divided = {joined((key, name)) for key, table in tables for name, each in table.items() if id(each) in model}
    divided |= {name for name in tensors if is_divided(name)}
    tensors = {name: it for name, it in tensors.items() if rank == 0 or name in divided or isinstance(it, DTensor)}
    held: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        found = {} if tensor.is_meta else {offset: part[here] for here, offset in boxes(tensor)}  # on meta: of others
        held[name] = {offset: box for offset, box in found.items() if box.numel()}
    shapes = {name: (str(name_of(tensor.dtype)), tuple(tensor.shape)) for name, tensor in tensors.items()}
    spans = {name: [(offset, tuple(box.shape)) for offset, box in found.items()] for name, found in held.items()}
    # of parameters that are another one, unless a hook has put something else under one of the names
    own_model: Mapping[str, Any] = checkpoint.get(MODEL, {})
    untouched = {name for name, each in own_model.items() if each is source.model.get(name)}
    tied = {name: other for name, other in source.tied.items() if {name, other} <= untouched}
    same = {joined((MODEL, name)): joined((MODEL, other)) for name, other in tied.items()}
    offers: list[Any] | None = [None] * group.size() if rank == 0 else None
    dist.gather_object(Offer(shapes, spans, same), offers, group=group)
    agreed = [run_or_raise_on_all(lambda: shared_out(offers) if offers else None, f"plan {target}", group)]
    dist.broadcast_object_list(agreed, group=group)
    shares = agreed[0]
    assert shares is not None
    own = folder.share_of(rank, shares, lambda name, offset, shape: _within(held[name], offset, shape))
    if copies:
        own = {name: box.to("cpu", copy=True) for name, box in own.items()}
    versions = {"torch": str(torch.__version__), "lightning": LIGHTNING}
    step, holds = int(checkpoint.get("global_step", 0)), tuple(checkpoint)
    head = Manifest(step, dict[str, int](source.layout.items()), versions, shares.tensors, shares.same, {}, holds)
    return Save(target, rank, own, shares, values, head)


def _encoded(checkpoint: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    try:
        values, tensors = encoded(dict(checkpoint), (*TENSORS, GlobalShard))
    except NotPlain as error:
        remedy = (
            "save it as numbers, strings, lists, dictionaries or tensors, or pass checkpoint='full' to the strategy, "
        )
        remedy += "which pickles it"
        if len(error.path) > 1 and error.path[0] in ("hyper_parameters", "datamodule_hyper_parameters"):
            remedy = f"leave it out with save_hyperparameters(ignore=[{error.path[1]!r}])"
        raise TypeError(f"{error}: a sharded checkpoint holds no code; {remedy}") from None
    for name, tensor in tensors.items():
        if name_of(tensor.dtype) is None:
            raise TypeError(
                f"{name} is of {tensor.dtype}, which safetensors does not know; convert it in on_save_checkpoint, or "
                "pass checkpoint='full' to the strategy"
            )
    return values, tensors


def _within(held: Mapping[tuple[int, ...], Tensor], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A box that lies within one of those that this rank holds."""
    for first, box in held.items():
        here = [start - before for start, before in zip(offset, first, strict=True)]
        ends = [start + size for start, size in zip(here, shape, strict=True)]
        if all(start >= 0 for start in here) and all(end <= size for end, size in zip(ends, box.shape, strict=True)):
            return box[tuple(slice(start, end) for start, end in zip(here, ends, strict=True))]
    raise AssertionError(f"{offset}, {shape} is no box of this rank")
