"""Redirection: how techniques wrap a module without changing its class, its children or its names; and `backward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

Forward = Callable[..., Any]


class Redirected:
    """What a module's `forward` is wrapped in, remembering the `original` so that it can be taken back."""

    def __init__(self, wrapped: Forward, original: Forward) -> None:
        functools.update_wrapper(self, original)  # Hugging Face reads the signature of `forward`
        self.wrapped = wrapped
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self.wrapped(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, in memory or in a file, has its own forward: what is wrapped leads to this module."""
        return _itself, (self.original,)


def _itself(forward: Forward) -> Forward:
    return forward


def redirect_forward(module: nn.Module, wrap: Callable[..., Forward], *given: Any, **options: Any) -> None:
    """Replaces the module's `forward` by `wrap(*given, forward, **options)`; later redirections wrap earlier ones."""
    module.__dict__["forward"] = Redirected(wrap(*given, module.forward, **options), module.forward)


def restore_forward(module: nn.Module) -> None:
    """Takes all redirections of the module back."""
    if isinstance(redirected := vars(module).get("forward"), Redirected):
        vars(module)["forward"] = original = original_of(redirected)
        if getattr(original, "__func__", None) is getattr(type(module), "forward", None):  # that of its class
            del vars(module)["forward"]


def original_of(forward: Any) -> Any:
    """The forward that was redirected, with all redirections taken back."""
    while isinstance(forward, Redirected):  # later techniques wrap earlier ones
        forward = forward.original
    return forward


@contextmanager
def plain_forwards(module: nn.Module) -> Iterator[None]:
    """Inside, the module and those in it run as if no technique had touched them."""
    before = {part: it for part in module.modules() if isinstance(it := vars(part).get("forward"), Redirected)}
    for part, redirected in before.items():
        vars(part)["forward"] = original_of(redirected)
    try:
        yield
    finally:
        for part, redirected in before.items():
            vars(part)["forward"] = redirected


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors are made in this dtype where a forward names none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def redirect_call(module: nn.Module, wrap: Callable[..., Forward], *given: Any) -> None:
    """Leads every call of the module through `wrap(*given, call)`, around its hooks too; copies are called plainly.

    A call that is redirected already is led through the new wrapper only.
    """
    before = module._compiled_call_impl  # where torch keeps the call of a compiled module, and looks first
    original = before.original if isinstance(before, Redirected) else before or module._call_impl
    module._compiled_call_impl = Redirected(wrap(*given, original), original)


def restore_call(module: nn.Module) -> None:
    """Takes `redirect_call` back."""
    redirected = module._compiled_call_impl
    if isinstance(redirected, Redirected):
        plain = getattr(redirected.original, "__func__", None) is nn.Module._call_impl
        module._compiled_call_impl = None if plain else redirected.original


class Pass(NamedTuple):
    """The arguments of `torch.autograd.backward`."""

    tensors: Any
    grad_tensors: Any = None
    retain_graph: bool | None = None
    create_graph: bool = False
    grad_variables: Any = None
    inputs: Any = None


Lead = Callable[[Forward, Pass], None]
"""Called in place of `torch.autograd.backward`, with it and its arguments."""


@contextmanager
def backward_led(lead: Lead) -> Iterator[None]:
    """Inside, `lead` is called in place of `torch.autograd.backward`."""
    table, plain = vars(torch.autograd), torch.autograd.backward

    @functools.wraps(plain)  # by its name, modes of functions know it
    def backward(*args: Any, **kwargs: Any) -> None:
        lead(plain, Pass(*args, **kwargs))

    table["backward"] = backward
    try:
        yield
    finally:
        table["backward"] = plain
