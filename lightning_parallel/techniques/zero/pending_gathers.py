"""Overlaps the all-gather of parameters after `optimizer.step()` with the next forward (ZeRO stages 1 and 2).

After an optimizer step the rows that other ranks stepped may arrive while the next forward runs, for parameters of
blocks: the forward of a block waits for the block's parameters first. Until then such a parameter has the class
`PendingParameter`, through which every use in Python passes: operations, methods, attributes, copies. The first use
waits, and the parameter is an ordinary `nn.Parameter` again. So hooks, callbacks, evaluation and checkpoints see full
parameters without any code of their own for it.

A use that bypasses Python (TorchScript, a replayed CUDA graph, a compiled model) would not wait. Hence only parameters
of blocks whose forward ran in Python during the latest step are deferred.
See docs/decisions/0046-rows-behind-the-next-forward.md.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_parallel.collectives.functional import Waitable
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward


class PendingParameter(nn.Parameter):
    """Class of a parameter whose all-gather is pending; the first use waits for it.

    Attributes:
        watch: the pending all-gather.
    """

    watch: PendingAllGather

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if type(tensor) is cls:
                tensor._use()
        return function(*args, **(kwargs or {}))

    def _use(self) -> None:
        watch: PendingAllGather | None = vars(self).get("watch")
        if watch is not None:  # None if another thread has just waited
            watch.complete()

    # `nn.Parameter` reads `type(self)` in these two before its first operation, so they wait first.

    def __deepcopy__(self, memo: Any) -> Any:
        self._use()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._use()
        return self.__reduce_ex__(protocol)


class PendingAllGather:
    """Pending all-gather of the rows of some parameters.

    Args:
        parameters: the parameters that receive the rows.
        pending: waits for the rows and copies them into the parameters; the attribute is None once that is done.
        buffered: bytes of message buffers; 0 if the rows are gathered directly into the parameters.
        exposed: whether another tensor shares memory with a parameter; a use of that tensor would not wait.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], pending: Waitable, buffered: int, exposed: bool) -> None:
        self.parameters, self.buffered, self.exposed = parameters, buffered, exposed
        self.pending: Waitable | None = pending
        self._lock = threading.RLock()
        device = parameters[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def complete(self) -> None:
        """Wait until the parameters are full, and make them ordinary parameters again, even if a rank is gone."""
        with self._lock:
            pending, self.pending = self.pending, None  # releases the message buffers
            if pending is None:
                return
            try:
                with ExitStack() as stack, torch.no_grad():  # without the user's dispatch modes and transforms
                    if torch._C._len_torch_dispatch_stack():
                        stack.enter_context(_disable_current_modes())
                    if self._stream is not None:  # the stream of the optimizer's step waits for the messages
                        stack.enter_context(torch.cuda.stream(self._stream))
                    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableFuncTorch():
                        pending.wait()
                if self._stream is not None:  # and the stream that uses the parameters waits for that one
                    torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            finally:
                for parameter in self.parameters:
                    if type(parameter) is PendingParameter:
                        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                        del vars(parameter)["watch"]


class AllGatherQueue:
    """Queue of the pending all-gathers of one model's parameters.

    Args:
        blocks: modules of the model; the forward of each, compiled or not, first waits for the block's parameters.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._pending: list[PendingAllGather] = []
        self._of_blocks = [list(block.parameters()) for block in blocks]
        self.in_blocks = {id(parameter) for parameters in self._of_blocks for parameter in parameters}
        """The `id` of each parameter that a block waits for."""
        self._entered: set[int] = set()
        for number, block in enumerate(blocks):
            redirect_forward(block, self._entered_through, number)
        _known_before_forks().add(self)

    def start(self, messages: Iterable[Callable[[], PendingAllGather]], buffer_bytes: int) -> None:
        """Start all-gathers, in the same order on all ranks; wait for those that cannot be deferred.

        Args:
            messages: functions that each start one all-gather.
            buffer_bytes: limit of the message buffers that exist at once, not counting the latest message.
        """
        self.complete()
        started: list[PendingAllGather] = []
        for message in messages:
            buffered = [arrival for arrival in started if arrival.buffered and arrival.pending]
            while buffered and sum(arrival.buffered for arrival in buffered) > buffer_bytes:
                buffered.pop(0).complete()
            started.append(message())
        entered = {id(parameter) for number in self._entered for parameter in self._of_blocks[number]}
        self._entered = set()
        for arrival in started:
            deferrable = [type(each) is nn.Parameter and id(each) in entered for each in arrival.parameters]
            if False not in deferrable and arrival.pending and not arrival.exposed:
                for parameter in arrival.parameters:  # from now on the first use of each waits
                    vars(parameter)["watch"] = arrival
                    parameter.__class__ = PendingParameter
                self._pending.append(arrival)
        for arrival in started:
            if arrival not in self._pending:
                arrival.complete()

    def complete(self) -> None:
        """Wait for all pending all-gathers."""
        pending, self._pending = self._pending, []
        for arrival in pending:
            arrival.complete()

    def _entered_through(self, number: int, forward: Forward) -> Forward:
        parameters = self._of_blocks[number]

        def entered(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                if torch.is_grad_enabled():
                    self._entered.add(number)
                for parameter in parameters if self._pending else ():
                    if type(parameter) is PendingParameter:
                        parameter._use()
            return forward(*args, **kwargs)

        return entered

    def close(self) -> None:
        """Wait for all. While an exception is propagating, rows that never arrive do not raise a second one."""
        for arrival in self._pending:
            with nullcontext() if sys.exc_info()[0] is None else suppress(RuntimeError):
                arrival.complete()


@functools.cache
def _known_before_forks() -> weakref.WeakSet[AllGatherQueue]:
    """Queues that are completed before a fork: in the new process, e.g. a DataLoader worker, no rows would arrive."""
    known = weakref.WeakSet[AllGatherQueue]()

    def complete() -> None:
        for arrivals in [*known]:
            arrivals.complete()

    os.register_at_fork(before=complete)  # once per process: such a handler cannot be removed
    return known
