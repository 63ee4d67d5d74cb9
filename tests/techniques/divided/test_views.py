"""Views of divided tensors that are changed in place change what they are views of, and the other way round."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks, run_on_ranks
from tests.tiers import sampled

SHAPE = 2, 6, 8
REFUSED = "was changed in place, but a view of its gathered copy exists"
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y.contiguous(),
    "positions": lambda y: y[:, 1:4],
    "one position": lambda y: y[:, 2],
    "every other": lambda y: y[:, ::2, 1::2],
    "narrow features": lambda y: y.narrow(-1, 3, 4),
    "select": lambda y: y.select(1, 4),
    "view": lambda y: y.view(12, 8)[3:7],
    "flatten": lambda y: y.flatten(1)[:, 5:20],
    "unflatten": lambda y: y.unflatten(-1, (2, 4))[..., 1, 1:],
    "transpose": lambda y: y.transpose(1, 2)[:, 3],
    "permute": lambda y: y.permute(2, 0, 1)[1:4],
    "mT": lambda y: y.mT[:, :3],
    "unsqueeze": lambda y: y.unsqueeze(1)[:, 0, 2],
    "diagonal": lambda y: y.diagonal(0, 1, 2),
    "unfold": lambda y: y.unfold(1, 2, 2)[:, 1],
    "view_as": lambda y: y.view_as(torch.zeros(2, 48))[:, 10:30],
}
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda v: v.mul_(2.0).add_(1.0),
    "zero_": lambda v: v.zero_(),
    "set": lambda v: v.__setitem__(..., v * 3),
    "+=": lambda v: v.__iadd__(0.5),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, -1.0),
}


def written(y: Tensor, view: str, change: str) -> Tensor:
    """What is computed from a tensor that was changed through a view."""
    beside = y.transpose(0, 2)
    CHANGES[change](VIEWS[view](y))
    before = (beside * beside.detach().cos()).tanh()
    first = (y * y.detach().cos()).tanh()
    return (first + before.transpose(0, 2)).square().sum() + (y.sin() * 2).sum()


def followed(y: Tensor, view: str, change: str) -> Tensor:
    """What is computed from views of a tensor that is changed, and then through them."""
    beside, seen = y.transpose(0, 2), VIEWS[view](y)
    y.mul_(1.5)
    beside[1:2] *= 1.1
    CHANGES[change](seen)
    return (y.sin() * 2).sum() + (seen * 3).cos().mean()


def on_ranks(dim: int) -> list[str]:
    """The views of which ranks find something else than one device; `followed` may refuse those of gathered tensors."""
    along = Ranks(dist.group.WORLD, "sequence")
    failed = []
    for view, change, used in itertools.product(VIEWS, CHANGES, (written, followed)):
        try:
            off = difference(used, view, change, dim, along)
        except RuntimeError as error:
            is_divided = isinstance(VIEWS[view](divided(torch.ones(SHAPE), dim, along)), Divided)
            off = str(error) if is_divided or used is written or REFUSED not in str(error) else 0.0
        if isinstance(off, str) or off > 1e-10:
            failed.append(f"{used.__name__} {view} {change}: {off}")
    return failed


def divided(own: Tensor, dim: int, along: Ranks) -> Any:
    elements = along.zigzag(6) if dim == 1 else along.elements(8, [[(0, 4)], [(4, 8)]])
    return Divided(own.index_select(dim, elements.numbers("index", own.device)), {dim: elements})


def difference(used: Callable[..., Any], view: str, change: str, dim: int, along: Ranks) -> float:
    """How far values and gradients are off."""
    torch.manual_seed(0)
    whole = torch.randn(SHAPE, dtype=torch.float64)
    plain, source = whole.clone().requires_grad_(), whole.clone().requires_grad_()
    expected = used(plain * 1.0, view, change)
    try:
        found = used(divided(source, dim, along) * 1.0, view, change)
    finally:
        along.viewed.clear()
    found = found.whole() if isinstance(found, Divided) else found
    expected.backward()
    found.backward()
    assert plain.grad is not None
    assert source.grad is not None
    dist.all_reduce(source.grad)
    return max(float((found - expected).detach().abs()), float((source.grad - plain.grad).abs().max()))


@ranks(2)
def test_recomputations_hold_no_tensors_of_others() -> None:
    along, layers = Ranks(dist.group.WORLD, "sequence"), 6
    y: Any = Divided(torch.ones(2, 3, 8, requires_grad=True), {1: along.chunks(6)})
    for _ in range(layers):
        y = checkpoint(lambda y: (y * 2 + (y * 3)[:, 0].sum()).tanh().exp(), y, use_reentrant=False)
    along.viewed.clear()  # as after a forward
    y.sum().backward()
    assert not along.viewed


@sampled(1, "dim", [1, 2])
def test_view_is_one(dim: int) -> None:
    assert run_on_ranks(2, on_ranks, dim) == [[], []]
