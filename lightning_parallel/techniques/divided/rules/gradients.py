"""Gradients that a user's step asks for while it runs: hooks on tensors, and `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.by_elements import completed, summand_of
from lightning_parallel.techniques.divided.table import Cuts, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, own_of


@rule(*operations("register_hook"))
def _hooked(func: Any, args: Any, kwargs: Any) -> Any:
    divided, hook = args

    def on_own(gradient: Tensor) -> Any:
        changed = hook(Divided(completed(gradient, divided.cuts), divided.cuts))
        return None if changed is None else _summand(changed, divided.cuts)

    return func(divided.own, on_own)


@rule(Tensor.retain_grad)
def _retained(func: Any, args: Any, kwargs: Any) -> None:
    func(args[0].own)


@rule(torch.autograd.grad)
def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Complete gradients: what copies have summands of is summed here, for nobody does so later."""
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
    found = func([_own(each) for each in outputs], [_own(each) for each in inputs], given, *rest[1:], **kwargs)
    return tuple(_complete(gradient, each) for gradient, each in zip(found, inputs, strict=True))


def _own(tensor: Any) -> Any:
    return tensor.own if isinstance(tensor, Divided) else tensor


def _seed(output: Any, seed: Tensor | None) -> Tensor | None:
    """The gradient that a rank gives to its elements of an output."""
    if not is_divided(output):
        return seed.whole("torch.autograd.grad") if isinstance(seed, Divided) else seed
    if seed is None and output.numel() > 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return _summand(torch.ones_like(output) if seed is None else seed, output.cuts)


def _summand(gradient: Tensor, cuts: Cuts) -> Tensor:
    own = own_of(gradient, cuts)
    for dim, elements in cuts.items():
        own = summand_of(own, dim, elements)
    return own


def _complete(gradient: Any, divided: Any) -> Any:
    if gradient is None or not is_divided(divided):
        return gradient
    return Divided(completed(gradient, divided.cuts), divided.cuts)
