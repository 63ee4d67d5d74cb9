"""Which elements of a dimension each rank of a group has, and which they are after the dimension changed its form.

Example: 2 ranks have 2 heads each of a dimension of 4 heads of width 8. `Elements` of the merged dimension are 0-15 on
rank 0 and 16-31 on rank 1; `shrunk(8)` gives those of the heads, 0-1 and 2-3, and `grown(8)` leads back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.made_of import MadeOf
from lightning_parallel.collectives.spans import Runs, Span, bounds, indices, joined

T = TypeVar("T")

KEPT = 1000
"""How many forms of a division are remembered: lengths of sequences may change with every batch."""


class Ranks:
    """The ranks that divide something among them.

    Args:
        group: the process group.
        name: of the axis of the mesh, by which other processes know what these ranks divide.
        sequence_dim: the dimension of a hidden state, (batch, sequence, features), that runs along the sequence, where
            these ranks keep their parts of it between the layers that they divide; None where they keep the whole.
        averages: tells whether a tensor is a parameter whose gradients are averaged over these ranks when a step ends.
            What a rank computed a summand of then counts `count` times; otherwise it is summed where it is used. None
            where no parameter is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        sequence_dim: int | None = None,
        averages: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self.group, self.name, self.sequence_dim = group, name, sequence_dim
        self.averages = averages
        self.rank, self.count = group.rank(), group.size()
        self.reduces_later = False
        """Whether a backward pass that runs now is the one after which gradients are reduced, not one of the user's."""
        self._chunks: dict[tuple[int, ...], Elements] = {}
        self._elements: dict[tuple[int, tuple[Runs, ...]], Elements] = {}
        self.gathered: dict[tuple[str, torch.Size], tuple[int, int]] = {}
        """What was gathered for want of a rule: operation and shape, and how often and how many bytes."""
        self.told: set[tuple[str, torch.Size]] = set()
        """The operations and shapes of which this was said."""
        self.viewed: list[Any] = []
        """Gathered tensors of which a step has views: before anything is computed, what changed there is taken."""
        self.met = set[str]()
        """The paths of parameters that have met divided tensors: their gradients become means when a step ends."""
        self.last_entered: tuple[Any, Any, Tensor] | None = None
        """The tensor that entered last (a weak reference), what it was then and where, and what stands for it since."""
        self.last_in_graph: tuple[Tensor, Any, Tensor] | None = None
        """The same while a compiler reads a graph; None before and after."""
        self.draws_in_graph = 0
        """How often a graph draws for elements of these ranks, while a compiler reads it; 0 before and after."""
        self.attention: Callable[..., Any] | None = None
        """What is called where these ranks have divided queries, keys and values along the sequence, by their owner."""
        self.forms: dict[Any, Any] = {}
        """What tensors that they have divided look like, by the table of rules."""
        self.made_of = MadeOf()
        """What each of many layers would make of the same mask again."""

    def forget(self, gone: Any) -> None:
        """Lets go of what stands for the tensor of this weak reference, which is no more."""
        if self.last_entered is not None and self.last_entered[0] is gone:
            self.last_entered = None

    def elements(self, size: int, runs: Iterable[Iterable[Span]]) -> Elements:
        """The elements of a dimension of `size`, from the spans that each rank has: one object for the same ones."""
        key = size, tuple([joined(each) for each in runs])
        if key not in self._elements:
            if len(self._elements) > KEPT:
                self._elements.clear()
            self._elements[key] = Elements(self, *key)
        return self._elements[key]

    def chunks(self, *sizes: int) -> Elements:
        """Consecutive elements for each rank: of a whole dimension, or of each of the parts that it consists of.

        Args:
            sizes: of the parts; `chunks(4, 2)` gives two ranks the elements 0-1, 4 and 2-3, 5.
        """
        if sizes not in self._chunks:
            if len(self._chunks) > KEPT:
                self._chunks.clear()
            starts = list(accumulate(sizes, initial=0))
            chunks = [[bounds(size, self.count, rank) for size in sizes] for rank in range(self.count)]
            runs = [
                [(start + low, start + high) for start, (low, high) in zip(starts, each, strict=False)]
                for each in chunks
            ]
            self._chunks[sizes] = self.elements(starts[-1], runs)
        return self._chunks[sizes]

    def zigzag(self, size: int) -> Elements:
        """Two chunks for each rank, of 2 x count: the first and the last, the second and the last but one, ...

        In causal attention a position has as much work as it has predecessors; so ranks get equal work.
        Source: J. Zhu, zigzag ring attention, 2024; Llama team, The Llama 3 Herd of Models, 2024, section 3.3.
        """
        pairs = [(rank, 2 * self.count - 1 - rank) for rank in range(self.count)]
        return self.elements(size, [[bounds(size, 2 * self.count, number) for number in pair] for pair in pairs])


