"""Parameters of which rows of other ranks are still under way, while the next step runs: who uses one waits for it.

After an optimizer step the rows that other ranks stepped come behind the next forward, for parameters of blocks: these
wait for their own parameters when their forward begins. Until then such a parameter has the class `Arriving`, which
every use of it in Python passes through: operations, methods, attributes, copies. The first one waits, the parameter
becomes what it was, and nothing of this is left. So hooks, callbacks, evaluations and checkpoints see whole parameters
without being known here.

A use that does not pass through Python (TorchScript, a replayed CUDA graph, a compiled model) would not wait. Hence
only parameters of blocks whose forward the latest step began in Python are deferred.
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


class Arriving(nn.Parameter):
    """The class of a parameter whose first use is waited for.

    Attributes:
        watch: the rows on their way.
    """

    watch: Arrival

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if type(tensor) is cls:
                tensor._use()
        return function(*args, **(kwargs or {}))

    def _use(self) -> None:
        watch: Arrival | None = vars(self).get("watch")
        if watch is not None:  # else another thread has just waited
            watch.complete()

    # Copying looks at the class first.

    def __deepcopy__(self, memo: Any) -> Any:
        self._use()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._use()
        return self.__reduce_ex__(protocol)


class Arrival:
    """Rows on their way into some parameters.

    Args:
        parameters: into which they come.
        pending: waits for them, and puts them in place; None once they are there.
        buffered: the bytes of messages that lie beside the parameters.
        exposed: whether memory of a parameter is also used through something else, which would not wait.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], pending: Waitable, buffered: int, exposed: bool) -> None:
        self.parameters, self.buffered, self.exposed = parameters, buffered, exposed
        self.pending: Waitable | None = pending
        self._lock = threading.RLock()
        device = parameters[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def complete(self) -> None:
        """Waits; afterwards the parameters are whole and ordinary, or ordinary if a rank is gone."""
        with self._lock:
            pending, self.pending = self.pending, None  # lets go of messages
            if pending is None:
                return
            try:
                with ExitStack() as stack, torch.no_grad():  # no mode or transform of the user's takes part
                    if torch._C._len_torch_dispatch_stack():
                        stack.enter_context(_disable_current_modes())
                    if self._stream is not None:  # that on which rows were stepped waits for messages
                        stack.enter_context(torch.cuda.stream(self._stream))
                    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableFuncTorch():
                        pending.wait()
                if self._stream is not None:  # and who needs them for that one
                    torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            finally:
                for parameter in self.parameters:
                    if type(parameter) is Arriving:
                        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                        del vars(parameter)["watch"]


class Arrivals:
    """The rows on their way into the parameters of one model.

    Args:
        blocks: modules of it; their own forward waits for what they hold before anything in it runs, compiled or not.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._pending: list[Arrival] = []
        self._of_blocks = [list(block.parameters()) for block in blocks]
        self.in_blocks = {id(parameter) for parameters in self._of_blocks for parameter in parameters}
        """The `id` of the parameters that blocks wait for."""
        self._entered: set[int] = set()
        for number, block in enumerate(blocks):
            redirect_forward(block, self._entered_through, number)
        _known_before_forks().add(self)

    def start(self, messages: Iterable[Callable[[], Arrival]], buffer_bytes: int) -> None:
        """Starts all messages, in this order; what cannot be deferred is there when this returns.

        Args:
            messages: each starts one.
            buffer_bytes: how much may lie beside the parameters, beyond the latest message.
        """
        self.complete()
        started: list[Arrival] = []
        for message in messages:
            beside = [arrival for arrival in started if arrival.buffered and arrival.pending]
            while beside and sum(each.buffered for each in beside) > buffer_bytes:
                beside.pop(0).complete()
            started.append(message())
        entered = {id(parameter) for number in self._entered for parameter in self._of_blocks[number]}
        self._entered = set()
        for arrival in started:
            ready = [type(each) is nn.Parameter and id(each) in entered for each in arrival.parameters]
            if False not in ready and arrival.pending and not arrival.exposed:
                for parameter in arrival.parameters:  # its first use waits
                    vars(parameter)["watch"] = arrival
                    parameter.__class__ = Arriving
                self._pending.append(arrival)
        for arrival in started:
            if arrival not in self._pending:
                arrival.complete()

    def complete(self) -> None:
        """Waits for all."""
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
                    if type(parameter) is Arriving:
                        parameter._use()
            return forward(*args, **kwargs)

        return entered

    def close(self) -> None:
        """Waits for all. In a run that ends by an error, as on other ranks, what does not come is no second one."""
        for arrival in self._pending:
            with nullcontext() if sys.exc_info()[0] is None else suppress(RuntimeError):
                arrival.complete()


@functools.cache
def _known_before_forks() -> weakref.WeakSet[Arrivals]:
    """Those whose rows must be there when a process forks: in the new one, such as a loader's worker, none arrive."""
    known = weakref.WeakSet[Arrivals]()

    def complete() -> None:
        for arrivals in [*known]:
            arrivals.complete()

    os.register_at_fork(before=complete)  # once in a process: nobody can take it back
    return known
