"""Rules of tensors' own state in a step: `data`, copies, `requires_grad`, hooks, and `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.divided.metadata import memory_of
from lightning_parallel.techniques.divided.table import operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, is_divided, local_elements_of, local_part


@rule(Tensor.data.__get__, *operations("detach"))  # type: ignore[attr-defined]
def _without_history(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    shard = func(divided.own)
    alias: Any = Divided(shard, divided.cuts)
    if isinstance(divided, Wrapper):
        alias.form = divided.form
        alias._gathers = divided.gathers  # shared: a change of one of the two is a change of the other
    return alias


@rule(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    divided, value = args
    if not isinstance(divided, Divided):
        return NotImplemented
    divided.own.data.copy_(local_elements_of(value, divided.cuts))
    for elements in divided.cuts.values():  # on one device, views keep the old memory
        viewed = elements.ranks.viewed
        viewed[:] = [each for each in viewed if memory_of(each.own) != memory_of(divided.own)]
    divided.forget()
    return None


@rule(Tensor.requires_grad_)
def _learning(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    divided.requires_grad = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    return divided


@rule(Tensor.__deepcopy__)
def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy to a full tensor: a copy of a model is used on one device, without the ranks."""
    divided, memo = args
    with torch.no_grad():
        full = divided.whole("a copy").clone()
    copied = nn.Parameter(full, divided.requires_grad) if divided.stored is not None else full
    return memo.setdefault(id(divided), copied)


# ---------------------------------------------------------------- gradients that a step reads while it runs


@rule(*operations("register_hook"))
def _hooked(func: Any, args: Any, kwargs: Any) -> Any:
    divided, hook = args

    def local_hook(gradient: Tensor) -> Any:  # the user's hook gets the gradient as a `Divided` tensor
        changed = hook(Divided(gradient, divided.cuts))
        return None if changed is None else local_elements_of(changed, divided.cuts)

    return func(divided.own, local_hook)


@rule(torch.autograd.grad)
def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute gradients of local shards, when a step calls `torch.autograd.grad`."""
    outputs, inputs, *rest = args
    seeds = rest[0] if rest else kwargs.pop("grad_outputs", None)
    if kwargs.get("is_grads_batched"):
        raise NotImplementedError(
            "torch.autograd.grad(is_grads_batched=True) does not support divided tensors; call it once for each of "
            "grad_outputs"
        )
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    seeds = [seeds] if isinstance(seeds, Tensor) else list(seeds or [None] * len(outputs))
    local_seeds: list[Tensor | None] = []  # gradient of this rank's shard of each output
    for output, seed in zip(outputs, seeds, strict=True):
        if is_divided(output):
            if seed is None and output.numel() > 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            local_seeds.append(local_elements_of(torch.ones_like(output) if seed is None else seed, output.cuts))
        else:
            local_seeds.append(seed.whole("torch.autograd.grad") if is_divided(seed) else seed)
    gradients = func(list(map(local_part, outputs)), list(map(local_part, inputs)), local_seeds, *rest[1:], **kwargs)
    return tuple(
        Divided(gradient, each.cuts) if gradient is not None and is_divided(each) else gradient
        for gradient, each in zip(gradients, inputs, strict=True)
    )
