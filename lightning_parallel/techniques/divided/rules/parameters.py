"""What a user's step does with parameters themselves: memory that is written directly, copies, who learns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.divided.table import rule
from lightning_parallel.techniques.divided.tensor import Divided, own_of


@rule(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(func: Any, args: Any, kwargs: Any) -> Any:
    """The same memory without history, in which a change is one of the tensor."""
    divided = args[0]
    return Divided(divided.own.data, divided.cuts) if divided.cuts else divided.own.data


@rule(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    divided, value = args
    if not isinstance(divided, Divided):
        return NotImplemented
    divided.own.data.copy_(own_of(value, divided.cuts))
    divided.forget()
    return None


@rule(Tensor.requires_grad_)
def _learning(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    divided.requires_grad = {"requires_grad": True, **dict(zip(("requires_grad",), args[1:], strict=False)), **kwargs}[
        "requires_grad"
    ]
    return divided


@rule(Tensor.__deepcopy__)
def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """A copy of a model is one device's: what becomes of it nobody knows."""
    divided, memo = args
    with torch.no_grad():
        made = divided.whole("a copy").clone()
    copied = nn.Parameter(made, divided.requires_grad) if divided.stored is not None else made
    return memo.setdefault(id(divided), copied)


@rule(Tensor.data_ptr, Tensor.untyped_storage)
def _memory(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].own)
