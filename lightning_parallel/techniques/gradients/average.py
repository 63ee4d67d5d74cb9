"""Averaging gradients in place: what data parallel does to all of them, and ZeRO to those it cannot shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.functional import Pending, all_reduce
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.bucket import Bucket
from lightning_parallel.techniques.gradients.buckets import BucketedStep
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.holders import Holders, Replicas
from lightning_parallel.techniques.tools.shards import as_gradient, local

Compression = Literal["bf16", "fp16"]
REDUCE_DTYPES: dict[Compression | None, torch.dtype | None] = {
    None: None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


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

    def make_bucket(members: Sequence[nn.Parameter], holders: Holders) -> Bucket:
        return AllReduceBucket(members, holders, REDUCE_DTYPES[compression])

    return BucketedStep(step, parameters, mesh, make_bucket, int(bucket_mb * 2**20), replicas=replicas)


class AllReduceBucket(Bucket):
    """A bucket whose gradients are averaged in place: afterwards they are parts of the message.

    Args:
        parameters: see `Bucket`.
        holders: of the parameters.
        reduce_dtype: in which the message is sent and summed; None for that of the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], holders: Holders, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(parameters, holders)
        self._group, self._reduce_dtype = holders.all.get_group(), reduce_dtype
        self._again = 1 / (holders.scale * holders.all.size())
        self._reduced = False
        self._message: Tensor | None = None
        self._views: list[Tensor] = []
        self._pending = Pending(None)
        self._shapes = [local(parameter.detach()).shape for parameter in self.parameters]  # in a step they look whole
        self._sizes = [*(shape.numel() for shape in self._shapes), len(self.parameters)]

    def begin(self, synced: bool, given: bool = False) -> None:
        """See `Bucket.begin`."""
        super().begin(synced, given)
        self._message = None
        if self._again != 1 and self.active and not given:
            self.reopen()

    def reopen(self) -> None:
        """See `Bucket.reopen`; of parameters that all ranks hold, the mean of means is the same."""
        if self._reduced and self._again != 1:
            for gradient in (parameter.grad for parameter in self.parameters):
                if gradient is not None:
                    local(gradient).mul_(self._again)
        self._reduced = False

    def rooms(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        """See `Bucket.rooms`."""
        self._allocate()
        return [self._views[index] for index in indices]

    def moved(self, indices: Sequence[int]) -> None:
        """See `Bucket.moved`. The message is where gradients live from now on, unless a module cast its parameter."""
        for index in indices:
            parameter = self.parameters[index]
            if parameter.grad is not None and parameter.dtype == self.dtype:
                parameter.grad = as_gradient(self._views[index], parameter)

    def fill(self, index: int, gradient: Tensor | None) -> None:
        """See `Bucket.fill`."""
        if gradient is None:
            self._views[index].zero_()
        else:
            torch.mul(gradient, self.scale, out=self._views[index])

    def start(self, unused: list[int]) -> None:
        """See `Bucket.start`."""
        assert self._message is not None
        self._unused, message = unused, self._message
        self._flags.fill_(1)
        if unused:
            self._flags[unused] = 0
        sent = message if self._reduce_dtype is None else message.to(self._reduce_dtype)
        self._pending = all_reduce(sent, self._group)
        if sent is not message:
            self._pending = Pending(self._pending, lambda: message.copy_(sent))

    def finish(self) -> None:
        """See `Bucket.finish`."""
        self._pending.wait()
        self._reduced = True
        used = self._flags[self._unused].tolist() if self._unused else ()
        somewhere = dict(zip(self._unused, used, strict=True))
        for index, parameter in enumerate(self.parameters):
            if index in somewhere or parameter.dtype != self.dtype:
                reduced = as_gradient(self._views[index], parameter).to(parameter.dtype)
                parameter.grad = reduced if somewhere.get(index, True) else None
        self._message, self._views, self._pending = None, [], Pending(None)  # gradients keep it

    def _allocate(self) -> None:
        if self._message is None:
            first = local(self.parameters[0].detach())
            self._message = torch.empty(sum(self._sizes), dtype=self.dtype, device=first.device)
            *slots, self._flags = torch.split(self._message, self._sizes)
            # what is written to one gradient is no change of the others: each counts its own versions
            self._views = [slot.view(shape).data for slot, shape in zip(slots, self._shapes, strict=True)]
