"""What lies where: results of divided tensors share memory and have strides as those of whole tensors do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.techniques.test_divided import DIVISIONS, compared
from tests.tiers import sampled


@ranks(2)
def test_what_is_gathered_is_contiguous() -> None:
    """Also where each rank has one element of the dimension."""
    among = Ranks(dist.group.WORLD, "tp")
    whole = torch.arange(48.0).view(3, 2, 8)
    elements = among.chunks(2)
    divided = Divided(elements.take(whole, 1).clone(), {1: elements})
    assert divided.whole().is_contiguous()
    assert torch.equal(divided.whole().view(6, 8), whole.view(6, 8))
    assert torch.equal(divided.as_strided((4, 3), (8, 2), 1), whole.as_strided((4, 3), (8, 2), 1))


def copied(y: Tensor) -> list[Tensor]:
    """What torch copies on one device, though a rank may have nothing but what is contiguous."""
    head, features = y[:, :, 1:3], y[..., :4]
    turned = head.transpose(1, 2)
    return [
        head.contiguous(),
        turned.contiguous(),
        turned.flatten(2),
        turned.reshape(2, 2, -1),
        features.contiguous(),
        features.reshape(-1, 4),
        features.flatten(2),
        features.unsqueeze(1).detach().contiguous(),
        features[:1, :, 1:3].contiguous(),
        features.split([1, 5], 1)[1].contiguous(),
        features.transpose(1, 2)[:, :, 1:].reshape_as(torch.empty(8, 5, 4)),
        y[:, :3].contiguous(),
        y[:, 2:4].reshape(4, -1),
        y.flatten(2)[..., 8:24].contiguous(),
        y.chunk(2, -1)[1].contiguous(),
        y.chunk(2, -1)[0].reshape(2, 6, -1),
    ]


def viewed(y: Tensor) -> list[Tensor]:
    """What is a view on one device."""
    return [
        y.contiguous(),
        y[:1, :4].contiguous(),
        y[0, 2:4].reshape(-1),
        y[:, :, 1:3].reshape(2, 6, 2, 8, 1),
        y[..., :4].unsqueeze(1).reshape(2, 6, 4, 4),
        y.transpose(1, 2)[:1, :1].contiguous(),
        y.flatten(2),
        y.reshape(12, 4, 8),
    ]


def of_what_was_computed(x: Tensor, w: Tensor) -> Tensor:
    """Products of turned tensors are turned too, which one head does not tell."""
    turned = (x * w)[:, :, 1:3].transpose(1, 2) * 2
    copy, joined = turned.contiguous(), turned.reshape(2, 2, 48)
    copy.mul_(3), joined.mul_(5)
    return turned.sin() + copy + joined.view(2, 2, 6, 8)


def changed(y: Tensor, parts: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """What comes out after each of the parts was changed in place."""
    y = y * 1.0
    total = 0.0
    for k, part in enumerate(parts(y), 2):
        part.mul_(k)
        total = total + k * part.clone().square().mean() if part.numel() else total
    return y.sin() + total


@sampled(1, "division", DIVISIONS)
@ranks(2)
def test_a_copy_is_none_of_the_tensor_and_a_view_is(division: str) -> None:
    compared(of_what_was_computed, DIVISIONS[division], "plain")
    failed = []
    for parts in (copied, viewed):
        count = len(parts(torch.ones(2, 6, 4, 8)))
        for k in range(count):
            try:
                compared(
                    lambda x, w, k=k, parts=parts: changed(x * w, lambda y: parts(y)[k : k + 1]),
                    DIVISIONS[division],
                    "plain",
                )
            except Exception as error:
                failed.append(f"{parts.__name__} {k}: {type(error).__name__} {str(error)[:150]}")
    assert not failed, "\n".join(failed)


def turned_in_place(x: Tensor, w: Tensor) -> Tensor:
    """Each of them is the same object afterwards."""
    y = x * w
    z = y.view(2, 6, 4, 8)
    again = z.transpose_(1, 2)
    assert again is z
    assert z.shape == (2, 4, 6, 8)
    assert len(z.unsqueeze_(1)) == 2
    z.mul_(2).squeeze_(1).swapaxes_(-1, 0).swapdims_(0, 3)
    return z.transpose(1, 2).sin() + y + torch.add((z * 1).unsqueeze_(0).squeeze_(0).transpose_(1, 2), y)


@sampled(3, "division", DIVISIONS)
@ranks(2)
def test_dimensions_change_their_order_in_place(division: str) -> None:
    compared(turned_in_place, DIVISIONS[division], "plain")


@ranks(2)
def test_another_shape_in_place_is_refused_on_all_ranks() -> None:
    among = Ranks(dist.group.WORLD, "tp")
    make = lambda: Divided(torch.ones(3, 1, 8), {1: among.chunks(2)})  # noqa: E731
    with pytest.raises(ValueError, match=r"resize_ .* \(3, 2, 8\) .* write y = x\.reshape\(\.\.\.\) and use y"):
        make().resize_(6, 8)
    divided = make()
    view = divided.diagonal(0, 0, 1).mul_(2.0)
    with pytest.raises(ValueError, match=r"transpose_ .* in place, .* write y = x\.transpose\(\.\.\.\) and use y"):
        divided.transpose_(1, 2)
    del view
    assert divided.transpose_(1, 2).shape == (3, 8, 2)