class Elements:
    """The indices of a dimension of `size` that each of the ranks has, ascending.

    Each index is on one rank: ranks may have no element, but no two have the same.

    Args:
        ranks: among which the dimension is divided.
        size: of the whole dimension.
        runs: for each rank, its spans.

    Raises:
        ValueError: an index that no rank has, or several have.
    """

    def __init__(self, ranks: Ranks, size: int, runs: tuple[Runs, ...]) -> None:
        self.ranks, self.size, self.runs = ranks, size, runs
        self.lengths = [sum(stop - start for start, stop in each) for each in runs]
        self.length, self.longest = self.lengths[ranks.rank], max(self.lengths)
        self.own = runs[ranks.rank]
        if sum(self.lengths) != size:
            raise ValueError(
                f"ranks have {self.lengths} elements of a dimension of {size}, but each is on one rank: leave whole "
                "what several need, as heads of keys of which there are fewer than ranks"
            )
        chunk = size // ranks.count
        self.even = runs == tuple([((rank * chunk, rank * chunk + chunk),) for rank in range(ranks.count)])
        """Whether each rank has one chunk, all of the same length, in the order of the ranks."""
        self._derived: dict[tuple[str, int, int], Elements] = {}
        self._index: dict[tuple[str, torch.device], Tensor] = {}

    def same(self, other: Elements | None) -> bool:
        """Whether the same ranks have the same elements; compilers compare objects by identity."""
        if other is None or self is other:
            return self is other
        return self.ranks is other.ranks and self.size == other.size and self.runs == other.runs

    def __repr__(self) -> str:
        shown = ", ".join(f"{start}-{stop - 1}" for start, stop in self.own) or "none"
        return f"{shown} of {self.size}"

    # ---------------------------------------------------------------- the same elements in another form

    def grown(self, k: int) -> Elements:
        """The elements after the dimension took in the next one, of size `k`: (n, k) -> (n * k)."""
        return self._map("grown", k, 0, self.size * k, lambda runs: [(a * k, b * k) for a, b in runs])

    def shrunk(self, k: int) -> Elements | None:
        """Elements after groups of `k` became a dimension: (n) -> (n / k, k); None if ranks have parts of groups."""
        if self.size % k or any(a % k or b % k for runs in self.runs for a, b in runs):
            return None
        return self._map("shrunk", k, 0, self.size // k, lambda runs: [(a // k, b // k) for a, b in runs])

    def tiled(self, m: int) -> Elements:
        """The elements after the dimension was taken in by the one before it, of size `m`: (m, n) -> (m * n)."""
        n = self.size
        return self._map("tiled", m, 0, n * m, lambda runs: [(i * n + a, i * n + b) for i in range(m) for a, b in runs])

    def untiled(self, m: int) -> Elements | None:
        """The elements of one of `m` parts: (n) -> (m, n / m); None unless a rank has the same of every part."""
        if self.size % m:
            return None
        part = self.cut(0, self.size // m)
        return part if part.tiled(m).same(self) else None

    def cut(self, start: int, stop: int) -> Elements:
        """The elements from `start` to before `stop`, numbered from `start`."""
        return self._map(
            "cut", start, stop, stop - start,
            lambda runs: [(max(a, start) - start, min(b, stop) - start) for a, b in runs if a < stop and b > start],
        )  # fmt: skip

    def before(self, index: int) -> int:
        """How many of this rank's elements lie before an index."""
        return sum(min(b, index) - a for a, b in self.own if a < index)

    def _map(self, how: str, x: int, y: int, size: int, change: Callable[[Runs], Sequence[Span]]) -> Elements:
        key = how, x, y
        if key not in self._derived:
            if len(self._derived) > KEPT:
                self._derived.clear()
            self._derived[key] = self.ranks.elements(size, [change(runs) for runs in self.runs])
        return self._derived[key]

    # ---------------------------------------------------------------- in tensors

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's elements of a tensor that has all, differentiable; one span of them is a view."""
        if len(self.own) == 1:
            return whole.narrow(dim, self.own[0][0], self.length)
        return whole.index_select(dim, self.index(whole.device))

    def index(self, device: torch.device) -> Tensor:
        """This rank's indices, (length,)."""
        return self.numbers("index", device)

    def numbers(self, name: str, device: torch.device) -> Tensor:
        """Indices or rows, where the ranks' parts, each padded to the longest, lie one after the other.

        Args:
            name: "index" for this rank's indices, (length,), "order" for the row of each element, (size,), "of_all" for
                the element of each row, `size` for padding, (count * longest,).
            device: where they are needed.
        """
        compiles = torch.compiler.is_dynamo_compiling()  # where a function of autograd must not change anything else
        if not compiles and (known := self._index.get((name, device))) is not None:
            return known
        if name == "index":
            found = indices(self.own)
        else:
            rows = torch.full((len(self.runs), self.longest), self.size)  # [ranks, longest]
            for rank, runs in enumerate(self.runs):
                rows[rank, : self.lengths[rank]] = indices(runs)
            found = rows.flatten() if name == "of_all" else rows.flatten().argsort(stable=True)[: self.size]
        found = found.to(device)
        if not compiles:
            self._index[name, device] = found
        return found
