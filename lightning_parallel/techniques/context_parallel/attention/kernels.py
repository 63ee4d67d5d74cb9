"""Attention of one rectangle of scores, whose results can be merged with those of others: see `merged`.

Forward tells the log-sum-exp of each query's scores. Backward is given that of all keys that the query meets, and the
output over all of them, which makes the gradients of rectangles those of the whole. Torch's fused kernels do that:

| | where | masks |
|---|---|---|
| flash on the CPU | all floating dtypes | yes |
| flash on CUDA | 16 bits | no |
| efficient | CUDA | yes |
| cuDNN | CUDA, 16 bits | yes |
| plain | everywhere; makes the scores | yes |

Torch itself says which of them it would take.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


class Given(NamedTuple):
    """What a kernel computes with. Heads of keys and values are as many as those of queries, or a divisor of them."""

    query: Tensor  # (B, H, rows, D)
    key: Tensor  # (B, Hkv, keys, D)
    value: Tensor  # (B, Hkv, keys, Dv)
    bias: Tensor | None  # broadcasts to (B, H, rows, keys)
    is_causal: bool
    scale: float | None
    dropout: float


Draws = tuple[Tensor, ...]
"""From what a kernel drew which weights it dropped, in a form of its own."""

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """A way to compute it."""

    grouped: bool
    """Whether keys and values may have fewer heads than queries."""

    def forward(self, given: Given) -> tuple[Tensor, Tensor, Draws]:
        """The output (B, H, rows, Dv), the log-sum-exp of scores (B, H, rows), and what was drawn."""

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor, draws: Draws) -> Gradients:
        """The gradients of queries, keys and values, given output and log-sum-exp over all keys."""


class How(NamedTuple):
    """How a rectangle was computed, which backward does alike."""

    kernel: Kernel
    draws: Draws


def attend(given: Given, mask: Tensor | None) -> tuple[Tensor, Tensor, How]:
    """Output, log-sum-exp, and how they came about. Those of a query that meets none are zeros and minus infinity.

    Args:
        given: without a bias.
        mask: booleans or summands of the scores, broadcast to them.
    """
    given = given._replace(bias=_bias(mask, given.query.dtype))
    with torch.autocast(given.query.device.type, enabled=False):
        kernel, used = _chosen(given)
        out, total, draws = kernel.forward(used)
    how = How(kernel, draws)
    if mask is None:
        return out, total, how
    # Kernels do not agree on what they tell of these queries.
    alone = ~mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) == -math.inf
    return out.masked_fill(alone[..., None], 0.0), total.masked_fill(alone, -math.inf), how


def attend_backward(
    gradient: Tensor, given: Given, mask: Tensor | None, out: Tensor, total: Tensor, how: How
) -> Gradients:
    """The gradients of queries, keys and values.

    Args:
        gradient: of the output.
        given: as for `attend`.
        mask: the same.
        out: over all keys.
        total: the log-sum-exp over all keys; finite.
        how: what `attend` told.
    """
    used = given = given._replace(bias=_bias(mask, given.query.dtype))
    if not how.kernel.grouped:
        used = _with_all_heads(given)
    with torch.autocast(given.query.device.type, enabled=False):
        of_query, of_key, of_value = how.kernel.backward(gradient, used, out, total, how.draws)
    if used.key is not given.key:
        of_key, of_value = (_summed_in_groups(each, given.key.shape[1]) for each in (of_key, of_value))
    return of_query, of_key, of_value


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _chosen(given: Given) -> tuple[Kernel, Given]:
    """The kernel that torch would take, and what it computes with."""
    kernel = _known(given)
    if kernel.grouped or given.query.shape[1] == given.key.shape[1]:
        return kernel, given
    given = _with_all_heads(given)
    kernel = _known(given)
    return (Plain() if kernel.grouped else kernel), given


def _known(given: Given) -> Kernel:
    is_cuda = given.query.device.type == "cuda"
    if is_cuda and given.query.shape[-1] % 8:  # torch pads such heads before it calls a kernel
        return Plain()
    choice = torch._fused_sdp_choice(
        given.query, given.key, given.value, given.bias, given.dropout, given.is_causal,
        scale=given.scale, enable_gqa=given.query.shape[1] != given.key.shape[1],
    )  # fmt: skip
    if choice == SDPBackend.FLASH_ATTENTION.value:
        return Flash() if is_cuda else FlashOnCpu() if given.query.device.type == "cpu" else Plain()
    if not is_cuda:
        return Plain()
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        return Cudnn()
    return Efficient() if choice == SDPBackend.EFFICIENT_ATTENTION.value else Plain()


def _with_all_heads(given: Given) -> Given:
    times = given.query.shape[1] // given.key.shape[1]
    if times == 1:
        return given
    return given._replace(key=given.key.repeat_interleave(times, 1), value=given.value.repeat_interleave(times, 1))


def _summed_in_groups(gradient: Tensor, heads: int) -> Tensor:
    return gradient.view(gradient.shape[0], heads, -1, *gradient.shape[2:]).sum(2)


# ---------------------------------------------------------------- the kernels


class Plain:
    """Products and a softmax, in at least single precision."""

    grouped = False

    def forward(self, given: Given) -> tuple[Tensor, Tensor, Draws]:
        """See `Kernel`."""
        scores = self._scores(given)
        total = torch.logsumexp(scores, -1)
        weights = (scores - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp_()
        draws: Draws = ()
        if given.dropout:
            draws = (_generator(weights.device).get_state(),)
            weights *= self._kept(given, weights, None)
        return (weights @ given.value.to(scores.dtype)).to(given.query.dtype), total, draws

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor, draws: Draws) -> Gradients:
        """See `Kernel`."""
        scores = self._scores(given)
        query, key, value, gradient, out = (each.to(scores.dtype) for each in (*given[:3], gradient, out))
        weights = (scores - total.to(scores.dtype)[..., None]).exp_()
        of_weights = gradient @ value.mT
        of_value = weights.mT @ gradient
        if given.dropout:
            kept = self._kept(given, weights, draws[0])
            of_weights *= kept
            of_value = (weights * kept).mT @ gradient
        of_scores = weights * (of_weights - (gradient * out).sum(-1, keepdim=True)) * _scale(given)
        dtype = given.query.dtype
        return (of_scores @ key).to(dtype), (of_scores.mT @ query).to(dtype), of_value.to(dtype)

    def _kept(self, given: Given, like: Tensor, state: Tensor | None) -> Tensor:
        """What weights are multiplied with: nothing, or what makes up for those that were dropped."""
        generator = None
        if state is not None:
            generator = torch.Generator(like.device)
            generator.set_state(state)
        kept = torch.empty_like(like).bernoulli_(1 - given.dropout, generator=generator)
        return kept.div_(1 - given.dropout) if given.dropout < 1 else kept

    def _scores(self, given: Given) -> Tensor:
        dtype = torch.float64 if given.query.dtype == torch.float64 else torch.float32
        scores = given.query.to(dtype) @ given.key.to(dtype).mT * _scale(given)
        if given.bias is not None:
            scores += given.bias
        if given.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(later, -math.inf)
        return scores


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def _scale(given: Given) -> float:
    return 1 / math.sqrt(given.query.shape[-1]) if given.scale is None else given.scale


class FlashOnCpu:
    """Torch's kernel for the CPU, which drops nothing."""

    grouped = True

    def forward(self, given: Given) -> tuple[Tensor, Tensor, Draws]:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale, dropout = given
        out, total = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, is_causal, attn_mask=bias, scale=scale
        )
        return out, total, ()

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor, draws: Draws) -> Gradients:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale, dropout = given
        found: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, total, dropout, is_causal, attn_mask=bias, scale=scale
        )
        return found


