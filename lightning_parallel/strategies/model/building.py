"""Makes of the user's module what this rank keeps of it: agreed, divided, made, loaded and moved, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.checkpoint.hub.folder import HubState
from lightning_parallel.collectives.functional import broadcast_tensors
from lightning_parallel.plan.plan import ParallelPlan
from lightning_parallel.strategies.build import materialise
from lightning_parallel.strategies.checkpoint import hub
from lightning_parallel.strategies.checkpoint.whole import keep_sums_on_first, load_whole_state_dict
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import fingerprint_model, gather_objects, require_same
from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.technique import Technique


class Building:
    """The making of one run's model.

    Args:
        techniques: by which it is divided.
    """

    def __init__(self, techniques: Sequence[Technique]) -> None:
        self._techniques = techniques
        self._deferred = materialise.Deferred()
        self._waiting: tuple[Mapping[str, Any], bool, bool] | None = None

    def recording(self, device: torch.device) -> AbstractContextManager[None]:
        """Modules built inside are remembered, to be made on the device."""
        return self._deferred.recording(device)

    def converting(self) -> AbstractContextManager[None]:
        """Conversions of remembered modules are remembered."""
        return self._deferred.converting()

    def draw(self, host: dist.ProcessGroup) -> None:
        """Leaves random states as a build by `configure_model` would have. Collective over `host`, all ranks."""
        self._deferred.draw(host)

    def make_whole(self, module: nn.Module, host: dist.ProcessGroup) -> None:
        """Makes on every rank's host a module that was not divided, as there was no batch. Collective over `host`."""
        cpu = torch.device("cpu")
        self._deferred.find(module)
        self._deferred.materialise(module, cpu, cpu, host)
        if self._waiting is not None:
            self.load(module, *self._waiting)

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool, first: bool) -> None:
        """Loads into the whole model; into one that `configure_model` deferred, once its shards exist.

        Args:
            module: the user's.
            state: whole tensors, under the names of the module or of the hub.
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

    def divide(
        self,
        divided: DividedModel,
        plan: ParallelPlan,
        sample: Callable[[], Sample],
        device: torch.device,
        host: dist.ProcessGroup,
    ) -> None:
        """Divides the model and makes what this rank keeps, with the values of rank 0.

        Args:
            divided: has the user's module yet whole.
            plan: what the model's parts are.
            sample: takes a step for a technique that analyzes one.
            device: this rank's.
            host: all ranks.
        """
        module = divided.module
        prints = gather_objects(fingerprint_model(module), host)
        require_same("the model", prints, "build it from the same configuration everywhere")
        self._deferred.find(module)
        if host.size() > 1 and (world := dist.group.WORLD) is not None:
            broadcast_tensors(materialise.real_tensors(module), world, device)
        divided.divide(self._techniques, plan, sample)
        shards = torch.device("cpu") if any(t.traits.shards_on_host for t in self._techniques) else device
        self._deferred.materialise(module, device, shards, host)
        divided.beside.follow()
        if self._waiting is not None:
            self.load(module, *self._waiting)
        materialise.move_whole_tensors(module, device)
