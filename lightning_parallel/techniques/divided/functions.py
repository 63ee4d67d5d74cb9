"""Functions of autograd that are written in Python, with tensors that ranks have divided.

`Function.apply` asks no tensor for its rules, and would take a divided one for a tensor without history: gradients
would be lost without a word. So for the time of a step such functions get the whole, with its history. So do
transforms of `torch.func`, which act below Python: what they are given, and what functions that they call find; and
TorchScript. What the user compiled by `torch.compile` runs as it is where it may meet divided tensors.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._functorch import apis, eager_transforms
from torch._functorch import utils as of_functions
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.mesh import rank_in_world
from lightning_parallel.techniques.divided.in_graph import inside
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, let_change
from lightning_parallel.techniques.tools.redirect import Pass, Redirected, led_backward

log = logging.getLogger(__name__)

Lead = Callable[[Callable[..., Any]], Callable[..., Any]]

KEEPS_ARGUMENTS = "_NoopSaveInputs"
"""The function by which `torch.utils.checkpoint` keeps what a recomputation starts from: it computes nothing."""

PLAIN = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None)))
"""Types of arguments that are neither divided nor called."""

OF_CODE = frozenset((FunctionType, BuiltinFunctionType, ModuleType, type, torch.dtype, torch.device))
"""Types of what functions name beside tensors."""

GET_WHOLES = (
    (apis, "vmap_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_vjp_with_argnums"),
    (eager_transforms, "_jvp_with_argnums"),
    (torch.jit.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
)
"""Through which all transforms of `torch.func` go, which look them up at each call, and what TorchScript compiled."""

LED: tuple[tuple[Any, str], ...] = (
    (of_functions, "unwrap_dead_wrappers"),
    (eval_frame, "_callback_from_stance"),
    (torch.autograd, "backward"),
    *GET_WHOLES,
)
"""All that is replaced for the time of a step."""

OF_BLOCKS = inside.__module__
"""Where the functions are from that the strategy has compiled: they get plain tensors."""

NOT_THE_USERS = ("torch.", "lightning_parallel.")
"""Where functions are from that meet no divided tensors when they are not given any."""


class FunctionsGetWholes:
    """Inside, functions of autograd, transforms and TorchScript get whole tensors, backward passes leaves of inputs.

    `Function.apply` looks up one function of torch at each call, and leads its arguments through it; that one is
    replaced. To replace `apply` would miss code that took it earlier, as in `norm = MyNorm.apply`. So is one that each
    call of a compiled function looks up: by its answer the function runs as it is where divided tensors may meet in it.

    What stands for the functions of torch is kept from step to step: to make it anew takes longer than to put it there.

    And views remember the operations that made them, as torch has them do where there are no strides: after changes in
    place they have their history by these. By strides, views of which a rank has no element have none that can be
    differentiated twice, and other ranks would wait for that rank in backward.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._plain: list[Any] = []
        self._led: list[Any] = []
        self._leads: list[Lead] = [
            _unwrapped,
            partial(_callback, set[str]()),
            partial(led_backward, _to_leaves),
            *[_of_wholes] * len(GET_WHOLES),
        ]

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._views = _force_original_view_tracking(True)
        plain = [getattr(owner, name) for owner, name in LED]
        if plain != self._plain:
            self._plain, self._led = plain, [lead(each) for lead, each in zip(self._leads, plain, strict=True)]
        _put(self._led)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            _put(self._plain)
            self._views.__exit__(None, None, None)


def _put(functions: Iterable[Any]) -> None:
    for (owner, name), function in zip(LED, functions, strict=True):
        setattr(owner, name, function)


def _unwrapped(before: Callable[..., Any]) -> Callable[..., Any]:
    def unwrapped(args: tuple[Any, ...]) -> Any:
        if not PLAIN.issuperset(map(type, args)) and any(
            isinstance(each, Divided) or _is_called(each) for each in args
        ):
            function = sys._getframe(1).f_locals["cls"]
            if function.__name__ != KEEPS_ARGUMENTS:
                for each in filter(is_divided, args) if _writes(function) else ():
                    let_change(each)
                args = tuple(_with_wholes(each, function.__name__) for each in args)
        return before(args)

    return unwrapped


