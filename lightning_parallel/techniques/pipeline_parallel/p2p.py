"""Point-to-point messages between stages: outputs of a stage forwards, their gradients backwards.

A message consists of a structure (the pickled output, with a number in place of each tensor) and the tensors. Ranks
send a structure only once. In training, microbatches with the same shapes must have the same structure. In evaluation,
a block may return more values in some batches, e.g. attention maps in the first one, so a message starts with the
number of its structure:

    training, first microbatch with its shapes      structure, tensors
    training, all others                            tensors
    evaluation, structure that was not sent yet     0, structure, tensors
    evaluation, k-th structure for these shapes     k, tensors
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Channel, PendingTensor
from lightning_parallel.values import TensorSpec


class Structure(NamedTuple):
    """A message without its tensors: the pickled value, in which numbers stand for tensors, and the tensors' specs."""

    pickled: bytes
    specs: tuple[TensorSpec, ...]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Return the value with these tensors in their places."""
        unpickler = pickle.Unpickler(io.BytesIO(self.pickled))
        unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


class Message(NamedTuple):
    """Output of a stage, ready to be sent. A tensor that occurs several times in it is sent once."""

    structure: Structure
    tensors: list[Tensor]


def packed(value: Any) -> Message:
    """Separate a value into structure and tensors, at any depth; raise TypeError if it cannot be pickled."""
    buffer, tensors, specs, numbers = io.BytesIO(), list[Tensor](), list[TensorSpec](), dict[int, int]()

    def number_of(part: Any) -> int | None:
        """Return the number that replaces a tensor in the pickle; None for any other object."""
        if not isinstance(part, Tensor):
            return None
        if id(part) not in numbers:
            specs.append(TensorSpec.of(part))
            numbers[id(part)] = len(tensors)
            tensors.append(part)
        return numbers[id(part)]

    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = number_of  # type: ignore[method-assign]
    try:
        pickler.dump(value)
    except Exception as error:
        raise TypeError(
            f"a block returned something that cannot be sent to the next stage ({error}); return tensors and plain "
            "values (for Hugging Face models: use_cache=False)"
        ) from error
    return Message(Structure(buffer.getvalue(), tuple(specs)), tensors)


def has_gradients(tensor: Tensor) -> bool:
    """Return whether the dtype of a tensor supports gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


class P2P:
    """Send and receive for the stages of one rank; `rank_of` maps a stage to the rank that holds it."""

    def __init__(self, channel: Channel, rank_of: Callable[[int], int], stages: int) -> None:
        # tags: 2 * (m * stages + s) for the output of stage s on microbatch m, and one more for its gradients
        self.channel, self._rank_of, self._stages = channel, rank_of, stages
        self._received: dict[Hashable, list[Structure]] = {}
        self._sent: dict[Hashable, list[Structure]] = {}

    def send_forward(self, stage: int, microbatch: int, shapes: Hashable, message: Message, varies: bool) -> None:
        """Start to send the output of a stage to the next one; `shapes` identify the shapes of the microbatch.

        `varies`: microbatches with the same shapes may have different structures (evaluation); else raises ValueError.
        """
        receiver, tag = self._rank_of(stage + 1), 2 * (microbatch * self._stages + stage)
        known, structure = self._sent.setdefault((stage, shapes, varies), []), message.structure
        number = known.index(structure) + 1 if structure in known else 0
        if varies:
            self.channel.send(torch.tensor([number], device=self.channel.device), receiver, tag)
        elif known and not number:
            # Bytes may differ though values are equal: pickle writes a string again unless it is the same object.
            old, new = (repr(s.filled(s.specs)) for s in (known[0], structure))
            if old != new:
                raise ValueError(
                    f"stage {stage} returned {new}, but {old} for an earlier microbatch of the same shapes; in "
                    "training, only the values of tensors may vary. Return what varies as tensors"
                )
        if not number and (varies or not known):
            known.append(structure)
            self.channel.send_object(structure, receiver, tag)
        for tensor in message.tensors:
            self.channel.send(tensor, receiver, tag)

    def receive_forward(
        self, stage: int, microbatch: int, shapes: Hashable, varies: bool
    ) -> tuple[Structure, list[PendingTensor]]:
        """Start to receive the output of the previous stage; waits only for numbers and structures."""
        source, tag = self._rank_of(stage - 1), 2 * (microbatch * self._stages + stage - 1)
        known = self._received.setdefault((stage - 1, shapes, varies), [])
        number = min(len(known), 1)
        if varies:
            number = int(self._receive([TensorSpec((1,), torch.long)], source, tag)[0].wait())
        if not number:
            known.append(self.channel.receive_object(source, tag))
        structure = known[number - 1]
        return structure, self._receive(structure.specs, source, tag)

    def send_backward(self, stage: int, microbatch: int, gradients: list[Tensor]) -> None:
        """Start to send the gradients of a stage's inputs to the previous stage."""
        receiver, tag = self._rank_of(stage - 1), 2 * (microbatch * self._stages + stage - 1) + 1
        for gradient in gradients:
            self.channel.send(gradient, receiver, tag)

    def receive_backward(self, stage: int, microbatch: int, specs: Sequence[TensorSpec]) -> list[PendingTensor]:
        """Start to receive the gradients of a stage's outputs, which have these shapes and dtypes."""
        return self._receive(specs, self._rank_of(stage + 1), 2 * (microbatch * self._stages + stage) + 1)

    def _receive(self, specs: Sequence[TensorSpec], source: int, tag: int) -> list[PendingTensor]:
        return [self.channel.receive(spec.empty(self.channel.device), source, tag) for spec in specs]


class Unsent(TensorSpec):
    """Spec that is sent in place of a tensor that no later stage reads."""
