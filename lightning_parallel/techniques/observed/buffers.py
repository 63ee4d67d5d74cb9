"""Where an observed step reads a model's buffers, and which of them it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.observed.positions import SeenBuffers
from lightning_parallel.techniques.observed.shapes import mark_of

Span = tuple[int, int]
"""The first element of a tensor in its memory, and the one after its last."""


class BufferUses:
    """The positions at which a step uses buffers, by any of their names and through views.

    Args:
        model: whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._spans: dict[int, list[tuple[Span, str]]] = {}
        self._model, self._before = model, dict(model.named_buffers(remove_duplicate=False))
        for name, buffer in self._before.items():
            self._spans.setdefault(memory_of(buffer), []).append((_span(buffer), name))
        self._uses: dict[str, set[int]] = {}
        self._written: set[str] = set()
        self._inside: dict[str, set[int]] = {}
        by_id: dict[int, list[str]] = {}
        for name, buffer in self._before.items():
            by_id.setdefault(id(buffer), []).append(name)
        self._same = {name: tuple(names) for names in by_id.values() if len(names) > 1 for name in names}

    def touched(self, inputs: Sequence[Tensor], written: Sequence[Tensor], here: int, later: Sequence[int]) -> None:
        """An operation gets tensors, and changes some of them.

        Args:
            inputs: what it gets.
            written: what it changes.
            here: its position.
            later: the positions at which stages run it again, this one too; none within blocks and parts.
        """
        if not self._spans:
            return
        changed = {name for tensor in written for name in self._names(tensor)}
        self._written |= changed
        for name in changed if not later else ():
            self._inside.setdefault(name, set()).add(here)
        for name in {name for tensor in inputs for name in self._names(tensor)}:
            self._uses.setdefault(name, set()).update((here,) if name in changed else (here, *later))

    def end(self) -> None:
        """The step has come to its end: what it put in the place of buffers changed them."""
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            if self._before.get(name, buffer) is not buffer:
                self._written.add(name)

    def left(self, within: Callable[[str], bool]) -> Iterator[Tensor]:
        """Buffers that the step leaves with what depends on parameters, but for those `within` blocks and parts."""
        for name, buffer in self._model.named_buffers():
            if mark_of(buffer) is not None and not within(name):
                yield buffer

    def seen(self) -> SeenBuffers:
        """What was seen."""
        return SeenBuffers(frozen(self._uses), frozenset(self._written), frozen(self._inside), self._same)

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


def frozen(positions: Mapping[str, set[int]]) -> dict[str, frozenset[int]]:
    """The same positions, as sets that nobody changes."""
    return {name: frozenset(some) for name, some in positions.items()}
