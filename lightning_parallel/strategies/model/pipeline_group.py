"""Gathers over a pipeline group what its ranks hold of a model.

A pipeline group is one rank of every stage, so together its ranks hold the full model. Without a pipeline it is this
rank alone, and there is no communication.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_parallel.collectives.functional import broadcast_tensors
from lightning_parallel.collectives.point_to_point import Channel, broadcast_object
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies.logged.metrics import snapshot_metric
from lightning_parallel.techniques.tools import stage_tree
from lightning_parallel.techniques.tools.staged import StageRanks
from lightning_parallel.values import TensorSpec

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


class PipelineGroup:
    """The ranks that hold the full model together with this one: axis `pp` of the mesh.

    Args:
        mesh: of the run.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._group, self._device = mesh["pp"].get_group(), mesh.device
        self.ranks, self.rank = mesh.sizes["pp"], mesh["pp"].get_local_rank()

    def united(
        self, values: Mapping[Key, Any], keep: bool, order: Iterable[Key] = (), to_all: bool = False
    ) -> dict[Key, Any]:
        """Return the entries of all ranks of the group. Collective over the group.

        Args:
            values: this rank's entries; their tensors are on the host if `keep`, else on meta.
            keep: whether the first rank receives the values of others; else they are on meta. The same on all ranks.
            order: keys that come first, in this order.
            to_all: whether all ranks receive values. Then the first rank that has a key decides, also for others.
        """
        merged: dict[Key, Any] = {} if to_all and self.ranks > 1 else dict(values)
        device = "cpu" if to_all or (keep and self.rank == 0) else "meta"
        for source in range(self.ranks if self.ranks > 1 else 0):
            # shapes first, by pickle
            specs = pytree.tree_map_only(_is_plain if keep else Tensor, TensorSpec.of, dict(values))
            entries = broadcast_object(specs, source, self._group, self._device)
            is_source = self.rank == source
            entries = (
                dict(values) if is_source else pytree.tree_map_only(TensorSpec, lambda s: s.empty(device), entries)
            )
            # in the same order on all ranks, as the source's entries were pickled
            tensors = [leaf for leaf in pytree.tree_leaves(entries) if _is_plain(leaf)]
            if to_all:
                broadcast_tensors(tensors, self._group, self._device, source)
            elif keep and source != 0:
                self._send_to_first(tensors, source)
            for key, entry in entries.items():
                merged.setdefault(key, entry)
        return {key: merged[key] for key in dict.fromkeys((*order, *merged)) if key in merged}

    def _send_to_first(self, tensors: Iterable[Tensor], source: int) -> None:
        """Send tensors from rank `source` to the first rank, one by one, so that this has only one in flight."""
        channel = Channel(self._group, self._device)
        for tensor in tensors:
            if self.rank == source:
                channel.send(tensor.to(self._device), 0)
                channel.finish()
            elif self.rank == 0:
                tensor.copy_(channel.receive(torch.empty_like(tensor, device=self._device), source).wait())

    @torch.no_grad()
    def complete(self, module: nn.Module) -> None:
        """Fill this rank's module, whose tensors are on the host, with those of all stages. Collective over the group.

        A stage may have cast a parameter, or replaced a buffer by one of another shape: the first rank that holds a
        tensor decides.
        """
        local = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        values = self.united(local, keep=True, to_all=True)
        if (tree := stage_tree.tree_of(module)) is not None:
            tree.restore(lambda shape: torch.empty_like(shape, device="cpu"))
        for name, value in values.items():
            owner, _, key = name.rpartition(".")
            part = module.get_submodule(owner)
            parameter = part._parameters.get(key)
            tensor = part._buffers.get(key) if parameter is None else parameter
            if tensor is None:
                part._buffers[key] = value  # a buffer that the other stage made in a step
            elif tensor.is_inference() or TensorSpec.of(tensor) != TensorSpec.of(value):
                tensor.data = value
            elif value is not local.get(name):
                tensor.detach().copy_(value)  # keeps strides, and memory that others see

    def attach(self, module: nn.Module) -> None:
        """Expose all stages' tensors on every rank as `Staged` ones, as on one device. Collective over the group."""
        if (tree := stage_tree.tree_of(module)) is not None:
            named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            names_by_rank = self.gathered({name for name, _ in named})
            tree.attach(StageRanks(self._group, self._device, self.rank), names_by_rank)
            tree.expose()

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks of the group, in rank order. Collective over the group."""
        if self.ranks == 1:
            return [value]
        return [broadcast_object(value, source, self._group, self._device) for source in range(self.ranks)]

    def broadcast_metrics(self, module: nn.Module, source: int | None) -> None:
        """Copy the metrics' states of rank `source` to all ranks; None: they are equal. Collective over the group."""
        metrics = [part for part in module.modules() if isinstance(part, Metric)]
        if source is None or not metrics:
            return
        # by pickle: states may be lists of any length, which other ranks do not know
        states = [pytree.tree_map_only(Tensor, Tensor.cpu, snapshot_metric(metric)) for metric in metrics]
        for metric, received in zip(metrics, broadcast_object(states, source, self._group, self._device), strict=True):
            vars(metric).update(pytree.tree_map_only(Tensor, partial(Tensor.to, device=metric.device), received))


def _is_plain(value: Any) -> bool:
    """Whether a value is sent as a tensor; third-party subclasses, which collectives do not take, are pickled."""
    return type(value) is Tensor
