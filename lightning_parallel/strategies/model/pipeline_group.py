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

    def united(self, values: Mapping[Key, Any], keep: bool, order: Iterable[Key] = ()) -> dict[Key, Any]:
        """Return the entries of all ranks of the group. Collective over the group.

        Args:
            values: this rank's entries; their tensors are on the host if `keep`, else on meta.
            keep: whether the first rank receives the values of others; else they are on meta. The same on all ranks.
            order: keys that come first, in this order.
        """
        merged: dict[Key, Any] = dict(values)
        for source in range(self.ranks if self.ranks > 1 else 0):
            # shapes first, by pickle; then tensors one by one, so that the first rank has only one in flight
            shapes = pytree.tree_map_only(_is_plain if keep else Tensor, TensorSpec.of, dict(values))
            for key, shape in broadcast_object(shapes, source, self._group, self._device).items():
                received = self._sent_to_first(values.get(key), shape, source, keep) if source != 0 else None
                if key not in merged:
                    on_meta = pytree.tree_map_only(TensorSpec, lambda spec: spec.empty("meta"), shape)
                    merged[key] = on_meta if received is None else received
        return {key: merged[key] for key in dict.fromkeys((*order, *merged)) if key in merged}

    def completed(self, values: Mapping[Key, Any]) -> dict[Key, Any]:
        """Return the entries of all ranks on every rank, with tensors on the host. Collective over the group."""
        result: dict[Key, Any] = {}
        for source in range(self.ranks):
            shapes = pytree.tree_map_only(_is_plain, TensorSpec.of, dict(values))
            specs = broadcast_object(shapes, source, self._group, self._device)
            here = self.rank == source
            entries = dict(values) if here else pytree.tree_map_only(TensorSpec, lambda spec: spec.empty("cpu"), specs)
            # in the same order on all ranks, as the source's entries were pickled
            tensors = [leaf for leaf in pytree.tree_leaves(entries) if _is_plain(leaf)]
            broadcast_tensors(tensors, self._group, self._device, source)
            result = {**entries, **result}
        return result

    def _sent_to_first(self, value: Any, shape: Any, source: int, keep: bool) -> Any:
        """Send a value from rank `source` to the first rank of the group; return it there, and None on all others."""
        if not keep or self.rank not in (0, source):
            return None
        channel = Channel(self._group, self._device)
        if self.rank == source:
            for tensor in pytree.tree_leaves(value):
                if _is_plain(tensor):
                    channel.send(tensor.to(self._device), 0)
            channel.finish()
            return None

        def receive(spec: TensorSpec) -> Tensor:
            return channel.receive(spec.empty(self._device), source).wait().cpu()

        return pytree.tree_map_only(TensorSpec, receive, shape)

    @torch.no_grad()
    def complete(self, module: nn.Module) -> None:
        """Fill this rank's module, whose tensors are on the host, with those of all stages. Collective over the group.

        A stage may have cast a parameter, or replaced a buffer by one of another shape: the first rank that holds a
        tensor decides.
        """
        tensors = sorted((*module.named_parameters(), *module.named_buffers()))
        holders = self.gathered({name: TensorSpec.of(tensor) for name, tensor in tensors})
        if (tree := stage_tree.tree_of(module)) is not None:
            tree.restore(lambda shape: torch.empty_like(shape, device="cpu"))
        for source, specs in enumerate(holders):
            tensors_of_source = list[Tensor]()
            for name, spec in specs.items():
                if any(name in before for before in holders[:source]):
                    continue
                owner, _, key = name.rpartition(".")
                part = module.get_submodule(owner)
                parameter = part._parameters.get(key)
                tensor = part._buffers.get(key) if parameter is None else parameter
                if tensor is None:
                    tensor = part._buffers[key] = spec.empty("cpu")  # a buffer that the other stage made in a step
                elif spec != TensorSpec.of(tensor):
                    # values come by the broadcast below
                    tensor.data = spec.empty(tensor.device)
                tensors_of_source.append(tensor)
            broadcast_tensors(tensors_of_source, self._group, self._device, source)

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
