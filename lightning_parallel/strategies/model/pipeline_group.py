"""What the ranks of one pipeline hold of a model, put together.

A pipeline group is one rank of every stage. Where there is no pipeline it is this rank alone, and everything here is
at hand.
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
from lightning_parallel.collectives.point_to_point import Lane, share_object
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies.logged.metrics import everything
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.staged import StageRanks
from lightning_parallel.values import TensorSpec

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


class PipelineGroup:
    """The ranks with which this one holds a whole model.

    Args:
        mesh: whose axis `pp` they are.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._group, self._device = mesh["pp"].get_group(), mesh.device
        self.ranks, self.rank = mesh.sizes["pp"], mesh["pp"].get_local_rank()

    def united(self, values: Mapping[Key, Any], keep: bool, order: Iterable[Key] = ()) -> dict[Key, Any]:
        """All entries that any rank of the group holds: with values on its first rank where `keep`, else as shapes.

        Args:
            values: this rank's entries; tensors in them on the host where `keep`, else on meta.
            keep: the same on all ranks of the group.
            order: the keys that come first, in their order.
        """
        merged: dict[Key, Any] = dict(values)
        for source in range(self.ranks if self.ranks > 1 else 0):
            # shapes first, by pickle; then tensors one by one, so that the first rank has one in flight
            shapes = pytree.tree_map_only(_is_plain if keep else Tensor, TensorSpec.of, dict(values))
            for key, shape in share_object(shapes, source, self._group, self._device).items():
                theirs = self._sent_to_first(values.get(key), shape, source, keep) if source != 0 else None
                if key not in merged:
                    on_meta = pytree.tree_map_only(TensorSpec, lambda spec: spec.empty("meta"), shape)
                    merged[key] = on_meta if theirs is None else theirs
        return {key: merged[key] for key in dict.fromkeys((*order, *merged)) if key in merged}

    def completed(self, values: Mapping[Key, Any]) -> dict[Key, Any]:
        """All entries that any rank of the group holds, on all of them; the tensors are on the host."""
        found: dict[Key, Any] = {}
        for source in range(self.ranks):
            shapes = pytree.tree_map_only(_is_plain, TensorSpec.of, dict(values))
            theirs = share_object(shapes, source, self._group, self._device)
            here = self.rank == source
            made = dict(values) if here else pytree.tree_map_only(TensorSpec, lambda spec: spec.empty("cpu"), theirs)
            # all ranks have the tensors of the source in the same order
            tensors = [each for each in pytree.tree_leaves(made) if _is_plain(each)]
            broadcast_tensors(tensors, self._group, self._device, source)
            found = {**made, **found}
        return found

    def _sent_to_first(self, value: Any, shape: Any, source: int, keep: bool) -> Any:
        """The value of rank `source`, on the first rank of the group; None on all others."""
        if not keep or self.rank not in (0, source):
            return None
        lane = Lane(self._group, self._device)
        if self.rank == source:
            for tensor in pytree.tree_leaves(value):
                if _is_plain(tensor):
                    lane.send(tensor.to(self._device), 0)
            lane.finish()
            return None

        def receive(spec: TensorSpec) -> Tensor:
            return lane.receive(spec.empty(self._device), source).wait().cpu()

        return pytree.tree_map_only(TensorSpec, receive, shape)

    @torch.no_grad()
    def complete(self, module: nn.Module) -> None:
        """Gives this rank's module, whose tensors are on the host, those of all stages.

        A stage may have cast a parameter, or put a buffer of another shape in the place of one: its first holder tells.
        """
        tensors = sorted((*module.named_parameters(), *module.named_buffers()))
        holders = self.gathered({name: TensorSpec.of(tensor) for name, tensor in tensors})
        if (tree := elsewhere.tree_of(module)) is not None:
            tree.restore(lambda shape: torch.empty_like(shape, device="cpu"))
        for source, theirs in enumerate(holders):
            places = list[Tensor]()
            for name, shape in theirs.items():
                if any(name in before for before in holders[:source]):
                    continue
                owner, _, key = name.rpartition(".")
                part = module.get_submodule(owner)
                found = part._parameters.get(key)
                tensor = part._buffers.get(key) if found is None else found
                if tensor is None:
                    tensor = part._buffers[key] = shape.empty("cpu")  # the stage that holds it made it in a step
                elif shape != TensorSpec.of(tensor):
                    # its values come by the broadcast that follows
                    tensor.data = shape.empty(tensor.device)
                places.append(tensor)
            broadcast_tensors(places, self._group, self._device, source)

    def attach(self, module: nn.Module) -> None:
        """Lets the module's tensors behave on every rank as on one device between steps, and shows all of them."""
        if (tree := elsewhere.tree_of(module)) is not None:
            named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            held = self.gathered({name for name, _ in named})
            tree.attach(StageRanks(self._group, self._device, self.rank), held)
            tree.expose()

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks of the group."""
        if self.ranks == 1:
            return [value]
        return [share_object(value, source, self._group, self._device) for source in range(self.ranks)]

    def share_metrics(self, module: nn.Module, source: int | None) -> None:
        """Gives all ranks of the group what the metrics of one of them hold; None if they held the same."""
        metrics = [part for part in module.modules() if isinstance(part, Metric)]
        if source is None or not metrics:
            return
        # by pickle: states may be lists of any length, which other ranks do not know
        held = [pytree.tree_map_only(Tensor, Tensor.cpu, everything(metric)) for metric in metrics]
        for metric, shared in zip(metrics, share_object(held, source, self._group, self._device), strict=True):
            vars(metric).update(pytree.tree_map_only(Tensor, partial(Tensor.to, device=metric.device), shared))


def _is_plain(value: Any) -> bool:
    """Whether a value is sent as a tensor; a third-party subclass, which no message takes, is pickled."""
    return type(value) is Tensor
