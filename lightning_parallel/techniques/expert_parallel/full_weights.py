"""Expert weights that code outside of the experts' module reads, such as a penalty on them or their norms.

While a step runs, the stored weights compute as `FullExpertWeight` tensors (see `step_parameters`). Only experts
compute with their local rows. Other readers get the weights of all experts, gathered. Each rank reads them for its own
samples, so gradients are summed over ranks. Elementwise functions, and sums, means and norms of all elements, need no
gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.collectives.conjugate_collectives import counted, gathered
from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.divided.metadata import memory_of, state_of
from lightning_parallel.techniques.divided.python_functions import run_below_autograd
from lightning_parallel.techniques.divided.rules.single import IN_PLACE, ONE_BY_ONE
from lightning_parallel.techniques.divided.step_parameters import Parameters, Part, computing_in
from lightning_parallel.techniques.divided.table import RULES, form_of, operations, same_cuts
from lightning_parallel.techniques.divided.tensor import Wrapper, run_on_full_tensors, write_back_changes
from lightning_parallel.techniques.expert_parallel.local_experts import OF_EXPERTS
from lightning_parallel.techniques.tools.means import original
from lightning_parallel.techniques.tools.shards import construct_dtensor


class FullExpertWeight(Wrapper):
    """An expert parameter, or an elementwise function of one, for code outside of the experts' module.

    In operations with other `Divided` tensors its rules come first, because it is a subclass of theirs.

    Args:
        own: the local rows, with autograd history.
        elements: the rows of each rank.
        alike: number of ranks that read the same samples (tensor parallel).
    """

    alike: int

    @staticmethod
    def __new__(cls, own: Tensor, elements: Elements, alike: int) -> FullExpertWeight:  # noqa: D102
        form = form_of(own.shape, {0: elements}, elements.ranks)
        wrapper: FullExpertWeight = construct_dtensor(cls, own, form, own.requires_grad)
        wrapper.alike = alike
        return wrapper

    @property
    def num_data_ranks(self) -> float:
        """Number of ranks that read different samples."""
        return self.only.ranks.count / self.alike

    def whole(self, reader: str = "") -> Tensor:
        """See `Divided.whole`. Gradients are summed over all ranks that read different samples."""
        key = "whole", torch.is_grad_enabled(), state_of(self.own)
        if key not in self.gathers:
            self.gathers[key] = gathered(counted(self.own, 1 / self.alike), 0, self.only)
        return self.gathers[key]

    def of_all(self, number: Tensor) -> Tensor:
        """Gather a number from each rank, (ranks,). In backward, gradients are summed as those of `whole`."""
        return gathered(counted(number[None], 1 / self.alike), 0, self.only.ranks.chunks(self.only.ranks.count))

    def again(self, own: Tensor) -> FullExpertWeight:
        """Return an `FullExpertWeight` with these local rows of a tensor that was computed from this one."""
        return FullExpertWeight(own, self.only, self.alike)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = original(func)
        args, kwargs = computing_in(args, kwargs)
        for each in args:
            if isinstance(each, FullExpertWeight):
                write_back_changes(each.form.viewed)
        known = RULES.get(func)
        if known in ANSWERING:
            return known(func, args, kwargs)
        result = _on_local_rows(func, args, kwargs)
        return run_on_full_tensors(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run operations that `__torch_function__` does not see, below autograd, on full tensors."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].again(args[0].own.detach())
        return run_below_autograd(
            func, args, kwargs, FullExpertWeight, FullExpertWeight.whole, OF_EXPERTS, "give it weight.clone() + 0"
        )


ANSWERING = {RULES[each] for each in (Tensor.get_device, Tensor.stride, Tensor.new_zeros, Tensor.requires_grad_,
                                      Tensor.__deepcopy__, Tensor.data.__set__)}  # type: ignore[attr-defined]  # fmt: skip
"""Rules of `Divided` that hold for `FullExpertWeight`, too: they read metadata, or do the same for every reader."""


SINGLE = frozenset(ONE_BY_ONE) - IN_PLACE
ALIASES = {Tensor.data.__get__, *operations("detach")}  # type: ignore[attr-defined]
POWERS = frozenset(operations("pow", "__pow__"))
PAIRS = frozenset(operations("add", "sub", "mul", "div", "__add__", "__sub__", "__mul__", "__truediv__"))
SUMS = frozenset(operations("sum"))
MEANS = frozenset(operations("mean"))
NORMS = frozenset((*operations("norm"), torch.linalg.vector_norm))


def _on_local_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute from local rows, and from sums over ranks; return NotImplemented where that is not enough.

    A scalar operand may differ between ranks, as a loss does, so it is combined with reduced or full tensors only.
    """
    if func is torch.autograd.grad:
        return _asked(*args, **kwargs)
    first, rest = args[0] if args else None, args[1:]
    if not isinstance(first, FullExpertWeight):
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
        case (FullExpertWeight() as other,) if (
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


def _of_one(func: Any, rows: FullExpertWeight) -> Any:
    if func in SINGLE or func in ALIASES:
        result: Any = rows.again(func(rows.own))
        if memory_of(result.own) == memory_of(rows.own):
            result._gathers = rows.gathers  # shared: both have one memory, so a change of one changes the other
        return result
    if func in SUMS or (func in MEANS and rows.is_floating_point()):
        summed = rows.of_all(rows.own.sum()).sum()
        return summed / rows.numel() if func in MEANS else summed
    return NotImplemented


# ---------------------------------------------------------------- gradients that a step asks for


def _asked(outputs: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad`. Gradients of expert weights become means over ranks that read different samples."""
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    outputs, rest, kwargs = tree_map_only(FullExpertWeight, FullExpertWeight.whole, (outputs, rest, kwargs))
    gradients = torch.autograd.grad(
        outputs, [each.own if isinstance(each, FullExpertWeight) else each for each in inputs], *rest, **kwargs
    )
    return tuple(
        each.again(gradient / each.num_data_ranks)
        if isinstance(each, FullExpertWeight) and gradient is not None
        else gradient
        for gradient, each in zip(gradients, inputs, strict=True)
    )


def _hooked(rows: FullExpertWeight, hook: Callable[[Tensor], Any]) -> Any:
    readers = rows.num_data_ranks  # the hook gets the mean over these ranks; autograd gets the sum

    def local_hook(gradient: Tensor) -> Any:
        changed = hook(rows.again(gradient / readers))
        if changed is None:
            return None
        return (changed.own if isinstance(changed, FullExpertWeight) else rows.only.take(changed, 0)) * readers

    return rows.own.register_hook(local_hook)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- while a step runs


class ExpertPart(Part):
    """Class of stored expert weights while a step runs: they compute as `FullExpertWeight` tensors."""

    axis = "ep"
    step: ClassVar[Parameters | None] = None


class ExpertWeights(Parameters):
    """The parameters of a model with experts that are sharded over ranks.

    Args:
        model: the model.
        ranks: the ranks that hold different experts.
        alike: number of these ranks that read the same samples (tensor parallel).
    """

    kind = ExpertPart

    def __init__(self, model: nn.Module, ranks: Ranks, alike: int) -> None:
        super().__init__(model, ranks, lambda own, cuts: FullExpertWeight(own, cuts[0], alike))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `Parameters.computing`. On exit, changes through views of gathered weights go to the local rows."""
        if not self._entered:
            self.ranks.viewed.clear()
        with super().computing(), FunctionsGetFullTensors():
            yield
            write_back_changes(self.ranks.viewed)
