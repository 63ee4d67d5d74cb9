"""Redirection: how techniques wrap a module without changing its class, its children or its names; and `backward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

Forward = Callable[..., Any]


class Redirected:
    """A module's `forward` led through `wrap` of it, remembering the `original` so that it can be taken back."""

    def __init__(self, wrap: Callable[[Forward], Forward], original: Forward) -> None:
        functools.update_wrapper(self, original)  # Hugging Face reads the signature of `forward`
        self.wrap = wrap
        self.wrapped = wrap(original)
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self.wrapped(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, in memory or in a file, has its own forward: what is wrapped leads to this module."""
        return _itself, (self.original,)


def _itself(forward: Forward) -> Forward:
    return forward


class Surrounded(Redirected):
    """A forward with something done around it that computes nothing: a compiler does it around its graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if torch.compiler.is_dynamo_compiling():
            return self.original(*args, **kwargs)
        return self.wrapped(*args, **kwargs)


def redirect_forward(
    module: nn.Module, wrap: Callable[[Forward], Forward], kind: type[Redirected] = Redirected
) -> None:
    """Replaces the module's `forward` by `wrap(forward)`; later redirections wrap earlier ones."""
    module.__dict__["forward"] = kind(wrap, module.forward)


def with_surroundings_of(forward: Forward, run: Forward) -> Forward:
    """What runs, with that around it which was put around a forward, and which its graphs leave out."""
    wraps = []
    while isinstance(forward, Redirected):
        wraps += [forward.wrap] if isinstance(forward, Surrounded) else []
        forward = forward.original
    for wrap in reversed(wraps):
        run = wrap(run)
    return run


def restore_forward(module: nn.Module) -> None:
    """Takes all redirections of the module back."""
    while isinstance(redirected := module.__dict__.get("forward"), Redirected):
        put_forward(module, redirected.original)


def put_forward(module: nn.Module, forward: Forward) -> None:
    """Makes this the module's forward."""
    if own_forward(module, forward) is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def own_forward(module: nn.Module, forward: Forward) -> Forward | None:
    """The entry that a module needs for this forward: None for that of its class, which needs none."""
    return None if getattr(forward, "__func__", None) is getattr(type(module), "forward", None) else forward


@contextmanager
def plain_forwards(module: nn.Module) -> Iterator[None]:
    """Inside, the module and those in it run as if no technique had touched them."""
    redirected = {part: vars(part)["forward"] for part in module.modules() if "forward" in vars(part)}
    for part, forward in redirected.items():
        while isinstance(forward, Redirected):
            forward = forward.original
        vars(part)["forward"] = forward
    try:
        yield
    finally:
        for part, forward in redirected.items():
            vars(part)["forward"] = forward


class Listener(TorchFunctionMode):
    """A mode that hears what a step computes, but not what is in graphs: these are read, and run, without it."""


def unheard(forward: Forward) -> Forward:
    """The forward, as it runs where no listener is: a compiler would read it once more, for each of them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_torch_function_mode_enabled() or torch.compiler.is_dynamo_compiling():
            return forward(*args, **kwargs)
        with without_listeners():
            return forward(*args, **kwargs)

    return run


@contextmanager
def without_listeners() -> Iterator[None]:
    """Inside, no listener is active; modes of others are."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    left = [mode for mode in modes if not isinstance(mode, Listener)]
    _replace_modes(modes, left)
    try:
        yield
    finally:
        _replace_modes(left, modes)


def _replace_modes(before: list[Any], now: list[Any]) -> None:
    if len(before) != len(now):
        for _ in before:
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in now:
            _push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors are made in this dtype where a forward names none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def redirect_call(module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
    """Leads every call of the module through `wrap(call)`, around its hooks too; copies of it are called plainly.

    A call that is redirected already is led through the new wrapper only.
    """
    before = module._compiled_call_impl  # where torch keeps the call of a compiled module, and looks first
    original = before.original if isinstance(before, Redirected) else before or module._call_impl
    module._compiled_call_impl = Redirected(wrap, original)


def restore_call(module: nn.Module) -> None:
    """Takes `redirect_call` back."""
    redirected = module._compiled_call_impl
    if isinstance(redirected, Redirected):
        plain = getattr(redirected.original, "__func__", None) is nn.Module._call_impl
        module._compiled_call_impl = None if plain else redirected.original


@contextmanager
def plain_calls(module: nn.Module) -> Iterator[None]:
    """Inside, calls of the module and of those in it are led nowhere else."""
    redirected = {
        part: part._compiled_call_impl for part in module.modules() if isinstance(part._compiled_call_impl, Redirected)
    }
    for part, call in redirected.items():
        plain = getattr(call.original, "__func__", None) is nn.Module._call_impl
        part._compiled_call_impl = None if plain else call.original
    try:
        yield
    finally:
        for part, call in redirected.items():
            part._compiled_call_impl = call


class Pass(NamedTuple):
    """What `torch.autograd.backward` is given."""

    tensors: Any
    grad_tensors: Any = None
    retain_graph: bool | None = None
    create_graph: bool = False
    grad_variables: Any = None
    inputs: Any = None


Lead = Callable[[Forward, Pass], None]
"""What is called in place of `torch.autograd.backward`, with it and what it is given."""


def led_backward(lead: Lead, plain: Forward) -> Forward:
    """What stands for `torch.autograd.backward` where `lead` is called in its place."""

    @functools.wraps(plain)  # by its name, modes of functions know it
    def backward(*args: Any, **kwargs: Any) -> None:
        lead(plain, Pass(*args, **kwargs))

    return backward


@contextmanager
def backward_led(lead: Lead) -> Iterator[None]:
    """Inside, `lead` is called in place of `torch.autograd.backward`."""
    table, plain = vars(torch.autograd), torch.autograd.backward
    table["backward"] = led_backward(lead, plain)
    try:
        yield
    finally:
        table["backward"] = plain
