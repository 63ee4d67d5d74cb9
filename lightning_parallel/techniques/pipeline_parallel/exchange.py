"""What stages send each other: what a block returned, and the gradients of it.

The first time that microbatches of some shapes are seen, the structure of what follows is sent ahead; after that only
tensors travel. Stages on one rank hand over without a message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
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


def layout_of(value: Any) -> Layout:
    """The layout of what a block returned.

    Raises:
        TypeError: something in it can be neither sent as a tensor nor pickled.
    """
    tensors = list(tensors_of(value))
    rest = map_tensors(lambda _: _Slot(), value)
    try:
        pickled = pickle.dumps(rest)
    except Exception as error:
        raise TypeError(
            f"a block returned a {type(value).__name__} with something that cannot go to the next stage ({error}); "
            "return tensors and plain values (for Hugging Face models: use_cache=False)"
        ) from error
    return Layout(pickled, tuple(map(shape_of, tensors)))


class _Slot:
    """Where a tensor was."""


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
        self._known: dict[Hashable, Layout] = {}

    def send_forward(self, stage: int, microbatch: int, signature: Hashable, value: Any) -> None:
        """Sends what a stage returned to the next one.

        Raises:
            ValueError: for microbatches of one shape, the value had another layout before.
        """
        to, tag = self._rank_of(stage + 1), self._tag(stage, microbatch)
        layout = layout_of(value)
        known = self._known.get((stage, signature))
        if known is None:
            self._known[stage, signature] = layout
            self.lane.send_object(layout, to, tag)
        elif known != layout:
            raise ValueError(
                f"the last block of stage {stage} returned tensors {layout.tensors} for a microbatch for which it "
                f"returned {known.tensors} before; what goes from stage to stage must follow from the batch's shapes"
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
