"""Operations on divided tensors, whose arguments are spelled in all the ways that torch takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.techniques.test_divided import DIVISIONS, WAYS, compared, values
from tests.tiers import sampled

Operation = Callable[[Tensor, Tensor], Any]


def attended(x: Tensor, w: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(*(((x * w).transpose(1, 2),) * 3), attn_mask=mask)


class Labelled(Tensor):
    """A class of somebody's own."""


# x is (2, 6, 4, 8), w is (8,)
SPELLED: dict[str, Operation] = {
    "sums": lambda x, w: torch.sum(input=x * w, dim=1) + (x * w).sum(axis=1) + torch.sum(x, 1, keepdim=False),
    "means": lambda x, w: x * w - (x * w).mean(0, keepdims=True) - torch.mean(input=x, axis=1, keepdims=True),
    "largest": lambda x, w: torch.max(x * w, other=x) + torch.amax(input=x, axis=(1,), keepdims=True),
    "largest one": lambda x, w: (x * w) + torch.argmax(input=x, axis=-1, keepdims=True),
    "spreads": lambda x, w: torch.var(input=x * w, axis=1, keepdims=True) + x.std(axis=-1, keepdims=True),
    "lengths": lambda x, w: torch.linalg.vector_norm(x=x * w, dim=1) + torch.norm(input=x, dim=1),
    "at a rank": lambda x, w: x * w - x.kthvalue(5, dim=1, keepdim=True).values,
    "exponents": lambda x, w: (
        torch.logsumexp(input=x * w, dim=-1, keepdims=True) + torch.special.logsumexp(x, -1, True)
    ),
    "softmax": lambda x, w: torch.softmax(input=x, dim=-1) * w + torch.log_softmax(x * w, axis=1),
    "special softmax": lambda x, w: torch.special.softmax(x, -1) * w + torch.special.log_softmax(x * w, dim=-1),
    "sorted": lambda x, w: (x * w).sort(axis=1).values + torch.topk(input=x, k=6, axis=1).values,
    "running": lambda x, w: torch.cumsum(input=x * w, axis=1) + torch.roll(input=x, shifts=1, dims=1),
    "rolled": lambda x, w: torch.roll(x * w, (1, 2), (0, 1)) + torch.roll(x, 3) + x.roll((2, 1), dims=(1, 3)),
    "flipped": lambda x, w: (x * w).flip(1, 2) + x.flip((0, 3)) + torch.flip(input=x, dims=[1]) + x.flip(-1),
    "pointwise": lambda x, w: F.gelu(input=x * w) + torch.clamp(input=x, min=0) + torch.pow(input=x, exponent=2),
    "pairs": lambda x, w: torch.mul(input=x, other=w) + torch.add(x, other=w, alpha=2) + torch.sub(x1=x, x2=w),
    "where": lambda x, w: torch.where(condition=x > 0, input=x * w, other=w) + torch.where(x > 0, other=x, input=w),
    "joined": lambda x, w: torch.cat(tensors=[x, x * w], axis=1) + torch.cat(tensors=(x, x), dim=1),
    "stacked": lambda x, w: torch.stack((x, x * w), axis=1) + torch.stack(tensors=[x, x], dim=1),
    "pieces": lambda x, w: torch.chunk(input=x * w, chunks=2, axis=-1)[1] + (x * w).unbind(axis=1)[0].sum(),
    "pieces that overlap": lambda x, w: (
        w
        * sum(k * piece.square().sum() for dim in range(4) for k, piece in enumerate(x.tensor_split((3, 1, 5), dim), 1))
    ),
    "shapes": lambda x, w: torch.reshape(input=x * w, shape=(2, 6, 32)) + torch.flatten(input=x, start_dim=2),
    "orders": lambda x, w: torch.transpose(input=x * w, dim0=1, dim1=2) + torch.permute(input=x, dims=(0, 2, 1, 3)),
    "new dimensions": lambda x, w: torch.unsqueeze(input=x * w, dim=1) + torch.squeeze(input=x[None], dim=0)[:, None],
    "chosen": lambda x, w: torch.index_select(input=x * w, dim=1, index=torch.tensor([3, 0])),
    "repeated": lambda x, w: torch.repeat_interleave(input=x * w, repeats=2, dim=1),
    "linear": lambda x, w: F.linear(input=x * w, weight=w.outer(w), bias=w) + F.linear(x, w.outer(w), bias=w),
    "linear to a number": lambda x, w: F.linear(x * w, w)[..., None] * F.linear(x, w.outer(w)),
    "norms": lambda x, w: (
        F.layer_norm(input=x, normalized_shape=(8,), weight=w) + F.rms_norm(input=x, normalized_shape=(8,))
    ),
    "of arrays": lambda x, w: (x * w)[:, np.array([3, 0])] + (x * w)[..., np.array([1, 5, 0, 2, 3, 4, 6, 7])][:, :2],
    "as other numbers": lambda x, w: x * w + (x * w).detach().view(dtype=torch.int64).view(dtype=torch.float64),
    "of nothing": lambda x, w: torch.cat(
        [(x * w)[:, :0].reshape(2, 0, 32), x.flatten(2)[:, :0].view(2, 0, 32), x.flatten(2)], 1
    ),
    "products of one": lambda x, w: torch.einsum("bthd,bthd->bthd", x * w, x.mean(-1, keepdim=True)),
    "without rules": lambda x, w: (x * w).as_subclass(Tensor).tanh() + x.as_subclass(Labelled) * w,
    "by strides": lambda x, w: x * w + (x * w).contiguous().as_strided((2, 4), (8, 2), 5).mean(),
    "attention with a bias that learns": lambda x, w: attended(x, w, w.outer(w)[:6, :6]),
    "attention with a bias of heads": lambda x, w: attended(x, w, torch.einsum("bthd,bshd->bhts", x, x.sin() * w)),
    "attention with a bias of torch": lambda x, w: attended(x, w, causal_lower_right(6, 6)),
}


def twice(operation: Operation) -> Operation:
    """The second call is one that is remembered."""
    return lambda x, w: operation(x, w) + operation(x, w)


@sampled(1, "division", DIVISIONS)
@ranks(2)
def test_values_and_gradients_are_those_of_the_whole(division: str) -> None:
    failed = []
    for name, operation in SPELLED.items():
        for way in WAYS:
            try:
                compared(twice(operation), DIVISIONS[division], way)
            except Exception as error:
                failed.append(f"{name} ({way}): {type(error).__name__} {error}")
    assert not failed, "\n".join(failed)


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


@sampled(1, "division", ["sequence", "heads", "features"])
@ranks(2)
def test_it_is_laid_out_as_the_whole(division: str) -> None:
    among = Ranks(dist.group.WORLD, "tp")
    x, _ = values()
    (dim, make), *_ = DIVISIONS[division].items()
    divided = Divided(make(among).take(x, dim).clone(), {dim: make(among)})
    for name, made in LAID.items():
        assert layout(made(divided)) == layout(made(x)), name
        torch.testing.assert_close(by_strides(made(divided)), by_strides(made(x)), msg=name)


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
def test_dropout_moves_the_generator_where_it_draws_alone() -> None:
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


@ranks(2)
def test_as_strided_with_the_offset_of_the_base_is_refused() -> None:
    elements = Ranks(dist.group.WORLD, "tp").chunks(8)
    divided: Any = Divided(torch.arange(12.0).view(3, 4), {1: elements})
    with pytest.raises(ValueError, match="which the view does not know; write"):
        divided[1:].as_strided((2,), (1,), 3)
    assert divided[1:].as_strided((2,), (8,)).shape == (2,)
