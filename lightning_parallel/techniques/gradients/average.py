"""Averaging gradients in place: what data parallel does to all of them, and ZeRO to those it cannot shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from lightning_parallel.collectives.functional import Pending, all_reduce
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.bucket import Bucket
from lightning_parallel.techniques.gradients.buckets import BucketedStep
from lightning_parallel.techniques.gradients.memory import Lent
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.holders import Holders
from lightning_parallel.techniques.tools.replicas import Replicas
from lightning_parallel.techniques.tools.shards import as_gradient, local

Compression = Literal["bf16", "fp16", "powersgd"]
CommunicationHook = Callable[[Any, Any], Future[Tensor]]
BucketHook = Callable[[Any], Future[Tensor]]


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
    hooks: dict[Holders, BucketHook | None] = {}
    made: list[AllReduceBucket] = []

    def make_bucket(members: Sequence[nn.Parameter], holders: Holders) -> Bucket:
        if holders not in hooks:
            hooks[holders] = _communication_hook(compression, holders.all.get_group())
        made.append(AllReduceBucket(members, holders, hooks[holders], index=len(made)))
        return made[-1]

    return BucketedStep(step, parameters, mesh, make_bucket, int(bucket_mb * 2**20), replicas=replicas)


class AllReduceBucket(Bucket):
    """A bucket in whose buffer the gradients live: they are averaged in place.

    It offers what torch's communication hooks read of a bucket: `buffer`, `gradients`, `index`, `is_last`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        holders: Holders,
        hook: BucketHook | None = None,
        index: int = 0,
    ) -> None:
        divided = holders.all.size() if hook else 1  # torch's hooks divide by the ranks of the group for themselves
        super().__init__(parameters, holders, divided)
        self._group = holders.all.get_group()
        self._hook = hook
        self._index = index
        self._again = 1 / (holders.scale * holders.all.size())
        self._reduced = False
        self._pending = Pending(None)
        self._message: Tensor | None = None
        self._views: list[Tensor] = []
        self._gradients: list[Tensor] = []

    # ---------------------------------------------------------------- the reduction

    def agree(self, dtype: torch.dtype) -> None:
        """See `Bucket.agree`."""
        if dtype != self.dtype:
            self._message = None
        super().agree(dtype)

    def begin(self, synced: bool, given: bool = False) -> None:
        """See `Bucket.begin`. Gradients live in the buffer: there is a new one where somebody keeps one of them."""
        super().begin(synced, given)
        if self._again != 1 and self.active and not given:
            self.reopen()
        if self._message is not None and self._lent.is_kept(self.parameters):
            self._message = None

    def reopen(self) -> None:
        """See `Bucket.reopen`; of parameters that all ranks hold, the mean of means is the same."""
        if self._reduced and self._again != 1:
            for gradient in (parameter.grad for parameter in self.parameters):
                if gradient is not None:
                    local(gradient).mul_(self._again)
        self._reduced = False

    def keep(self, index: int) -> None:
        """See `Bucket.keep`. The gradient moves into the buffer, where later passes add to it, unless one is kept."""
        parameter = self.parameters[index]
        grown = parameter.grad
        if parameter.dtype != self.dtype:  # lives beside the message
            return
        self._allocate()
        if grown is None or grown is self._gradient(index) or grown.is_sparse or self._lent.is_one_kept(index):
            return
        self._views[index].copy_(local(grown))
        parameter.grad = self._gradient(index)

    def rooms(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        """See `Bucket.rooms`."""
        self._allocate()
        return [self._views[index] for index in indices]

    def moved(self, indices: Sequence[int]) -> None:
        """See `Bucket.moved`. The message is where gradients live from now on, unless they have another dtype."""
        for index in indices:
            parameter = self.parameters[index]
            if parameter.grad is not None and parameter.dtype == self.dtype:
                parameter.grad = self._gradient(index)

    def fill(self, index: int, gradient: Tensor | None) -> None:
        """See `Bucket.fill`."""
        self._allocate()
        view = self._views[index]
        if gradient is None:
            view.zero_()
        else:
            torch.mul(gradient if gradient.dtype == self.dtype else gradient.to(self.dtype), self.scale, out=view)

    def _gradient(self, index: int) -> Tensor:
        """A parameter's part of the message; `module.to` may have given other memory to the tensor that it was."""
        gradient = self._gradients[index]
        if local(gradient).data_ptr() != self._views[index].data_ptr():
            gradient = self._gradients[index] = self._as_gradient(index)
        return gradient

    def start(self, unused: list[int]) -> None:
        """See `Bucket.start`."""
        self._unused = unused
        self._flags.fill_(1)
        if unused:
            self._flags[unused] = 0
        self._pending = self._reduce()

    def finish(self) -> None:
        """See `Bucket.finish`."""
        self._pending.wait()
        self._reduced = True
        used = set(range(len(self.parameters))) - set(self._unused)
        if self._unused:
            used |= {
                index for index, sum_ in zip(self._unused, self._flags[self._unused].tolist(), strict=True) if sum_
            }
        for index, parameter in enumerate(self.parameters):
            if index in self._unused or parameter.dtype != self.dtype:
                parameter.grad = self._gradient(index).to(parameter.dtype) if index in used else None

    def _reduce(self) -> Pending:
        if self._hook is None:
            return all_reduce(self.buffer(), self._group)
        future = self._hook(self)
        return Pending(None, lambda: self.set_buffer(future.wait()))

    def _allocate(self) -> None:
        if self._message is not None:
            return
        kept = [local(parameter.detach()) for parameter in self.parameters]
        sizes = [part.numel() for part in kept]
        first = kept[0]
        self._message = torch.zeros(sum(sizes) + len(sizes), dtype=self.dtype, device=first.device)
        *slots, self._flags = torch.split(self._message, [*sizes, len(sizes)])
        self._views = [slot.view_as(part) for slot, part in zip(slots, kept, strict=True)]
        self._gradients = [self._as_gradient(index) for index in range(len(sizes))]
        self._lent = Lent(self._message, self._gradients)

    def _as_gradient(self, index: int) -> Tensor:
        return as_gradient(self._views[index].detach(), self.parameters[index])

    # ---------------------------------------------------------------- what torch's hooks read

    def buffer(self) -> Tensor:
        """The message: all gradients and the flags, flat."""
        assert self._message is not None
        return self._message

    def set_buffer(self, tensor: Tensor) -> None:
        """Takes the reduced message, which a hook may hand over in another tensor."""
        if tensor.data_ptr() != self.buffer().data_ptr():
            self.buffer().copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """The parts of the message with the shapes of their parameters; the flags travel as one vector."""
        return [*self._views, self._flags]

    def index(self) -> int:
        """The number of this bucket in the order of sending."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step; PowerSGD counts its iterations there, so here: the first."""
        return self._index == 0


def _communication_hook(compression: Compression | None, group: dist.ProcessGroup) -> BucketHook | None:
    if compression is None:
        return None
    state, hook = _hook_and_state(compression, group)
    return lambda bucket: hook(state, bucket)


def _hook_and_state(compression: Compression, group: dist.ProcessGroup) -> tuple[Any, CommunicationHook]:
    if compression == "bf16":
        return group, default_hooks.bf16_compress_hook
    if compression == "fp16":
        return group, default_hooks.fp16_compress_hook
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=10)
    return state, powerSGD_hook.powerSGD_hook
