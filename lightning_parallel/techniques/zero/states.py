"""ZeRO stages 1 and 2: whole parameters, sharded gradients and optimizer states.

Every rank keeps the same rows of every parameter: those that `Shard(0)` of a DTensor gives it. Gradients are
reduce-scattered to those rows, an optimizer steps them in place, and the rows are gathered back into the parameters,
behind the forward that follows.
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
from lightning_parallel.mesh import ParallelMesh, place_in
from lightning_parallel.techniques.gradients.buckets import Bucket, BucketedStep, has_shard, no_op
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.tools.global_shard import GlobalShard, global_of, local_of
from lightning_parallel.techniques.tools.holders import Holders, Replicas
from lightning_parallel.techniques.tools.shards import (
    as_shard,
    divided_again,
    kept_of,
    local,
    made_as_dtensors_are,
    shard_of_part,
)
from lightning_parallel.techniques.zero.arrivals import Arrival, Arrivals
from lightning_parallel.techniques.zero.casts import refuse_casts

BUCKET_BYTES = 25 * 2**20

BESIDE_BYTES = 2 * BUCKET_BYTES
"""How much of small parameters may be under way at once: their messages lie beside them."""

IN_PLACE_BYTES = 2**20
"""From this size on a parameter's rows are gathered where they lie; smaller ones travel together, beside them."""

T = TypeVar("T")


