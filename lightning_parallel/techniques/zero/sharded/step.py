"""A step on sharded parameters: whole while the user's code can see them, and following what it does to either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.buckets import UserSetGradients, no_op
from lightning_parallel.techniques.step import Step, StepFn, WrappedStep
from lightning_parallel.techniques.zero.casts import refuse_casts
from lightning_parallel.techniques.zero.sharded.backward import ShardedBackward
from lightning_parallel.techniques.zero.sharded.fsdp import remove_hooks_of_state_dicts
from lightning_parallel.techniques.zero.sharded.root import Root

T = TypeVar("T")


class ShardedParametersStep(WrappedStep):
    """Runs every step through the root, so that parameters are whole while the user's code can see them."""

    def __init__(self, inner: Step, root: Root, mesh: ParallelMesh) -> None:
        super().__init__(inner)
        self._root = root
        self._backward = ShardedBackward(root, mesh.loss.get_group())
        self._given = UserSetGradients()
        self._began = self._went_back = False

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
        try:
            self._backward.run(lambda: self.inner.backward(run), given=run is no_op)
        finally:
            self._root.in_backward = False
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
        self._backward.synced = False
        try:
            with super().unsynced():
                yield
        finally:
            root.set_requires_all_reduce(True)
            self._backward.synced = True

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
            self._root.count_as_changed(parameters)
            self._root.show_gradients()
        self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """See `Step.close`."""
        self._root.drop()
        self._root.restore_modules()
        self.inner.close()
