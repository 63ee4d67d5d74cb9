"""Attention of one rectangle of scores, with results that `ring` merges with those of other rectangles.

Forward also returns the log-sum-exp of each query's scores. Backward gets the output and the log-sum-exp over all keys
of the query, so that the gradients of rectangles add up to those of full attention. Torch's fused kernels can do that:

| | where | masks |
|---|---|---|
| flash on the CPU | all floating dtypes | yes |
| flash on CUDA | 16 bits | no |
| efficient | CUDA; also where torch would choose cuDNN's | yes |
| plain | everywhere; allocates the scores | yes |

`torch._fused_sdp_choice` says which of them torch's attention would choose.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


class KernelInputs(NamedTuple):
    """Arguments of a kernel. The number of key and value heads Hkv divides the number of query heads H."""

    query: Tensor  # [B, H, rows, D]
    key: Tensor  # [B, Hkv, keys, D]
    value: Tensor  # [B, Hkv, keys, Dv]
    bias: Tensor | None  # broadcasts to [B, H, rows, keys]
    is_causal: bool
    scale: float | None
    dropout: float


RandomState = tuple[Tensor, ...]
"""Random state from which a kernel drew the weights to drop, in the format of that kernel."""

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """An implementation of attention."""

    grouped: bool
    """Whether keys and values may have fewer heads than queries."""

    def forward(self, inputs: KernelInputs) -> tuple[Tensor, Tensor, RandomState]:
        """Return the output [B, H, rows, Dv], the log-sum-exp of scores [B, H, rows], and the random state."""

    def backward(
        self, gradient: Tensor, inputs: KernelInputs, out: Tensor, total: Tensor, random: RandomState
    ) -> Gradients:
        """Return gradients of queries, keys and values, given the output and the log-sum-exp over all keys."""


class KernelState(NamedTuple):
    """The kernel that computed a rectangle and its random state, for backward."""

    kernel: Kernel
    random: RandomState


def attend(inputs: KernelInputs, mask: Tensor | None) -> tuple[Tensor, Tensor, KernelState]:
    """Return output, log-sum-exp and state. A query without keys has the output 0 and the log-sum-exp -inf.

    Args:
        inputs: without a bias.
        mask: booleans, or biases of the scores; broadcasts to [B, H, rows, keys].
    """
    inputs = with_bias(inputs, mask)
    with torch.autocast(inputs.query.device.type, enabled=False):
        kernel = kernel_for(inputs)
        if not kernel.grouped and inputs.query.shape[1] != inputs.key.shape[1]:
            inputs = with_all_heads(inputs)
            kernel = kernel_for(inputs)
        out, total, random = kernel.forward(inputs)
    if mask is not None:  # kernels return different results for queries without keys
        keyless = ~mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) == -math.inf
        out, total = out.masked_fill(keyless[..., None], 0.0), total.masked_fill(keyless, -math.inf)
    return out, total, KernelState(kernel, random)


def attend_backward(
    gradient: Tensor, out: Tensor, total: Tensor, inputs: KernelInputs, mask: Tensor | None, state: KernelState
) -> Gradients:
    """Return the gradients of queries, keys and values.

    Args:
        gradient: gradient of the output.
        out: output over all keys.
        total: log-sum-exp over all keys; finite.
        inputs: as for `attend`.
        mask: as for `attend`.
        state: returned by `attend`.
    """
    inputs, key_heads = with_bias(inputs, mask), inputs.key.shape[1]
    if not state.kernel.grouped:
        inputs = with_all_heads(inputs)
    with torch.autocast(inputs.query.device.type, enabled=False):
        of_query, of_key, of_value = state.kernel.backward(gradient, inputs, out, total, state.random)
    if inputs.key.shape[1] != key_heads:
        of_key, of_value = (torch.unflatten(each, 1, (key_heads, -1)).sum(2) for each in (of_key, of_value))
    return of_query, of_key, of_value


def with_bias(inputs: KernelInputs, mask: Tensor | None) -> KernelInputs:
    """Return the inputs with the mask as a bias of the scores."""
    if mask is not None and mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=inputs.query.dtype, device=mask.device)
        mask = zeros.masked_fill_(~mask, -math.inf)
    return inputs._replace(bias=mask)


def with_all_heads(inputs: KernelInputs) -> KernelInputs:
    """Return the inputs with a head of keys and values for each head of queries."""
    times = inputs.query.shape[1] // inputs.key.shape[1]
    if times == 1:
        return inputs
    return inputs._replace(key=inputs.key.repeat_interleave(times, 1), value=inputs.value.repeat_interleave(times, 1))


def kernel_for(inputs: KernelInputs) -> Kernel:
    """Return the kernel that torch's attention would choose."""
    device = inputs.query.device.type
    if device == "cuda" and inputs.query.shape[-1] % 8:  # torch pads such heads before it calls a kernel
        return Plain()
    choice = torch._fused_sdp_choice(
        inputs.query, inputs.key, inputs.value, inputs.bias, inputs.dropout, inputs.is_causal,
        scale=inputs.scale, enable_gqa=inputs.query.shape[1] != inputs.key.shape[1],
    )  # fmt: skip
    if choice == SDPBackend.FLASH_ATTENTION.value and device in ("cuda", "cpu"):
        return Flash() if device == "cuda" else FlashOnCpu()
    fused = SDPBackend.EFFICIENT_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
    return Efficient() if device == "cuda" and choice in fused else Plain()


