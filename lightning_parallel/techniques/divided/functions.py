"""Functions of autograd that are written in Python, with tensors that ranks have divided.

`Function.apply` asks no tensor for its rules, and would take a divided one for a tensor without history: gradients
would be lost without a word. So for the time of a step such functions get the whole, with its history. So do
transforms of `torch.func`, which act below Python: what they are given, and what functions that they call find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._functorch import apis, eager_transforms
from torch._functorch import utils as of_functions
from torch.utils._pytree import tree_map_only

from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools.redirect import Pass, backward_led

KEEPS_ARGUMENTS = "_NoopSaveInputs"
"""The function by which `torch.utils.checkpoint` keeps what a recomputation starts from: it computes nothing."""

PLAIN = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None)))
"""Types of arguments that are neither divided nor called."""

TRANSFORMS = (
    (apis, "vmap_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_vjp_with_argnums"),
    (eager_transforms, "_jvp_with_argnums"),
)
"""Through which all transforms of `torch.func` go, which look them up at each call."""


@contextmanager
def functions_get_wholes() -> Iterator[None]:
    """Inside, functions of autograd and transforms get whole tensors, and backward passes the leaves of their inputs.

    `Function.apply` looks up one function of torch at each call, and leads its arguments through it; that one is
    replaced. To replace `apply` would miss code that took it earlier, as in `norm = MyNorm.apply`.
    """
    before = of_functions.unwrap_dead_wrappers
    transforms = [(module, name, getattr(module, name)) for module, name in TRANSFORMS]

    def unwrapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not PLAIN.issuperset(map(type, args)) and any(
            isinstance(each, Divided) or _is_called(each) for each in args
        ):
            function = sys._getframe(1).f_locals["cls"]
            if function.__name__ != KEEPS_ARGUMENTS:
                args = tuple(_with_wholes(each, function.__name__) for each in args)
        return before(args)

    of_functions.unwrap_dead_wrappers = unwrapped
    for module, name, transform in transforms:
        setattr(module, name, _of_wholes(transform))
    try:
        with backward_led(_to_leaves):
            yield
    finally:
        of_functions.unwrap_dead_wrappers = before
        for module, name, transform in transforms:
            setattr(module, name, transform)


def _of_wholes(transform: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Divided, lambda each: each.whole("torch.func"), (args, kwargs))
        return transform(*args, **kwargs)

    return run


def _to_leaves(backward: Callable[..., None], given: Pass) -> None:
    """Stands for `torch.autograd.backward`, which would look for divided inputs in the graph and find none."""
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
