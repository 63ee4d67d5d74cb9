"""Each kernel of attention, forward and backward, against products and a softmax in double precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_parallel.techniques.context_parallel.kernels import (
    Efficient,
    Flash,
    FlashOnCpu,
    Kernel,
    KernelInputs,
    Plain,
    attend,
    attend_backward,
)
from recipes.gpt import Attention, GPTConfig, Rotary
from tests.gpu import on_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SHAPES = {"square": (40, 40), "few queries": (24, 40), "one more key": (40, 41)}


def given(device: torch.device, dtype: torch.dtype, rows: int, keys: int, groups: int, causal: bool) -> KernelInputs:
    random = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, 16, generator=random, dtype=torch.float64).to(device, dtype)

    return KernelInputs(draw(4, rows), draw(4 // groups, keys), draw(4 // groups, keys), None, causal, None, 0.0)


def gradient_of(query: Tensor) -> Tensor:
    return torch.randn(query.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(query)


def exact(these: KernelInputs, bias: Tensor | None = None) -> list[Tensor]:
    """Output, log-sum-exp and gradients, by autograd."""
    query, key, value = (each.double().clone().requires_grad_() for each in these[:3])
    scores = query @ key.repeat_interleave(4 // key.shape[1], 1).mT / 4
    if bias is not None:
        scores = scores + bias.double()
    if these.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ value.repeat_interleave(4 // value.shape[1], 1)
    out.backward(gradient_of(these.query).double())
    return [out.detach(), scores.detach().logsumexp(-1), query.grad, key.grad, value.grad]  # type: ignore[list-item]


def compare(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for what, got, exactly in zip(("out", "total", "of query", "of key", "of value"), found, wanted, strict=True):
        tolerance = TOLERANCE[dtype] * max(1.0, exactly.abs().max().item())
        assert (got.double() - exactly).abs().max().item() < tolerance, what


def check(kernel: Kernel, these: KernelInputs) -> None:
    out, total, draws = kernel.forward(these)
    gradients = kernel.backward(gradient_of(these.query), these, out, total, draws)
    compare([out, total, *gradients], exact(these._replace(bias=None), these.bias), these.query.dtype)


def check_forms(kernel: Kernel, device: torch.device, dtype: torch.dtype, masks: bool) -> None:
    for rows, keys in SHAPES.values():
        for groups in (1, 2) if kernel.grouped else (1,):
            plain = given(device, dtype, rows, keys, groups, False)
            check(kernel, plain)
            if rows == keys:
                check(kernel, plain._replace(is_causal=True))
            if masks:
                bias = torch.randn(rows, keys, generator=torch.Generator().manual_seed(2)).to(plain.query)
                check(kernel, plain._replace(bias=bias.expand(2, 4, rows, keys)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kernel_of_the_host(dtype: torch.dtype) -> None:
    check_forms(FlashOnCpu(), CPU, dtype, masks=True)


def test_products_and_a_softmax() -> None:
    check_forms(Plain(), CPU, torch.float64, masks=True)


KERNELS: dict[str, tuple[Any, tuple[torch.dtype, ...], bool]] = {
    "flash": (Flash, (torch.float16, torch.bfloat16), False),
    "efficient": (Efficient, (torch.float32, torch.float16, torch.bfloat16), True),
    "plain": (Plain, (torch.float64, torch.float32, torch.bfloat16), True),
}


@on_gpu
@pytest.mark.parametrize(("name", "dtype"), [(name, kind) for name in KERNELS for kind in KERNELS[name][1]])
def test_a_kernel_of_the_gpu(name: str, dtype: torch.dtype) -> None:
    kernel, _, masks = KERNELS[name]
    check_forms(kernel(), GPU, dtype, masks)


# ---------------------------------------------------------------- as torch chooses


def check_choice(device: torch.device, dtype: torch.dtype, expected: type, groups: int = 2) -> None:
    these = given(device, dtype, 40, 40, groups, True)
    out, total, how = attend(these, None)
    assert type(how.kernel) is expected
    gradients = attend_backward(gradient_of(these.query), out, total, these, None, how)
    compare([out, total, *gradients], exact(these), dtype)


def test_what_torch_takes_on_the_host() -> None:
    check_choice(CPU, torch.float32, FlashOnCpu)


# with as many heads of queries for one of keys as torch's own kernel takes
BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, Flash, 2),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, Efficient, 1),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, Efficient, 1),
    "plain": (SDPBackend.MATH, Plain, 2),
}


@on_gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_what_torch_takes_on_a_gpu(name: str) -> None:
    backend, expected, groups = BACKENDS[name]
    with sdpa_kernel(backend):
        check_choice(GPU, torch.bfloat16, expected, groups)


# ---------------------------------------------------------------- our GPT


def attention_of_gpt(device: torch.device, dtype: torch.dtype, qk_norm: bool, groups: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "context": 64, "dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 64}
    config = GPTConfig(**sizes, n_kv_heads=4 // groups, qk_norm=qk_norm)
    module, rotary = Attention(config).to(device, dtype), Rotary(config.head_dim, config.rope_theta)
    x = torch.randn(2, 48, 64, dtype=torch.float64).to(device, dtype).requires_grad_()
    out = module(x, rotary(torch.arange(48, device=device)))
    # a sum: gradients of a mean are so small that float16 has few digits for them
    F.mse_loss(out.double(), torch.ones_like(out, dtype=torch.float64), reduction="sum").backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]  # type: ignore[list-item]


def check_attention_of_gpt(
    device: torch.device, dtype: torch.dtype, groups: int = 2, kernel: SDPBackend | None = None
) -> None:
    for qk_norm in (False, True):
        wanted = attention_of_gpt(CPU, torch.float64, qk_norm, groups)
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            found = attention_of_gpt(device, dtype, qk_norm, groups)
        for got, exactly in zip(found, wanted, strict=True):
            scale = exactly.abs().max().item()
            assert (got.cpu().double() - exactly).abs().max().item() < 2 * TOLERANCE[dtype] * scale


def test_attention_of_our_gpt_on_the_host() -> None:
    check_attention_of_gpt(CPU, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_of_our_gpt(name: str, dtype: torch.dtype) -> None:
    backend, _, groups = BACKENDS[name]
    check_attention_of_gpt(GPU, dtype, groups, backend)
