"""The batch of a step whose sequences are divided: which of its tensors run along them, and what the step is shown."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.values import held_by_objects, map_tensors, tensors_of


class Sequences:
    """Divides the tensors of a batch that run along a sequence.

    All ranks read the same samples, so each keeps the whole of these tensors beside its own elements: numbers of tokens
    are small, and code that needs all of them, such as a shift of labels, costs no message.

    Args:
        ranks: among which positions are divided.
        dim: the dimension of a batch's tensors that runs along the sequence.
        balanced: whether a rank has a chunk from the front and one from the back; else one chunk.
        asker: the technique, for messages.
    """

    def __init__(self, ranks: Ranks, dim: int, balanced: bool, asker: str) -> None:
        self.ranks, self._dim, self._balanced, self._asker = ranks, dim, balanced, asker

    def elements(self, length: int) -> Elements:
        """The positions of a sequence of this length that ranks have."""
        return self.ranks.zigzag(length) if self._balanced else self.ranks.chunks(length)

    def divided(self, batch: Any) -> Any:
        """The batch in which tensors along a sequence look as they did, and have only this rank's positions.

        Raises:
            ValueError: a batch with tensors of which none runs along a sequence, or one does within an object.
        """
        lengths = {tensor.shape[self._dim] for tensor in tensors_of(batch) if self._is_tokens(tensor)}
        found = [tensor for tensor in tensors_of(batch) if self._runs_along(tensor, lengths)]
        chosen = {id(tensor): tensor.shape[: self._dim + 1] for tensor in found if tensor.shape[self._dim] > 1}
        for holder, tensor in held_by_objects(batch):
            if not found or (tensor.dim() > max(self._dim, 1) and tensor.shape[: self._dim + 1] in chosen.values()):
                raise ValueError(self._within_object(type(holder).__name__, tuple(tensor.shape)))
        if not found and (shapes := [tuple(tensor.shape) for tensor in tensors_of(batch)]):
            raise ValueError(self._no_sequence(shapes))
        return map_tensors(lambda each: self._marked(each) if id(each) in chosen else each, batch)

    def _is_tokens(self, tensor: Tensor) -> bool:
        """Numbers of tokens, labels, masks: (batch, sequence, ...)."""
        return tensor.dim() > max(self._dim, 1) and not tensor.is_floating_point()

    def _runs_along(self, tensor: Tensor, lengths: set[int]) -> bool:
        """Whether a tensor has a position for each token; without tokens, whether it is (batch, sequence, features)."""
        if self._is_tokens(tensor):
            return True
        if tensor.dim() <= max(self._dim, 1):
            return False
        return tensor.shape[self._dim] in lengths if lengths else tensor.dim() == 3

    def _marked(self, whole: Tensor) -> Tensor:
        elements = self.elements(whole.shape[self._dim])
        made = Divided(elements.take(whole, self._dim), {self._dim: elements})
        return made if whole.requires_grad else made.known_to_be(whole)

    def _within_object(self, holder: str, shape: tuple[int, ...]) -> str:
        return (
            f"{self._asker} divides the sequences of tensors in dicts, lists, tuples and dataclasses, but a tensor of "
            f"shape {shape} is an attribute of a {holder}, which is none of them: every rank would compute all of it; "
            f"make {holder} a dataclass, or let collate_fn return a dict or a tuple"
        )

    def _no_sequence(self, shapes: list[tuple[int, ...]]) -> str:
        return (
            f"{self._asker} divides sequences, but none of the batch's tensors, of shapes {shapes}, runs along one: it "
            "looks for tokens (batch, sequence) or features (batch, sequence, features), with the sequence in "
            f"dimension {self._dim}. Name another dimension, as in plan=ParallelPlan(sequence_dim=0), or train a model "
            "without sequences with DataParallelStrategy or ZeroStrategy"
        )
