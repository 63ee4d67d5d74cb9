"""A step on sharded parameters: whole while the user's code can see them, and following what it does to either.

`fully_shard` leaves two things out of backward passes. It reduces the gradients that a rank has: where ranks use other
parameters, their messages do not fit each other. And it ends a backward pass by hooks on what the forward returned: one
that the user runs within the forward (manual optimization) would never end, its gradients never reach the shards.
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
    """Runs every step through the root, so that parameters are whole while the user's code can see them."""

    def __init__(self, inner: Step, root: Root, mesh: ParallelMesh) -> None:
        super().__init__(inner)
        self._root, self._ranks = root, mesh.loss.get_group()
        self._given = UserSetGradients()
        self._began = self._went_back = False
        # of a backward pass: whether `fully_shard` ended it, is ending it, `backward` runs it, and nothing is computed
        self._finished = self._ending = self._within_run = self._reduces_given = False
        self._used: set[ShardedParameter] = set()
        self._filled: dict[ShardedParameter, Tensor | None] = {}
        for each in root.groups:
            each.surround_end(self._finish)
            each.surround("post_backward", self._reduce)

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        self._root.drop()  # hooks may have written to the shards since a forward that no backward followed
        self._went_back = False
        try:
            result: T = self._root(self._run, run, *args, **kwargs)
        finally:
            self._root.settle_gradients()
        if torch.is_grad_enabled() and not self._went_back:  # backward needs the root whole, and hooks shards
            self._root.put_in_modules(whole=False)
        else:
            self._root.drop()
        pairs = [(each.shard, each.whole) for each in self._root.parameters_known]
        refuse_casts(self._root.model, ((shard, shard.dtype, whole.dtype) for shard, whole in pairs))
        return result

    def _run(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """Run the step while the root's parameters are whole."""
        if not self._began:  # `fully_shard` puts more of them there when the root first runs
            remove_hooks_of_state_dicts(self._root)
            self._began = True
        if torch.is_grad_enabled():
            self._root.show_gradients()
        return self._root.lasting(self.inner.forward(run, *args, **kwargs))

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`. Inside a step (manual optimization) the root's parameters stay whole."""
        if self._root.running:
            self._root.learn_as_wholes()  # what was frozen when it was used may learn by now
        else:
            self._root.put_in_modules(whole=True)
        self._root.in_backward = self._went_back = True
        self._root.settle_gradients()
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
            self._root.show_gradients()

    def gathered(self) -> list[Tensor]:
        """See `Step.gathered`."""
        return [*(each.whole for each in self._root.parameters_known), *self.inner.gathered()]

    def gather_anew(self) -> None:
        """See `Step.gather_anew`."""
        self._root.gather(forget=True)
        self.inner.gather_anew()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """See `Step.unsynced`. Gradients are sharded after every pass; replicas meet only in the last one."""
        root: Any = self._root
        root.set_requires_all_reduce(False)
        try:
            with super().unsynced():
                yield
        finally:
            root.set_requires_all_reduce(True)

    def before_backward(self) -> None:
        """See `Step.before_backward`."""
        if self._root.settle_gradients():
            self.backward(no_op)
        super().before_backward()

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`: the end of a backward reduces what wholes have for `grad`."""
        given = self._root.settle_gradients() or self._given.among(parameters)
        if self._root.running:
            if given:
                self.backward(no_op)
            self._root.show_gradients()
        self.inner.average_given(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`. Inside a step, what is whole now is newer than its shards."""
        if self._root.running:
            self._root.keep_writes()
            self._root.settle_gradients()
        self._given.step(parameters)
        self.inner.before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.after_optimizer_step`. Inside a step, what is whole now is out of date."""
        if self._root.running:
            self._root.learn_as_wholes()
            self._root.gather(forget=True)
            # they count as changed, which `fully_shard` hides where it gathers them anew
            stepped = set(map(id, parameters))
            increment_version([each.elements for each in self._root.parameters_known if id(each.shard) in stepped])
            self._root.show_gradients()
        self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """See `Step.close`."""
        self._root.drop()
        self._root.restore_modules()
        self.inner.close()

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
                local(each.whole.grad).mul_(1 / group.mesh.size() if self._reduces_given else group.scale)
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
