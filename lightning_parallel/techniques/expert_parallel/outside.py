"""Weights of experts that code outside of their module reads: a penalty on them, their norms, a look at one of them.

While a step runs, an `Outside` computes for what is stored of them (see `parts`). Experts themselves compute with what
a rank has. Whoever else reads one gets the weights of all experts, gathered; each rank reads for its own samples, so
gradients of all ranks are summed. Functions of single elements, and sums, means and norms of all, need no gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.collectives.by_elements import counted, gathered
from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.looks import memory_of, state_of
from lightning_parallel.techniques.divided.parts import Parameters, Part, computing_in
from lightning_parallel.techniques.divided.python_functions import called_below
from lightning_parallel.techniques.divided.rules.single import IN_PLACE, ONE_BY_ONE
from lightning_parallel.techniques.divided.table import RULES, form_of, operations, same_cuts
from lightning_parallel.techniques.divided.tensor import Wrapper, of_wholes, settle
from lightning_parallel.techniques.expert_parallel.own_experts import OF_EXPERTS
from lightning_parallel.techniques.tools.means import original
from lightning_parallel.techniques.tools.shards import made_as_dtensors_are


class Outside(Wrapper):
    """A parameter of experts, or what single elements of one became, for readers outside of the experts' module.

    Where it meets other divided tensors, its rules come first, as those of a class under theirs.

    Args:
        own: the rows that this rank has, with their history.
        elements: which they are.
        alike: how many of the ranks read for the same samples.
    """

    alike: int

    @staticmethod
    def __new__(cls, own: Tensor, elements: Elements, alike: int) -> Outside:  # noqa: D102
        form = form_of(own.shape, {0: elements}, elements.ranks)
        made: Outside = made_as_dtensors_are(cls, own, form, own.requires_grad)
        made.alike = alike
        return made

    @property
    def readers_apart(self) -> float:
        """How many ranks read for samples of their own."""
        return self.only.ranks.count / self.alike

    def whole(self, reader: str = "") -> Tensor:
        """See `Divided.whole`; its gradients are summed over all ranks that read it."""
        key = "whole", torch.is_grad_enabled(), state_of(self.own)
        if key not in self.gathers:
            self.gathers[key] = gathered(counted(self.own, 1 / self.alike), 0, self.only)
        return self.gathers[key]

    def of_all(self, number: Tensor) -> Tensor:
        """A number of each rank, (ranks,), for this rank's own use."""
        return gathered(counted(number[None], 1 / self.alike), 0, self.only.ranks.chunks(self.only.ranks.count))

    def again(self, own: Tensor) -> Outside:
        """The same rows of what it became."""
        return Outside(own, self.only, self.alike)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = original(func)
        args, kwargs = computing_in(args, kwargs)
        for each in args:
            if isinstance(each, Outside):
                settle(each.form.viewed)
        known = RULES.get(func)
        if known in ANSWERING:
            return known(func, args, kwargs)
        result = _by_own_rows(func, args, kwargs)
        if result is not NotImplemented:
            return result
        return of_wholes(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Gives wholes to code that `__torch_function__` does not see, below autograd."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].again(args[0].own.detach())
        return called_below(func, args, kwargs, Outside, Outside.whole, OF_EXPERTS, "give it weight.clone() + 0")


SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]

ANSWERING = {RULES[each] for each in (Tensor.get_device, Tensor.stride, Tensor.new_zeros, Tensor.requires_grad_,
                                      Tensor.__deepcopy__, SET_DATA)}  # fmt: skip
"""Rules of divided tensors that only answer a question, or do the same whoever reads."""


SINGLE = frozenset(ONE_BY_ONE) - IN_PLACE
ALIASES = {Tensor.data.__get__, *operations("detach")}  # type: ignore[attr-defined]
POWERS = frozenset(operations("pow", "__pow__"))
PAIRS = frozenset(operations("add", "sub", "mul", "div", "__add__", "__sub__", "__mul__", "__truediv__"))
SUMS = frozenset(operations("sum"))
MEANS = frozenset(operations("mean"))
NORMS = frozenset((*operations("norm"), torch.linalg.vector_norm))


