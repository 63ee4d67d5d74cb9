"""Operations on a tensor that ranks divide and on one that they have alike, and ways to divide; beside random ones."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from lightning_parallel.collectives.elements import Elements, Ranks

SHAPE = (2, 6, 4, 8)


def zigzag(size: int) -> Callable[[Ranks], Elements]:
    """Uneven: of 8 elements the first rank has 0, 1, 6 and 7, the other four; of 6 it has two."""
    quarter = size // 4
    return lambda among: among.elements(size, [[(0, quarter), (size - quarter, size)], [(quarter, size - quarter)]])


def halves(size: int) -> Callable[[Ranks], Elements]:
    return lambda among: among.chunks(size)


def all_on_one(size: int) -> Callable[[Ranks], Elements]:
    return lambda among: among.elements(size, [[(0, size)], []])


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


swish = Swish.apply  # kept before anything is divided


def closing_over(x, w):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return x * w

        @staticmethod
        def backward(ctx, gradient):
            return (gradient * x).sum((0, 1, 2))

    return Scaled.apply(w) + x


def changed_in_place(x, w):
    y = x * 2
    y[:, 1] = 0.5
    y += w
    y.mul_(3).clamp_(max=2.0)
    return y


def normed_by_hand(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def in_many_forms(x, w):
    """What rules remember of one form of the arguments must not answer for another."""
    made = 0
    for _ in range(2):
        for shape in ((2, 24, 8), (2, 6, 32), (12, 4, 8), (2, 6, -1), (2, 3, 2, 4, 8), (48, 8)):
            y = (x * w).reshape(shape)
            made = made + (y * y.view(shape)).sum() + y.transpose(0, -1).sum(0).square().sum() + y.mT[0].sum()
        for dims in ((0, 1), (1, 2), (2, 3), (1, 3)):
            y = x.flatten(*dims).unflatten(dims[0], (-1, 2))
            made = made + y.transpose(0, -1).unsqueeze(1).cumsum(0)[-1].max() + x.transpose(*dims)[0, 0].sum()
    return made * w


def by_masks(x, w):
    made = x * w
    for shape in ((6, 4, 8), (6, 1, 8), (1, 4, 1), (4, 1), (8,), (1,), (), (2, 6, 1, 1), (3, 1, 1, 1, 8)):
        mask = torch.arange(1.0, 1 + math.prod(shape)).double().view(shape) / math.prod(shape)
        made = (made * mask + mask) - (mask - made).where(mask > 0.5, made) / 2
    return made


def attention_by_hand(x, w):
    q, k = x.transpose(1, 2), (x * 2).transpose(1, 2)
    scores = (q @ k.transpose(-2, -1)) / 3 + torch.ones(6, 6).triu(1) * -5
    return (scores.softmax(-1) @ k).transpose(1, 2).reshape(2, 6, 32)


def multi_head(x, w):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64) / 3  # noqa: E731
    h = x.flatten(2)
    out, _ = F.multi_head_attention_forward(
        h, h, h, 32, 4, draw(96, 32), draw(96), None, None, False, 0.0, draw(32, 32), draw(32), need_weights=False
    )
    return out


def with_hook(x, w):
    y = x * w
    y.register_hook(lambda gradient: gradient * 2 + gradient.mean())
    return y


def inner_gradient(x, w):
    y = x * 1
    (gradient,) = torch.autograd.grad((y * y * w).sum(), y)
    return y + gradient.detach()


def written_through_views(x, w):
    """Through views of results that torch itself makes as views of something that nobody has."""
    y = torch.einsum("bthd,de->bthe", x, w.outer(w))
    y.narrow(1, 1, 3).mul_(2)
    y.select(2, 1).add_(w)
    z = (x * w).repeat_interleave(2, -1)
    z.narrow(-1, 0, 8).mul_(0.5)
    z[..., 0, :].clamp_(max=0.1)
    return y + z[..., 4:12]


def changed_beside_views(x, w):
    """Views that ranks divide of what is changed afterwards, once nobody has one of the gathered whole any more."""
    y = x * w
    turned = y.permute(0, 3, 2, 1)
    seen, rows = turned[..., 0] * 1, y.reshape(12, 32)
    y[y > 1] = 0.5
    rows.mul_(1.5)
    F.relu(y, inplace=True)
    return seen.sum() * 2 + rows.square().sum() + turned.sum() * y


def gated(x, w):
    return F.gelu(x) * w + x.mean(-1, keepdim=True)


compiled = torch.compile(gated, backend="eager", fullgraph=True)


def attended(x: Tensor, w: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(*(((x * w).transpose(1, 2),) * 3), attn_mask=mask)


class Labelled(Tensor):
    """A class of somebody's own."""


