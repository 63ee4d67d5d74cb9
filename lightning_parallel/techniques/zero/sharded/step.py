"""A step on sharded parameters: whole while the user's code can see them, and following what it does to either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.buckets import Given, nothing
from lightning_parallel.techniques.step import Step, StepFn, WrappedStep
from lightning_parallel.techniques.zero.casts import refuse_casts
from lightning_parallel.techniques.zero.sharded.backward import ShardedBackward
from lightning_parallel.techniques.zero.sharded.groups import put_in_tables, shards_of, states_of
from lightning_parallel.techniques.zero.sharded.learning import Learning
from lightning_parallel.techniques.zero.sharded.root import entrances, remove_hooks_of_state_dicts
from lightning_parallel.techniques.zero.sharded.writes import StepsWrites

T = TypeVar("T")


class ShardedParametersStep(WrappedStep):
    """Runs every step through the root, so that parameters are whole while the user's code can see them."""

    def __init__(self, inner: Step, root: Any, mesh: ParallelMesh) -> None:
        super().__init__(inner)
        self._root = root
        self._backward = ShardedBackward(root, mesh.loss.get_group())
        self._flags = Learning({id(module): module for module in (root, *entrances(root.model))})
        self._given = Given()
        self._began = self._went_back = False
        self._writes, self._gradients = StepsWrites(states_of(root), root), root.reads.gradients
        root.before_forward_of, root.before_end = self._flags.agree, self._writes.end

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""

        def whole(*args: Any, **kwargs: Any) -> T:
            if not self._began:  # `fully_shard` puts more of them there when the root first runs
                remove_hooks_of_state_dicts(self._root)
                self._began = True
            self._flags.agree(self._root)
            self._backward.attend()
            if torch.is_grad_enabled():
                self._gradients.show()
            output = self.inner.forward(run, *args, **kwargs)
            self._flags.agree(self._root)
            return output if torch.is_grad_enabled() else self._writes.with_copies(output)

        self._root.drop()  # hooks may have written to the shards since a forward that no backward followed
        self._went_back = False
        try:
            result: T = self._root(whole, *args, **kwargs)
        finally:
            self._gradients.settle()
        if torch.is_grad_enabled() and not self._went_back:  # backward needs the root whole, and hooks shards
            put_in_tables((self._root, *self._root.shells), whole=False)
        else:
            self._root.drop()
        refuse_casts(self._root.model, self._backward.casts())
        self._writes.refuse_views(result)  # on one device they would follow the optimizer's step, as copies do not
        return result

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`. Inside a step (manual optimization) the root's parameters stay whole."""
        if self._root.running:
            self._flags.agree(self._root)  # what was frozen when it was used may learn by now
        else:
            put_in_tables((self._root, *self._root.shells), whole=True)
        self._root.in_backward = self._went_back = True
        self._gradients.settle()
        try:
            self._backward.run(lambda: self.inner.backward(run), given=run is nothing)
        finally:
            self._root.in_backward = False
        if not self._root.running:
            self._root.drop()
        if run is not nothing:
            self._given.stepped = set()
        if self._root.running:
            self._gradients.show()

    def gathered(self) -> list[Tensor]:
        """See `Step.gathered`."""
        return [*(whole for whole, _ in shards_of(self._root)), *self.inner.gathered()]

    def gather_anew(self) -> None:
        """See `Step.gather_anew`."""
        with self._writes.forgotten():
            self._root.gather()
        self.inner.gather_anew()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """See `Step.unsynced`. Gradients are sharded after every pass; replicas meet only in the last one."""
        self._root.set_requires_all_reduce(False)
        self._backward.synced = False
        try:
            with super().unsynced():
                yield
        finally:
            self._root.set_requires_all_reduce(True)
            self._backward.synced = True

    def before_backward(self) -> None:
        """See `Step.before_backward`."""
        if self._gradients.settle():
            self.backward(nothing)
        super().before_backward()

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`: the end of a backward reduces what wholes have for `grad`."""
        given = self._gradients.settle() or self._given.among(parameters)
        if self._root.running:
            if given:
                self.backward(nothing)
            self._gradients.show()
        self.inner.average_given(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`. Inside a step, what is whole now is newer than its shards."""
        if self._root.running:
            self._writes.keep()
            self._gradients.settle()
        self._given.step(parameters)
        self.inner.before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.after_optimizer_step`. Inside a step, what is whole now is out of date."""
        if self._root.running:
            self._flags.agree(self._root)
            with self._writes.forgotten():
                self._root.gather()
            self._writes.change(parameters)
            self._gradients.show()
        self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """See `Step.close`."""
        self._backward.close()
        self._root.drop()
        self._root.tables.put_back()
        self.inner.close()
