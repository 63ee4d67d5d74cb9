"""Step on sharded parameters (ZeRO stage 3): they are full while the user's code can see them.

It closes two gaps in the backward passes of `fully_shard`, which only reduces the gradients that a rank has: where
ranks use different parameters, their messages do not match. And it ends a backward pass by hooks on the output of the
forward: a pass inside the forward (manual optimization) would not end, its gradients would not reach the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel.collectives.functional import all_reduce
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.buckets import UserSetGradients, no_op
from lightning_parallel.techniques.step import Step, StepFn, WrappedStep
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.techniques.zero.casts import refuse_casts
from lightning_parallel.techniques.zero.sharded.fsdp import ParamGroup, ShardedParameter, remove_hooks_of_state_dicts
from lightning_parallel.techniques.zero.sharded.root import Root

T = TypeVar("T")


class ShardedParametersStep(WrappedStep):
    """Runs every step through the root, so that parameters are full while the user's code can see them."""

    def __init__(self, inner: Step, root: Root, mesh: ParallelMesh) -> None:
        super().__init__(inner)
        self._root, self._ranks = root, mesh.loss.get_group()
        self._given = UserSetGradients()
        self._began = self._went_back = False
        # of a backward pass: `fully_shard` ended it; is ending it; `self.backward` runs it; it computes nothing new
        self._finished = self._ending = self._within_run = self._reduces_given = False
        self._used: set[ShardedParameter] = set()
        self._filled: dict[ShardedParameter, Tensor | None] = {}
        for group in root.groups:
            group.wrap_backward_end(self._finish)
            group.surround("post_backward", self._reduce)

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        self._root.drop()  # full since a forward without a backward; hooks may have written to the shards since then
        self._went_back = False
        try:
            result: T = self._root(self._run, run, *args, **kwargs)
        finally:
            self._root.collect_gradients()
        if torch.is_grad_enabled() and not self._went_back:  # the root stays full for backward, hooks get shards
            self._root.set_in_modules(whole=False)
        else:
            self._root.drop()
        pairs = [(each.shard, each.whole) for each in self._root.ever_gathered]
        refuse_casts(self._root.model, ((shard, shard.dtype, whole.dtype) for shard, whole in pairs))
        return result

    def _run(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """Run the step while the root's parameters are full."""
        if not self._began:  # `fully_shard` adds more such hooks when the root runs first
            remove_hooks_of_state_dicts(self._root)
            self._began = True
        if torch.is_grad_enabled():
            self._root.expose_gradients()
        return self._root.lasting(self.inner.forward(run, *args, **kwargs))

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`. Inside a step (manual optimization) the root's parameters stay full."""
        if self._root.running:
            self._root.sync_requires_grad()  # a parameter may have been unfrozen since it was used
        else:
            self._root.set_in_modules(whole=True)
        self._root.in_backward = self._went_back = True
        self._root.collect_gradients()
        self._finished, self._within_run, self._reduces_given = False, True, run is no_op
        try:
            if not self._root.running:
                self._root.gather(of_units=True)
            self.inner.backward(run)
            if self._root.running and not self._finished:  # this rank had no gradient for any parameter of the root
                self._root.groups[0].end_backward()
        finally:
            self._root.in_backward = self._within_run = self._reduces_given = False
        self._forget_unused()
        if not self._root.running:
            self._root.drop()
        if run is not no_op:
            self._given.stepped = set()
        if self._root.running:
            self._root.expose_gradients()

    def gathered(self) -> list[Tensor]:
        """See `Step.gathered`."""
        return [*(each.whole for each in self._root.ever_gathered), *self.inner.gathered()]

    def regather_parameters(self) -> None:
        """See `Step.regather_parameters`."""
        self._root.gather(forget=True)
        self.inner.regather_parameters()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """See `Step.unsynced`. Every pass reduce-scatters gradients; only the last all-reduces them over replicas."""
        root: Any = self._root
        root.set_requires_all_reduce(False)
        try:
            with super().unsynced():
                yield
        finally:
            root.set_requires_all_reduce(True)

    def before_backward(self) -> None:
        """See `Step.before_backward`."""
        if self._root.collect_gradients():
            self.backward(no_op)
        super().before_backward()

    def average_user_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_user_gradients`. A backward without computation reduces the `grad` of full parameters."""
        has_user_set = self._root.collect_gradients() or self._given.among(parameters)
        if self._root.running:
            if has_user_set:
                self.backward(no_op)
            self._root.expose_gradients()
        self.inner.average_user_gradients(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`. Inside a step, copy writes to full parameters to the shards first."""
        if self._root.running:
            self._root.write_back_parameters()
            self._root.collect_gradients()
        self._given.step(parameters)
        self.inner.before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.after_optimizer_step`. Inside a step, the full parameters are out of date: gather them again."""
        if self._root.running:
            self._root.sync_requires_grad()
            self._root.gather(forget=True)
            # for autograd they have changed, which `fully_shard` hides when it gathers
            stepped = set(map(id, parameters))
            increment_version([each.elements for each in self._root.ever_gathered if id(each.shard) in stepped])
            self._root.expose_gradients()
        self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """See `Step.close`."""
        self._root.drop()
        self._root.restore_modules()
        self.inner.close()

    # ---------------------------------------------------------------- parameters that a rank did not use

    def _reduce(self, group: ParamGroup, reduce: Callable[[], None], *unused: Any) -> None:
        """Reduce the gradients of a group: a rank that used it, and every rank if it stays full, sends all of them.

        For parameters without a gradient on this rank it sends zeros. A group of blocks that the step read outside of
        these waits for the end of the backward pass, as more gradients may arrive.
        """
        read_outside = group.stays_full and not group.of_root
        if read_outside and not self._ending:
            return
        self._root.collect_gradients()  # `torch.autograd.grad` comes here without `Step.backward`
        trainable = [each for each in group.parameters if each.whole is not None and each.whole.requires_grad]
        used = {parameter for parameter in trainable if parameter.whole.grad is not None}
        self._used |= used
        if used or group.stays_full:
            for parameter in trainable:
                if parameter not in used:
                    self._filled.setdefault(parameter, parameter.shard.grad)
                    parameter.whole.grad = torch.zeros_like(parameter.whole)
        if group.scale is not None:
            for parameter in used:
                local(parameter.whole.grad).mul_(1 / group.mesh.size() if self._reduces_given else group.scale)
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
            if not self._within_run:  # else `self.backward` does
                self._root.expose_gradients()

    def _forget_unused(self) -> None:
        """Give a parameter that no rank used its old gradient, mostly None: with zeros, weight decay would move it.

        Collective over all ranks, at the very end of the backward pass: ranks may finish the reductions outside of
        `fully_shard` at different times within it.
        """
        if not self.synced:
            return
        holders: dict[DeviceMesh | None, list[ShardedParameter]] = {None: []}  # None: held by all ranks; these first
        for group in self._root.groups:
            holders.setdefault(None if group.scale is None else group.mesh, []).extend(group.parameters)
        used_by_any: set[ShardedParameter] = set()
        for mesh, parameters in holders.items():
            groups = [self._ranks] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
            counts = torch.tensor([parameter in self._used for parameter in parameters], dtype=torch.float32)
            counts = counts.to(parameters[0].shard.device_mesh.device_type if parameters else "cpu")
            for process_group in groups:  # sums over the axes of a mesh, one after the other
                all_reduce(counts, process_group).wait()
            used_by_any |= {each for each, count in zip(parameters, counts.tolist(), strict=True) if count > 0}
        for parameter, before in self._filled.items():
            if parameter not in used_by_any:
                parameter.shard.grad = before
        self._used.clear()
        self._filled.clear()