class ShardedStatesStep(BucketedStep):
    """Reduces gradients to shards, lets optimizers step shards, and gathers the parameters after that.

    Args:
        inner: the step to wrap.
        parameters: all parameters of the model that have rows to share.
        mesh: its `fsdp` view holds the shards, `dp_replicate` the replicas of hybrid sharding.
        stage: 1 keeps whole gradients while they accumulate, 2 reduces every backward pass and keeps shards.
        offload: keeps the shards that the optimizer steps, and so its states, in host memory.
        model: in whose forwards no parameter may be cast.
        blocks: modules before whose forward their own parameters are waited for.
        replicas: compares what ranks hold of the parameters.
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
        replicas: Replicas | None = None,
    ) -> None:
        self._model, self._all = model, list(model.parameters())
        self._arrivals = Arrivals(blocks)
        self._offload, self._stage = offload, stage
        self._in_step = False
        make_bucket = partial(ScatterBucket, offload=offload)
        super().__init__(inner, parameters, mesh, make_bucket, BUCKET_BYTES, stage == 1, replicas)
        self._aside: list[tuple[nn.Parameter, Tensor | None]] = []  # sharded gradients while `torch.compile` compiles
        callback_handler.register_start_callback(self._before_compiling)
        callback_handler.register_end_callback(self._after_compiling)

    def stored(self, parameter: nn.Parameter) -> Tensor:
        """The rows of the parameter that this rank's optimizer steps, as a DTensor."""
        if self._waiting:  # it may have learnt to learn since the last backward
            self._adopt_unfrozen()
        place = self.places.get(id(parameter))
        return self.inner.stored(parameter) if place is None else place[0].shards[place[1]].stored()

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """See `Step.accumulated`."""
        return self.stored(parameter) if self._stage == 2 else self.inner.accumulated(parameter)

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`. A forward that casts parameters, as some routers do, is refused."""
        self._in_step, before = True, self._dtypes()
        try:
            output = self.inner.forward(run, *args, **kwargs)
        finally:
            self._in_step = False
        if (after := self._dtypes()) != before:
            refuse_casts(self._model, zip(self._all, before, after, strict=True))
        return output

    def _dtypes(self) -> list[torch.dtype]:
        with torch._C.DisableTorchFunctionSubclass():  # rows that arrive are not waited for
            return [parameter.dtype for parameter in self._all]

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._arrivals.complete()  # what the forward did not use
        super().backward(run)

    def before_backward(self) -> None:
        """See `Step.before_backward`: techniques around this one look at parts, before which none may be written."""
        if self._has_given([parameter for bucket in self.buckets for parameter in bucket.parameters]):
            self.backward(no_op)
        super().before_backward()

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`."""
        if self._has_given(parameters):
            self.backward(no_op)
        super().average_given(parameters)

    def _has_given(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a step of manual optimization put gradients of its own in the place of reduced ones."""
        mine = (parameter for parameter in parameters if id(parameter) in self.places)
        return any(parameter.grad is not None and not has_shard(parameter) for parameter in mine)

    def shard_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.shard_gradients`."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or id(parameter) not in self.places or has_shard(parameter):
                continue
            stored = cast(DTensor, self.stored(parameter))
            part = shard_of_part(gradient, stored) if isinstance(gradient, DTensor) else local_of(gradient, stored)
            with torch._C.DisableTorchFunctionSubclass():  # a parameter of a split layer would take its own cut of it
                parameter.grad = global_of(as_shard(part, stored))
        super().shard_gradients(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Users may have written into parameters: rows on the host take over what they wrote."""
        self.shard_gradients(parameters)
        for parameter in parameters if self._offload else ():
            if place := self.places.get(id(parameter)):
                shard = place[0].shards[place[1]]
                shard.rows().copy_(kept_of(parameter).view(-1)[shard.start : shard.stop])
        super().before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Starts to gather the stepped rows of all ranks into the whole parameters, in the order of the forward."""
        stepped = set(map(id, parameters))
        messages = []
        for bucket in reversed(self.buckets):  # parameters of blocks may come later, and have messages of their own
            mine = [shard for shard in bucket.shards if id(shard.parameter) in stepped]
            for late in (True, False):
                shards = [shard for shard in mine if (id(shard.parameter) in self._arrivals.in_blocks) is late]
                if shards:
                    messages.append(partial(gather_rows, shards, bucket.group))
        self._arrivals.start(messages, BESIDE_BYTES)
        if self._in_step:  # what was computed from them before is out of date; rows that come do not tell
            increment_version([local(each) for each in parameters if id(each) in self.places])
        self.inner.after_optimizer_step(parameters)

    def _before_compiling(self, _: Any) -> None:
        """Compilers read a parameter with its gradient, and fail where that is a DTensor and the parameter is none."""
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
        """See `Step.close`. The parameters are whole."""
        with suppress(ValueError):  # it is closed already
            callback_handler.remove_start_callback(self._before_compiling)
            callback_handler.remove_end_callback(self._after_compiling)
        self._arrivals.close()
        super().close()


class ScatterBucket(Bucket):
    """A bucket whose message is laid out rank by rank: (ranks, this bucket's chunks and flags).

    | after      | message        | received                         | `parameter.grad`                       |
    | ---------- | -------------- | -------------------------------- | -------------------------------------- |
    | between    | none           | none                             | a shard, or None; whole in stage 1     |
    | `begin`    | none           | none; shards there are carried   | None: backward makes a new one         |
    | `receive`  | filled, scaled | none                             | None: its memory is free again         |
    | `send`     | under way      | under way                        | None                                   |
    | `wait`     | none           | one copy's sum; then all copies' | None                                   |
    | `finalize` | none           | with what was carried            | a view of it; None if unused           |

    A bucket carries the shards of earlier passes under stage 2: what it receives is added to them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], holders: Holders, offload: bool) -> None:
        super().__init__(parameters, holders)
        self.shards = [RowShard(parameter, holders.sharing, offload) for parameter in parameters]
        self.group, self._ranks = holders.sharing.get_group(), holders.sharing.size()
        self._replica_group = None if holders.replicas is None else holders.replicas.get_group()
        self._sizes = [*(shard.chunk for shard in self.shards), len(self.shards)]
        self._specs: list[tuple[int, torch.Size, Any]] = []  # of a shard of each gradient: elements, shape, spec
        # views of the message, which is [ranks, chunks + flags]: [ranks, chunk] of each parameter, [ranks, flags]
        self._chunks: Sequence[Tensor] = ()
        self._received: Tensor | None = None  # [chunks + flags]
        self._accumulated: dict[int, Tensor] = {}
        self._of_one_replica = False  # the shards are not summed over replicas yet

    # ---------------------------------------------------------------- gradients

    def begin(self, synced: bool, given: bool = False) -> None:
        """See `Bucket.begin`. Gradients that are sharded already step aside, to be added to in `finalize`."""
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
        """See `Bucket._copy_in`. Each rank gets its rows, the last ones are padded with zeros."""
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
        """See `Bucket.wait`. Hybrid sharding now sums the shards over the replicas, in passes that synchronise."""
        assert self._received is not None
        self._sent.wait()
        self._message, self._chunks, self._sent = None, (), Pending(None)
        if self._replica_group is None:
            return
        if self._of_one_replica:  # earlier passes were not summed over the replicas: now their sum is, with this one
            self._add_accumulated(self._received)
        if self.synced:
            self._sent = all_reduce(self._received, self._replica_group)
        self._of_one_replica = not self.synced

    def finalize(self) -> None:
        """See `Bucket.finalize`."""
        assert self._received is not None
        self._sent.wait()
        self._add_accumulated(self._received)
        *parts, flags = torch.split(self._received, self._sizes)
        nowhere = self._unused and (flags[self._unused] == 0).tolist()  # complex ones have no order
        unused = {index for index, missing in zip(self._unused, nowhere, strict=True) if missing}
        if not self._specs:
            empty = [torch.empty(shard.numel, dtype=shard.parameter.dtype) for shard in self.shards]
            made = [shard.as_dtensor(flat) for shard, flat in zip(self.shards, empty, strict=True)]
            self._specs = [(each._local_tensor.numel(), each._local_tensor.shape, each._spec) for each in made]
        for index, parameter in enumerate(self.parameters):
            part, (kept, shape, spec) = parts[index], self._specs[index]
            if index in unused:
                parameter.grad = None
            else:
                # what is written to one gradient is no change of the others: each counts its own versions
                parameter.grad = made_as_dtensors_are(GlobalShard, part[:kept].view(shape).data, spec, False)
        self._received, self._sent = None, Pending(None)

    def _add_accumulated(self, received: Tensor) -> None:
        *parts, flags = torch.split(received, self._sizes)
        for index, shard in self._accumulated.items():
            flags[index] = 1  # other replicas may have used it in no pass
            parts[index][: self.shards[index].numel] += shard.reshape(-1)
        self._accumulated = {}


# ---------------------------------------------------------------- rows


class RowShard:
    """The rows of one parameter that one rank of a mesh keeps.

    In flat memory rank k's rows are the elements [k c, (k + 1) c), where c holds ceil(rows / ranks) rows; the last
    ranks may have fewer, or none.
    """

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh, offload: bool) -> None:
        self.parameter, self.mesh, self.offload = parameter, mesh, offload
        kept = kept_of(parameter)
        self.shape, self.row = kept.shape, kept.numel() // kept.shape[0]
        self.chunk = ceil(kept.shape[0] / mesh.size()) * self.row
        self.start, self.stop = (self.row * end for end in bounds(kept.shape[0], mesh.size(), place_in(mesh)))
        self.numel = self.stop - self.start
        """The number of elements that this rank keeps."""
        self.full = kept.numel() // self.chunk  # ranks whose chunks have no padding
        self.even = kept.numel() == self.chunk * mesh.size()
        self.gathers_in_place = self.even and kept.nbytes >= IN_PLACE_BYTES
        """Whether the rows of all ranks are gathered where they belong, with no message beside the parameter."""

        self._stored: DTensor | None = None
        self.targets: list[Tensor] = []  # the rows of ranks with full chunks, (ranks, chunk), and the rest
        self._address = 0
        self.own_views = 0
        """How many tensors here use the parameter's memory."""

    def as_dtensor(self, flat: Tensor) -> DTensor:
        """A flat piece of this rank's elements, as the sharded form of a tensor with the parameter's shape."""
        rows = flat.view(self.numel // self.row, *self.shape[1:])
        return divided_again(rows, self.mesh, self.parameter)

    def stored(self) -> DTensor:
        """This rank's rows in the parameter's own memory, or their copy on the host."""
        kept: Any = self.parameter
        address = (kept._local_tensor if isinstance(kept, DTensor) else kept).data_ptr()
        if self._stored is None or address != self._address:
            # made anew where the memory was replaced, as `module.to` does
            self._stored, self.targets = None, []
            before, flat, full = users_of(self.parameter), kept_of(self.parameter).view(-1), self.full
            own = flat[self.start : self.stop]
            self._stored = self.as_dtensor(own.to("cpu", copy=True) if self.offload else own)
            self._address = address
            self.targets = [flat[: full * self.chunk].view(full, self.chunk), flat[full * self.chunk :]]
            del flat, own  # they use the memory until then
            self.own_views = users_of(self.parameter) - before
        return self._stored

    def rows(self) -> Tensor:
        """What is stored, flat and plain."""
        return self.stored()._local_tensor.view(-1)


def gather_rows(shards: Sequence[RowShard], group: dist.ProcessGroup) -> Arrival:
    """Starts to gather what all ranks of a group stored into the parameters of these shards, which were stepped.

    Others are not written, though they would stay the same: a graph that is still to go backward, as that of a
    generator while its critic is stepped, takes them for changed.
    """
    parameters = [shard.parameter for shard in shards]
    # whether another tensor uses the memory of one, before messages use it, too
    exposed = any(users_of(shard.parameter) > 1 + shard.own_views for shard in shards)
    pending: list[Waitable] = []
    small: list[RowShard] = []
    for shard in shards:
        if not shard.gathers_in_place:
            small.append(shard)
            continue
        flat = kept_of(shard.parameter).view(-1)  # the parameter's own memory
        own = flat[shard.start : shard.stop]
        if shard.offload:
            own.copy_(shard.rows())
        pending.append(all_gather(flat, own, group))
    if not small:
        return Arrival(parameters, All(pending), 0, exposed)
    sizes = [shard.chunk for shard in small]
    together = local(small[0].parameter).new_empty(group.size(), sum(sizes))  # [ranks, chunks]
    own = together[group.rank()]
    slots = zip(small, torch.split(own, sizes), strict=True)
    torch._foreach_copy_([slot[: shard.numel] for shard, slot in slots], [shard.rows() for shard in small])

    def unpack() -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for shard, chunks in zip(small, torch.split(together, sizes, dim=1), strict=True):
            full, rest = shard.targets
            targets.append(full)
            sources.append(chunks[: len(full)])
            if not shard.even:  # the last rank that has rows has fewer, and those after it none
                targets.append(rest)
                sources.append(chunks[len(full), : len(rest)])
        torch._foreach_copy_(targets, sources)

    pending.append(Pending(all_gather(together, own, group), unpack))
    return Arrival(parameters, All(pending), together.nbytes, exposed)


def users_of(tensor: Tensor) -> int:
    """How many tensors use the memory of a tensor."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` itself
