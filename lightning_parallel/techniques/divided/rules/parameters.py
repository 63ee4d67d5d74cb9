"""What a user's step does with parameters themselves: memory that is written directly, copies, who learns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.divided.looks import memory_of
from lightning_parallel.techniques.divided.table import operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, own_of


@rule(Tensor.data.__get__, *operations("detach"))  # type: ignore[attr-defined]
def _without_history(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    made = func(divided.own)
    alias: Any = Divided(made, divided.cuts)
    if isinstance(divided, Wrapper):
        alias.form = divided.form
        alias._gathers = divided.gathers  # one for both: a change of one of them is a change of the other
    return alias


@rule(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    divided, value = args
    if not isinstance(divided, Divided):
        return NotImplemented
    divided.own.data.copy_(own_of(value, divided.cuts))
    for elements in divided.cuts.values():  # views on one device keep what was there
        viewed = elements.ranks.viewed
        viewed[:] = [each for each in viewed if memory_of(each.own) != memory_of(divided.own)]
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