class Flash:
    """Flash attention on CUDA."""

    grouped = True

    def forward(self, given: Given) -> tuple[Tensor, Tensor, Draws]:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = given
        out, total, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal, scale=scale
        )
        return out, total, (seed, offset)

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor, draws: Draws) -> Gradients:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = given
        found: Gradients = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, total.contiguous(), None, None, query.shape[2], key.shape[2], dropout,
            is_causal, *draws, scale=scale,
        )  # fmt: skip
        return found


class Efficient:
    """Memory-efficient attention on CUDA. What it knows of queries comes in steps of 32 of them."""

    grouped = False

    def forward(self, given: Given) -> tuple[Tensor, Tensor, Draws]:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = given
        out, total, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(given), True, dropout, is_causal, scale=scale
        )
        return out, total[..., : query.shape[2]], (seed, offset)

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor, draws: Draws) -> Gradients:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = given
        if torch.version.hip is None:
            total = F.pad(total, (0, -total.shape[-1] % 32), value=math.inf)
        of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, _aligned(given), out, total.contiguous(), *draws, dropout,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        return of_query, of_key, of_value


class Cudnn:
    """Attention of cuDNN."""

    grouped = True

    def forward(self, given: Given) -> tuple[Tensor, Tensor, Draws]:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale, dropout = given
        out, total, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, dropout, is_causal, False, scale=scale
        )
        return out, total.squeeze(-1), (seed, offset)

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor, draws: Draws) -> Gradients:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale, dropout = given
        found: Gradients = aten._scaled_dot_product_cudnn_attention_backward(
            gradient, query, key, value, out, total[..., None].contiguous(), *draws, bias, None, None,
            query.shape[2], key.shape[2], dropout, is_causal, scale=scale,
        )  # fmt: skip
        return found


def _aligned(given: Given) -> Any:
    """The bias of every score, in rows that begin where the kernel can read them."""
    if given.bias is None:
        return None
    columns = given.key.shape[2]
    shape = *given.query.shape[:3], columns
    return F.pad(given.bias.expand(*given.bias.shape[:-1], columns), (0, -columns % 16))[..., :columns].expand(shape)
