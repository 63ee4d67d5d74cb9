"""Wrapping of a module's `forward` or call without changing its class, children or names; and of `backward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

Forward = Callable[..., Any]


class Redirected:
    """A wrapped `forward` or call of a module, which keeps the `original`, so that the wrapping can be undone."""

    def __init__(self, wrapped: Forward, original: Forward) -> None:
        functools.update_wrapper(self, original)  # Hugging Face reads the signature of `forward`
        self.wrapped = wrapped
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self.wrapped(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle only the original: `wrapped` refers to this module, not to its copy."""
        return original_of, (self.original,)


def redirect_forward(module: nn.Module, wrap: Callable[..., Forward], *given: Any, **options: Any) -> None:
    """Replace the module's `forward` by `wrap(*given, forward, **options)`; later redirections wrap earlier ones."""
    module.__dict__["forward"] = Redirected(wrap(*given, module.forward, **options), module.forward)


def restore_forward(module: nn.Module) -> None:
    """Undo all redirections of the module's `forward`."""
    if isinstance(redirected := vars(module).get("forward"), Redirected):
        vars(module)["forward"] = original = original_of(redirected)
        if getattr(original, "__func__", None) is getattr(type(module), "forward", None):  # the method of its class
            del vars(module)["forward"]


def original_of(forward: Any) -> Any:
    """Return the `forward` without its redirections."""
    while isinstance(forward, Redirected):  # later techniques wrap earlier ones
        forward = forward.original
    return forward


@contextmanager
def plain_forwards(module: nn.Module) -> Iterator[None]:
    """Context manager: the forwards of a module and of its submodules are not redirected inside."""
    wrappers = {part: call for part in module.modules() if isinstance(call := vars(part).get("forward"), Redirected)}
    for part, redirected in wrappers.items():
        vars(part)["forward"] = original_of(redirected)
    try:
        yield
    finally:
        for part, redirected in wrappers.items():
            vars(part)["forward"] = redirected


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager: set torch's default dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def redirect_call(module: nn.Module, wrap: Callable[..., Forward], *given: Any) -> None:
    """Replace every call of the module, hooks included, by `wrap(*given, call)`; copies of the module are not affected.

    A redirection that is in place already is replaced.
    """
    current = module._compiled_call_impl  # torch keeps the call of a compiled module here, and tries it first
    original = current.original if isinstance(current, Redirected) else current or module._call_impl
    module._compiled_call_impl = Redirected(wrap(*given, original), original)


def restore_call(module: nn.Module) -> None:
    """Undo `redirect_call`."""
    redirected = module._compiled_call_impl
    if isinstance(redirected, Redirected):
        is_plain = getattr(redirected.original, "__func__", None) is nn.Module._call_impl
        module._compiled_call_impl = None if is_plain else redirected.original


class Pass(NamedTuple):
    """The arguments of `torch.autograd.backward`."""

    tensors: Any
    grad_tensors: Any = None
    retain_graph: bool | None = None
    create_graph: bool = False
    grad_variables: Any = None
    inputs: Any = None


@contextmanager
def intercept_backward(lead: Callable[[Forward, Pass], None]) -> Iterator[None]:
    """Context manager: `lead` is called inside in place of `torch.autograd.backward`, with that and its arguments."""
    table, original = vars(torch.autograd), torch.autograd.backward

    @functools.wraps(original)  # function modes recognize `backward` by its name
    def backward(*args: Any, **kwargs: Any) -> None:
        lead(original, Pass(*args, **kwargs))

    table["backward"] = backward
    try:
        yield
    finally:
        table["backward"] = original
