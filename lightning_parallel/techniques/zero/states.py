"""ZeRO stages 1 and 2: full parameters, sharded gradients and optimizer states.

Each rank steps the rows of every parameter that `Shard(0)` of a DTensor would give it. Gradients are reduce-scattered
to those rows, the optimizer steps the rows in place, and an all-gather puts the rows of all ranks into the full
parameters while the next forward runs.
Source: S. Rajbhandari et al., ZeRO, SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import All, Pending, Waitable, all_gather, all_reduce, reduce_scatter
from lightning_parallel.collectives.spans import bounds
from lightning_parallel.mesh import ParallelMesh, index_in_mesh
from lightning_parallel.techniques.gradients.buckets import Bucket, BucketedStep, has_shard, no_op
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.tools.global_shard import GlobalShard, as_global_shard, local_of
from lightning_parallel.techniques.tools.holders import Holders
from lightning_parallel.techniques.tools.shards import (
    as_shard,
    construct_dtensor,
    local,
    local_tensor_of,
    shard_rows_of,
)
from lightning_parallel.techniques.zero.casts import refuse_casts
from lightning_parallel.techniques.zero.pending_gathers import AllGatherQueue, PendingAllGather

BUCKET_BYTES = 25 * 2**20

BUFFER_BYTES = 2 * BUCKET_BYTES
"""Limit of the message buffers for small parameters that are being gathered at once."""

IN_PLACE_BYTES = 2**20
"""Parameters of at least this size are gathered in place; smaller ones share one message, with a buffer of its own."""

T = TypeVar("T")


class ShardedStatesStep(BucketedStep):
    """Reduce-scatters gradients to shards, lets optimizers step the shards, then gathers the full parameters.

    Args:
        inner: the step to wrap.
        parameters: all parameters of the model that have rows to shard.
        mesh: its view `fsdp` holds the shards, `dp_replicate` the replicas of hybrid sharding.
        stage: 1 keeps full gradients while they accumulate, 2 reduces in every backward pass and keeps shards.
        offload: whether the shards that the optimizer steps, and so its states, are kept in host memory.
        model: the model, whose parameters must be the same on all ranks, and which no forward may cast.
        blocks: modules whose forward waits for their parameters.
    """

    buckets: list[ScatterBucket]  # type: ignore[assignment]
    places: dict[int, tuple[ScatterBucket, int]]  # type: ignore[assignment]

    def __init__(
        self,
        inner: Step,
        parameters: Sequence[nn.Parameter],
        mesh: ParallelMesh,
        stage: int,
        offload: bool,
        model: nn.Module,
        blocks: Sequence[nn.Module] = (),
    ) -> None:
        self._model, self._all = model, list(model.parameters())
        self._arrivals = AllGatherQueue(blocks)
        self._offload, self._stage = offload, stage
        self._in_step = False
        make_bucket = partial(ScatterBucket, offload=offload)
        named = dict(model.named_parameters())
        super().__init__(inner, parameters, mesh, make_bucket, BUCKET_BYTES, stage == 1, named)
        self._aside: list[tuple[nn.Parameter, Tensor | None]] = []  # sharded gradients, removed during compilation
        callback_handler.register_start_callback(self._before_compiling)
        callback_handler.register_end_callback(self._after_compiling)

    def stored(self, parameter: nn.Parameter) -> Tensor:
        """Return the rows of the parameter that this rank's optimizer steps, as a DTensor."""
        if self._waiting:  # the parameter may have been unfrozen since the last backward
            self._adopt_unfrozen()
        place = self.places.get(id(parameter))
        return self.inner.stored(parameter) if place is None else place[0].shards[place[1]].stored()

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """See `Step.accumulated`."""
        return self.stored(parameter) if self._stage == 2 else self.inner.accumulated(parameter)

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`. Refuse a forward that casts parameters, as some routers do."""
        self._in_step, before = True, self._dtypes()
        try:
            output = self.inner.forward(run, *args, **kwargs)
        finally:
            self._in_step = False
        if (after := self._dtypes()) != before:
            refuse_casts(self._model, zip(self._all, before, after, strict=True))
        return output

    def _dtypes(self) -> list[torch.dtype]:
        with torch._C.DisableTorchFunctionSubclass():  # do not wait for pending rows
            return [parameter.dtype for parameter in self._all]

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._arrivals.complete()  # parameters that the forward did not use may still be pending
        super().backward(run)

    def before_backward(self) -> None:
        """See `Step.before_backward`. Reduce gradients set by the user before an outer step reads the shards."""
        if self._has_given([parameter for bucket in self.buckets for parameter in bucket.parameters]):
            self.backward(no_op)
        super().before_backward()

    def average_user_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_user_gradients`."""
        if self._has_given(parameters):
            self.backward(no_op)
        super().average_user_gradients(parameters)

    def _has_given(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return True if a step with manual optimization replaced sharded gradients by full ones of its own."""
        bucketed = (parameter for parameter in parameters if id(parameter) in self.places)
        return any(parameter.grad is not None and not has_shard(parameter) for parameter in bucketed)

    def shard_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.shard_gradients`."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or id(parameter) not in self.places or has_shard(parameter):
                continue
            stored = cast(DTensor, self.stored(parameter))
            with torch._C.DisableTorchFunctionSubclass():  # a tensor-parallel parameter would shard it once more
                parameter.grad = as_global_shard(as_shard(local_of(gradient, stored), stored))
        super().shard_gradients(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`. With `offload`, copy what users wrote into parameters to the host rows."""
        self.shard_gradients(parameters)
        for parameter in parameters if self._offload else ():
            if place := self.places.get(id(parameter)):
                shard = place[0].shards[place[1]]
                shard.rows().copy_(local_tensor_of(parameter).view(-1)[shard.start : shard.stop])
        super().before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start gathering the stepped rows of all ranks into the full parameters, in the order of the forward."""
        stepped = set(map(id, parameters))
        messages = []
        # only all-gathers of block parameters can be deferred, so these have messages of their own
        for bucket in reversed(self.buckets):
            changed = [shard for shard in bucket.shards if id(shard.parameter) in stepped]
            for in_block in (True, False):
                shards = [shard for shard in changed if (id(shard.parameter) in self._arrivals.in_blocks) is in_block]
                if shards:
                    messages.append(partial(gather_rows, shards, bucket.group))
        self._arrivals.start(messages, BUFFER_BYTES)
        if self._in_step:  # autograd graphs over the old values are stale; gathering does not bump the version counter
            increment_version([local(parameter) for parameter in parameters if id(parameter) in self.places])
        self.inner.after_optimizer_step(parameters)

    def _before_compiling(self, _: Any) -> None:
        """Remove sharded gradients: compilers fail on a parameter that is no DTensor with a gradient that is one."""
        self._arrivals.complete()
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        self._aside = [(parameter, parameter.grad) for parameter in parameters if has_shard(parameter)]
        for parameter, _gradient in self._aside:
            parameter.grad = None

    def _after_compiling(self, _: Any) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside.clear()

    def close(self) -> None:
        """See `Step.close`. Afterwards the parameters are full."""
        with suppress(ValueError):  # closed before
            callback_handler.remove_start_callback(self._before_compiling)
            callback_handler.remove_end_callback(self._after_compiling)
        self._arrivals.close()
        super().close()


