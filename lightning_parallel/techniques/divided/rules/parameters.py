"""What a user's step does with parameters themselves: memory that is written directly, copies, who learns."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.table import form_of, operations, rule
from lightning_parallel.techniques.divided.tensor import OWN, Divided, Viewed, Wrapper, own_of, wrapped


def alike(parameter: Tensor, ranks: Ranks) -> Divided:
    """A parameter that all ranks have alike, whose gradients they add up once a step, and not wherever it is used.

    Where it meets divided tensors a rank computes a summand of its gradient. Where it does not, all compute the whole
    gradient, of which each takes its share, so that the sum is right for any mixture of uses.
    """
    compiled = torch.compiler.is_dynamo_compiling()
    made = Divided(parameter, {}) if compiled else wrapped(parameter, form_of(parameter.shape, {}, ranks))
    made.ranks, made.stored = ranks, parameter
    return made


class Alias(Wrapper):
    """One without history over the memory of another, in which a change is one of the other's, and of views of that."""

    other: weakref.ref[Any]

    @property
    def origin(self) -> Any:  # type: ignore[override]
        """The other, as long as somebody has it."""
        return self.other()

    @property
    def own(self) -> Tensor:  # type: ignore[override]
        """This rank's elements, as they are after changes of views of the other."""
        if type(origin := self.origin) is Viewed:
            origin.take_changes()
        return OWN(self)

    def whole(self, reader: str = "") -> Tensor:
        """See `Divided.whole`: that of which there are views counts changes together with what it gives here."""
        return origin.whole(reader).detach() if type(origin := self.origin) is Viewed else super().whole(reader)

    def forget(self) -> None:
        """See `Divided.forget`."""
        super().forget()
        if (origin := self.origin) is not None:
            origin.forget()


@rule(Tensor.data.__get__, *operations("detach"))  # type: ignore[attr-defined]
def _without_history(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    made = func(divided.own)
    if not divided.cuts:
        return made
    alias: Any = Divided(made, divided.cuts)
    if isinstance(divided, Wrapper):
        alias.form = divided.form
        alias.other, alias.__class__ = weakref.ref(divided if divided.origin is None else divided.origin), Alias
    return alias


@rule(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    divided, value = args
    if not isinstance(divided, Divided):
        return NotImplemented
    divided.own.data.copy_(own_of(value, divided.cuts))
    if type(divided) is Viewed:  # views on one device keep what was there: autograd is to refuse what it kept of them
        divided._shown = *divided._shown[:2], -1
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
