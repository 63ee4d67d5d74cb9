"""Where an observed step reads a model's buffers, and which of them it changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

Span = tuple[int, int]
"""The first element of a tensor in its memory, and the one after its last."""


class BufferUses:
    """The positions at which a step uses buffers, also by other names and through views.

    Args:
        model: whole.

    Attributes:
        uses: FQN of a buffer -> the positions at which it must be there.
        written: FQN of those that the step changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._spans: dict[int, list[tuple[Span, str]]] = {}
        self._model, self._before = model, dict(model.named_buffers(remove_duplicate=False))
        for name, buffer in self._before.items():
            self._spans.setdefault(memory_of(buffer), []).append((_span(buffer), name))
        self.uses: dict[str, set[int]] = {}
        self.written: set[str] = set()

    def touched(self, inputs: Sequence[Tensor], written: Sequence[Tensor], here: int, later: Iterable[int]) -> None:
        """An operation gets tensors, and changes some of them.

        Args:
            inputs: what it gets.
            written: what it changes.
            here: its position.
            later: the other positions at which stages run it again.
        """
        if not self._spans:
            return
        changed = {name for tensor in written for name in self._names(tensor)}
        self.written |= changed
        for name in {name for tensor in inputs for name in self._names(tensor)}:
            self.uses.setdefault(name, set()).update((here,) if name in changed else (here, *later))

    def end(self) -> None:
        """The step has come to its end: what it put in the place of buffers changed them."""
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            if self._before.get(name, buffer) is not buffer:
                self.written.add(name)

    def _names(self, tensor: Tensor) -> Iterator[str]:
        known = self._spans.get(memory_of(tensor))
        if known:
            start, end = _span(tensor)
            yield from (name for (first, after), name in known if start < after and first < end)


def memory_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, on meta too."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else -1


def _span(tensor: Tensor) -> Span:
    start = int(tensor.storage_offset())
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1 if tensor.numel() else 0)
