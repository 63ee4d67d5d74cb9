"""A process group whose messages take time: one process is rank 0 of many, the others are made up.

A message lasts ALPHA and its bytes over the bandwidth, on a wire of its group's own, in the order in which messages are
started. What rank 0 receives is what it sent itself, so that sums and gathers have plausible values. With layers that
sleep in place of computing it shows what a strategy hides behind computing, without a second machine.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "delaying"


@dataclass
class Pace:
    """How long messages take, and what they took; of all groups that were made under it.

    Attributes:
        alpha: seconds of every message.
        bandwidth: bytes in a second.
        on: whether messages take time at all, as they need not before the first step.
        messages: how many were sent.
        busy: the seconds that they took.
        waited: the seconds for which somebody waited for them, but for C++, as in DDP.
    """

    alpha: float = 0.0002
    bandwidth: float = 2e9
    on: bool = False
    messages: int = 0
    busy: float = 0.0
    waited: float = 0.0

    def of(self, sent: float) -> float:
        if not self.on:
            return 0.0
        seconds = self.alpha + sent / self.bandwidth
        self.messages, self.busy = self.messages + 1, self.busy + seconds
        return seconds


class Wire:
    """Carries one message after the other; a message that is late does not delay the next one."""

    def __init__(self) -> None:
        self._free = 0.0
        self._waiting: queue.Queue[tuple[float, Callable[[], None]]] = queue.Queue()
        threading.Thread(target=self._run, name="wire", daemon=True).start()

    def send(self, seconds: float, arrived: Callable[[], None]) -> float:
        """When the message arrives."""
        self._free = max(self._free, time.perf_counter()) + seconds
        self._waiting.put((self._free, arrived))
        return self._free

    def _run(self) -> None:
        while True:
            end, arrived = self._waiting.get()
            time.sleep(max(0.0, end - time.perf_counter()))
            arrived()


class UnderWay(dist.Work):
    """A message on the wire."""

    def __init__(self, future: Any, pace: Pace, arrives: float) -> None:
        super().__init__()
        self._future, self._pace, self._arrives = future, pace, arrives

    def wait(self, *_: Any) -> bool:
        start = time.perf_counter()
        self._future.wait()
        time.sleep(max(0.0, self._arrives - time.perf_counter()))
        self._pace.waited += time.perf_counter() - start
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Any:
        return self._future


class Delaying(dist.ProcessGroup):
    """Rank 0 of a group; results are there at once, but nobody is told before the message has arrived."""

    def __init__(self, pace: Pace, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._pace, self._wire, self._ranks, self._begun = pace, Wire(), size, 0
        self._others = (size - 1) / size

    def _send(self, sent: float, result: Any) -> UnderWay:
        future: Any = torch.futures.Future()
        self._begun += 1
        arrives = self._wire.send(self._pace.of(sent), lambda: future.set_result(result))
        return UnderWay(future, self._pace, arrives)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> UnderWay:
        if opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
            torch._foreach_mul_(tensors, self._ranks)
        return self._send(2 * self._others * bytes_of(tensors), tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> UnderWay:
        return self._send(bytes_of(tensors), tensors)

    def barrier(self, opts: Any = None) -> UnderWay:
        return self._send(0, [])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> UnderWay:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return self._send(self._others * sum(map(bytes_of, outputs)), outputs)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> UnderWay:
        for output, own in zip(outputs, inputs, strict=True):
            output.view(self._ranks, -1).copy_(own.reshape(1, -1).clone())  # own may lie in output
        return self._send(self._others * bytes_of(outputs), outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> UnderWay:
        return self.allgather_into_tensor_coalesced([output], [own])

    all_gather_single = _allgather_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> UnderWay:
        for output, whole in zip(outputs, inputs, strict=True):
            output.copy_(whole.view(self._ranks, -1)[0].view_as(output) * self._ranks)
        return self._send(self._others * bytes_of(inputs), outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> UnderWay:
        return self.reduce_scatter_tensor_coalesced([output], [whole])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> UnderWay:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[0] * self._ranks)
        return self._send(self._others * sum(map(bytes_of, inputs)), outputs)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: Any = None, sizes: Any = None, opts: Any = None
    ) -> UnderWay:
        room = output.view(-1)
        room.copy_(given.reshape(-1).repeat(-(-room.numel() // max(given.numel(), 1)))[: room.numel()])
        return self._send(self._others * bytes_of([given]), output)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> UnderWay:
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(given)
        return self._send(self._others * bytes_of(inputs), outputs)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> UnderWay:
        return self._send(bytes_of(tensors), tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> UnderWay:
        """What nobody sent takes no time on this rank's wire, and is nothing."""
        torch._foreach_zero_(tensors)
        return self._send(0, tensors)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: "")
    _device_types = property(lambda self: [torch.device("cpu")])


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def pretended(ranks: int, pace: Pace) -> Iterator[None]:
    """Inside, this process is rank 0 of so many, and messages go at this pace."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])
    environment = {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    with mock.patch.dict("os.environ", environment), mock.patch.object(_Current, "pace", pace):
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Time:
    """A clock that only naps and waits set, in place of the module `time`: the same figures on any machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _WireInTime(Wire):
    """Nothing is carried: who waits for a message sets the clock to when it arrives."""

    def send(self, seconds: float, arrived: Callable[[], None]) -> float:
        self._free = max(self._free, time.perf_counter()) + seconds
        arrived()
        return self._free


@contextmanager
def told_by_a_clock(*modules: ModuleType) -> Iterator[Time]:
    """Inside, messages and the naps of these modules take time of one clock, and none of the machine's."""
    clock = Time()
    with ExitStack() as stack:
        for module in (sys.modules[__name__], *modules):
            stack.enter_context(mock.patch.object(module, "time", clock))
        stack.enter_context(mock.patch.object(sys.modules[__name__], "Wire", _WireInTime))
        yield clock


class _Current:
    """torch makes groups by a function that it keeps for the life of the process."""

    pace = Pace()


def _make(store: Any, rank: int, size: int, timeout: Any) -> Delaying:
    return Delaying(_Current.pace, rank, size)
