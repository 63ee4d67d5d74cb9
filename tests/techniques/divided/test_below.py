"""Below autograd, operations on divided tensors are exact, write to them, or are refused where a gradient is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks


@torch.library.custom_op("lightning_parallel_tests::shift_", mutates_args={"x"})
def shift(x: Tensor, by: float) -> None:
    """Adds to each element the one beside it."""
    x.add_(x.roll(1, -1), alpha=by)


def scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is, of newer torch
        return torch.jit.script(function)  # type: ignore[no-any-return]


def halved(x: Tensor) -> Tensor:
    x[:, 1:3] *= 0.5
    return x.add_(1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "an operation of a library": lambda x: shift(x, 0.5),
    "one on what has no history": lambda x: shift(x.detach(), 0.5),
    "a script": lambda x: scripted(halved)(x),
    "a script, on data": lambda x: scripted(halved)(x.data),
    "a transform": lambda x: torch.vmap(lambda row: row.mul_(0.5))(x),
}


def elements() -> Any:
    return Ranks(dist.group.WORLD, "tp").chunks(6)


def read_by_a_transform(x: Tensor) -> Tensor:
    """A transform finds in a function what it was not given, and one looks along what it is given."""
    found = torch.func.grad(lambda scale: (x * scale).square().sum())(torch.tensor(2.0)) * x
    return found + torch.func.jvp(torch.sin, (x,), (x,))[1]  # type: ignore[no-any-return]


READS: dict[str, Callable[[Tensor], Any]] = {
    "a script": lambda x: scripted(product)(x, x),
    "a transform of rows": lambda x: torch.vmap(lambda row: row.cumsum(0) * 2)(x),
    "a gradient": lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
    "a Jacobian": lambda x: torch.func.jacrev(lambda y: y.cumsum(1)[0])(x),
}


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.relu(y).sum(1, keepdim=True)


def halves_of(whole: Tensor) -> tuple[Any, Tensor]:
    """How ranks divide columns, and what this one has of them."""
    parts = Ranks(dist.group.WORLD, "tp").chunks(6)
    return parts, parts.take(whole.detach(), 1).clone()


@ranks(2)
def test_writes_below_autograd_are_there() -> None:
    for name, write in WRITES.items():
        whole = torch.arange(24.0).view(4, 6)
        parts, own = halves_of(whole)
        divided = Divided(own, {1: parts})
        with FunctionsGetFullTensors(), torch.no_grad():
            write(divided)
            write(whole)
            torch.testing.assert_close((divided * 2).whole(), whole * 2, msg=name)


@ranks(2)
def test_reads_below_autograd_are_exact_or_refused() -> None:
    """What loses a gradient is refused; a transform may find in a function what it was not given."""
    for name, read in READS.items():
        whole = torch.arange(24.0).view(4, 6) / 9
        parts, own = halves_of(whole)
        with FunctionsGetFullTensors():
            torch.testing.assert_close((read(Divided(own, {1: parts})) + 0), read(whole), msg=name)
            own.requires_grad_()
            with pytest.raises(RuntimeError, match=r"TorchScript interpreter|its gradient cannot be followed"):
                read(Divided(own, {1: parts}))
    whole = (torch.arange(24.0).view(4, 6) / 9).requires_grad_()
    parts, own = halves_of(whole)
    own.requires_grad_()
    with FunctionsGetFullTensors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # torch's own, in its jvp
        read_by_a_transform(Divided(own, {1: parts})).sum().backward()
    read_by_a_transform(whole).sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(own.grad, parts.take(whole.grad, 1))


@ranks(2)
def test_arrays_only_read_and_other_memory_is_refused() -> None:
    parts, own = halves_of(torch.ones(4, 6))
    divided: Any = Divided(own, {1: parts})
    for array in (divided.numpy(), np.asarray(divided)):
        assert array.sum() == 24
        with pytest.raises(ValueError, match="read-only"):
            array *= 2
    assert (divided.numpy().copy() * 2).sum() == 48
    with pytest.raises(ValueError, match="set_ cannot give a divided tensor of shape"):
        divided.set_(torch.zeros(4, 6))
