"""Step wrappers of sharded models: activate `Divided` parameters, and leave only full tensors on modules afterwards."""

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
from torch.utils._pytree import tree_map_only

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.spans import Runs
from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.divided.step_parameters import Parameters, Part, computing
from lightning_parallel.techniques.divided.tensor import Divided, is_divided
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.step import Step, StepFn, WrappedStep
from lightning_parallel.techniques.tools.redirect import Redirected
from lightning_parallel.values import ATOMS, add_note, like, map_kind

T = TypeVar("T")

log = logging.getLogger(__name__)

OF_TORCH = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""

HOLD = (Divided, list, deque, dict, tuple)
"""`Divided` tensors, and containers that may hold them."""

NO_TENSORS = frozenset(ATOMS)
DEPTH = 5
"""How many levels of containers are searched: they may contain each other."""


class ComputingStep(WrappedStep):
    """Step whose forward and backward compute with full parameters (`Divided` tensors) in place of the stored shards.

    Args:
        inner: the step to wrap.
        parameters: the parameters of the model, as they are stored between steps.
    """

    def __init__(self, inner: Step, parameters: Parameters) -> None:
        super().__init__(inner)
        self.parameters = parameters

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        with self.parameters.computing():  # also for recomputation in a pipeline, whose backward passes run here
            return self.inner.forward(run, *args, **kwargs)

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        with self.parameters.computing():  # for recomputation
            self.inner.backward(run)


@dataclass(eq=False)
class ComputingDivision(Division):
    """Model whose stored shards of parameters compute as full parameters while a step runs."""

    parameters: Parameters

    def outputs(self, outputs: Any) -> Any:
        """Gather the sharded tensors that the step returned."""
        return tree_map_only((Divided, Part), lambda each: computing(each).whole("output of the step"), outputs)

    def expose_gathered(self) -> None:
        """See `Division.expose_gathered`."""
        self.parameters.find()


class DividedStep(WrappedStep):
    """Step after which the module keeps full tensors in place of `Divided` ones.

    Between steps, code may run on one rank only, such as printing on rank 0, and must not gather. So `Divided` tensors
    that a step leaves in attributes of modules, in lists, dicts and states of metrics, become full when the batch is
    done: after the backward pass if there is one, since backward may compute from them.

    Args:
        inner: the step to wrap.
        model: the user's module.
        ranks: the ranks that shard its tensors; tensors gathered because no rule exists are logged after the step.

    Raises:
        ValueError: a part of the model is compiled already.
    """

    def __init__(self, inner: Step, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(inner)
        for name, module in model.named_modules():
            call = module._compiled_call_impl  # set by module.compile(), and by techniques that redirect calls
            if isinstance(module, OptimizedModule) or not (call is None or isinstance(call, Redirected)):
                raise ValueError(
                    f"{name or type(model).__name__} is compiled by torch.compile, which does not support divided "
                    "tensors; leave that out, and let the strategy compile the blocks: HybridStrategy(..., Compile())"
                )
        self._ranks = ranks
        self._attributes = [vars(module) for module in model.modules()]
        self._functions = FunctionsGetFullTensors()
        self._in_forward = self._went_back = False

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        self._in_forward, self._went_back = True, False
        self._ranks.viewed.clear()

        def of_the_user(*args: Any, **kwargs: Any) -> T:
            # Backward passes inside the user's step are the user's own: their gradients are not reduced later.
            with _reducing_later(self._ranks, False):
                return run(*args, **kwargs)

        with self._functions, _reducing_later(self._ranks, True):
            output = self.inner.forward(of_the_user, *args, **kwargs)
        self._in_forward = False  # not reset if the step raised: the run is over
        for view in self._ranks.viewed:
            view.write_back_views()
        self._ranks.viewed.clear()
        if self._went_back or not torch.is_grad_enabled():
            self._leave()
        return output

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        # FunctionsGetFullTensors: for recomputation.
        with self._functions, _reducing_later(self._ranks, True):
            try:
                self.inner.backward(run)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):  # where the full tensor would be copied
                    add_note(
                        error,
                        "this tensor may be divided over ranks; torch may then save its shard for backward where it "
                        "would copy the full tensor. Write x = x + y instead of x += y",
                    )
                raise
        self._went_back = True
        if not self._in_forward:
            self._leave()

    def _leave(self) -> None:
        ranks = self._ranks
        if ranks.rank == 0 and ranks.gathered:  # gathers that were not logged before, most bytes first
            title = (
                f"Gathered from {ranks.count} ranks of {ranks.name}, as these operations have no rule for divided "
                "tensors; bytes that one rank received in one step:"
            )
            most_first = sorted(ranks.gathered.items(), key=lambda row: -row[1][1])
            rows = [("operation", "shape", "times", "bytes")]
            rows += [(call, str(tuple(shape)), str(n), f"{received:,}") for (call, shape), (n, received) in most_first]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in rows]
            log.info("\n".join([title, *lines]))
        ranks.told |= ranks.gathered.keys()
        ranks.gathered.clear()
        for table in self._attributes:
            for name, value in [*table.items()]:
                if isinstance(value, HOLD) and name not in OF_TORCH and (full := _whole(value)) is not value:
                    table[name] = full


