"""Collectives for the techniques. Only this module knows the names and quirks of torch's versions and backends."""

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

# torch 2.13 renamed these two functions and deprecated the old names, the only ones that torch 2.11 has.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HIGHEST = dist.AllreduceOptions()
HIGHEST.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

NEVER_SENT, AT_ONCE = 2**30, timedelta(milliseconds=1)  # a tag that no message has, and the timeout of its receive


def to_group_device(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Move a tensor to the device from which all ranks of the group send values that lie on different devices.

    This is the host if the group's backend supports CPU tensors, else the accelerator. Gloo supports both, and a world
    may have a backend for each; but a number may be on the GPU of one rank and on the host of another.
    """
    device_types = {device.type for device in group._device_types}
    return tensor.to(torch.device("cpu" if "cpu" in device_types else device_types.pop()))


def packed(numbers: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Stack scalars of one dtype, from any devices, as [n] on the device of `to_group_device`; one copy per device."""
    by_device = group_by_dtype_and_device(numbers)
    if len(by_device) == 1:
        return to_group_device(torch.stack(list(numbers)), group)
    moved = {values[0].device: iter(to_group_device(torch.stack(values), group).unbind()) for values in by_device}
    return torch.stack([next(moved[number.device]) for number in numbers])


class Waitable(Protocol):
    """Handle of an operation in progress, such as `dist.Work`."""

    def wait(self) -> Any:
        """Return when the operation is complete."""


class Pending:
    """Handle of a collective in progress. After `wait()`, operations that the caller starts may use the result."""

    def __init__(self, work: Waitable | None, finish: Callable[..., object] | None = None, *args: Any) -> None:
        self._work, self._finish, self._args = work, finish, args

    def wait(self) -> None:
        """Wait for the collective and complete its result, e.g. copy it from the host."""
        work, finish, args = self._work, self._finish, self._args
        self._work, self._finish, self._args = None, None, ()
        if work is not None:
            work.wait()
        if finish is not None:
            finish(*args)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start summing `tensor` in place over `group`."""
    return Pending(dist.all_reduce(tensor, group=group, async_op=True))


def all_reduce_max(numbers: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Start replacing each number by its maximum over the ranks of the group.

    For small messages on the host, one or two per step: the checks of `dist.all_reduce` before it calls the group take
    as long as the call.
    """
    work: Waitable = group.allreduce([numbers], HIGHEST)
    return work


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start filling `output`, n times as large as `shard`, with the shards of all n ranks in rank order.

    `shard` may be this rank's slice of `output`. Conjugate of `reduce_scatter`.
    """
    if shard.device == output.device and _is_read(output, group):  # the usual case, without the calls of the other
        return Pending(_all_gather(_flat(output), _flat(shard), group=group, async_op=True))
    buffer = receive_buffer(output, group)
    work = _all_gather(_flat(buffer), _flat(sendable(shard, group)), group=group, async_op=True)
    return filled(work, [(buffer, output)])


def reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start summing `tensor`, n times as large as `output`, over the group; `output` gets this rank's slice of the sum.

    Conjugate of `all_gather`.
    """
    if tensor.device == output.device and _is_read(output, group):
        return Pending(_reduce_scatter(output.view(-1), tensor.view(-1), group=group, async_op=True))
    buffer = receive_buffer(output, group)
    work = _reduce_scatter(buffer.view(-1), sendable(tensor, group).view(-1), group=group, async_op=True)
    return filled(work, [(buffer, output)])


def _is_read(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the group's backend accesses the memory of a tensor directly."""
    return tensor.is_cpu or not is_gloo(group)


def _flat(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor, as bytes where backends may not support its dtype."""
    flat = tensor.view(-1)
    return flat if flat.is_floating_point() and flat.element_size() > 1 else flat.view(torch.uint8)


# The next functions return a new tensor. While `torch.compile` traces, they use torch's functional collectives, which
# wait for the result. Tensors on meta represent activations of other ranks, as those of another pipeline stage: nothing
# is sent for them.


def result(tensor: Tensor) -> Tensor:
    """Return the output of an autograd.Function; while Dynamo traces, as a new object.

    Some operations return their input: those that wait for messages, and `contiguous`. Graphs of torch 2.11 then list
    the tensor twice among their outputs, and its gradient got lost.
    """
    return tensor.view_as(tensor) if torch.compiler.is_dynamo_compiling() else tensor


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' tensors. Collective over `group`."""
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = traceable.all_reduce(tensor, "sum", group)
        return traced
    total = tensor.clone(memory_format=torch.contiguous_format)
    if not tensor.is_meta:
        dist.all_reduce(total, group=group)
    return total


def all_gather_stacked(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' tensors as [ranks, *shape]. Collective over `group`."""
    tensor = tensor.contiguous()
    if torch.compiler.is_dynamo_compiling():
        return traceable.all_gather_tensor(tensor[None], 0, group)
    output = tensor.new_empty((group.size(), *tensor.shape))
    if not tensor.is_meta:
        all_gather(output, tensor, group).wait()
    return output


def reduce_scatter_row(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' tensors, [ranks, *shape], and return this rank's row of the sum. Collective over `group`."""
    tensor = tensor.contiguous()
    if torch.compiler.is_dynamo_compiling():
        row: Tensor = traceable.reduce_scatter_tensor(tensor, "sum", 0, group)[0]
        return row
    output = tensor.new_empty(tensor.shape[1:])
    if not tensor.is_meta:
        reduce_scatter(output, tensor, group).wait()
    return output


def exchange(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], group: dist.ProcessGroup) -> Pending:
    """Start sending tensors to some ranks of the group, and filling tensors with what some ranks send.

    Messages between two ranks arrive in the order in which they were sent; both ranks must expect each message. Tensors
    are contiguous and must not change until `wait()`; empty tensors are not sent.

    Args:
        sent: the tensor for each receiving rank.
        received: the tensor to fill for each sending rank.
        group: the ranks are numbered in this group; this rank is not among them.
    """
    buffers = {rank: receive_buffer(tensor, group) for rank, tensor in received.items() if tensor.numel()}
    messages = [dist.P2POp(dist.irecv, buffer, group=group, group_peer=rank) for rank, buffer in buffers.items()]
    for rank, tensor in sent.items():
        if tensor.numel():
            messages.append(dist.P2POp(dist.isend, sendable(tensor, group), group=group, group_peer=rank))
    if not messages:
        return Pending(None)
    return filled(All(dist.batch_isend_irecv(messages)), [(buffer, received[rank]) for rank, buffer in buffers.items()])


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether the backend is gloo: messages go through host memory, and are matched by tags."""
    return group.name() == "gloo"  # `dist.get_backend` takes several times as long to find it


# Over gloo, tensors on an accelerator go through the host, so that ranks can share one GPU, which NCCL refuses.


def sendable(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor where the group can read it: itself, or a copy on the host."""
    return tensor if _is_read(tensor, group) else tensor.cpu()


def receive_buffer(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return memory that the group can write: the tensor itself, or an empty one like it on the host."""
    return tensor if _is_read(tensor, group) else torch.empty_like(tensor, device="cpu")


def filled(work: Waitable, rooms: Sequence[tuple[Tensor, Tensor]]) -> Pending:
    """Return a handle that waits for `work`, then copies the first tensor of each pair to the second one."""

    def fill() -> None:
        for buffer, tensor in rooms:
            if buffer is not tensor:
                tensor.detach().copy_(buffer)

    return Pending(work, fill)


class All:
    """Handle of several operations in progress."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all operations are complete."""
        for work in self._works:
            work.wait()


def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device, source: int = 0
) -> None:
    """Broadcast the values of the group's rank `source` to all its ranks, in few large messages through `device`."""
    source, limit_bytes = dist.get_global_rank(group, source), 64 * 2**20
    for same_kind in group_by_dtype_and_device(tensors):
        messages, bytes_left = list[list[Tensor]](), 0
        for tensor in same_kind:
            size = tensor.numel() * tensor.element_size()
            if not messages or size > bytes_left:
                messages.append([])
                bytes_left = limit_bytes
            messages[-1].append(tensor)
            bytes_left -= size
        for message in messages:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in message]).to(device)
            dist.broadcast(flat.view(torch.uint8), src=source, group=group)  # backends do not support every dtype
            parts = torch.split(flat, [tensor.numel() for tensor in message])
            for tensor, values in zip(message, parts, strict=True):
                tensor.detach().copy_(values.view_as(tensor))


def group_by_dtype_and_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, in their order: each group fits one message, or one fused operation."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def prefix_store(name: str, within: Any = None) -> Any:
    """Return a torch store with a prefix, for notes between ranks without a collective, while its server lives."""
    store = dist.distributed_c10d._get_default_store() if within is None else within
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def connect_store(name: str, address: str, port: int, keeps: bool, seconds: float) -> Any:
    """Connect to a store as `prefix_store` does, before the process group exists, at the address of its rendezvous.

    Args:
        name: prefix of the keys.
        address: host of the store.
        port: port of the store.
        keeps: whether this process serves the store, now and for the process group.
        seconds: timeout of the connection.

    Raises:
        DistNetworkError: nobody serves a store there, or this process cannot.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=keeps,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch's rendezvous makes its store
    )
    store.set_timeout(timedelta(seconds=60))  # of each later operation
    return prefix_store(name, store)


class StoreTimeout(dist.DistNetworkError):
    """The process that serves a store does not answer."""


def call_with_timeout(seconds: float, ask: Callable[..., T], *args: Any) -> T:
    """Return the result of `ask`, which queries a store. A store itself waits forever for a server that is stopped.

    Raises:
        StoreTimeout: there is no answer within `seconds`.
    """
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(ask(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([future], seconds).done:
        raise StoreTimeout(
            "the process that keeps the store, rank 0 or torchrun, does not answer: it is stopped, or its host is gone"
        )
    return future.result()


def close_gloo_connections(kept: dist.ProcessGroup | None = None) -> None:
    """Close this process's gloo connections: ranks that wait for it get an error at once. Nothing can be sent after.

    Gloo closes the connections of a group when a receive in it times out, and has no other call for it. Connections of
    other backends end with the process.

    Args:
        kept: a group whose connections stay open.
    """
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not kept]:
        device_types = {device.type for device in group._device_types}
        backend = group._get_backend(torch.device("cpu")) if "cpu" in device_types else None
        if group.size() > 1 and backend is not None and backend.name() == "gloo":
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), NEVER_SENT).wait(AT_ONCE)


def count_collectives(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has started in a group; 0 if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0
