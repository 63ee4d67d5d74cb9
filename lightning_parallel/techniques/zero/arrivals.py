"""Parameters of which rows of other ranks are still under way, while the next step runs: who uses one waits for it.

After an optimizer step the rows that other ranks stepped come behind the next forward. Until they are there a parameter
has the class `Arriving`, which every use of it in Python passes through: operations, methods, attributes, copies. The
first one waits, the parameter becomes what it was, and nothing of this is left. So hooks, callbacks, evaluations and
checkpoints see whole parameters without being known here.

A use that does not pass through Python (TorchScript, a replayed CUDA graph, a C++ extension) would not wait. Hence only
what a step was seen to use is deferred: the first step after which a parameter was stepped is watched, with its rows in
place. See docs/decisions/0023-stepped-rows-behind-the-next-forward.md.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_parallel.collectives.functional import Waitable, no_second_error
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward


class Watch(Protocol):
    """Somebody who must know of the first use of a parameter."""

    def used(self, parameter: nn.Parameter, function: Callable[..., Any] | None) -> None:
        """A parameter is about to be used; afterwards it is an ordinary one again."""


class Arriving(nn.Parameter):
    """The class of a parameter whose first use is waited for.

    Attributes:
        watch: what waits.
    """

    watch: Watch

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if type(tensor) is cls:
                tensor._use(function)
        return function(*args, **(kwargs or {}))

    def _use(self, function: Any = None) -> None:
        watch: Watch | None = vars(self).get("watch")
        if watch is not None:  # else another thread has just waited
            watch.used(self, function)

    # Copying looks at the class first.

    def __deepcopy__(self, memo: Any) -> Any:
        self._use()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._use()
        return self.__reduce_ex__(protocol)


def _watch(parameter: nn.Parameter, watch: Watch) -> None:
    vars(parameter)["watch"] = watch
    parameter.__class__ = Arriving


def _release(parameter: nn.Parameter) -> None:
    if type(parameter) is Arriving:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del vars(parameter)["watch"]


@contextmanager
def plainly() -> Iterator[None]:
    """Inside, parameters are used as they are at the moment, and no mode or transform of the user's takes part."""
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with modes, torch._C.DisableTorchFunctionSubclass(), torch._C._DisableFuncTorch(), torch.no_grad():
        yield


class Arrival:
    """Rows on their way into some parameters.

    Args:
        parameters: into which they come.
        pending: waits for them, and puts them in place.
        buffered: the bytes of messages that lie beside the parameters.
        exposed: whether memory of a parameter is also used through something else, which would not wait.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], pending: Waitable, buffered: int, exposed: bool) -> None:
        self.parameters, self.buffered, self.exposed = parameters, buffered, exposed
        self._pending: Waitable | None = pending
        self._lock = threading.RLock()
        device = parameters[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def over(self) -> bool:
        """Whether the rows are in place."""
        return self._pending is None

    def defer(self) -> None:
        """Lets the first use of a parameter wait."""
        for parameter in self.parameters:
            _watch(parameter, self)

    def used(self, parameter: nn.Parameter, function: Callable[..., Any] | None) -> None:
        """See `Watch.used`."""
        self.complete()

    def complete(self) -> None:
        """Waits; afterwards the parameters are whole and ordinary, or ordinary if a rank is gone."""
        with self._lock:
            pending, self._pending = self._pending, None  # lets go of messages
            if pending is None:
                return
            try:
                with self._on_stream(), plainly():
                    pending.wait()
            finally:
                for parameter in self.parameters:
                    _release(parameter)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Messages are waited for by the stream on which the rows were stepped, and that one by who needs them."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            current.wait_stream(self._stream)


class Rehearsal:
    """Watches which parameters a step uses, in a way that would wait for them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.used_in_python: set[int] = set()  # their `id`, as tensors are slow to be hashed
        self._watched = [parameter for parameter in parameters if type(parameter) is nn.Parameter]
        for parameter in self._watched:
            _watch(parameter, self)

    def used(self, parameter: nn.Parameter, function: Callable[..., Any] | None) -> None:
        """See `Watch.used`. To read an attribute, such as the gradient, is not yet to use the values."""
        _release(parameter)
        if getattr(function, "__name__", "") not in ("__get__", "__set__", "__delete__"):
            self.used_in_python.add(id(parameter))

    def close(self) -> None:
        """The step is over. Rows may be on their way already, where the optimizer stepped within it."""
        for parameter in self._watched:
            if vars(parameter).get("watch") is self:
                _release(parameter)