class ScatterBucket(Bucket):
    """Bucket that is reduce-scattered; its message is [ranks, chunks + flags], one row for each rank.

    | after      | message        | received                               | `parameter.grad`                     |
    | ---------- | -------------- | -------------------------------------- | ------------------------------------ |
    | (idle)     | none           | none                                   | a shard, or None; full in stage 1    |
    | `begin`    | none           | none                                   | None: backward makes a new one       |
    | `receive`  | filled, scaled | none                                   | None: its memory is free again       |
    | `send`     | being sent     | being received                         | None                                 |
    | `wait`     | none           | sum of one replica; then over replicas | None                                 |
    | `finalize` | none           | plus the accumulated shards            | a view of `received`; None if unused |

    In stage 2 `begin` takes the shards of earlier passes off the parameters, and `finalize` adds them to the result.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], holders: Holders, offload: bool) -> None:
        super().__init__(parameters, holders)
        self.shards = [RowShard(parameter, holders.sharing, offload) for parameter in parameters]
        self.group, self._ranks = holders.sharing.get_group(), holders.sharing.size()
        self._replica_group = None if holders.replicas is None else holders.replicas.get_group()
        self._sizes = [*(shard.chunk for shard in self.shards), len(self.shards)]
        self._specs: list[tuple[int, torch.Size, Any]] = []  # of each gradient's shard: number of elements, shape, spec
        # views of the message: [ranks, chunk] for each parameter, then [ranks, flags]
        self._chunks: Sequence[Tensor] = ()
        self._received: Tensor | None = None  # [chunks + flags]
        self._accumulated: dict[int, Tensor] = {}
        self._of_one_replica = False  # whether the accumulated shards still have to be summed over the replicas

    # ---------------------------------------------------------------- gradients

    def begin(self, synced: bool, given: bool = False) -> None:
        """See `Bucket.begin`. Set gradients that are sharded already aside; `finalize` adds them to the new ones."""
        super().begin(synced, given)
        self._accumulated = {}
        for index, parameter in enumerate(self.parameters):
            if (gradient := parameter.grad) is not None and has_shard(parameter):
                self._accumulated[index] = local(gradient)
                parameter.grad = None

    def _slots(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        if self._message is None:
            first = self.parameters[0]
            self._message = torch.empty(self._ranks, sum(self._sizes), dtype=self.dtype, device=first.device)
            self._chunks = torch.split(self._message, self._sizes, dim=1)
        return [self._chunks[index] if self.shards[index].even else None for index in indices]

    def _after_copy(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.parameters[index].grad = None

    def _copy_in(self, index: int, gradient: Tensor | None) -> None:
        """See `Bucket._copy_in`. Each rank gets its own rows; the chunks of the last ranks are padded with zeros."""
        shard, chunks = self.shards[index], self._chunks[index]  # chunks: [ranks, chunk]
        if gradient is None:
            chunks.zero_()
        elif shard.even:
            torch.mul(gradient.reshape(chunks.shape), self.scale, out=chunks)
        else:
            full, end = shard.full, shard.full * shard.chunk
            flat = gradient.reshape(-1)
            torch.mul(flat[:end].view(full, shard.chunk), self.scale, out=chunks[:full])
            if full < chunks.shape[0]:
                chunks[full:].zero_()
                chunks[full, : flat.numel() - end] = flat[end:] * self.scale

    def _start(self) -> None:
        assert self._message is not None
        flags = self._chunks[-1].fill_(1)
        if self._unused:
            flags[:, self._unused] = 0
        self._received = self._message.new_empty(self._message.shape[1])
        self._sent = reduce_scatter(self._received, self._message, self.group)

    def wait(self) -> None:
        """See `Bucket.wait`. With hybrid sharding, start the all-reduce over the replicas if the pass synchronizes."""
        assert self._received is not None
        self._sent.wait()
        self._message, self._chunks, self._sent = None, (), Pending(None)
        if self._replica_group is None:
            return
        if self._of_one_replica:  # earlier passes were not summed over the replicas: sum them with this one
            self._add_accumulated(self._received)
        if self.synced:
            self._sent = all_reduce(self._received, self._replica_group)
        self._of_one_replica = not self.synced

    def finalize(self) -> None:
        """See `Bucket.finalize`."""
        assert self._received is not None
        self._sent.wait()
        self._add_accumulated(self._received)
        *chunks, flags = torch.split(self._received, self._sizes)
        # a flag counts the ranks with a gradient; `== 0`, as complex numbers cannot be compared by `>`
        unused_by_all = self._unused and (flags[self._unused] == 0).tolist()
        unused = {index for index, missing in zip(self._unused, unused_by_all, strict=True) if missing}
        if not self._specs:
            dtensors = [each.as_dtensor(torch.empty(each.numel, dtype=each.parameter.dtype)) for each in self.shards]
            self._specs = [(it._local_tensor.numel(), it._local_tensor.shape, it._spec) for it in dtensors]
        for index, parameter in enumerate(self.parameters):
            chunk, (numel, shape, spec) = chunks[index], self._specs[index]
            if index in unused:
                parameter.grad = None
            else:
                # `.data`: a write to one gradient must not bump the version counters of the others
                parameter.grad = construct_dtensor(GlobalShard, chunk[:numel].view(shape).data, spec, False)
        self._received, self._sent = None, Pending(None)

    def _add_accumulated(self, received: Tensor) -> None:
        *chunks, flags = torch.split(received, self._sizes)
        for index, shard in self._accumulated.items():
            flags[index] = 1  # other replicas may not have used the parameter in any pass
            chunks[index][: self.shards[index].numel] += shard.reshape(-1)
        self._accumulated = {}


# ---------------------------------------------------------------- rows


class RowShard:
    """Rows of one parameter that one rank of a mesh reduces gradients to and steps.

    In flat memory these are the elements [k c, (k + 1) c) for rank k, where c, the chunk, is the number of elements of
    ceil(rows / ranks) rows; the last ranks may have fewer, or none. E.g. a parameter [5, 4] on 2 ranks: c = 12, rank 0
    has 12 elements, rank 1 has 8.
    """

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh, offload: bool) -> None:
        self.parameter, self.mesh, self.offload = parameter, mesh, offload
        tensor = local_tensor_of(parameter)
        self.shape, self.row = tensor.shape, tensor.numel() // tensor.shape[0]
        self.chunk = ceil(tensor.shape[0] / mesh.size()) * self.row
        self.start, self.stop = (self.row * end for end in bounds(tensor.shape[0], mesh.size(), index_in_mesh(mesh)))
        self.numel = self.stop - self.start
        """Number of elements of this rank's rows."""
        self.full = tensor.numel() // self.chunk  # number of ranks whose chunks have no padding
        self.even = tensor.numel() == self.chunk * mesh.size()
        self.gathers_in_place = self.even and tensor.nbytes >= IN_PLACE_BYTES
        """Whether the rows of all ranks are gathered directly into the parameter, without a message buffer."""

        self._stored: DTensor | None = None
        self.targets: list[Tensor] = []  # views of the parameter: [self.full, chunk], and the elements after these
        self._address = 0
        self.own_views = 0
        """Number of tensors of this object that share the parameter's memory."""

    def as_dtensor(self, flat: Tensor) -> DTensor:
        """Return this rank's elements, given as a flat tensor, as a DTensor with the parameter's shape."""
        rows = flat.view(self.numel // self.row, *self.shape[1:])
        return shard_rows_of(rows, self.mesh, self.parameter)

    def stored(self) -> DTensor:
        """Return this rank's rows as a DTensor: a view of the parameter's memory, or with `offload` a host copy."""
        parameter: Any = self.parameter
        address = (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).data_ptr()
        if self._stored is None or address != self._address:
            # first call, or the parameter's memory was replaced, as `module.to` does
            self._stored, self.targets = None, []
            before, flat, full = storage_users(self.parameter), local_tensor_of(self.parameter).view(-1), self.full
            rows = flat[self.start : self.stop]
            self._stored = self.as_dtensor(rows.to("cpu", copy=True) if self.offload else rows)
            self._address = address
            self.targets = [flat[: full * self.chunk].view(full, self.chunk), flat[full * self.chunk :]]
            del flat, rows  # these count as users of the memory, too
            self.own_views = storage_users(self.parameter) - before
        return self._stored

    def rows(self) -> Tensor:
        """Return the local tensor of `stored()`, flat."""
        return self.stored()._local_tensor.view(-1)


def gather_rows(shards: Sequence[RowShard], group: dist.ProcessGroup) -> PendingAllGather:
    """Start to all-gather the rows that the ranks of a group stepped into the parameters of `shards`.

    Parameters that were not stepped must not be passed: a write, even of the same values, would make autograd take them
    for changed in a graph whose backward is still to come, e.g. the generator's while its critic is stepped.
    """
    parameters = [shard.parameter for shard in shards]
    # whether another tensor shares a parameter's memory; counted before the messages below share it, too
    exposed = any(storage_users(shard.parameter) > 1 + shard.own_views for shard in shards)
    pending: list[Waitable] = []
    small: list[RowShard] = []
    for shard in shards:
        if not shard.gathers_in_place:
            small.append(shard)
            continue
        flat = local_tensor_of(shard.parameter).view(-1)  # a view of the parameter
        rows = flat[shard.start : shard.stop]
        if shard.offload:
            rows.copy_(shard.rows())
        pending.append(all_gather(flat, rows, group))
    if not small:
        return PendingAllGather(parameters, All(pending), 0, exposed)
    sizes = [shard.chunk for shard in small]
    message = local(small[0].parameter).new_empty(group.size(), sum(sizes))  # [ranks, chunks]
    rows = message[group.rank()]
    slots = zip(small, torch.split(rows, sizes), strict=True)
    torch._foreach_copy_([slot[: shard.numel] for shard, slot in slots], [shard.rows() for shard in small])

    def unpack() -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for shard, chunks in zip(small, torch.split(message, sizes, dim=1), strict=True):  # chunks: [ranks, chunk]
            full, rest = shard.targets
            targets.append(full)
            sources.append(chunks[: len(full)])
            if not shard.even:  # one rank has a partly filled chunk, and the ranks after it have no rows
                targets.append(rest)
                sources.append(chunks[len(full), : len(rest)])
        torch._foreach_copy_(targets, sources)

    pending.append(Pending(all_gather(message, rows, group), unpack))
    return PendingAllGather(parameters, All(pending), message.nbytes, exposed)


def storage_users(tensor: Tensor) -> int:
    """Return the number of tensors that share the memory of a tensor, itself included."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` itself
