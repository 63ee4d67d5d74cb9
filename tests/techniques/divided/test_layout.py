"""What lies where: results of divided tensors share memory and have strides as those of whole tensors do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.techniques.divided.operations import DIVISIONS, values
from tests.techniques.divided.test_operations import compared
from tests.tiers import sampled

LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "the last two": lambda x: x.mT * 2,
    "joined and turned": lambda x: x.flatten(2).mT,
    "permuted": lambda x: x.permute(3, 0, 1, 2),
    "moved and copied": lambda x: x.movedim(3, 1).clone(),
    "made dense": lambda x: x.transpose(1, 2).contiguous(),
    "expanded": lambda x: x.unsqueeze(1).expand(2, 3, 6, 4, 8),
    "of one": lambda x: x[:, None].transpose(0, 1),
}


def layout(x: Tensor) -> Any:
    sizes = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    dense = x.is_contiguous(), x.is_contiguous(memory_format=torch.contiguous_format)
    bytes_of = x.nbytes, x.itemsize, x.element_size(), x.storage_offset()
    return sizes, x.stride(-1), dense, bytes_of, x.layout, x.is_sparse, x.dtype, x.is_signed(), x.is_conj(), x.is_neg()


def by_strides(x: Tensor) -> Tensor:
    """Windows of two, as sliding attention takes them."""
    size = [*x.shape[:1], x.shape[1] - 1, 2, *x.shape[2:]]
    return x.as_strided(size, [*x.stride()[:2], *x.stride()[1:]])


@ranks(2)
def test_divided_tensor_is_laid_out_as_the_whole() -> None:
    among = Ranks(dist.group.WORLD, "tp")
    x, _ = values()
    for division in ("sequence", "heads", "features"):
        (dim, make), *_ = DIVISIONS[division].items()
        divided = Divided(make(among).take(x, dim).clone(), {dim: make(among)})
        for name, made in LAID.items():
            assert layout(made(divided)) == layout(made(x)), name
            torch.testing.assert_close(by_strides(made(divided)), by_strides(made(x)), msg=name)
    whole, elements = torch.arange(48.0).view(3, 2, 8), among.chunks(2)  # one element for each rank
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


def of_what_was_computed(x: Tensor, w: Tensor) -> Tensor:
    """Products of turned tensors are turned too, which one head does not tell."""
    turned = (x * w)[:, :, 1:3].transpose(1, 2) * 2
    copy, joined = turned.contiguous(), turned.reshape(2, 2, 48)
    copy.mul_(3), joined.mul_(5)
    return turned.sin() + copy + joined.view(2, 2, 6, 8)


def copy_changed(number: int, x: Tensor, w: Tensor) -> Tensor:
    """What comes out after one of the copies was changed in place."""
    y = x * w * 1.0
    part = copied(y)[number]
    part.mul_(2)
    return y.sin() + (2 * part.clone().square().mean() if part.numel() else 0.0)


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


@sampled(1, "division", DIVISIONS)
@ranks(2)
def test_copy_is_none_of_the_tensor_and_a_view_is(division: str) -> None:
    failed, cases = [], {"computed": of_what_was_computed, "turned in place": turned_in_place}
    for number in range(len(copied(torch.ones(2, 6, 4, 8)))):
        cases[f"copied {number}"] = partial(copy_changed, number)
    for name, case in cases.items():
        try:
            compared(case, DIVISIONS[division])
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__} {str(error)[:150]}")
    assert not failed, "\n".join(failed)


@ranks(2)
def test_another_shape_or_offset_is_refused_on_all_ranks() -> None:
    among = Ranks(dist.group.WORLD, "tp")
    make = lambda: Divided(torch.ones(3, 1, 8), {1: among.chunks(2)})  # noqa: E731
    with pytest.raises(ValueError, match=r"resize_ .* \(3, 2, 8\) .* write y = x\.reshape\(\.\.\.\) and use y"):
        make().resize_(6, 8)
    divided = make()
    view = divided.diagonal(0, 0, 1).mul_(2.0)
    with pytest.raises(ValueError, match=r"transpose_ .* in place\. .* write y = x\.transpose\(\.\.\.\) and use y"):
        divided.transpose_(1, 2)
    del view
    assert divided.transpose_(1, 2).shape == (3, 8, 2)
    divided = Divided(torch.arange(12.0).view(3, 4), {1: among.chunks(8)})
    with pytest.raises(ValueError, match="which the view does not have; write"):
        divided[1:].as_strided((2,), (1,), 3)
    assert divided[1:].as_strided((2,), (8,)).shape == (2,)


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a module": torch.nn.Dropout(0.3).eval(),
    "of probability 0": torch.nn.Dropout(0.0),
    "of all": lambda x: F.dropout(x, 1.0) + torch.dropout(x, 1.0, True),
    "of a function": lambda x: F.dropout(x, training=False),
    "by places": lambda x: torch.dropout(x, 0.3, False),
    "by names": lambda x: torch.dropout(input=x, p=0.0, train=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.3) + F.feature_alpha_dropout(x, 0.0, True),
    "leaks": lambda x: F.rrelu(x, 0.1, 0.3) + torch.rrelu(x, 0.1, 0.3, False),
    "in place": lambda x: F.dropout(x.clone(), 0.3, False, True),
}
DROPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "of a function": lambda x: F.dropout(x, 0.5),
    "by places": lambda x: torch.dropout(x, 0.5, True),
    "alpha": lambda x: F.alpha_dropout(x, p=0.5, training=True),
    "leaks": lambda x: F.rrelu(x - 9, training=True),
}


@ranks(2)
def test_dropout_moves_the_generator_only_where_it_draws() -> None:
    among = Ranks(dist.group.WORLD, "tp")
    x, _ = values()
    divided = Divided(among.chunks(8).take(x, 3).clone(), {3: among.chunks(8)})
    before = torch.get_rng_state()
    for name, drop in DROPOUTS.items():
        torch.testing.assert_close(drop(divided).whole(), drop(x), msg=name)
        assert torch.equal(torch.get_rng_state(), before), name
    for name, drop in DROPPED.items():
        torch.set_rng_state(before)
        assert not torch.equal(drop(divided).whole(), drop(x)), name
        torch.set_rng_state(before)
        drop(divided)
        assert not torch.equal(torch.get_rng_state(), before), name
