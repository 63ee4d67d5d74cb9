"""Findings of one observed forward: the order of a model's parts, the parameters that each uses, and its work.

Positions count along the blocks: 0 is before the first one, 2k+1 inside block k, 2k+2 after block k and before the
next, and 2n after the last. Between two positions a pipeline may cut the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

Call = tuple[str, int]
"""The FQN of a block, or of a part beside the blocks, and how many calls of it were before."""


@dataclass(frozen=True)
class Source:
    """A tensor that a module returned.

    Attributes:
        call: from which.
        position: where that was.
        number: of the tensor, among those that were returned.
    """

    call: Call
    position: int
    number: int


@dataclass(frozen=True)
class Made:
    """The origin of a value: where it was made, and from what.

    Attributes:
        position: where.
        returned: whether it is what a block returned.
        sources: what modules returned, from which the code between them makes it again; None for a value from
            within a module.
        parameters: FQN of the parameters that this code reads.
    """

    position: int
    returned: bool = False
    sources: frozenset[Source] | None = None
    parameters: frozenset[str] = frozenset()

    def is_at_hand(self, position: int) -> bool:
        """Whether the value is still there wherever the model may be cut between its making and this position."""
        if self.position == position:
            return True
        if self.returned:
            return position in (self.position + 1, self.position + 2)
        return self.position % 2 == 0 and position == self.position + 1


@dataclass(frozen=True)
class SkipTensor:
    """A value made at one position and used at a later one, past what the blocks hand on to each other."""

    made: Made
    used: int
    what: str


@dataclass(frozen=True)
class SeenBuffers:
    """The buffers that a step used.

    Attributes:
        uses: FQN of a buffer -> the positions at which it must be there.
        written: FQN of those that the step changed.
        inside: FQN of those that blocks and parts changed -> the positions at which they did.
        same: FQN of those that have several names -> all of these.
    """

    uses: Mapping[str, frozenset[int]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    inside: Mapping[str, frozenset[int]] = field(default_factory=dict)
    same: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Traversal:
    """Everything that was seen.

    Attributes:
        blocks: the FQN of the blocks in the order in which they ran.
        uses: FQN of a parameter -> the positions at which it is used.
        calls: FQN of a module -> the positions at which it is called.
        work: FLOPs at each position.
        skip_tensors: values that go past the blocks.
        parts: FQN of the outermost modules beside the blocks that have parameters and are called.
        complete: whether the step was followed to its end. If not, what follows the blocks may use anything.
        hooked: FQN of the modules in blocks and parts whose hooks ran.
        lasting: FQN of the modules on which the step left hooks of its own. From all others it took them back.
        casts: by the FQN of parameters that modules cast for themselves, the dtype in which the step left them.
        shapes: of the tensors that each call returned, by their numbers.
        buffers: where they are read and changed.
    """

    blocks: tuple[str, ...]
    uses: Mapping[str, frozenset[int]]
    calls: Mapping[str, frozenset[int]]
    work: tuple[float, ...]
    skip_tensors: tuple[SkipTensor, ...]
    parts: tuple[str, ...] = ()
    complete: bool = True
    hooked: tuple[str, ...] = ()
    lasting: tuple[str, ...] = ()
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)
    shapes: Mapping[Call, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    buffers: SeenBuffers = field(default_factory=SeenBuffers)

    @property
    def end(self) -> int:
        """The position after the last block."""
        return 2 * len(self.blocks)


def ancestors(name: str) -> Iterator[str]:
    """The FQN of everything in which something lies."""
    yield ""
    for end, letter in enumerate(name):
        if letter == ".":
            yield name[:end]