class Plain:
    """Matrix products and a softmax, in float32 or float64."""

    grouped = False

    def forward(self, inputs: KernelInputs) -> tuple[Tensor, Tensor, RandomState]:
        """See `Kernel`."""
        scores = self._scores(inputs)
        total = torch.logsumexp(scores, -1)
        weights = (scores - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp_()
        random: RandomState = ()
        if inputs.dropout:
            device = weights.device
            is_cuda = device.type == "cuda"
            generator = torch.cuda.default_generators[device.index or 0] if is_cuda else torch.default_generator
            random = (generator.get_state(),)
            weights *= self._kept(inputs, weights, None)
        return (weights @ inputs.value.to(scores.dtype)).to(inputs.query.dtype), total, random

    def backward(
        self, gradient: Tensor, inputs: KernelInputs, out: Tensor, total: Tensor, random: RandomState
    ) -> Gradients:
        """See `Kernel`."""
        scores = self._scores(inputs)
        query, key, value, gradient, out = (each.to(scores.dtype) for each in (*inputs[:3], gradient, out))
        weights = (scores - total.to(scores.dtype)[..., None]).exp_()
        of_weights = gradient @ value.mT
        of_value = weights.mT @ gradient
        if inputs.dropout:
            generator = torch.Generator(weights.device)
            generator.set_state(random[0])
            factors = self._kept(inputs, weights, generator)
            of_weights *= factors
            of_value = (weights * factors).mT @ gradient
        of_scores = weights * (of_weights - (gradient * out).sum(-1, keepdim=True)) * self._scale(inputs)
        dtype = inputs.query.dtype
        return (of_scores @ key).to(dtype), (of_scores.mT @ query).to(dtype), of_value.to(dtype)

    def _kept(self, inputs: KernelInputs, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a factor for each weight: 0 if it is dropped, otherwise 1 / (1 - dropout)."""
        factors = torch.empty_like(like).bernoulli_(1 - inputs.dropout, generator=generator)
        return factors.div_(1 - inputs.dropout) if inputs.dropout < 1 else factors

    def _scores(self, inputs: KernelInputs) -> Tensor:
        dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
        scores = inputs.query.to(dtype) @ inputs.key.to(dtype).mT * self._scale(inputs)
        if inputs.bias is not None:
            scores += inputs.bias
        if inputs.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(later, -math.inf)
        return scores

    def _scale(self, inputs: KernelInputs) -> float:
        return 1 / math.sqrt(inputs.query.shape[-1]) if inputs.scale is None else inputs.scale


class FlashOnCpu:
    """Flash attention on the CPU, which has no dropout."""

    grouped = True

    def forward(self, inputs: KernelInputs) -> tuple[Tensor, Tensor, RandomState]:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale, dropout = inputs
        out, total = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, is_causal, attn_mask=bias, scale=scale
        )
        return out, total, ()

    def backward(
        self, gradient: Tensor, inputs: KernelInputs, out: Tensor, total: Tensor, random: RandomState
    ) -> Gradients:
        """See `Kernel`."""
        query, key, value, bias, is_causal, scale, dropout = inputs
        gradients: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, total, dropout, is_causal, attn_mask=bias, scale=scale
        )
        return gradients


class Flash:
    """Flash attention on CUDA."""

    grouped = True

    def forward(self, inputs: KernelInputs) -> tuple[Tensor, Tensor, RandomState]:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = inputs
        out, total, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal, scale=scale
        )
        return out, total, (seed, offset)

    def backward(
        self, gradient: Tensor, inputs: KernelInputs, out: Tensor, total: Tensor, random: RandomState
    ) -> Gradients:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = inputs
        gradients: Gradients = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, total.contiguous(), None, None, query.shape[2], key.shape[2], dropout,
            is_causal, *random, scale=scale,
        )  # fmt: skip
        return gradients


class Efficient:
    """Memory-efficient attention on CUDA, whose log-sum-exp is padded to a multiple of 32 queries."""

    grouped = False

    def forward(self, inputs: KernelInputs) -> tuple[Tensor, Tensor, RandomState]:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = inputs
        out, total, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, self._aligned_bias(inputs), True, dropout, is_causal, scale=scale
        )
        return out, total[..., : query.shape[2]], (seed, offset)

    def backward(
        self, gradient: Tensor, inputs: KernelInputs, out: Tensor, total: Tensor, random: RandomState
    ) -> Gradients:
        """See `Kernel`."""
        query, key, value, _, is_causal, scale, dropout = inputs
        if torch.version.hip is None:
            total = F.pad(total, (0, -total.shape[-1] % 32), value=math.inf)
        of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, self._aligned_bias(inputs), out, total.contiguous(), *random, dropout,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        return of_query, of_key, of_value

    def _aligned_bias(self, inputs: KernelInputs) -> Any:
        """Return the bias expanded to [B, H, rows, keys], with rows aligned to 16 elements, as the kernel requires."""
        if inputs.bias is None:
            return None
        columns = inputs.key.shape[2]
        bias = F.pad(inputs.bias.expand(*inputs.bias.shape[:-1], columns), (0, -columns % 16))[..., :columns]
        return bias.expand(*inputs.query.shape[:3], columns)
