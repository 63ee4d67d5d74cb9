"""Makes of the user's module what this rank keeps of it: built, loaded, agreed, divided, placed, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.checkpoint.hub.folder import HubState
from lightning_parallel.collectives.functional import broadcast_tensors
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan.plan import ParallelPlan
from lightning_parallel.strategies.build.born_sharded import born_sharded
from lightning_parallel.strategies.build.placement import Placement, move_whole_tensors, real_tensors
from lightning_parallel.strategies.checkpoint import hub
from lightning_parallel.strategies.checkpoint.whole import keep_sums_on_first, load_whole_state_dict
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import fingerprint_model, gather_objects, require_same
from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.technique import Technique

CPU = torch.device("cpu")


class Building:
    """The making of one run's model.

    Args:
        techniques: by which it is divided.
    """

    def __init__(self, techniques: Sequence[Technique]) -> None:
        self._techniques = techniques
        self._waiting: tuple[Mapping[str, Any], bool, bool] | None = None

    def sharded(self, mesh: ParallelMesh, host: dist.ProcessGroup) -> AbstractContextManager[None]:
        """Inside, parameters are born as shards. Collective over `host`, all ranks."""
        return born_sharded(mesh.world, host, mesh.device)

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool, first: bool) -> None:
        """Load into the full model, or its shards; into one on meta once it has values.

        Args:
            module: the user's.
            state: full tensors, under the names of the module or of the hub.
            strict: whether names must fit.
            first: whether this rank is the first of those that see different data.
        """
        if isinstance(state, HubState):
            state, strict = hub.named(module, state, strict), False  # it has told of what is missing or left over
        if any(parameter.is_meta for parameter in module.parameters()):
            self._waiting = (state, strict, first)
            return
        load_whole_state_dict(module, state, strict)
        keep_sums_on_first(module, first)

    def make_whole(self, module: nn.Module, host: dist.ProcessGroup) -> None:
        """Make on every rank's host a module that was not divided, as there was no batch. Collective over `host`."""
        Placement(module).finish(CPU, CPU, host)
        if self._waiting is not None:
            self.load(module, *self._waiting)

    def divide(
        self,
        divided: DividedModel,
        plan: ParallelPlan,
        sample: Callable[[], Sample],
        device: torch.device,
        host: dist.ProcessGroup,
    ) -> None:
        """Divide the model and make what this rank keeps, with the values of rank 0. Collective over `host`.

        Args:
            divided: has the user's module, which no technique has divided yet.
            plan: what the model's parts are.
            sample: takes a step for a technique that analyzes one.
            device: this rank's.
            host: all ranks.
        """
        module = divided.module
        prints = gather_objects(fingerprint_model(module), host)
        require_same("the model", prints, "build it from the same configuration everywhere")
        placement = Placement(module)
        if host.size() > 1 and (world := dist.group.WORLD) is not None:
            broadcast_tensors(real_tensors(module), world, device)
        divided.divide(self._techniques, plan, sample)
        offloads = any(technique.traits.shards_on_host for technique in self._techniques)
        placement.finish(device, CPU if offloads else device, host)
        if self._waiting is not None:
            self.load(module, *self._waiting)
        move_whole_tensors(module, device)
