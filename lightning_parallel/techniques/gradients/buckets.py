"""Gradients in buckets, reduced while backward still computes the next ones.

Shared by data parallel (all_reduce) and ZeRO-1/2 (reduce_scatter). Buckets are filled in the reverse order of the
parameters, roughly the order in which backward produces gradients, and sent in that one order on every rank, so that
ranks whose gradients arrive differently, or not at all, still meet in the same collectives.
Source: S. Li et al., PyTorch Distributed, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.bucket import Bucket
from lightning_parallel.techniques.step import Step, WrappedStep
from lightning_parallel.techniques.tools.holders import Holders, Replicas, holders_of
from lightning_parallel.techniques.tools.shards import local

IN_FLIGHT = 2
"""How many messages may be under way: more would hold more memory than they hide time."""


class Given:
    """Which gradients may be given by the user: of parameters that no backward went to since they were stepped.

    It is known at no cost in a backward. Where it is said too often, as of two steps by one gradient, means of means
    are the same.
    """

    def __init__(self) -> None:
        self.stepped: set[int] | None = None
        """The `id` of parameters that were stepped since the last backward; None before the first: all may be given."""

    def among(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether there are such among those that are about to be stepped."""
        return self.stepped is None or not self.stepped.isdisjoint(map(id, parameters))

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """They are stepped now."""
        if self.stepped is not None:
            self.stepped.update(map(id, parameters))


class BucketedStep(WrappedStep):
    """Reduces the gradients of some parameters in buckets during backward.

    Args:
        inner: the step to wrap.
        parameters: those whose gradients are reduced; frozen ones join when they are unfrozen.
        mesh: says who holds a parameter.
        make_bucket: makes a bucket of parameters that have the same holders.
        bucket_bytes: how large the gradients of one bucket may grow.
        accumulates_locally: whether `unsynced` passes skip the reduction (ZeRO-2 reduces each, to keep only shards).
        replicas: compares, before the first backward, what ranks hold of the parameters.
    """

    def __init__(
        self,
        inner: Step,
        parameters: Iterable[nn.Parameter],
        mesh: ParallelMesh,
        make_bucket: Callable[[Sequence[nn.Parameter], Holders], Bucket],
        bucket_bytes: int,
        accumulates_locally: bool = True,
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__(inner)
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[Bucket, int]] = {}  # by `id`: a tensor takes a call of Python's to be hashed
        self._holders_of = partial(holders_of, mesh=mesh)
        self._make_bucket = make_bucket
        self._bucket_bytes = bucket_bytes
        self._accumulates_locally, self._replicas = accumulates_locally, replicas
        self._waiting = list(parameters)
        self._handles: list[RemovableHandle] = []
        self._running = False
        self._given = Given()
        self._active: list[Bucket] = []
        self._next = 0
        self._adopt_unfrozen()

    # ---------------------------------------------------------------- the step

    def backward(self, run: Callable[[], None]) -> None:
        """Runs backward; reduction starts with the first full bucket and is over when this returns."""
        if self._replicas is not None:
            self._replicas.require_alike()
            self._replicas = None
        if not self.synced and self._accumulates_locally and not self._holds_shards():
            for bucket in self.buckets:
                bucket.reopen()
            return self.inner.backward(run)
        self._begin(given=run is nothing)
        try:
            self.inner.backward(run)
            self._finish()
        finally:
            self._running = False
        if run is not nothing:
            self._given.stepped = set()
        return None

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`: a backward to which nothing comes reduces what parameters have for `grad`."""
        if self._given.among(parameters):
            self.backward(nothing)
        self.inner.average_given(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`."""
        self._given.step(parameters)
        self.inner.before_optimizer_step(parameters)

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.inner.close()

    # ---------------------------------------------------------------- during backward

    def _holds_shards(self) -> bool:
        return any(has_shard(parameter) for bucket in self.buckets for parameter in bucket.parameters)

    def _begin(self, given: bool = False) -> None:
        self._adopt_unfrozen()
        for bucket in self.buckets:
            bucket.begin(self.synced, given)
        self._active = [bucket for bucket in self.buckets if bucket.active]
        self._next = 0
        self._running = True

    def _on_gradient(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # a function of autograd, as that of a pipeline, had none to give
            return
        if not self._running:
            if not self.synced:
                return
            # The user called `loss.backward()` without the strategy: reduce all the same.
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket.receive(index)
        if not bucket.missing:
            self._send_in_order()

    def _send_in_order(self) -> None:
        while self._next < len(self._active):
            if self._active[self._next].missing:
                return
            self._send_next()

    def _send_next(self) -> None:
        self._active[self._next].send()
        self._next += 1
        if self._next > IN_FLIGHT:
            self._active[self._next - IN_FLIGHT - 1].settle()

    def _finish(self) -> None:
        while self._next < len(self._active):
            self._send_next()
        for bucket in self._active[-IN_FLIGHT:]:
            bucket.settle()
        for bucket in self._active:
            bucket.finish()
        self._running = False

    # ---------------------------------------------------------------- buckets

    def _adopt_unfrozen(self) -> None:
        ready = [parameter for parameter in self._waiting if parameter.requires_grad]
        if not ready:
            return
        self._waiting = [parameter for parameter in self._waiting if not parameter.requires_grad]
        ready.reverse()
        for group, holders in split_by_size(ready, self._bucket_bytes, self._holders_of):
            bucket = self._make_bucket(group, holders)
            self.buckets.append(bucket)
            for index, parameter in enumerate(group):
                self.places[id(parameter)] = (bucket, index)
                hook = partial(self._on_gradient, bucket, index)
                register = cast(Callable[..., RemovableHandle], parameter.register_post_accumulate_grad_hook)
                self._handles.append(register(hook))


def nothing() -> None:
    """A backward to which nothing comes: what parameters have for `grad` is reduced."""


def has_shard(parameter: nn.Parameter) -> bool:
    """Whether the gradient of a parameter is divided more finely than the parameter."""
    whole = parameter.placements if isinstance(parameter, DTensor) else ()
    return isinstance(parameter.grad, DTensor) and parameter.grad.placements != whole


def split_by_size(
    parameters: Sequence[nn.Parameter], limit_bytes: int, holders_of: Callable[[nn.Parameter], Holders]
) -> list[tuple[list[nn.Parameter], Holders]]:
    """Groups parameters of one dtype and device that have the same holders, in their order, up to so many bytes."""
    groups: list[tuple[list[nn.Parameter], Holders]] = []
    open_groups: dict[tuple[torch.dtype, torch.device, Holders], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device, holders_of(parameter))
        size = local(parameter.detach()).nbytes
        group, used = open_groups.get(key, ([], limit_bytes))
        if used + size > limit_bytes:
            group, used = [], 0
            groups.append((group, key[2]))
        group.append(parameter)
        open_groups[key] = (group, used + size)
    return groups
