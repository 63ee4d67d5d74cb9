"""Backward passes under ZeRO stage 3: what `fully_shard` leaves out.

It reduces the gradients that a rank has: where ranks use other parameters, their messages do not fit each other. And it
ends a backward pass by hooks on what the forward returned: one that the user runs within the forward (manual
optimization) would never end, its gradients never reach the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel.collectives.functional import all_reduce
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.techniques.zero.sharded.fsdp import ParamGroup, ShardedParameter
from lightning_parallel.techniques.zero.sharded.root import Root


class ShardedBackward:
    """Watches the backward passes through one root.

    Args:
        root: the module around the step, whose parameters are whole while a step is `running`.
        group: all ranks that see other data.
    """

    def __init__(self, root: Root, group: dist.ProcessGroup) -> None:
        self._root, self._ranks = root, group
        self._used: set[ShardedParameter] = set()
        self._filled: dict[ShardedParameter, Tensor | None] = {}
        self._finished = self._ending = self._within_run = self._given = False
        self.synced = True
        for each in root.groups:
            each.surround_end(self._finish)
            each.surround("post_backward", self._reduce)

    def run(self, backward: Callable[[], None], given: bool = False) -> None:
        """Runs a backward pass to its end, also where this rank had no gradient for any of the root's parameters.

        Args:
            backward: runs it.
            given: whether it computes nothing, for gradients that a step gave, see `Bucket.begin`.
        """
        self._finished, self._within_run, self._given = False, True, given
        if not self._root.running:
            for group in self._root.groups:
                if group.stays_whole and not group.of_root:
                    group.gather()
        try:
            backward()
            if self._root.running and not self._finished:
                self._root.groups[0].end_backward()
        finally:
            self._within_run = self._given = False
        self._forget_unused()

    # ---------------------------------------------------------------- parameters that a rank did not use

    def _reduce(self, group: ParamGroup, reduce: Callable[[], None], *unused: Any) -> None:
        """Ranks that used a group, and all of them for the root, send all its gradients: zeros for those they lack.

        What a step reads outside of its blocks waits for the end, as more may come for it.
        """
        read_outside = group.stays_whole and not group.of_root
        if read_outside and not self._ending:
            return
        self._root.settle_gradients()  # `torch.autograd.grad` comes here without `Step.backward`
        learning = [each for each in group.parameters if each.whole is not None and each.whole.requires_grad]
        used = {each for each in learning if each.has_gradient}
        self._used |= used
        if used or group.stays_whole:
            for each in learning:
                if each not in used:
                    self._filled.setdefault(each, each.shard.grad)
                    each.whole.grad = torch.zeros_like(each.whole)
        if group.scale is not None:
            for each in used:
                local(each.whole.grad).mul_(1 / group.mesh.size() if self._given else group.scale)
        reduce()

    def _finish(self, finish: Callable[[], None]) -> None:
        self._ending = True
        try:
            finish()
        finally:
            self._ending = False
        self._finished = True
        if not self._within_run:
            self._forget_unused()
        if self._root.running:
            self._root.gather()
            if not self._within_run:  # else `Step.backward` shows them
                self._root.show_gradients()

    def _forget_unused(self) -> None:
        """A parameter that no rank used keeps the gradient it had, mostly none, or weight decay would move it.

        It asks the ranks, which may be done with what is reduced outside of `fully_shard` at different times within the
        backward pass: so it waits for the end of all of it.
        """
        if not self.synced:
            return
        shared: dict[DeviceMesh | None, list[ShardedParameter]] = {None: []}  # first by all, then by fewer ranks
        for group in self._root.groups:
            shared.setdefault(None if group.scale is None else group.mesh, []).extend(group.parameters)
        somewhere: set[ShardedParameter] = set()
        for mesh, parameters in shared.items():
            ranks = [self._ranks] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
            used = torch.tensor([each in self._used for each in parameters], dtype=torch.float32)
            used = used.to(parameters[0].shard.device_mesh.device_type if parameters else "cpu")
            for each_group in ranks:  # each group of ranks is asked in turn
                all_reduce(used, each_group).wait()
            somewhere |= {each for each, count in zip(parameters, used.tolist(), strict=True) if count > 0}
        for parameter, before in self._filled.items():
            if parameter not in somewhere:
                parameter.shard.grad = before
        self._used.clear()
        self._filled.clear()
