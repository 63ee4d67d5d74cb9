"""Gradients in buckets, reduced while backward still computes the next ones.

Shared by data parallel (all_reduce) and ZeRO-1/2 (reduce_scatter). Buckets are filled in the reverse order of the
parameters, roughly the order in which backward produces gradients, and sent in that one order on every rank, so that
ranks whose gradients arrive differently, or not at all, still meet in the same collectives.
Source: S. Li et al., PyTorch Distributed, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.bucket import AllReduceBucket, Bucket
from lightning_parallel.techniques.step import Step, WrappedStep
from lightning_parallel.techniques.tools.holders import Holders, Replicas, holders_of
from lightning_parallel.techniques.tools.shards import local

Compression = Literal["bf16", "fp16"]
REDUCE_DTYPES: dict[Compression | None, torch.dtype | None] = {
    None: None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

IN_FLIGHT = 2
"""How many messages may be under way: more would hold more memory than they hide time."""


class UserSetGradients:
    """Tracks parameters whose gradients the user may have set: those stepped since the last backward pass.

    They are averaged before the next step. Where one is averaged already, as for two steps by one gradient, the mean of
    means is the same.
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
        self._mesh, self._make_bucket = mesh, make_bucket
        self._bucket_bytes = bucket_bytes
        self._accumulates_locally, self._replicas = accumulates_locally, replicas
        self._waiting = list(parameters)
        self._handles: list[RemovableHandle] = []
        self._running = False
        self._given = UserSetGradients()
        self._active: list[Bucket] = []
        self._next = 0
        self._adopt_unfrozen()

    # ---------------------------------------------------------------- the step

    def backward(self, run: Callable[[], None]) -> None:
        """Runs backward; reduction starts with the first full bucket and is over when this returns."""
        if self._replicas is not None:
            self._replicas.require_alike()
            self._replicas = None
        parameters = (parameter for bucket in self.buckets for parameter in bucket.parameters)
        if not self.synced and self._accumulates_locally and not any(map(has_shard, parameters)):
            for bucket in self.buckets:
                bucket.before_accumulating()
            return self.inner.backward(run)
        self._begin(given=run is no_op)
        try:
            self.inner.backward(run)
            self._finish()
        finally:
            self._running = False
        if run is not no_op:
            self._given.stepped = set()
        return None

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`: a backward to which nothing comes reduces what parameters have for `grad`."""
        if self._given.among(parameters):
            self.backward(no_op)
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
        while self._next < len(self._active) and not self._active[self._next].pending:
            self._send_next()

    def _send_next(self) -> None:
        self._active[self._next].send()
        self._next += 1
        if self._next > IN_FLIGHT:
            self._active[self._next - IN_FLIGHT - 1].wait()

    def _finish(self) -> None:
        while self._next < len(self._active):
            self._send_next()
        for bucket in self._active[-IN_FLIGHT:]:
            bucket.wait()
        for bucket in self._active:
            bucket.finalize()
        self._running = False

    # ---------------------------------------------------------------- buckets

    def _adopt_unfrozen(self) -> None:
        """Groups parameters of one dtype and device with the same holders, from the last to the first, by bytes."""
        ready = [parameter for parameter in self._waiting if parameter.requires_grad]
        if not ready:
            return
        self._waiting = [parameter for parameter in self._waiting if not parameter.requires_grad]
        groups: list[tuple[list[nn.Parameter], Holders]] = []
        open_groups: dict[tuple[torch.dtype, torch.device, Holders], tuple[list[nn.Parameter], int]] = {}
        for parameter in reversed(ready):
            key = (parameter.dtype, parameter.device, holders_of(parameter, self._mesh))
            size = local(parameter.detach()).nbytes
            group, used = open_groups.get(key, ([], self._bucket_bytes))
            if used + size > self._bucket_bytes:
                group, used = [], 0
                groups.append((group, key[2]))
            group.append(parameter)
            open_groups[key] = (group, used + size)
        for group, holders in groups:
            bucket = self._make_bucket(group, holders)
            self.buckets.append(bucket)
            for index, parameter in enumerate(group):
                self.places[id(parameter)] = (bucket, index)
                register = cast(Callable[..., RemovableHandle], parameter.register_post_accumulate_grad_hook)
                self._handles.append(register(partial(self._on_gradient, bucket, index)))


def average_gradients(
    step: Step,
    parameters: Sequence[nn.Parameter],
    mesh: ParallelMesh,
    compression: Compression | None = None,
    bucket_mb: float = 25,
    replicas: Replicas | None = None,
) -> Step:
    """Averages gradients over all ranks that hold their parameters and see other data.

    Args:
        step: around which this is done.
        parameters: whose gradients are averaged; frozen ones join when they are unfrozen.
        mesh: says who holds a parameter.
        compression: what the gradients are sent as; None sends them as they are.
        bucket_mb: how large the gradients of one message may grow, in MiB.
        replicas: see `BucketedStep`.
    """
    if mesh.loss.size() == 1:
        return step
    make_bucket = partial(AllReduceBucket, reduce_dtype=REDUCE_DTYPES[compression])
    return BucketedStep(step, parameters, mesh, make_bucket, int(bucket_mb * 2**20), replicas=replicas)


def no_op() -> None:
    """A backward pass that computes nothing: the gradients that are in `grad` already are reduced."""


def has_shard(parameter: nn.Parameter) -> bool:
    """Whether the gradient of a parameter is divided more finely than the parameter."""
    whole = parameter.placements if isinstance(parameter, DTensor) else ()
    return isinstance(parameter.grad, DTensor) and parameter.grad.placements != whole