def _by_own_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """What needs no rows of other ranks, whoever reads; NotImplemented for the rest.

    A number that is met may be another one on each rank, as a loss is, so it is met after a reduction only.
    """
    if func is torch.autograd.grad:
        return _asked(*args, **kwargs)
    first, rest = args[0] if args else None, args[1:]
    if not isinstance(first, Outside):
        return NotImplemented
    if func in NORMS and _is_length(*rest, **kwargs):
        return torch.linalg.vector_norm(first.of_all(torch.linalg.vector_norm(first.own)))
    if kwargs:
        return NotImplemented
    match rest:
        case ():
            return _of_one(func, first)
        case (int() as power,) if func in POWERS:
            return first.again(func(first.own, power))
        case (Outside() as other,) if (
            func in PAIRS and first.shape == other.shape and same_cuts(first.cuts, other.cuts)
        ):
            return first.again(func(first.own, other.own))
        case (hook,) if func is Tensor.register_hook:
            return _hooked(first, hook)
    return NotImplemented


def _is_length(order: Any = 2, dim: Any = None, keepdim: bool = False, **named: Any) -> bool:
    """Whether these arguments of a norm ask for the Euclidean one over all elements."""
    order = named.pop("p", named.pop("ord", order))
    return order in ("fro", 2) and dim is None and not keepdim and not named


def _of_one(func: Any, rows: Outside) -> Any:
    if func in SINGLE or func in ALIASES:
        made: Any = rows.again(func(rows.own))
        if memory_of(made.own) == memory_of(rows.own):
            made._gathers = rows.gathers  # one for both: a change of one of them is a change of the other
        return made
    if func in SUMS or (func in MEANS and rows.is_floating_point()):
        summed = rows.of_all(rows.own.sum()).sum()
        return summed / rows.numel() if func in MEANS else summed
    return NotImplemented


# ---------------------------------------------------------------- gradients that a step asks for


def _asked(outputs: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`: of rows that tokens of all ranks reach, the mean over these ranks."""
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    outputs, rest, kwargs = tree_map_only(Outside, Outside.whole, (outputs, rest, kwargs))
    found = torch.autograd.grad(
        outputs, [each.own if isinstance(each, Outside) else each for each in inputs], *rest, **kwargs
    )
    return tuple(
        each.again(gradient / each.readers_apart) if isinstance(each, Outside) and gradient is not None else gradient
        for gradient, each in zip(found, inputs, strict=True)
    )


def _hooked(rows: Outside, hook: Callable[[Tensor], Any]) -> Any:
    many = rows.readers_apart

    def on_own(gradient: Tensor) -> Any:
        changed = hook(rows.again(gradient / many))
        if changed is None:
            return None
        return (changed.own if isinstance(changed, Outside) else rows.only.take(changed, 0)) * many

    return rows.own.register_hook(on_own)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- while a step runs


class ExpertPart(Part):
    """The class of stored weights of experts while a step runs: they compute as `Outside` tensors."""

    axis = "ep"
    step: ClassVar[Parameters | None] = None


class ExpertWeights(Parameters):
    """The parameters of a model of whose experts each rank has some.

    Args:
        model: whose they are.
        ranks: that have divided the experts.
        alike: how many of them read the same samples.
    """

    kind = ExpertPart

    def __init__(self, model: nn.Module, ranks: Ranks, alike: int) -> None:
        super().__init__(model, ranks, lambda own, cuts: Outside(own, cuts[0], alike))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `Parameters.computing`; what views of gathered weights changed is taken back at the end."""
        if not self._entered:
            self.ranks.viewed.clear()
        with super().computing(), FunctionsGetWholes():
            yield
            settle(self.ranks.viewed)
