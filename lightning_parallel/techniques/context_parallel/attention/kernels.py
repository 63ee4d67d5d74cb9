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


Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """A way to compute it."""

    grouped: bool
    """Whether keys and values may have fewer heads than queries."""

    def forward(self, given: Given) -> tuple[Tensor, Tensor]:
        """The output (B, H, rows, Dv), and the log-sum-exp of scores (B, H, rows)."""

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor) -> Gradients:
        """The gradients of queries, keys and values, given output and log-sum-exp over all keys."""


def attend(given: Given, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; minus infinity, and zeros, of a query that meets none of the keys.

    Args:
        given: without a bias.
        mask: booleans or summands of the scores, broadcast to them.
    """
    given = given._replace(bias=_bias(mask, given.query.dtype))
    kernel, used = _chosen(given, given.query)
    out, total = kernel.forward(used)
    if mask is None:
        return out, total
    # Kernels do not agree on what they tell of these queries.
    alone = ~mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) == -math.inf
    return out.masked_fill(alone[..., None], 0.0), total.masked_fill(alone, -math.inf)


def attend_backward(gradient: Tensor, given: Given, mask: Tensor | None, out: Tensor, total: Tensor) -> Gradients:
    """The gradients of queries, keys and values.

    Args:
        gradient: of the output.
        given: as for `attend`.
        mask: the same.
        out: over all keys.
        total: the log-sum-exp over all keys; finite.
    """
    given = given._replace(bias=_bias(mask, given.query.dtype))
    kernel, used = _chosen(given, given.query.detach().requires_grad_())
    of_query, of_key, of_value = kernel.backward(gradient, used, out, total)
    if used.key is not given.key:
        of_key, of_value = (_summed_in_groups(each, given.key.shape[1]) for each in (of_key, of_value))
    return of_query, of_key, of_value


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _chosen(given: Given, asked: Tensor) -> tuple[Kernel, Given]:
    """The kernel that torch would take, and what it computes with.

    Args:
        given: all of it.
        asked: queries, that say whether gradients will be asked for.
    """
    kernel = _known(given, asked)
    if given.query.shape[1] == given.key.shape[1] or kernel.grouped:
        return kernel, given
    times = given.query.shape[1] // given.key.shape[1]
    given = given._replace(key=given.key.repeat_interleave(times, 1), value=given.value.repeat_interleave(times, 1))
    return _known(given, asked), given


def _known(given: Given, asked: Tensor) -> Kernel:
    is_cuda = given.query.device.type == "cuda"
    if is_cuda and given.query.shape[-1] % 8:  # torch pads such heads before it calls a kernel
        return Plain()
    grouped = given.query.shape[1] != given.key.shape[1]
    choice = torch._fused_sdp_choice(
        asked, given.key, given.value, given.bias, 0.0, given.is_causal, scale=given.scale, enable_gqa=grouped
    )
    if choice == SDPBackend.FLASH_ATTENTION.value:
        return Flash() if is_cuda else FlashOnCpu() if given.query.device.type == "cpu" else Plain()
    if not is_cuda:
        return Plain()
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        return Cudnn()
    return Efficient() if choice == SDPBackend.EFFICIENT_ATTENTION.value else Plain()


def _summed_in_groups(gradient: Tensor, heads: int) -> Tensor:
    return gradient.view(gradient.shape[0], heads, -1, *gradient.shape[2:]).sum(2)


# ---------------------------------------------------------------- the kernels


class Plain:
    """Products and a softmax, in at least single precision."""

    grouped = False

    def forward(self, given: Given) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        scores = self._scores(given)
        total = torch.logsumexp(scores, -1)
        weights = (scores - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp_()
        return (weights @ given.value.to(scores.dtype)).to(given.query.dtype), total

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor) -> Gradients:
        """See `Kernel`."""
        scores = self._scores(given)
        query, key, value, gradient, out = (each.to(scores.dtype) for each in (*given[:3], gradient, out))
        weights = (scores - total.to(scores.dtype)[..., None]).exp_()
        of_value = weights.mT @ gradient
        delta = (gradient * out).sum(-1, keepdim=True)
        of_scores = weights * (gradient @ value.mT - delta) * _scale(given)
        dtype = given.query.dtype
        return (of_scores @ key).to(dtype), (of_scores.mT @ query).to(dtype), of_value.to(dtype)

    def _scores(self, given: Given) -> Tensor:
        dtype = torch.float64 if given.query.dtype == torch.float64 else torch.float32
        scores = given.query.to(dtype) @ given.key.to(dtype).mT * _scale(given)
        if given.bias is not None:
            scores += given.bias
        if given.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(later, -math.inf)
        return scores


def _scale(given: Given) -> float:
    return 1 / math.sqrt(given.query.shape[-1]) if given.scale is None else given.scale


class FlashOnCpu:
    """Torch's kernel for the CPU."""

    grouped = True

    def forward(self, given: Given) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale = given
        found: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=self._mask(bias), scale=scale
        )
        return found

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor) -> Gradients:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale = given
        found: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, total, 0.0, is_causal, attn_mask=self._mask(bias), scale=scale
        )
        return found

    def _mask(self, bias: Tensor | None) -> Tensor | None:
        return bias[None] if bias is not None and bias.dim() == 3 else bias


class Flash:
    """Flash attention on CUDA."""

    grouped = True

    def forward(self, given: Given) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale = given
        out, total, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        return out, total

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor) -> Gradients:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale = given
        nothing = torch.zeros(2, dtype=torch.int64, device=query.device).view(torch.uint64)
        found: Gradients = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, total.contiguous(), None, None, query.shape[2], key.shape[2], 0.0,
            is_causal, nothing, nothing[0], scale=scale,
        )  # fmt: skip
        return found


class Efficient:
    """Memory-efficient attention on CUDA. What it knows of queries comes in steps of 32 of them."""

    grouped = False

    def forward(self, given: Given) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale = given
        out, total, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(given), True, 0.0, is_causal, scale=scale
        )
        return out, total[..., : query.shape[2]]

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor) -> Gradients:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale = given
        if torch.version.hip is None:
            total = F.pad(total, (0, -total.shape[-1] % 32), value=math.inf)
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, _aligned(given), out, total.contiguous(), nothing, nothing, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        return of_query, of_key, of_value


class Cudnn:
    """Attention of cuDNN."""

    grouped = True

    def forward(self, given: Given) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale = given
        out, total, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, 0.0, is_causal, False, scale=scale
        )
        return out, total.squeeze(-1)

    def backward(self, gradient: Tensor, given: Given, out: Tensor, total: Tensor) -> Gradients:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale = given
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        found: Gradients = aten._scaled_dot_product_cudnn_attention_backward(
            gradient, query, key, value, out, total[..., None].contiguous(), nothing, nothing, bias, None, None,
            query.shape[2], key.shape[2], 0.0, is_causal, scale=scale,
        )  # fmt: skip
        return found


def _aligned(given: Given) -> Any:
    """The bias of every score, in rows that begin where the kernel can read them."""
    if given.bias is None:
        return None
    columns = given.key.shape[2]
    shape = *given.query.shape[:3], columns
    return F.pad(given.bias.expand(*given.bias.shape[:-1], columns), (0, -columns % 16))[..., :columns].expand(shape)
