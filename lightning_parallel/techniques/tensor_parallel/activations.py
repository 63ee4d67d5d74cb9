"""What activations look like between and inside the regions of tensor parallelism, and the ways between.

Between regions every rank has the whole hidden state, or its part of the sequence. Inside a region, from a colwise to a
rowwise module, a rank has its features (its heads) of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.conjugate import (
    copy_to_ranks,
    gather_parts,
    join_parts,
    own_part,
    sum_over_ranks,
    sum_to_parts,
)
from lightning_parallel.collectives.overlap import gather_and_multiply, multiply_and_scatter
from lightning_parallel.techniques.tensor_parallel.randomness import OwnRandomness
from lightning_parallel.techniques.tensor_parallel.regather import Regathered

Entry = Literal["linear", "parent", "face"]


@dataclass(frozen=True)
class Mode:
    """How a block runs.

    Args:
        entry: where the hidden state enters a region: at its colwise modules; at the module that holds them; or there,
            and what looks at the shape of attention's input sees as many features as a rank's heads have.
        gathered: the regions whose colwise modules give all features and whose rowwise modules get them, by the name
            of the module that holds them in the block.
    """

    entry: Entry = "linear"
    gathered: frozenset[str] = frozenset()


class Activations:
    """Enters and leaves regions on one rank.

    Args:
        group: the ranks of the axis tp.
        sequence_dim: the dimension of the hidden state that runs along the sequence.
        regathers: whether backward gathers the inputs of regions again, to keep only parts of them.
        overlaps: whether products overlap with the collectives of a split sequence.
    """

    _regathered: Regathered | None
    _overlaps = False

    def __init__(
        self, group: dist.ProcessGroup, sequence_dim: int, regathers: bool = False, overlaps: bool = False
    ) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.sequence_dim = sequence_dim
        self.length: int | None = None
        """The length of the whole sequence while it is split between regions."""
        self._regathers, self._regathered = regathers, None
        self._overlaps = overlaps
        self._drops = False
        self._randomness = OwnRandomness(self.rank)
        self._inside = False
        self._entered: tuple[Tensor, Tensor] | None = None
        self._face: tuple[Tensor, Tensor] | None = None
        self.mode = Mode()
        self.form: tuple[int, ...] | None = None
        """The shape of the block's hidden state on this rank, but for its first dimension."""

    @property
    def own_length(self) -> int | None:
        """The length of this rank's part of the sequence, padding included."""
        return None if self.length is None else ceil(self.length / self.ranks)

    # ---------------------------------------------------------------- blocks

    def begin_block(self, length: int | None, mode: Mode, hidden: Tensor | None) -> None:
        """A block starts.

        Args:
            length: of the sequence of which it gets a part; None for what is whole.
            mode: how it runs.
            hidden: what it gets.
        """
        self.length, self._drops, self.mode = length, False, mode
        self.form = None if hidden is None else tuple(hidden.shape[1:])

    def resume_in_backward(self, output: Tensor) -> None:
        """When backward reaches this result of a block, what the block recomputes finds all as it was."""
        state = self.length, self._drops, self.mode, self.form

        def resume(_: Tensor) -> None:
            self.length, self._drops, self.mode, self.form = state

        if output.requires_grad:
            output.register_hook(resume)  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------- regions

    def enter(self, x: Tensor) -> Tensor:
        """Hidden state -> input of a colwise module; the same for all modules that get the same hidden state."""
        if self._face is not None and self._face[0] is x:
            return self._face[1]
        if self._inside:
            return x
        if self._entered is not None and self._entered[0] is x:
            return self._entered[1]
        entered = self._enter(x)
        self._entered = (x, entered)
        return entered

    def _enter(self, x: Tensor) -> Tensor:
        x = _in_autocast_dtype(x)
        if self.length is None:
            return copy_to_ranks(x, self.group)
        regathers = self._regathers and not torch.compiler.is_compiling()
        gathered = gather_parts(x, self.sequence_dim, self.length, self.group, keep=regathers)
        self._regathered = Regathered(gathered) if regathers else None
        return gathered

    def leave(self, y: Tensor) -> Tensor:
        """Output of a rowwise module, of which each rank has a summand -> hidden state."""
        self.forget()
        if self.length is None:
            if self._drops:
                self._randomness.end()
            return sum_over_ranks(y, self.group)
        return sum_to_parts(y, self.sequence_dim, self.group)

    def may_overlap(self, x: Tensor, enters: bool) -> bool:
        """Whether the product of a map with this input may overlap with the collective before or after it.

        Args:
            x: the input.
            enters: whether the map is colwise, and `x` a hidden state that may not have entered yet.
        """
        if not self._overlaps or self.length is None or self.length % self.ranks or x.dim() != 3:
            return False
        entered = self._inside or any(kept is not None and kept[0] is x for kept in (self._entered, self._face))
        return not (torch.compiler.is_compiling() or (enters and (entered or self._regathers)))

    def enter_and_multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Enters a region, and begins with its first map."""
        part = _in_autocast_dtype(x)
        entered, product = gather_and_multiply(part, weight.to(part.dtype), self.sequence_dim, self.group)
        self._entered = (x, entered)
        return product

    def multiply_and_leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """Ends a region with its last map."""
        self.forget()
        x = _in_autocast_dtype(x)
        return multiply_and_scatter(x, weight.to(x.dtype), self.sequence_dim, self.group)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, what modules get has entered the region already."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def facing(self, face: Tensor, entered: Tensor) -> Iterator[None]:
        """Inside, colwise modules that get the face get what entered."""
        before, self._face = self._face, (face, entered)
        try:
            yield
        finally:
            self._face = before

    def face_of(self, entered: Tensor) -> Tensor:
        """Has the shape of what entered, with a rank's share of the features, and neither values nor memory."""
        shape = (*entered.shape[:-1], entered.shape[-1] // self.ranks)
        return entered.new_full((), torch.nan).expand(shape)

    def forget(self) -> None:
        """Lets go of the input of the last region."""
        self._entered = self._regathered = None

    # ---------------------------------------------------------------- randomness

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around a block that drops activations: ranks draw differently where they have different ones."""
        self._drops = True
        if self.length is not None:
            self._randomness.begin()
        try:
            yield
        finally:
            self._randomness.end()
            self._drops = False

    @property
    def attended(self) -> bool:
        """Whether the product of a colwise module with its input is more than that: see `attend`."""
        return self._drops or self._regathered is not None

    def attend(self, product: Callable[[], Tensor]) -> Tensor:
        """Lets backward keep only a part of the input, and ranks draw differently from here to the region's end."""
        if self._regathered is None:
            y = product()
        else:
            with self._regathered.lightly_kept():
                y = product()
        if self._drops and self.length is None:
            self._randomness.begin()
        return y

    # ---------------------------------------------------------------- features

    def join_features(self, y: Tensor, features: int, parts: tuple[int, ...] = ()) -> Tensor:
        """All features of a colwise module, alike on all ranks; `parts` are the sizes of those of a fused one."""
        self._randomness.end()
        joined = join_parts(y, y.dim() - 1, features, self.group)
        if len(parts) < 2:
            return joined
        pieces = torch.split(joined, [part // self.ranks for _ in range(self.ranks) for part in parts], -1)
        return torch.cat([piece for number in range(len(parts)) for piece in pieces[number :: len(parts)]], -1)

    def own_features(self, x: Tensor) -> Tensor:
        """This rank's features of what all ranks have alike."""
        if self._drops and self.length is not None:
            self._randomness.begin()
        part = own_part(x, x.dim() - 1, self.group)
        chunk = ceil(x.shape[-1] / self.ranks)
        kept = max(0, min(chunk, x.shape[-1] - self.rank * chunk))
        return part if kept == chunk else part[..., :kept]

    # ---------------------------------------------------------------- the sequence

    def split(self, hidden: Tensor) -> Tensor:
        """Hidden state of the whole sequence -> this rank's part of it."""
        self.length = hidden.shape[self.sequence_dim]
        return own_part(hidden, self.sequence_dim, self.group)

    def join(self, hidden: Tensor) -> Tensor:
        """Takes `split` back, of one tensor of those that are split."""
        assert self.length is not None
        return join_parts(hidden, self.sequence_dim, self.length, self.group)


def _in_autocast_dtype(x: Tensor) -> Tensor:
    """What a matrix product would turn its input into, so that half the bytes travel."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