# x is (2, 6, 4, 8), w is (8,)
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "weighted": lambda x, w: x * w + 1,
    "cast as it": lambda x, w: (w[:1].float().type_as(x) + w[1:2].float().to(x)) * x,
    "new": lambda x, w: x * x.new_full((8,), 2.0) + x.new_zeros(4, 8) + x.new_tensor([1.0]),
    "in place": changed_in_place,
    "in place through views": written_through_views,
    "in place beside views": changed_beside_views,
    "rms by hand": normed_by_hand,
    "layer norm": lambda x, w: F.layer_norm(x, (8,), w, w * 2),
    "layer norm with weights of its elements": lambda x, w: F.layer_norm(
        x * w, (8,), x.flatten()[:8], x.flatten()[4:12]
    ),
    "log sum exp of nothing": lambda x, w: (
        (x * w).masked_fill(torch.arange(4).view(4, 1) < 2, -torch.inf).logsumexp(-1).exp()
    ),
    "log sum exp of infinities": lambda x, w: (
        x.detach().masked_fill(torch.arange(8) == 6, torch.inf).logsumexp(-1).isinf() * x.sum(-1) * w.sum()
    ),
    "largest of unknown ones": lambda x, w: (
        (
            sum(x.detach().masked_fill(torch.arange(8) == 5, torch.nan).argmax(dim).sum() for dim in (1, 2, 3))
            + (x.detach() * 10).long().argmax(-1).sum()
        )
        * (x * w)
    ),
    "softmax of a dtype": lambda x, w: (
        torch.softmax(x.detach().float(), -1, torch.double) * F.log_softmax(x.detach().float(), 3, 3, torch.double) * x
    ),
    "heads": lambda x, w: (x * w).flatten(2).view(2, 6, 4, 8).transpose(1, 2).reshape(2, 4, 48),
    "fused": lambda x, w: torch.cat([t * k for k, t in enumerate((x * w).reshape(2, 6, 2, 16).unbind(2))], -1),
    "repeated": lambda x, w: torch.repeat_interleave(x * w, 2, dim=2) + (x * w).repeat(1, 1, 2, 1),
    "a list of one": lambda x, w: (x * w)[:, :, [-2]] + x[:, [0]],
    "added to products": lambda x, w: (x[:, 0] * w).baddbmm(x[:, 1] @ x[:, 2].mT, x[:, 3], beta=0.5, alpha=2),
    "one key for all queries": lambda x, w: F.scaled_dot_product_attention(
        (x * w).transpose(1, 2), x[:, :, :1].transpose(1, 2), x[:, :, 1:2].transpose(1, 2)
    ),
    "linear with a number": lambda x, w: F.linear(x, w.outer(w), w.sum()) + F.linear(x, w.outer(w), w[:1]),
    "many forms": in_many_forms,
    "masks": by_masks,
    "attention by hand": attention_by_hand,
    "attention": lambda x, w: F.scaled_dot_product_attention(*(((x * w).transpose(1, 2),) * 3), is_causal=True),
    "masked attention": lambda x, w: F.scaled_dot_product_attention(
        *(((x * w).transpose(1, 2),) * 3), attn_mask=torch.ones(6, 6, dtype=torch.bool).tril()
    ),
    "attention of fewer samples": lambda x, w: F.scaled_dot_product_attention(
        (x * w)[:1].transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2)
    ),
    "multi-head attention": multi_head,
    "cross-entropy": lambda x, w: F.cross_entropy((x * w).reshape(-1, 8), torch.arange(48) % 8 - 1, ignore_index=-1),
    "likelihood": lambda x, w: F.nll_loss(
        F.log_softmax((x * w).movedim(-1, 1), 1), torch.arange(48).view(2, 6, 4) % 8 - 1, ignore_index=-1
    ),
    "cross-entropy of classes": lambda x, w: F.cross_entropy(
        (x * w).movedim(-1, 1), torch.arange(48).view(2, 6, 4) % 8, weight=w.detach().abs(), label_smoothing=0.1
    ),
    "binary cross-entropy": lambda x, w: F.binary_cross_entropy_with_logits(
        x * w, (x > 0).double(), pos_weight=w.detach().abs()
    ),
    "margins": lambda x, w: (
        F.margin_ranking_loss(x * w, w.expand_as(x), (x > 0).double() * 2 - 1, margin=0.1)
        + F.hinge_embedding_loss(x * w, (x > 0).double() * 2 - 1)
        + F.triplet_margin_loss((x * w).flatten(0, 2), x.flatten(0, 2), w.expand(48, 8))
        + F.multi_margin_loss((x * w).flatten(0, 2), torch.arange(48) % 8, weight=w.detach().abs())
    ),
    "convolved": lambda x, w: F.conv1d(x.flatten(2).mT, w.view(1, 1, 8).expand(32, 1, 8), groups=32, padding=4),
    "of a function": lambda x, w: swish(x * w),
    "of a recomputed function": lambda x, w: checkpoint(lambda y: swish(y * w), x * 2, use_reentrant=False),
    "of a reentrant checkpoint": lambda x, w: checkpoint(lambda y, w: swish(y * 3) * w, x * 2, w, use_reentrant=True),
    "of a function that closes over it": closing_over,
    "of a hook": with_hook,
    "of a gradient": inner_gradient,
    "of a compiled function": lambda x, w: compiled(x * w, w) + compiled(w, w[:1]).sum(),
}
SPELLED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sums": lambda x, w: torch.sum(input=x * w, dim=1) + (x * w).sum(axis=1) + torch.sum(x, 1, keepdim=False),
    "largest": lambda x, w: torch.max(x * w, other=x) + torch.amax(input=x, axis=(1,), keepdims=True),
    "largest one": lambda x, w: (x * w) + torch.argmax(input=x, axis=-1, keepdims=True),
    "spreads": lambda x, w: torch.var(input=x * w, axis=1, keepdims=True) + x.std(axis=-1, keepdims=True),
    "softmax": lambda x, w: torch.softmax(input=x, dim=-1) * w + torch.log_softmax(x * w, axis=1),
    "sorted": lambda x, w: (x * w).sort(axis=1).values + torch.topk(input=x, k=6, axis=1).values,
    "rolled": lambda x, w: torch.roll(x * w, (1, 2), (0, 1)) + torch.roll(x, 3) + x.roll((2, 1), dims=(1, 3)),
    "pairs": lambda x, w: torch.mul(input=x, other=w) + torch.add(x, other=w, alpha=2) + torch.sub(x1=x, x2=w),
    "joined": lambda x, w: torch.cat(tensors=[x, x * w], axis=1) + torch.cat(tensors=(x, x), dim=1),
    "pieces that overlap": lambda x, w: (
        w
        * sum(k * piece.square().sum() for dim in range(4) for k, piece in enumerate(x.tensor_split((3, 1, 5), dim), 1))
    ),
    "shapes": lambda x, w: torch.reshape(input=x * w, shape=(2, 6, 32)) + torch.flatten(input=x, start_dim=2),
    "chosen": lambda x, w: torch.index_select(input=x * w, dim=1, index=torch.tensor([3, 0])),
    "linear": lambda x, w: F.linear(input=x * w, weight=w.outer(w), bias=w) + F.linear(x, w.outer(w), bias=w),
    "norms": lambda x, w: (
        F.layer_norm(input=x, normalized_shape=(8,), weight=w) + F.rms_norm(input=x, normalized_shape=(8,))
    ),
    "of arrays": lambda x, w: (x * w)[:, np.array([3, 0])] + (x * w)[..., np.array([1, 5, 0, 2, 3, 4, 6, 7])][:, :2],
    "as other numbers": lambda x, w: x * w + (x * w).detach().view(dtype=torch.int64).view(dtype=torch.float64),
    "of nothing": lambda x, w: torch.cat(
        [(x * w)[:, :0].reshape(2, 0, 32), x.flatten(2)[:, :0].view(2, 0, 32), x.flatten(2)], 1
    ),
    "without rules": lambda x, w: (x * w).as_subclass(Tensor).tanh() + x.as_subclass(Labelled) * w,
    "by strides": lambda x, w: x * w + (x * w).contiguous().as_strided((2, 4), (8, 2), 5).mean(),
    "attention with a bias that learns": lambda x, w: attended(x, w, w.outer(w)[:6, :6]),
    "attention with a bias of heads": lambda x, w: attended(x, w, torch.einsum("bthd,bshd->bhts", x, x.sin() * w)),
    "attention with a bias of torch": lambda x, w: attended(x, w, causal_lower_right(6, 6)),
}
"""Arguments in all the ways that torch takes."""


def values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(SHAPE, generator=generator, dtype=torch.float64),
        torch.randn(8, generator=generator, dtype=torch.float64),
    )


DIVISIONS = {
    "sequence zigzag": {1: zigzag(6)},
    "sequence": {1: halves(6)},
    "heads": {2: halves(4)},
    "features": {3: halves(8)},
    "features zigzag": {3: zigzag(8)},
    "samples": {0: halves(2)},
    "heads on one rank": {2: all_on_one(4)},
    "features on one rank": {3: all_on_one(8)},
}
