"""Messages between stages: what a block returned, and the gradients of it.

The first time that microbatches of some shapes are seen, the structure of what follows is sent ahead; after that only
tensors travel. Stages on one rank hand over without a message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Arriving, Lane
from lightning_parallel.values import ATOMS, TensorSpec, children_of, field_names, map_tensors, rebuilt, tensors_of

PLAIN = (*ATOMS, TensorSpec)


@dataclass(frozen=True)
class Structure:
    """A message without its tensors.

    Attributes:
        rest: everything in it that is no tensor, pickled.
        tensors: its tensors, in their order.
    """

    rest: bytes
    tensors: tuple[TensorSpec, ...]


def structure_of(value: Any) -> Structure:
    """The structure of what a stage returned.

    Raises:
        TypeError: something in it can be neither sent as a tensor nor pickled.
    """
    try:
        return Structure(pickle.dumps(_without_tensors(value)), tuple(map(TensorSpec.of, tensors_of(value))))
    except Exception as error:
        raise TypeError(
            f"a block returned something that cannot go to the next stage ({error}); "
            "return tensors and plain values (for Hugging Face models: use_cache=False)"
        ) from error


def _without_tensors(value: Any) -> Any:
    return map_tensors(TensorSpec.of, value)


def _fits(before: Any, now: Any) -> bool:
    """Whether a value has a structure that is known, in a glance; `difference` looks closer, and tells."""
    if isinstance(now, Tensor):
        return type(before) is TensorSpec and before.shape == now.shape and before.dtype == now.dtype
    if type(before) is not type(now):
        return False
    if isinstance(now, PLAIN):
        return bool(before == now)
    children, own = children_of(before), children_of(now)
    known = bool(own) or isinstance(now, (list, tuple, dict))  # else it may be anything
    named = isinstance(now, (list, tuple)) or _names(before) == _names(now)
    return known and named and len(children) == len(own) and all(map(_fits, children, own))


def difference(before: Any, now: Any, where: str = "") -> str | None:
    """Describes the first difference between two structures: its place and both values; None without one."""
    if type(before) is not type(now):
        return f"{where} is a {type(now).__name__} and was a {type(before).__name__}"
    children, own = children_of(before), children_of(now)
    if not children and not own:
        return None if _is_same(before, now) else f"{where} is {now!r} and was {before!r}"
    names, own_names = _names(before), _names(now)
    if len(children) != len(own) or names != own_names:
        return f"{where} holds {own_names or len(own)} and held {names or len(children)}"
    pairs = zip(names or range(len(children)), children, own, strict=True)
    return next((found for name, old, new in pairs if (found := difference(old, new, f"{where}[{name!r}]"))), None)


def _names(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Mapping) else [*field_names(value.__class__)]


def _is_same(before: Any, now: Any) -> bool:
    try:
        return bool(before is now or before == now) or pickle.dumps(before) == pickle.dumps(now)
    except Exception:  # what compares itself in a way of its own, or cannot be sent
        return False


class Unsent(TensorSpec):
    """A tensor that is not sent, because no later stage uses it."""

    def zeros(self, device: torch.device) -> Tensor:
        """Zeros of its shape."""
        return self.empty(device).zero_()


def rebuild(structure: Structure, tensors: list[Tensor]) -> Any:
    """The value of a structure with these tensors."""
    waiting = iter(tensors)
    return _filled(pickle.loads(structure.rest), waiting)


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    if type(value) is TensorSpec:
        return next(tensors)
    children = children_of(value)
    return rebuilt(value, [_filled(child, tensors) for child in children]) if children else value


def floating(value: Any) -> list[Tensor]:
    """The tensors of a structure that can have gradients."""
    return [tensor for tensor in tensors_of(value) if has_gradients(tensor)]


def has_gradients(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind that can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


class Exchange:
    """Sends and receives for the stages of one rank.

    Args:
        lane: the ranks of this pipeline.
        rank_of: the rank that holds a stage.
        stages: how many stages there are.
    """

    def __init__(self, lane: Lane, rank_of: Callable[[int], int], stages: int) -> None:
        self.lane, self._rank_of, self._stages = lane, rank_of, stages
        self._known: dict[Hashable, Structure] = {}  # of what was received
        self._sent: dict[Hashable, Any] = {}  # values, with `TensorSpec` for tensors

    def send_forward(self, stage: int, microbatch: int, signature: Hashable, value: Any) -> None:
        """Sends what a stage returned to the next one.

        Raises:
            TypeError: something in it can be neither sent as a tensor nor pickled.
            ValueError: for microbatches of one shape, the value had another structure before.
        """
        to, tag = self._rank_of(stage + 1), self._tag(stage, microbatch)
        before = self._sent.get((stage, signature))
        if before is None:
            structure = structure_of(value)
            self._sent[stage, signature] = pickle.loads(structure.rest)
            self.lane.send_object(structure, to, tag)
        elif not _fits(before, value) and (found := difference(before, _without_tensors(value))):
            raise ValueError(
                f"what stage {stage} hands on differs from what it handed on for a microbatch of the same shapes: "
                f"{found}; what goes from stage to stage must follow from the batch's shapes, but for the values of "
                "tensors: return as tensors what varies"
            )
        for tensor in tensors_of(value):
            self.lane.send(tensor, to, tag)

    def receive_forward(self, stage: int, microbatch: int, signature: Hashable) -> tuple[Structure, list[Arriving]]:
        """Starts to receive what the stage before returned."""
        source, tag = self._rank_of(stage - 1), self._tag(stage - 1, microbatch)
        structure: Structure | None = self._known.get((stage - 1, signature))
        if structure is None:
            structure = self._known[stage - 1, signature] = self.lane.receive_object(source, tag)
        return structure, self._receive(structure.tensors, source, tag)

    def send_backward(self, stage: int, microbatch: int, gradients: list[Tensor]) -> None:
        """Sends the gradients of what a stage received back to the stage before."""
        to, tag = self._rank_of(stage - 1), self._tag(stage - 1, microbatch) + 1
        for gradient in gradients:
            self.lane.send(gradient, to, tag)

    def receive_backward(self, stage: int, microbatch: int, specs: Sequence[TensorSpec]) -> list[Arriving]:
        """Starts to receive the gradients of what a stage returned."""
        return self._receive(specs, self._rank_of(stage + 1), self._tag(stage, microbatch) + 1)

    def _receive(self, specs: Sequence[TensorSpec], source: int, tag: int) -> list[Arriving]:
        return [self.lane.receive(spec.empty(self.lane.device), source, tag) for spec in specs]

    def _tag(self, stage: int, microbatch: int) -> int:
        return 2 * (microbatch * self._stages + stage)
