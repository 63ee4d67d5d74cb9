"""Gradients that a user's step asks for while it runs: hooks on tensors, and `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel.techniques.divided.table import operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, local_part, own_of


@rule(*operations("register_hook"))
def _hooked(func: Any, args: Any, kwargs: Any) -> Any:
    divided, hook = args

    def on_own(gradient: Tensor) -> Any:
        changed = hook(Divided(gradient, divided.cuts))
        return None if changed is None else own_of(changed, divided.cuts)

    return func(divided.own, on_own)


@rule(Tensor.retain_grad)
def _retained(func: Any, args: Any, kwargs: Any) -> None:
    func(args[0].own)


@rule(torch.autograd.grad)
def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of own elements, as a step asks for them."""
    outputs, inputs, *rest = args
    seeds = rest[0] if rest else kwargs.pop("grad_outputs", None)
    if kwargs.get("is_grads_batched"):
        raise NotImplementedError(
            "torch.autograd.grad(is_grads_batched=True) of tensors that ranks have divided; call it once for each of "
            "grad_outputs"
        )
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    seeds = [seeds] if isinstance(seeds, Tensor) else list(seeds or [None] * len(outputs))
    given = [_seed(output, seed) for output, seed in zip(outputs, seeds, strict=True)]
    found = func(list(map(local_part, outputs)), list(map(local_part, inputs)), given, *rest[1:], **kwargs)
    return tuple(
        Divided(gradient, each.cuts) if gradient is not None and is_divided(each) else gradient
        for gradient, each in zip(found, inputs, strict=True)
    )


def _seed(output: Any, seed: Tensor | None) -> Tensor | None:
    """The gradient that a rank gives to its elements of an output."""
    if not is_divided(output):
        return seed.whole("torch.autograd.grad") if isinstance(seed, Divided) else seed
    if seed is None and output.numel() > 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return own_of(torch.ones_like(output) if seed is None else seed, output.cuts)
