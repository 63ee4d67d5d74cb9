"""The collectives that techniques call; the names and habits of torch's versions and backends are known only here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as traceable
from torch import Tensor

T = TypeVar("T")

# torch 2.13 gave these two new names and deprecated the old ones, which are all that torch 2.11 has.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HIGHEST = dist.AllreduceOptions()
HIGHEST.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

NEVER_SENT, AT_ONCE = 2**30, timedelta(milliseconds=1)  # a tag, and how long to wait for what has it


def within_reach(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor, on the one device from which all ranks of the group send what they have in different places.

    That is the host, if the group's backend carries its tensors. Gloo carries those of devices too, and a world may
    have a backend for each; but a number that is on the device of one rank may be on the host of another.
    """
    carried = {device.type for device in group._device_types}
    return tensor.to(torch.device("cpu" if "cpu" in carried else carried.pop()))


def packed(numbers: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Numbers of one dtype and any place, (n,), `within_reach`; those of one place are moved together."""
    by_place = by_kind(numbers)
    if len(by_place) == 1:
        return within_reach(torch.stack(list(numbers)), group)
    moved = {same[0].device: iter(within_reach(torch.stack(same), group).unbind()) for same in by_place}
    return torch.stack([next(moved[number.device]) for number in numbers])


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Returns when it is over."""


class Pending:
    """A collective under way. `wait()` returns when the result may be used by what the caller does next."""

    def __init__(self, work: Waitable | None, finish: Callable[..., object] | None = None, *args: Any) -> None:
        self._work, self._finish, self._args = work, finish, args

    def wait(self) -> None:
        """Waits for the collective and completes its result."""
        work, finish, args = self._work, self._finish, self._args
        self._work, self._finish, self._args = None, None, ()
        if work is not None:
            work.wait()
        if finish is not None:
            finish(*args)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Starts to sum `tensor` in place over the group."""
    return Pending(dist.all_reduce(tensor, group=group, async_op=True))


def highest(numbers: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Starts to put the highest of all ranks in the place of each number.

    For small messages of the host, one or two in every step: what `dist.all_reduce` asks before it calls the group
    takes as long as the call.
    """
    work: Waitable = group.allreduce([numbers], HIGHEST)
    return work


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Pending:
    """Starts to fill `output` (size n x shard) with the shards of all n ranks, in their order.

    `shard` may be this rank's part of `output`. Conjugate of `reduce_scatter`.
    """
    room = room_for(output, group)
    work = _all_gather(_flat(room), _flat(sendable(shard, group)), group=group, async_op=True)
    return filled(work, [(room, output)])


def reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Starts to sum `tensor` (size n x output) over the group and to leave this rank's part in `output`.

    Conjugate of `all_gather`.
    """
    room = room_for(output, group)
    work = _reduce_scatter(room.view(-1), sendable(tensor, group).view(-1), group=group, async_op=True)
    return filled(work, [(room, output)])


def _is_read(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group reads the memory where a tensor lies."""
    return tensor.is_cpu or not is_gloo(group)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor in a row; as bytes where backends may not know its dtype."""
    flat = tensor.view(-1)
    return flat if flat.is_floating_point() and flat.element_size() > 1 else flat.view(torch.uint8)


# The next three make a new tensor of another one. What `torch.compile` traces goes through torch's traceable forms,
# which wait there. Tensors on meta stand for what other ranks compute, as those of another stage of a pipeline: nothing
# is sent for them.


def result(tensor: Tensor) -> Tensor:
    """What a function of autograd returns; for a compiler an object that nothing within it was.

    Some operations return what they got: those that wait for messages, and `contiguous`. Graphs of torch 2.11 then have
    it twice among their results, and its gradient got lost.
    """
    return tensor.view_as(tensor) if torch.compiler.is_dynamo_compiling() else tensor


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' tensors."""
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = traceable.all_reduce(tensor, "sum", group)
        return traced
    total = tensor.clone(memory_format=torch.contiguous_format)
    if not tensor.is_meta:
        dist.all_reduce(total, group=group)
    return total


def parts_of_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors, (ranks, *shape)."""
    tensor = tensor.contiguous()
    if torch.compiler.is_dynamo_compiling():
        return traceable.all_gather_tensor(tensor[None], 0, group)
    output = tensor.new_empty((group.size(), *tensor.shape))
    if not tensor.is_meta:
        all_gather(output, tensor, group).wait()
    return output


def scattered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums the ranks' tensors, (ranks, *shape), and returns the row of the sum that has this rank's number."""
    tensor = tensor.contiguous()
    if torch.compiler.is_dynamo_compiling():
        row: Tensor = traceable.reduce_scatter_tensor(tensor, "sum", 0, group)[0]
        return row
    output = tensor.new_empty(tensor.shape[1:])
    if not tensor.is_meta:
        reduce_scatter(output, tensor, group).wait()
    return output


def exchange(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], group: dist.ProcessGroup) -> Pending:
    """Starts to send a tensor to each of some ranks of the group, and to fill tensors with what some ranks send.

    Between two ranks messages arrive in the order in which they were sent; both must know of each. Tensors are
    contiguous, and stay as they are until they were waited for; empty ones do not travel.

    Args:
        sent: by the rank that gets it.
        received: by the rank that sends it.
        group: in which these are ranks; not this one.
    """
    rooms = {rank: room_for(tensor, group) for rank, tensor in received.items() if tensor.numel()}
    messages = [dist.P2POp(dist.irecv, room, group=group, group_peer=rank) for rank, room in rooms.items()]
    for rank, tensor in sent.items():
        if tensor.numel():
            messages.append(dist.P2POp(dist.isend, sendable(tensor, group), group=group, group_peer=rank))
    if not messages:
        return Pending(None)
    return filled(All(dist.batch_isend_irecv(messages)), [(room, received[rank]) for rank, room in rooms.items()])


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether messages reach the memory of the host alone, and find each other by tags."""
    return group.name() == "gloo"  # `dist.get_backend` takes several times as long to find it


# Over gloo what lies on a device goes through the host, so that ranks can share one GPU, which NCCL refuses.


def sendable(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor, where the group can read it."""
    return tensor if _is_read(tensor, group) else tensor.cpu()


