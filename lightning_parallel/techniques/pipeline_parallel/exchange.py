"""What stages send each other: what a block returned, and the gradients of it.

The first time that microbatches of some shapes are seen, the structure of what follows is sent ahead; after that only
tensors travel. Stages on one rank hand over without a message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Arriving, Lane
from lightning_parallel.values import children_of, map_tensors, rebuilt, tensors_of

Shape = tuple[tuple[int, ...], torch.dtype]
"""What a receiver must know of a tensor."""


def shape_of(tensor: Tensor) -> Shape:
    """The shape and the dtype of a tensor."""
    return tuple(tensor.shape), tensor.dtype


@dataclass(frozen=True)
class Layout:
    """The structure of a message.

    Attributes:
        rest: the structure, with everything in it that is no tensor, pickled.
        tensors: shape and dtype of its tensors.
    """

    rest: bytes
    tensors: tuple[Shape, ...]


class _Slot:
    """Where a tensor is, and of what shape."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = shape_of(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slot) and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.shape)

    def __repr__(self) -> str:
        return f"a tensor of shape {self.shape[0]} and {self.shape[1]}"


def layout_of(value: Any) -> Layout:
    """The layout of what a stage returned.

    Raises:
        TypeError: something in it can be neither sent as a tensor nor pickled.
    """
    try:
        return Layout(pickle.dumps(_with_slots(value)), tuple(map(shape_of, tensors_of(value))))
    except Exception as error:
        raise TypeError(
            f"a block returned something that cannot go to the next stage ({error}); "
            "return tensors and plain values (for Hugging Face models: use_cache=False)"
        ) from error


def _with_slots(value: Any) -> Any:
    return map_tensors(_Slot, value)


def difference(before: Any, now: Any, where: str = "") -> str | None:
    """Where two structures differ, and in what; None if they do not."""
    if type(before) is not type(now):
        return f"{where} is a {type(now).__name__} and was a {type(before).__name__}"
    children, own = children_of(before), children_of(now)
    if len(children) != len(own) or _names(before) != _names(now):
        return f"{where} holds {_names(now) or len(own)} and held {_names(before) or len(children)}"
    if not children:
        return None if _is_same(before, now) else f"{where} is {now!r} and was {before!r}"
    names = _names(before) or range(len(children))
    pairs = zip(names, children, own, strict=True)
    return next((found for name, old, new in pairs if (found := difference(old, new, f"{where}[{name!r}]"))), None)


def _names(value: Any) -> list[Any]:
    if isinstance(value, Mapping) or not is_dataclass(value):
        return list(value) if isinstance(value, Mapping) else []
    return [field.name for field in fields(value)]


def _is_same(before: Any, now: Any) -> bool:
    try:
        return bool(before is now or before == now) or pickle.dumps(before) == pickle.dumps(now)
    except Exception:  # what compares itself in a way of its own, or cannot be sent
        return False


class Absent:
    """In the place of a tensor that nobody uses."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Absent) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"a tensor of shape {self.shape} and {self.dtype}"

    def zeros(self, device: torch.device) -> Tensor:
        """A tensor like it."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def rebuild(layout: Layout, tensors: list[Tensor]) -> Any:
    """The value of a layout with these tensors."""
    waiting = iter(tensors)
    return _filled(pickle.loads(layout.rest), waiting)


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, _Slot):
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
        self._known: dict[Hashable, Layout] = {}  # of what was received
        self._sent: dict[Hashable, Any] = {}  # structures, with slots for tensors

    def send_forward(self, stage: int, microbatch: int, signature: Hashable, value: Any) -> None:
        """Sends what a stage returned to the next one.

        Raises:
            TypeError: something in it can be neither sent as a tensor nor pickled.
            ValueError: for microbatches of one shape, the value had another layout before.
        """
        to, tag = self._rank_of(stage + 1), self._tag(stage, microbatch)
        before = self._sent.get((stage, signature))
        if before is None:
            layout = layout_of(value)
            self._sent[stage, signature] = pickle.loads(layout.rest)
            self.lane.send_object(layout, to, tag)
        elif found := difference(before, _with_slots(value)):
            raise ValueError(
                f"what stage {stage} hands on differs from what it handed on for a microbatch of the same shapes: "
                f"{found}; what goes from stage to stage must follow from the batch's shapes, but for the values of "
                "tensors: return as tensors what varies"
            )
        for tensor in tensors_of(value):
            self.lane.send(tensor, to, tag)

    def receive_forward(self, stage: int, microbatch: int, signature: Hashable) -> tuple[Layout, list[Arriving]]:
        """Starts to receive what the stage before returned."""
        source, tag = self._rank_of(stage - 1), self._tag(stage - 1, microbatch)
        layout: Layout | None = self._known.get((stage - 1, signature))
        if layout is None:
            layout = self._known[stage - 1, signature] = self.lane.receive_object(source, tag)
        return layout, self._receive(layout.tensors, source, tag)

    def send_backward(self, stage: int, microbatch: int, gradients: list[Tensor]) -> None:
        """Sends the gradients of what a stage received back to the stage before."""
        to, tag = self._rank_of(stage - 1), self._tag(stage - 1, microbatch) + 1
        for gradient in gradients:
            self.lane.send(gradient, to, tag)

    def receive_backward(self, stage: int, microbatch: int, shapes: Sequence[Shape]) -> list[Arriving]:
        """Starts to receive the gradients of what a stage returned."""
        return self._receive(shapes, self._rank_of(stage + 1), self._tag(stage, microbatch) + 1)

    def _receive(self, shapes: Sequence[Shape], source: int, tag: int) -> list[Arriving]:
        device = self.lane.device
        empty = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
        return [self.lane.receive(tensor, source, tag) for tensor in empty]

    def _tag(self, stage: int, microbatch: int) -> int:
        return 2 * (microbatch * self._stages + stage)