def _writes(function: Any) -> bool:
    """Whether a function of autograd changes what it is given, which it must say by `mark_dirty`."""
    codes = (getattr(inspect.unwrap(each), "__code__", None) for each in (function.forward, function.setup_context))
    return any(code is not None and "mark_dirty" in code.co_names for code in codes)


def _of_wholes(function: Callable[..., Any]) -> Callable[..., Any]:
    reader = "torch.func" if isinstance(function, FunctionType) else "TorchScript"

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Divided, partial(_to_change, reader=reader), (args, kwargs))
        return function(*args, **kwargs)

    return run


def _to_change(divided: Divided, reader: str) -> Tensor:
    """The whole, for code that nobody hears: it may change what it gets."""
    if is_divided(divided) and not torch.compiler.is_dynamo_compiling():
        let_change(divided)
    return divided.whole(reader)


def _callback(said: set[str], before: Callable[..., Any]) -> Callable[..., Any]:
    def callback(compiler: Any) -> Any:
        """Stands for what tells a call of a compiled function by what its frames are compiled: by nothing."""
        if not callable(compiler):  # nothing is to be compiled
            return before(compiler)
        called = sys._getframe(1).f_locals
        function = called.get("fn")
        is_own = getattr(function, "__module__", None) == OF_BLOCKS
        if function is None or is_own or not _may_meet_divided(function, called):
            return before(compiler)
        name = getattr(function, "__qualname__", type(function).__name__)
        if name not in said and rank_in_world() == 0:
            log.warning(
                "%s, compiled by torch.compile, runs as it is where it may get tensors that ranks have divided; to "
                "compile, let the strategy do it with the blocks: HybridStrategy(..., Compile())",
                name,
            )
        said.add(name)
        if called.get("fullgraph_count_enabled"):  # nobody asks how many were
            vars(eval_frame)["set_fullgraph_compiled_frame_count"](-1)
        return None

    return callback


def _may_meet_divided(function: Any, called: dict[str, Any]) -> bool:
    """Whether a compiled function is given divided tensors, or is one of the user's that may find some elsewhere."""
    while isinstance(function, Redirected):
        function = function.original
    given = tree_leaves((called["args"], called["kwargs"]))
    if isinstance(function, MethodType):
        given, function = [*given, function.__self__], function.__func__
    if any(map(_holds_divided, given)) or not isinstance(function, FunctionType):
        return True
    if function.__module__.startswith(NOT_THE_USERS) or function.__name__ == "forward":  # of a block
        return False
    code, named = function.__code__, function.__globals__
    found = tree_leaves((given, [named[name] for name in code.co_names if name in named]))
    unknown = any(type(each) not in PLAIN | OF_CODE and not isinstance(each, nn.Module) for each in found)
    return unknown or any(map(_holds_divided, found)) or not {"__class__"}.issuperset(code.co_freevars)


def _holds_divided(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(isinstance(each, Divided) for part in value.modules() for each in part._parameters.values())
    return isinstance(value, Divided)


def _to_leaves(backward: Callable[..., None], given: Pass) -> None:
    """Stands for `torch.autograd.backward`, which would look for divided inputs in the graph and find none.

    Raises:
        RuntimeError: gradients of parameters are to have a graph, which those lack that are summed when the step ends.
    """
    asked = given.inputs is not None and not any(
        isinstance(each, (Divided, nn.Parameter)) for each in tree_leaves(given.inputs)
    )
    if given.create_graph and not asked:
        raise RuntimeError(
            "backward(create_graph=True) for gradients of parameters, of which ranks sum some up when a step ends; use "
            "torch.autograd.grad(loss, parameters, create_graph=True), whose results are complete and have a graph"
        )
    backward(*given._replace(inputs=tree_map_only(Divided, lambda each: each.own, given.inputs)))


class GivesWholes:
    """What a function of autograd calls, as a reentrant checkpoint does with a layer: its results are whole.

    Args:
        called: a function, or a module.
    """

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        result = self._called(*args, **kwargs)
        return tree_map_only(Divided, lambda each: each.whole("a torch.autograd.Function"), result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._called, name)


def _with_wholes(argument: Any, function: str) -> Any:
    if isinstance(argument, Divided):
        return argument.whole(function)
    return GivesWholes(argument) if _is_called(argument) else argument


def _is_called(argument: Any) -> bool:
    return callable(argument) and not isinstance(argument, (type, GivesWholes))
