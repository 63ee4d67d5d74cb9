"""A step in which tensors are divided: what goes around their rules gets wholes, and so does who looks afterwards."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.spans import Runs
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.parts import Parameters, Part, computing
from lightning_parallel.techniques.divided.tensor import Divided, is_divided
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.step import Step, StepFn, WrappedStep
from lightning_parallel.techniques.tools.redirect import Redirected
from lightning_parallel.values import ATOMS, add_note, like, map_kind

T = TypeVar("T")

log = logging.getLogger(__name__)

OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

HOLD = (Divided, list, deque, dict, tuple)
"""Divided tensors, and what may hold them."""

NO_TENSORS = frozenset(ATOMS)
DEPTH = 5
"""How far within containers is looked: they may contain each other."""


class ComputingStep(WrappedStep):
    """A step in which, and in whose backward, parts of parameters compute as the whole.

    Args:
        inner: the step to wrap.
        parameters: of the model, as they are stored between steps.
    """

    def __init__(self, inner: Step, parameters: Parameters) -> None:
        super().__init__(inner)
        self.parameters = parameters

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        with self.parameters.computing():  # for what the backward passes of a pipeline, which run here, recompute
            return self.inner.forward(run, *args, **kwargs)

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        with self.parameters.computing():  # for what is recomputed
            self.inner.backward(run)


class DividedStep(WrappedStep):
    """A step after which the module keeps no divided tensors.

    Between steps code may run on one rank only, as what rank 0 prints does, and must not gather anything. So what a
    step leaves in the attributes of modules, in lists, dicts and the states of metrics, is whole when the batch is
    done: after the backward pass where there is one, for until then it may be what backward computes from.

    Args:
        inner: the step to wrap.
        model: the user's module.
        ranks: that divide its tensors; what they gathered for want of a rule is told after the step.

    Raises:
        ValueError: a part of the model that is compiled already.
    """

    def __init__(self, inner: Step, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(inner)
        for name, module in model.named_modules():
            call = module._compiled_call_impl  # of module.compile(); techniques redirect calls there too
            if isinstance(module, OptimizedModule) or not (call is None or isinstance(call, Redirected)):
                raise ValueError(
                    f"{name or type(model).__name__} is compiled by torch.compile, which does not know tensors that "
                    "ranks have divided; leave that out, and let the strategy compile the blocks: "
                    "HybridStrategy(..., Compile())"
                )
        self._ranks = ranks
        self._attributes = [vars(module) for module in model.modules()]
        self._functions = FunctionsGetWholes()
        self._in_forward = self._went_back = False

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        self._in_forward, self._went_back = True, False
        self._ranks.viewed.clear()

        def of_the_user(*args: Any, **kwargs: Any) -> T:
            # Backward passes in it are the user's own: nobody reduces later what they compute.
            with _reducing_later(self._ranks, False):
                return run(*args, **kwargs)

        with self._functions, _reducing_later(self._ranks, True):
            output = self.inner.forward(of_the_user, *args, **kwargs)
        self._in_forward = False  # not where it raised: the run is over
        for view in self._ranks.viewed:
            view.take_changes()
        self._ranks.viewed.clear()
        if self._went_back or not torch.is_grad_enabled():
            self._leave()
        return output

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        # Functions: for what is computed again.
        with self._functions, _reducing_later(self._ranks, True):
            try:
                self.inner.backward(run)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):  # where the whole would have been copied
                    add_note(
                        error,
                        "ranks may have parts of this tensor, and torch may keep a part itself for backward where it "
                        "keeps a copy of the whole; write x = x + y in place of x += y",
                    )
                raise
        self._went_back = True
        if not self._in_forward:
            self._leave()

    def _leave(self) -> None:
        ranks = self._ranks
        if ranks.rank == 0 and ranks.gathered:  # on one of them, what was not told before, most bytes first
            title = (
                f"Gathered from {ranks.count} ranks of {ranks.name}, as no rule divides the operation; "
                "bytes are those that a rank received in one step:"
            )
            most_first = sorted(ranks.gathered.items(), key=lambda row: -row[1][1])
            rows = [("operation", "shape", "times", "bytes")]
            rows += [(call, str(tuple(shape)), str(n), f"{received:,}") for (call, shape), (n, received) in most_first]
            w = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = [f"  {a:<{w[0]}}  {b:<{w[1]}}  {c:>{w[2]}}  {d:>{w[3]}}" for a, b, c, d in rows]
            log.info("\n".join([title, *lines]))
        ranks.told |= ranks.gathered.keys()
        ranks.gathered.clear()
        for table in self._attributes:
            for name, value in [*table.items()]:
                if isinstance(value, HOLD) and name not in OF_TORCH and (made := _whole(value)) is not value:
                    table[name] = made


@contextmanager
def _reducing_later(ranks: Ranks, now: bool) -> Iterator[None]:
    before, ranks.reduces_later = ranks.reduces_later, now
    try:
        yield
    finally:
        ranks.reduces_later = before


def _whole(value: Any, depth: int = DEPTH) -> Any:
    """The value without divided tensors: lists and dicts stay the same ones."""
    if isinstance(value, Divided):
        if value.stored is not None:
            return value.stored
        # With the gradient that was retained for it, which is there by now.
        whole, gradient = value.whole("what the module keeps"), value.grad if value.own.retains_grad else None
        if gradient is not None:
            if not whole.is_leaf:
                whole.retain_grad()
            whole.grad = gradient.whole("what the module keeps") if isinstance(gradient, Divided) else gradient
        return whole
    if not depth or not isinstance(value, HOLD):
        return value
    items: Any = value
    if NO_TENSORS.issuperset(map(type, value.values() if isinstance(value, dict) else value)):
        return value
    places: Any = list(value) if isinstance(value, dict) else range(len(value))
    made = {place: _whole(value[place], depth - 1) for place in places}
    changed = {place: each for place, each in made.items() if each is not value[place]}
    if not changed or not isinstance(value, tuple):
        for place, each in changed.items():
            items[place] = each
        return value
    return like(value, list(made.values()))


# ---------------------------------------------------------------- from one stage of a pipeline to the next


@dataclass
class Parcel:
    """A rank's own elements, and by dimensions which they are: what one stage of a pipeline sends to the next.

    The rank that receives a parcel has the same place among the ranks that divide, so its elements are the same.

    Attributes:
        own: the elements.
        cuts: for each divided dimension the name of the ranks that divide it, its size, and the spans of each rank.
    """

    own: Tensor
    cuts: dict[int, tuple[str, int, tuple[Runs, ...]]]


KINDS: Any = (Divided, Part)
"""What is sent as a parcel."""


@dataclass(eq=False)
class DividedTensors(Division):
    """A model in which tensors are divided; as parcels they go from one stage of a pipeline to the next.

    Args:
        ranks: that divide them.
    """

    ranks: Ranks

    def encode_activation(self, value: Any) -> Any:
        """See `Division.encode_activation`: the value with parcels in place of divided tensors."""

        def parcel(each: Any) -> Parcel:
            divided = computing(each)
            return Parcel(divided.own, {k: (e.ranks.name, e.size, e.runs) for k, e in divided.cuts.items()})

        return map_kind(KINDS, parcel, value)

    def decode_activation(self, value: Any) -> Any:
        """See `Division.decode_activation`: the value with divided tensors in place of parcels.

        A tensor that other ranks divide too stays a parcel, of divided elements, until these unpack it.
        """
        ranks = self.ranks

        def made(parcel: Parcel) -> Any:
            cuts = parcel.cuts.items()
            mine = {k: ranks.elements(size, runs) for k, (name, size, runs) in cuts if name == ranks.name}
            others = {k: cut for k, cut in cuts if k not in mine}
            own, before = (parcel.own.own, dict(parcel.own.cuts)) if is_divided(parcel.own) else (parcel.own, {})
            made = Divided(own, before | mine) if before | mine else own
            return Parcel(made, others) if others else made

        return map_kind(Parcel, made, value)
