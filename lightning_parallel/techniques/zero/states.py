"""ZeRO stages 1 and 2: whole parameters, sharded gradients and optimizer states.

Every rank keeps the same rows of every parameter: those that `Shard(0)` of a DTensor gives it. Gradients are
reduce-scattered to those rows, an optimizer steps them in place, and the rows are gathered back into the parameters,
behind the forward that follows.
Source: S. Rajbhandari et al., ZeRO, SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import Pending, Waitable, all_reduce, reduce_scatter
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.gradients.bucket import Bucket
from lightning_parallel.techniques.gradients.buckets import BucketedStep, has_shard, nothing
from lightning_parallel.techniques.gradients.memory import Lent
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.tools.global_shard import global_of, local_of
from lightning_parallel.techniques.tools.holders import Holders
from lightning_parallel.techniques.tools.replicas import Replicas
from lightning_parallel.techniques.tools.shards import as_shard, local, shard_of_part
from lightning_parallel.techniques.zero.arrivals import Arrival, Arrivals, refuse_unwatched_use
from lightning_parallel.techniques.zero.compilers import Compilers
from lightning_parallel.techniques.zero.rows import Gathering, RowShard

BUCKET_BYTES = 25 * 2**20

BESIDE_BYTES = 2 * BUCKET_BYTES
"""How much of small parameters may be under way at once: their messages lie beside them."""

T = TypeVar("T")


class ShardedStatesStep(BucketedStep):
    """Reduces gradients to shards, lets optimizers step shards, and gathers the parameters after that.

    Args:
        inner: the step to wrap.
        parameters: all parameters of the model.
        mesh: its `fsdp` view holds the shards, `dp_replicate` the replicas of hybrid sharding.
        stage: 1 keeps whole gradients while they accumulate, 2 reduces every backward pass and keeps shards.
        offload: keeps the shards that the optimizer steps, and so its states, in host memory.
        blocks: modules before whose forward their own parameters are waited for.
        replicas: compares what ranks hold of the parameters.
    """

    buckets: list[ScatterBucket]  # type: ignore[assignment]
    places: dict[nn.Parameter, tuple[ScatterBucket, int]]  # type: ignore[assignment]

    def __init__(
        self,
        inner: Step,
        parameters: Sequence[nn.Parameter],
        mesh: ParallelMesh,
        stage: int,
        offload: bool,
        blocks: Iterable[nn.Module] = (),
        replicas: Replicas | None = None,
    ) -> None:
        self._arrivals = Arrivals(blocks)
        self._compilers = Compilers(parameters, self._arrivals.before_compiling)
        self._offload, self._stage = offload, stage
        self._in_step = False
        super().__init__(inner, parameters, mesh, self._make_bucket, BUCKET_BYTES, stage == 1, replicas)

    def stored(self, parameter: nn.Parameter) -> Tensor:
        """The rows of the parameter that this rank's optimizer steps, as a DTensor."""
        if self._waiting:
            self._adopt_unfrozen()
        place = self.places.get(parameter)
        return self.inner.stored(parameter) if place is None else place[0].shards[place[1]].stored()

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """See `Step.accumulated`."""
        return self.stored(parameter) if self._stage == 2 else self.inner.accumulated(parameter)

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        self._in_step = True
        try:
            with self._arrivals.forward():
                return self.inner.forward(run, *args, **kwargs)
        finally:
            self._in_step = False

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        unread = self._arrivals.before_backward()
        super().backward(run)
        if unread and (self.synced or self._stage == 2):
            refuse_unwatched_use([p for p in unread if self._has_new_gradient(*self.places[p])])

    def before_backward(self) -> None:
        """See `Step.before_backward`: techniques around this one look at parts, before which none may be written."""
        if self._has_given(self.places):
            self.backward(nothing)
        super().before_backward()

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`."""
        if self._has_given(parameters):
            self.backward(nothing)
        super().average_given(parameters)

    def _has_given(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a step of manual optimization put gradients of its own in the place of reduced ones."""
        mine = (parameter for parameter in parameters if parameter in self.places)
        return any(parameter.grad is not None and not has_shard(parameter) for parameter in mine)

    def _has_new_gradient(self, bucket: ScatterBucket, index: int) -> bool:
        return bucket.active and index not in bucket.missing

    def shard_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.shard_gradients`."""
        for parameter in parameters:
            gradient = parameter.grad
            if parameter not in self.places or gradient is None or has_shard(parameter):
                continue
            stored = cast(DTensor, self.stored(parameter))
            part = shard_of_part(gradient, stored) if isinstance(gradient, DTensor) else local_of(gradient, stored)
            parameter.grad = global_of(as_shard(part, stored))
        super().shard_gradients(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Users may have written into parameters: rows on the host take over what they wrote."""
        self.shard_gradients(parameters)
        for parameter in parameters if self._offload else ():
            if place := self.places.get(parameter):
                place[0].shards[place[1]].follow()
        super().before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Starts to gather the stepped rows of all ranks into the whole parameters, in the order of the forward."""
        stepped = set(map(id, parameters))
        buckets = [b for b in reversed(self.buckets) if any(id(parameter) in stepped for parameter in b.parameters)]
        self._arrivals.start([partial(bucket.gather_parameters, stepped) for bucket in buckets], BESIDE_BYTES)
        if self._in_step:  # what was computed from them before is out of date; rows that come do not tell
            increment_version([local(each) for each in parameters if each in self.places])
        self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """See `Step.close`. The parameters are whole."""
        self._compilers.close()
        self._arrivals.close()
        super().close()

    def _make_bucket(self, parameters: Sequence[nn.Parameter], holders: Holders) -> Bucket:
        return ScatterBucket(parameters, holders, self._offload)


class ScatterBucket(Bucket):
    """A bucket whose message is laid out rank by rank: (ranks, this bucket's chunks and flags).

    A backward pass takes it through these states; `kept` is this rank's row of the message, in which its shards live.

    | after    | message        | kept                             | `parameter.grad`                       |
    | -------- | -------------- | -------------------------------- | -------------------------------------- |
    | between  | none           | the shards, or no memory         | a shard, or None; whole in stage 1     |
    | `keep`   | none           | no memory: whole ones grow       | whole (stage 1, a pass that only adds) |
    | `begin`  | none           | the shards of earlier passes     | None: backward makes a new one         |
    | `put`    | filled, scaled | as before                        | None: its memory is free again         |
    | `start`  | under way      | receives, unless it carries      | None                                   |
    | `settle` | none           | one copy's sum; then all copies' | None                                   |
    | `finish` | none           | what was carried and received    | a view of kept; None if unused         |

    A bucket carries the shards of earlier passes under stage 2: then it receives into a tensor beside them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], holders: Holders, offload: bool) -> None:
        super().__init__(parameters, holders)
        self.shards = [RowShard(parameter, holders.sharing, offload) for parameter in parameters]
        self._shard_group = holders.sharing.get_group()
        self._gatherings: dict[tuple[RowShard, ...], Gathering] = {}
        self._replica_group = None if holders.replicas is None else holders.replicas.get_group()
        self._ranks = holders.sharing.size()
        self._sizes = [*(shard.chunk for shard in self.shards), len(self.shards)]
        ends = [*accumulate(self._sizes[:-1])]
        self._slots = [slice(end - shard.chunk, end) for end, shard in zip(ends, self.shards, strict=True)]
        self._width = ends[-1] + len(self.shards)
        self._flags = slice(ends[-1], self._width)
        self._message: Tensor | None = None
        self._chunks: Sequence[Tensor] = ()  # of the message: each parameter's, and the flags
        self._make_kept()
        self._carried: list[int] = []
        self._pending: Waitable = Pending(None)
        self._of_one_replica = False  # what is kept is not summed over replicas yet

    def _make_kept(self) -> None:
        first, slots = self.parameters[0], zip(self.shards, self._slots, strict=True)
        self._kept = torch.zeros(self._width, dtype=first.dtype, device=first.device)
        # what is written to one gradient is no change of the others: each counts its own versions
        parts = [(shard, self._kept[slot][: shard.numel].data) for shard, slot in slots]
        self._gradients = [global_of(shard.as_dtensor(part)) for shard, part in parts]
        self._lent = Lent(self._kept, self._gradients)

    # ---------------------------------------------------------------- gradients

    def begin(self, synced: bool, given: bool = False) -> None:
        """See `Bucket.begin`. Gradients that are sharded already step aside, to be added to in `finish`."""
        super().begin(synced, given)
        if self._lent.is_kept(self.parameters):
            self._make_kept()
        # Views of kept are the gradients that optimizers hold: its memory may go and come, it may not move.
        self._kept.untyped_storage().resize_(self._width * self._kept.element_size())
        held = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        self._carried = [i for i in held if has_shard(self.parameters[i])]
        for index in self._carried:
            gradient = self.parameters[index].grad
            if gradient is not None and gradient is not self._gradients[index]:
                self._gradients[index].to_local().copy_(local(gradient))  # the user put another tensor in its place
            self.parameters[index].grad = None

    def keep(self, index: int) -> None:
        """See `Bucket.keep`. While whole gradients grow there are no shards of them, nor memory for shards."""
        if self._kept.untyped_storage().nbytes() and not any(map(has_shard, self.parameters)):
            if self._lent.is_kept(self.parameters):
                self._make_kept()
            self._kept.untyped_storage().resize_(0)

    def rooms(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        """See `Bucket.rooms`."""
        self._allocate()
        return [self._chunks[index] if self.shards[index].even else None for index in indices]

    def moved(self, indices: Sequence[int]) -> None:
        """See `Bucket.moved`."""
        for index in indices:
            self.parameters[index].grad = None

    def fill(self, index: int, gradient: Tensor | None) -> None:
        """See `Bucket.fill`."""
        self._allocate()
        chunks = self._chunks[index]
        if gradient is None:
            chunks.zero_()
        else:
            self.shards[index].copy_whole(gradient, chunks, self.scale)

    def _allocate(self) -> None:
        if self._message is None:
            self._message = self._kept.new_empty(self._ranks, self._width)
            self._chunks = torch.split(self._message, self._sizes, dim=1)

    def start(self, unused: list[int]) -> None:
        """See `Bucket.start`."""
        assert self._message is not None
        flags = self._chunks[-1].fill_(1)
        if unused:
            flags[:, unused] = 0
        self._unused = unused
        self._received = self._kept.new_empty(self._width) if self._carried else self._kept
        self._pending = reduce_scatter(self._received, self._message, self._shard_group)

    def settle(self) -> None:
        """See `Bucket.settle`. Hybrid sharding now sums the shards over the replicas, in passes that synchronise."""
        self._pending.wait()
        self._message, self._chunks = None, ()
        if self._of_one_replica:  # earlier passes were not summed over the replicas: now their sum is, with this one
            if self._carried:
                self._received[self._flags][self._carried] = 1  # other replicas may have used them in no pass
            self._add_carried()
        group = self._replica_group
        across = group is not None and self.synced
        self._pending = all_reduce(self._received, group) if across and group is not None else Pending(None)
        self._of_one_replica = group is not None and not self.synced

    def finish(self) -> None:
        """See `Bucket.finish`."""
        self._pending.wait()
        unused = set(self._unused_everywhere()) - set(self._carried)
        self._add_carried()
        self._received, self._pending = self._kept, Pending(None)  # lets go of what was only received to be added
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None if index in unused else self._gradients[index]

    def _unused_everywhere(self) -> list[int]:
        if not self._unused:
            return []
        used = (self._received[self._flags][self._unused] != 0).tolist()  # complex ones have no order
        return [index for index, somewhere in zip(self._unused, used, strict=True) if not somewhere]

    def _add_carried(self) -> None:
        if self._received is self._kept:
            return
        self._kept[self._flags].zero_()
        for index, slot in enumerate(self._slots):
            if index not in self._carried:
                self._kept[slot].zero_()
        self._received = self._kept.add_(self._received)

    def gather_parameters(self, stepped: Collection[int]) -> Arrival:
        """Starts to gather what all ranks stored into the parameters that were stepped.

        Others are not written, though they would stay the same: a graph that is still to go backward, as that of a
        generator while its critic is stepped, takes them for changed.

        Args:
            stepped: their `id`.
        """
        shards = (*[shard for shard in self.shards if id(shard.parameter) in stepped],)
        if shards not in self._gatherings:
            self._gatherings[shards] = Gathering(shards, self._shard_group)
        gathering, exposed = self._gatherings[shards], any(shard.is_exposed for shard in shards)
        return Arrival([shard.parameter for shard in shards], gathering.start(), gathering.nbytes, exposed)
