"""Each kernel of attention, forward and backward, against products and a softmax in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(Plain, torch.float64), *((FlashOnCpu, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16))],
)
def test_kernel_of_the_host(kernel: type[Kernel], dtype: torch.dtype) -> None:
    check_forms(kernel(), CPU, dtype, masks=True)


KERNELS: dict[str, tuple[Any, tuple[torch.dtype, ...], bool]] = {
    "flash": (Flash, (torch.float16, torch.bfloat16), False),
    "efficient": (Efficient, (torch.float32, torch.float16, torch.bfloat16), True),
    "plain": (Plain, (torch.float64, torch.float32, torch.bfloat16), True),
}


@on_gpu
@pytest.mark.parametrize(("name", "dtype"), [(name, kind) for name in KERNELS for kind in KERNELS[name][1]])
def test_kernel_of_the_gpu(name: str, dtype: torch.dtype) -> None:
    kernel, _, masks = KERNELS[name]
    check_forms(kernel(), GPU, dtype, masks)


@pytest.mark.parametrize(
    ("kernel", "dtype", "has_bias"),
    [(Flash, torch.bfloat16, False), (Efficient, torch.float32, True)],
)
def test_kernels_of_other_devices_are_called_as_torch_defines(kernel: Any, dtype: torch.dtype, has_bias: bool) -> None:
    """In shapes only."""
    with torch.device("meta"):
        query, key, value = (torch.empty(2, 4, length, 16, dtype=dtype) for length in (20, 12, 12))
        bias = torch.empty(1, 1, 20, 12, dtype=dtype) if has_bias else None
        given = KernelInputs(query, key, value, bias, False, None, 0.1)
        out, total, draws = kernel().forward(given)
        assert (out.shape, total.shape) == (query.shape, (2, 4, 20))
        found = kernel().backward(torch.empty_like(out), given, out, total, draws)
    assert [each.shape for each in found] == [query.shape, key.shape, value.shape]


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
