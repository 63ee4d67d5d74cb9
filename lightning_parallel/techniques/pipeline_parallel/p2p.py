"""Messages between stages: what a block returned, and the gradients of it.

A message is a structure, in which tensors are numbered, and its tensors. Ranks send a structure once. In training,
microbatches of the same shapes have the same one. In evaluation a block may return more in some batches, such as
attention maps in the first one, so there a message begins with the number of its structure:

    training, the first microbatch of its shapes    structure, tensors
    training, all others                            tensors
    evaluation, a structure that was not sent yet   0, structure, tensors
    evaluation, the k-th structure of these shapes  k, tensors
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Arriving, Lane
from lightning_parallel.values import TensorSpec

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class Structure(NamedTuple):
    """A message without its tensors: the pickled value, with numbers in their places, and their shapes and dtypes."""

    pickled: bytes
    specs: tuple[Spec, ...]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The value with these tensors."""
        unpickler = pickle.Unpickler(io.BytesIO(self.pickled))
        unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


class Message(NamedTuple):
    """What a stage returned, ready to be sent. A tensor that is in it twice is sent once."""

    structure: Structure
    tensors: list[Tensor]


def packed(value: Any) -> Message:
    """Take tensors out of a value, at any depth; raise TypeError for a value that cannot be pickled."""
    buffer, tensors, numbers = io.BytesIO(), list[Tensor](), dict[int, int]()

    def number_of(part: Any) -> int | None:
        """The number that stands in the place of a tensor."""
        if not isinstance(part, Tensor):
            return None
        if part.is_nested:
            TensorSpec.of(part)  # raises with the remedy
        if id(part) not in numbers:
            numbers[id(part)] = len(tensors)
            tensors.append(part)
        return numbers[id(part)]

    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = number_of  # type: ignore[method-assign]
    try:
        pickler.dump(value)
    except Exception as error:
        raise TypeError(
            f"a block returned something that cannot go to the next stage ({error}); "
            "return tensors and plain values (for Hugging Face models: use_cache=False)"
        ) from error
    return Message(Structure(buffer.getvalue(), tuple((tuple(t.shape), t.dtype) for t in tensors)), tensors)


def has_gradients(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind that can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


class P2P:
    """Sends and receives for the stages of one rank; `rank_of` names the rank that holds a stage."""

    def __init__(self, lane: Lane, rank_of: Callable[[int], int], stages: int) -> None:
        self.lane, self._rank_of, self._stages = lane, rank_of, stages
        self._received: dict[Hashable, list[Structure]] = {}
        self._sent: dict[Hashable, list[Structure]] = {}

    def send_forward(self, stage: int, microbatch: int, shapes: Hashable, message: Message, varies: bool) -> None:
        """Send what a stage returned to the next one.

        `varies`: microbatches of the same shapes may have several structures, as in evaluation; else ValueError.
        """
        to, tag = self._rank_of(stage + 1), 2 * (microbatch * self._stages + stage)
        known, structure = self._sent.setdefault((stage, shapes, varies), []), message.structure
        number = known.index(structure) + 1 if structure in known else 0
        if varies:
            self.lane.send(torch.tensor([number], device=self.lane.device), to, tag)
        elif known and not number:
            # equal structures have other bytes where a text in them is not the same object
            was, is_ = (repr(each.filled([TensorSpec(*spec) for spec in each.specs])) for each in (known[0], structure))
            if was != is_:
                raise ValueError(
                    f"what stage {stage} hands on differs from what it handed on for a microbatch of the same shapes: "
                    f"it is {is_} and was {was}; in training, only the values of tensors may vary: return as tensors "
                    "what varies"
                )
        if not number and (varies or not known):
            known.append(structure)
            self.lane.send_object(structure, to, tag)
        for tensor in message.tensors:
            self.lane.send(tensor, to, tag)

    def receive_forward(
        self, stage: int, microbatch: int, shapes: Hashable, varies: bool
    ) -> tuple[Structure, list[Arriving]]:
        """Start to receive what the stage before returned; see `send_forward`."""
        source, tag = self._rank_of(stage - 1), 2 * (microbatch * self._stages + stage - 1)
        known = self._received.setdefault((stage - 1, shapes, varies), [])
        number = min(len(known), 1)
        if varies:
            number = int(self._receive([((1,), torch.long)], source, tag)[0].wait())
        if not number:
            known.append(self.lane.receive_object(source, tag))
        structure = known[number - 1]
        return structure, self._receive(structure.specs, source, tag)

    def send_backward(self, stage: int, microbatch: int, gradients: list[Tensor]) -> None:
        """Send the gradients of what a stage received back to the stage before."""
        to, tag = self._rank_of(stage - 1), 2 * (microbatch * self._stages + stage - 1) + 1
        for gradient in gradients:
            self.lane.send(gradient, to, tag)

    def receive_backward(self, stage: int, microbatch: int, specs: Sequence[Spec]) -> list[Arriving]:
        """Start to receive the gradients of what a stage returned."""
        return self._receive(specs, self._rank_of(stage + 1), 2 * (microbatch * self._stages + stage) + 1)

    def _receive(self, specs: Sequence[Spec], source: int, tag: int) -> list[Arriving]:
        made = [torch.empty(shape, dtype=dtype, device=self.lane.device) for shape, dtype in specs]
        return [self.lane.receive(tensor, source, tag) for tensor in made]


class Unsent(TensorSpec):
    """A tensor that is not sent, because no later stage uses it."""