@contextmanager
def _reducing_later(ranks: Ranks, now: bool) -> Iterator[None]:
    before, ranks.reduces_later = ranks.reduces_later, now
    try:
        yield
    finally:
        ranks.reduces_later = before


def _whole(value: Any, depth: int = DEPTH) -> Any:
    """Replace `Divided` tensors in a value by full tensors; lists and dicts are changed in place. A collective."""
    if isinstance(value, Divided):
        if value.stored is not None:
            return value.stored
        # Keep the gradient that the user retained for it, which has been computed by now.
        whole, gradient = value.whole("attribute of the module"), value.grad if value.own.retains_grad else None
        if gradient is not None:
            if not whole.is_leaf:
                whole.retain_grad()
            whole.grad = gradient.whole("attribute of the module") if isinstance(gradient, Divided) else gradient
        return whole
    if not depth or not isinstance(value, HOLD):
        return value
    container: Any = value
    if NO_TENSORS.issuperset(map(type, value.values() if isinstance(value, dict) else value)):
        return value
    keys: Any = list(value) if isinstance(value, dict) else range(len(value))
    items_in_full = {key: _whole(value[key], depth - 1) for key in keys}
    changed = {key: item for key, item in items_in_full.items() if item is not value[key]}
    if not changed or not isinstance(value, tuple):
        for key, item in changed.items():
            container[key] = item
        return value
    return like(value, list(items_in_full.values()))


# ---------------------------------------------------------------- from one stage of a pipeline to the next


@dataclass
class Parcel:
    """Local shard of a tensor and its sharding, as one stage of a pipeline sends it to the next.

    The receiving rank has the same index among the ranks that shard the tensor, so it has the same elements.

    Attributes:
        own: the local shard.
        cuts: for each sharded dimension (axis name of the ranks, size of the full dimension, spans of each rank).
    """

    own: Tensor
    cuts: dict[int, tuple[str, int, tuple[Runs, ...]]]


@dataclass(eq=False)
class DividedTensors(Division):
    """Model with sharded tensors, which are sent between the stages of a pipeline as parcels.

    Args:
        ranks: the ranks that shard them.
    """

    ranks: Ranks

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Wrap the user's step: before each call, clear the cache of results derived from tensors."""

        def run_with_empty_cache(*args: Any, **kwargs: Any) -> T:
            self.ranks.derivations.forget()
            return run(*args, **kwargs)

        return run_with_empty_cache

    def encode_activation(self, value: Any) -> Any:
        """See `Division.encode_activation`: replace `Divided` tensors by parcels."""

        def parcel(each: Any) -> Parcel:
            divided = computing(each)
            return Parcel(divided.own, {k: (e.ranks.name, e.size, e.runs) for k, e in divided.cuts.items()})

        kinds: Any = Divided, Part
        return map_kind(kinds, parcel, value)

    def decode_activation(self, value: Any) -> Any:
        """See `Division.decode_activation`: replace parcels by `Divided` tensors.

        A tensor that other ranks shard too stays a parcel, around a `Divided` tensor, until their division decodes it.
        """
        ranks = self.ranks

        def unpack(parcel: Parcel) -> Any:
            cuts = parcel.cuts.items()
            new_cuts = {k: ranks.elements(size, runs) for k, (name, size, runs) in cuts if name == ranks.name}
            remaining = {k: cut for k, cut in cuts if k not in new_cuts}
            own, decoded_cuts = (parcel.own.own, dict(parcel.own.cuts)) if is_divided(parcel.own) else (parcel.own, {})
            tensor = Divided(own, decoded_cuts | new_cuts) if decoded_cuts | new_cuts else own
            return Parcel(tensor, remaining) if remaining else tensor

        return map_kind(Parcel, unpack, value)
