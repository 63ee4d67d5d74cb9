"""Whatever is done with a divided tensor, ranks get the values and gradients of the whole one."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.collectives.by_elements import complete
from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.tiers import sampled

SHAPE = (2, 6, 4, 8)


def zigzag(size: int) -> Callable[[Ranks], Elements]:
    """Uneven: of 8 elements the first rank has 0, 1, 6 and 7, the other four; of 6 it has two."""
    quarter = size // 4
    return lambda among: among.elements(size, [[(0, quarter), (size - quarter, size)], [(quarter, size - quarter)]])


def halves(size: int) -> Callable[[Ranks], Elements]:
    return lambda among: among.chunks(size)


def copied(size: int) -> Callable[[Ranks], Elements]:
    """The first rank has all but the last element, the other one all but the first."""
    return lambda among: among.elements(size, [[(0, size - 1)], [(1, size)]])


def everywhere(size: int) -> Callable[[Ranks], Elements]:
    return lambda among: among.elements(size, [[(0, size)], [(0, size)]])


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


class Pair(nn.Module):
    def forward(self, x, w):
        return x.mean((1, 2)) * w


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "weighted": lambda x, w: x * w + 1,
    "operators": lambda x, w: (2 - x) / (w**2 + 1) - x.detach() // 3 + (-x).abs() ** 1.5,
    "compared": lambda x, w: torch.where(x > w, x, w.expand_as(x)).masked_fill(x < -1, 0.0),
    "asked": lambda x, w: x * w * w.element_size() + w.is_cuda + x.is_sparse + w.is_meta,
    "cast as it": lambda x, w: (w[:1].float().type_as(x) + w[1:2].float().to(x)) * x,
    "functions": lambda x, w: F.gelu(x) + F.silu(x) + x.tanh() + torch.sigmoid(w) * F.softplus(x),
    "cast": lambda x, w: x.float().double() + x.to(w.dtype) + x.type_as(w) + w.type_as(x) + torch.arange(8).to(x),
    "new": lambda x, w: x * x.new_full((8,), 2.0) + x.new_zeros(4, 8) + x.new_tensor([1.0]),
    "in place": changed_in_place,
    "in place through views": written_through_views,
    "in place beside views": changed_beside_views,
    "rms by hand": normed_by_hand,
    "layer norm": lambda x, w: F.layer_norm(x, (8,), w, w * 2),
    "layer norm of two": lambda x, w: F.layer_norm(x, (4, 8)),
    "layer norm with weights of its elements": lambda x, w: F.layer_norm(
        x * w, (8,), x.flatten()[:8], x.flatten()[4:12]
    ),
    "rms norm": lambda x, w: F.rms_norm(x, (8,), w),
    "sum": lambda x, w: (x * w).sum() + x.sum(1, keepdim=True) + x.sum((0, 2), keepdim=True),
    "mean": lambda x, w: (x * w).mean(-1, keepdim=True) - x.mean(),
    "moments": lambda x, w: torch.var_mean(x, 1)[0] + x.std(1) * w,
    "extremes": lambda x, w: x.amax(-1, keepdim=True) + x.max(1, keepdim=True).values * w,
    "norm": lambda x, w: x.norm(dim=-1, keepdim=True) * w + torch.linalg.vector_norm(x),
    "softmax": lambda x, w: x.softmax(-1) * w + F.softmax(x, 1) + F.log_softmax(x, -1, dtype=torch.float64),
    "log sum exp": lambda x, w: torch.logsumexp(x * w, -1) + x.logsumexp(1)[:, :1, :1].sum(),
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
    "sorted": lambda x, w: x.sort(-1).values * w + x.topk(8, dim=-1).values,
    "running": lambda x, w: x.cumsum(1) * w + x.flip(1) + torch.roll(x, 1, 1),
    "normalised": lambda x, w: F.normalize(x, dim=-1) * w,
    "heads": lambda x, w: (x * w).flatten(2).view(2, 6, 4, 8).transpose(1, 2).reshape(2, 4, 48),
    "heads joined": lambda x, w: (x * w).permute(0, 2, 1, 3).contiguous().view(8, 6, 8),
    "positions joined": lambda x, w: (x * w).reshape(12, 32),
    "all joined": lambda x, w: (x * w).reshape(-1),
    "split heads": lambda x, w: (x * w).view(2, 6, 4, 2, 4).movedim(3, 1),
    "fused": lambda x, w: torch.cat([t * k for k, t in enumerate((x * w).reshape(2, 6, 2, 16).unbind(2))], -1),
    "axes": lambda x, w: x.unsqueeze(1).squeeze(1).swapaxes(1, 2).mT * 2 + (w.sum() * x).permute(0, 2, 3, 1),
    "expanded": lambda x, w: (x * w)[:, :, None].expand(2, 6, 3, 4, 8).reshape(2, 18, 4, 8),
    "repeated": lambda x, w: torch.repeat_interleave(x * w, 2, dim=2) + (x * w).repeat(1, 1, 2, 1),
    "a list of one": lambda x, w: (x * w)[:, :, [-2]] + x[:, [0]],
    "added to products": lambda x, w: (x[:, 0] * w).baddbmm(x[:, 1] @ x[:, 2].mT, x[:, 3], beta=0.5, alpha=2),
    "one key for all queries": lambda x, w: F.scaled_dot_product_attention(
        (x * w).transpose(1, 2), x[:, :, :1].transpose(1, 2), x[:, :, 1:2].transpose(1, 2)
    ),
    "stacked": lambda x, w: torch.stack([x, x * w, w.expand_as(x)], dim=1),
    "joined": lambda x, w: torch.cat([x, w.expand(2, 6, 4, 8), x * 2], dim=1),
    "rotated": lambda x, w: torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * w,
    "pieces": lambda x, w: sum(k * p.sum() for k, p in enumerate(x.split([1, 5], 1))) + x.chunk(2, -1)[1] * w[4:],
    "sliced": lambda x, w: (x * w)[:, 1:5, ..., 2:7] + x[:, :-2, :, 1:6],
    "every other": lambda x, w: (x * w)[:, ::2] + x[:, 1::2, :, :],
    "one": lambda x, w: (x * w)[:, 0] + x[:, -1] + x[0, 2][None],
    "masked": lambda x, w: (x * w)[torch.tensor([True, False])] + x[torch.tensor([1])],
    "chosen": lambda x, w: x.index_select(1, torch.tensor([3, 1])) * w + x[:, [0, 5]],
    "taken": lambda x, w: x.gather(1, torch.arange(6).view(1, 6, 1, 1).expand(2, 6, 4, 8).flip(1)) * w,
    "linear": lambda x, w: F.linear(x, w.outer(w), w),
    "linear with a number": lambda x, w: F.linear(x, w.outer(w), w.sum()) + F.linear(x, w.outer(w), w[:1]),
    "linear of all": lambda x, w: F.linear((x * w).flatten(2), torch.arange(96.0).double().view(3, 32) / 96),
    "products": lambda x, w: x @ w.outer(w) + torch.matmul(x, w.outer(w) * 2),
    "einsum": lambda x, w: torch.einsum("bthd,de->bthe", x, w.outer(w)) + torch.einsum("bthd,bshd->bhts", x, x).sum(),
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
    "grouped attention": lambda x, w: F.scaled_dot_product_attention(
        (x * w).transpose(1, 2), x[:, :, :2].transpose(1, 2), x[:, :, 1:3].transpose(1, 2), enable_gqa=True
    ),
    "multi-head attention": multi_head,
    "cross-entropy": lambda x, w: F.cross_entropy((x * w).reshape(-1, 8), torch.arange(48) % 8 - 1, ignore_index=-1),
    "cross-entropy of classes": lambda x, w: F.cross_entropy(
        (x * w).movedim(-1, 1), torch.arange(48).view(2, 6, 4) % 8, weight=w.detach().abs(), label_smoothing=0.1
    ),
    "each cross-entropy": lambda x, w: F.cross_entropy((x * w).reshape(48, 8), torch.arange(48) % 8, reduction="none"),
    "squared error": lambda x, w: F.mse_loss(x * w, torch.ones(2, 6, 4, 8).double()),
    "distances": lambda x, w: (
        F.l1_loss(x, w.expand_as(x), reduction="none") * F.smooth_l1_loss(x * w, x, reduction="sum")
    ),
    "binary cross-entropy": lambda x, w: F.binary_cross_entropy_with_logits(
        x * w, (x > 0).double(), pos_weight=w.detach().abs()
    ),
    "divergence": lambda x, w: F.kl_div(F.log_softmax(x * w, -1), F.softmax(x.detach(), -1), reduction="batchmean"),
    "margins": lambda x, w: (
        F.margin_ranking_loss(x * w, w.expand_as(x), (x > 0).double() * 2 - 1, margin=0.1)
        + F.hinge_embedding_loss(x * w, (x > 0).double() * 2 - 1)
        + F.triplet_margin_loss((x * w).flatten(0, 2), x.flatten(0, 2), w.expand(48, 8))
        + F.multi_margin_loss((x * w).flatten(0, 2), torch.arange(48) % 8, weight=w.detach().abs())
    ),
    "likelihood": lambda x, w: F.nll_loss(
        F.log_softmax((x * w).movedim(-1, 1), 1), torch.arange(48).view(2, 6, 4) % 8 - 1, ignore_index=-1
    ),
    "fourier": lambda x, w: torch.fft.fft(x, dim=1).real * w + torch.fft.rfft(x).abs().sum(),
    "turned": lambda x, w: torch.rot90(x, 1, (1, 2)).sum(2) * w,
    "lengths": lambda x, w: x * x.shape[1] + x.size(-1) * w + x.numel() / len(x) + x.dim(),
    "convolved": lambda x, w: F.conv1d(x.flatten(2).mT, w.view(1, 1, 8).expand(32, 1, 8), groups=32, padding=4),
    "of a function": lambda x, w: swish(x * w),
    "of a recomputed function": lambda x, w: checkpoint(lambda y: swish(y * w), x * 2, use_reentrant=False),
    "of a reentrant checkpoint": lambda x, w: checkpoint(lambda y, w: swish(y * 3) * w, x * 2, w, use_reentrant=True),
    "of a function that closes over it": closing_over,
    "of a hook": with_hook,
    "of a gradient": inner_gradient,
    "of a module": Pair(),
    "of a compiled function": lambda x, w: compiled(x * w, w) + compiled(w, w[:1]).sum(),
}


def outcome(operation: Callable[[Tensor, Tensor], Any], x: Tensor, w: Tensor) -> Tensor:
    made = operation(x, w)
    made = made.whole() if isinstance(made, Divided) else made
    (made * torch.linspace(1, 2, made.numel(), dtype=made.dtype).view(made.shape)).sum().backward()
    return made.detach()


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
    "copies of heads": {2: copied(4)},
    "copies of features": {3: copied(8)},
    "heads everywhere": {2: everywhere(4)},
    "features everywhere": {3: everywhere(8)},
    "heads on one rank": {2: all_on_one(4)},
    "features on one rank": {3: all_on_one(8)},
}


WAYS = ("plain", "parameter", "averaged")
"""Who reduces the gradient of what ranks have alike: where it is used, or when a step ends, over tp or cp ranks."""


def replicated(w: Tensor, way: str) -> Any:
    mine: Any = w.detach().clone().requires_grad_() if way == "plain" else nn.Parameter(w.detach().clone())
    if way == "parameter":
        mine._replicated_path = "w"
    return mine


def compared(operation: Callable[[Tensor, Tensor], Any], division: dict[int, Any], way: str) -> None:
    x, w = values()
    x.requires_grad_(), w.requires_grad_()
    expected = outcome(operation, x, w)
    among = Ranks(dist.group.WORLD, "tp", averages=(lambda _: True) if way == "averaged" else None)
    among.reduces_later = True
    (dim, make), *_ = division.items()
    elements = make(among)
    own = elements.take(x.detach(), dim).clone().requires_grad_()
    mine = replicated(w, way)
    with FunctionsGetWholes():
        found = outcome(operation, Divided(own, {dim: elements}), mine)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(complete(own.grad, dim, elements), elements.take(x.grad, dim), rtol=1e-10, atol=1e-12)
    if w.grad is not None:
        require_gradient(mine, w, way, rtol=1e-10, atol=1e-12)


def require_gradient(mine, whole, way, **tolerances):
    """Ranks have what makes the gradient of a parameter that all have alike as a mean."""
    if way != "plain":
        dist.all_reduce(mine.grad)
        mine.grad /= dist.get_world_size()
    torch.testing.assert_close(mine.grad, whole.grad, **tolerances)


@sampled(1, "division", DIVISIONS)
@ranks(2)
def test_values_and_gradients_are_those_of_the_whole(division):
    failed = []
    for name, operation in OPERATIONS.items():
        for way in WAYS:
            try:
                compared(operation, DIVISIONS[division], way)
            except Exception as error:
                failed.append(f"{name} ({way}): {type(error).__name__} {error}")
    assert not failed, "\n".join(failed)