def room_for(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Memory that the group can write: the tensor itself, or as much on the host."""
    return tensor if _is_read(tensor, group) else torch.empty_like(tensor, device="cpu")


def filled(work: Waitable, rooms: Sequence[tuple[Tensor, Tensor]]) -> Pending:
    """What fills each tensor from its room when the work is over."""

    def fill() -> None:
        for room, tensor in rooms:
            if room is not tensor:
                tensor.detach().copy_(room)

    return Pending(work, fill)


class All:
    """Several things under way."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def wait(self) -> None:
        """Returns when all are over."""
        for work in self._works:
            work.wait()


def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device, source: int = 0
) -> None:
    """Gives all ranks of the group the values that its rank `source` holds, in few, large messages through `device`."""
    source, limit_bytes = dist.get_global_rank(group, source), 64 * 2**20
    for same in by_kind(tensors):
        messages, room = list[list[Tensor]](), 0
        for tensor in same:
            size = tensor.numel() * tensor.element_size()
            if not messages or size > room:
                messages.append([])
                room = limit_bytes
            messages[-1].append(tensor)
            room -= size
        for message in messages:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in message]).to(device)
            dist.broadcast(flat.view(torch.uint8), src=source, group=group)  # backends do not know every dtype
            parts = torch.split(flat, [tensor.numel() for tensor in message])
            for tensor, values in zip(message, parts, strict=True):
                tensor.detach().copy_(values.view_as(tensor))


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, in their order: what one message, or one fused operation, can take."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def notes_under(name: str, within: Any = None) -> Any:
    """A torch store where ranks leave each other notes without a collective, while the process that keeps it lives."""
    store = dist.distributed_c10d._get_default_store() if within is None else within
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def notes_at(name: str, address: str, port: int, keeps: bool, seconds: float) -> Any:
    """Like `notes_under`, before there is a process group, at the address where the ranks will meet for it.

    Args:
        name: of the notes.
        address: where the store is.
        port: likewise.
        keeps: whether this process keeps it, now and for the process group.
        seconds: how long to look for it.

    Raises:
        DistNetworkError: nobody keeps one there, or this process cannot.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=keeps,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch makes it
    )
    store.set_timeout(timedelta(seconds=60))  # of one note
    return notes_under(name, store)


class Unanswered(dist.DistNetworkError):
    """The process that keeps a store does not answer."""


def answer_of(seconds: float, ask: Callable[..., T], *args: Any) -> T:
    """Return what a function gets that asks a store. A store itself waits forever for a process that is stopped.

    Raises:
        Unanswered: within so many seconds.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(ask(*args))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], seconds).done:
        raise Unanswered(
            "the process that keeps the store, rank 0 or torchrun, does not answer: it is stopped, or its host is gone"
        )
    return answer.result()


def hang_up(kept: dist.ProcessGroup | None = None) -> None:
    """Closes this process's connections over gloo: who waits for it there gets an error at once. Nothing is sent after.

    Gloo closes those of a group of which a message came too late, and has no other word for it. What other backends
    have open ends with the process.

    Args:
        kept: a group that goes on.
    """
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not kept]:
        kinds = {kind.type for kind in group._device_types}
        backend = group._get_backend(torch.device("cpu")) if "cpu" in kinds else None
        if group.size() > 1 and backend is not None and backend.name() == "gloo":
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), NEVER_SENT).wait(AT_ONCE)


def begun_in(group: dist.ProcessGroup) -> int:
    """The number of collectives that this rank has begun in a group; 0 of a backend that does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0