class Arrivals:
    """The rows on their way into the parameters of one model.

    Args:
        blocks: modules of it; their own forward waits for what they hold before anything in it runs, compiled or not.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._pending: list[Arrival] = []
        self._new: list[nn.Parameter] = []
        self._known: set[int] = set()
        self._used: set[int] = set()
        self._entered: set[int] = set()
        self._rehearsal: Rehearsal | None = None
        self._unread: list[nn.Parameter] = []
        self._running = self._compiles = False
        for block in blocks:
            redirect_forward(block, partial(self._entered_through, list(block.parameters())))
        _before_forks(self)

    # ---------------------------------------------------------------- after an optimizer step

    def start(self, messages: Iterable[Callable[[], Arrival]], buffer_bytes: int) -> None:
        """Starts all messages, in this order; what cannot be deferred is there when this returns.

        Args:
            messages: each starts one.
            buffer_bytes: how much may lie beside the parameters, beyond the latest message.
        """
        self.complete()
        started: list[Arrival] = []
        for message in messages:
            _make_room(started, buffer_bytes)
            started.append(message())
        self._unread = []
        for arrival in started:
            if not arrival.over and self._may_wait(arrival):
                arrival.defer()
                self._pending.append(arrival)
        for arrival in started:
            if arrival not in self._pending:
                arrival.complete()
                self._new += [parameter for parameter in arrival.parameters if id(parameter) not in self._known]

    def _may_wait(self, arrival: Arrival) -> bool:
        safe = self._entered if self._compiles else self._used
        return not arrival.exposed and all(type(p) is nn.Parameter and id(p) in safe for p in arrival.parameters)

    def complete(self) -> None:
        """Waits for all."""
        pending, self._pending = self._pending, []
        for arrival in pending:
            arrival.complete()

    # ---------------------------------------------------------------- during a forward

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a step of the user's. The first one after parameters were stepped is watched."""
        if not torch.is_grad_enabled():
            yield
            return
        self._begin_watching()
        self._running = True
        try:
            yield
        finally:
            self._running = False
            self._end_watching()
            self._unread = [p for arrival in self._pending if not arrival.over for p in arrival.parameters]

    def _begin_watching(self) -> None:
        if self._new:
            self._known.update(map(id, self._new))
            self._rehearsal = Rehearsal(() if self._compiles else self._new)
            self._new = []

    def _end_watching(self) -> None:
        if self._rehearsal is not None:
            self._rehearsal.close()
            self._used |= self._rehearsal.used_in_python
            self._rehearsal = None

    def _entered_through(self, parameters: Sequence[nn.Parameter], forward: Forward) -> Forward:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling() and (self._pending or self._rehearsal is not None):
                self._enter(parameters)
            return forward(*args, **kwargs)

        return entered

    def _enter(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if type(parameter) is Arriving:
                parameter._use()
        if self._rehearsal is not None:
            self._entered.update(map(id, parameters))
            self._used.update(map(id, parameters))

    # ---------------------------------------------------------------- what nobody may overlook

    def before_backward(self) -> list[nn.Parameter]:
        """Waits for what the forward did not use.

        Returns:
            Parameters that a whole forward passed without waiting for them: no gradient may come for them.
        """
        self.complete()
        unread, self._unread = self._unread, []
        return [] if self._running else unread

    def before_compiling(self) -> None:
        """A compiler looks at classes, and what it made does not: from now on only entrances of blocks count."""
        self._compiles = True
        self.complete()
        if self._rehearsal is not None:
            self._rehearsal.close()

    def close(self) -> None:
        """Waits for all."""
        self._end_watching()
        pending, self._pending = self._pending, []
        for arrival in pending:
            with no_second_error():
                arrival.complete()


def _make_room(started: Sequence[Arrival], limit: int) -> None:
    for arrival in started:
        if sum(each.buffered for each in started if not each.over) <= limit:
            return
        if arrival.buffered:
            arrival.complete()


def _before_forks(arrivals: Arrivals) -> None:
    """In a forked process, such as a loader's worker, nothing arrives."""
    known = weakref.WeakMethod(arrivals.complete)
    os.register_at_fork(before=lambda: (known() or nullcontext)())


def refuse_unwatched_use(parameters: Sequence[nn.Parameter]) -> None:
    """Raises for parameters whose rows were still under way when a step had used them.

    Raises:
        RuntimeError: tells what to do.
    """
    if parameters:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters)
        raise RuntimeError(
            f"parameters of the shapes {shapes} got gradients from a step that did not use them through PyTorch's "
            "Python functions, and so not with the values that the optimizer gave them; a model that is replayed (CUDA "
            "graphs) or runs outside of Python (TorchScript) must do so from the first step on"
        )
