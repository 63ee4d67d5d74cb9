"""Which elements of a tensor's dimension each rank has, and which ones it has after the dimension is reshaped.

Example: 2 ranks have 2 heads each of a dimension of 4 heads of width 8. `Elements` of the merged dimension are 0-15 on
rank 0 and 16-31 on rank 1; `shrunk(8)` gives those of the heads, 0-1 and 2-3, and `grown(8)` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.derived_cache import DerivedCache
from lightning_parallel.collectives.spans import Runs, Span, bounds, indices, joined, length_of

T = TypeVar("T")

KEPT = 1000
"""Size of each cache of `Elements`: lengths of sequences may change with every batch."""


class Ranks:
    """The ranks of one mesh axis that shard tensors among them, and the state that these tensors share.

    Args:
        group: the process group.
        name: the mesh axis, as "tp"; tensors sent to other processes refer to these ranks by it.
        sequence_dim: the sequence dimension of hidden states [B, T, H], if these ranks keep hidden states sharded along
            it between the layers that they divide; None if hidden states are full there.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, sequence_dim: int | None = None) -> None:
        self.group, self.name, self.sequence_dim = group, name, sequence_dim
        self.rank, self.count = group.rank(), group.size()
        self.reduces_later = False
        """Whether gradients are reduced after the running backward pass; False in a pass that the user's step runs."""
        self._chunks: dict[tuple[int, ...], Elements] = {}
        self._elements: dict[tuple[int, tuple[Runs, ...]], Elements] = {}
        self.gathered: dict[tuple[str, torch.Size], tuple[int, int]] = {}
        """Inputs gathered in this step because no rule covers the operation: (name, shape) -> (calls, bytes)."""
        self.told: set[tuple[str, torch.Size]] = set()
        """The operations and shapes of `gathered` that were logged."""
        self.viewed: list[Any] = []
        """Gathered tensors that have views in this step: changes in them reach the shards before the next operation."""
        self.met = set[str]()
        """Paths of parameters used together with sharded tensors: their gradients are averaged when a step ends."""
        self.last_entered: tuple[Any, Any, Tensor] | None = None
        """The last tensor passed to `entered` (a weak reference), its version and dtype, and the result, for reuse."""
        self.last_in_graph: tuple[Tensor, Any, Tensor] | None = None
        """The same while Dynamo traces a graph; None before and after."""
        self.draws_in_graph = 0
        """Number of random draws for elements of these ranks in the graph that Dynamo traces; 0 before and after."""
        self.averages: Callable[[Tensor], bool] | None = None
        """Returns whether a tensor is a parameter whose gradients are averaged over these ranks when a step ends. Its
        partial gradients are multiplied by `count`; those of other tensors are summed where the tensor is used. None
        if there are no such parameters; set from outside."""
        self.attention: Callable[..., Any] | None = None
        """Computes attention where these ranks shard queries, keys and values along the sequence; set from outside."""
        self.forms: dict[Any, Any] = {}
        """Cache of `divided.table`: the forms (shape, sharding, stride) of tensors that these ranks shard."""
        self.derivations = DerivedCache()
        """Cache of values computed from a mask, which each of many layers would compute again."""

    def forget(self, gone: Any) -> None:
        """Drop the result for the tensor of a weak reference; called back when the tensor is freed."""
        if self.last_entered is not None and self.last_entered[0] is gone:
            self.last_entered = None

    def elements(self, size: int, runs: Iterable[Iterable[Span]]) -> Elements:
        """Return the elements of a dimension of `size` from each rank's spans; the same object for the same spans."""
        key = size, tuple([joined(spans) for spans in runs])
        if key not in self._elements:
            if len(self._elements) > KEPT:
                self._elements.clear()
            self._elements[key] = Elements(self, *key)
        return self._elements[key]

    def chunks(self, *sizes: int) -> Elements:
        """Return consecutive elements for each rank: of the full dimension, or of each part that it consists of.

        Args:
            sizes: of the parts; `chunks(4, 2)` gives two ranks the elements 0-1, 4 and 2-3, 5.
        """
        if sizes not in self._chunks:
            if len(self._chunks) > KEPT:
                self._chunks.clear()
            starts = list(accumulate(sizes, initial=0))
            chunks = [[bounds(size, self.count, rank) for size in sizes] for rank in range(self.count)]
            runs = [
                [(start + low, start + high) for start, (low, high) in zip(starts, spans, strict=False)]
                for spans in chunks
            ]
            self._chunks[sizes] = self.elements(starts[-1], runs)
        return self._chunks[sizes]

    def zigzag(self, size: int) -> Elements:
        """Return two of 2 x count chunks for each rank: the first and the last, the second and the last but one, ...

        In causal attention a position has as much work as it has predecessors; so ranks get equal work. E.g. for size 8
        and 2 ranks: 0-1, 6-7 and 2-5.
        Source: J. Zhu, zigzag ring attention, 2024; Llama team, The Llama 3 Herd of Models, 2024, section 3.3.
        """
        pairs = [(rank, 2 * self.count - 1 - rank) for rank in range(self.count)]
        return self.elements(size, [[bounds(size, 2 * self.count, number) for number in pair] for pair in pairs])


class Elements:
    """The indices of a dimension of `size` that each rank has, ascending.

    Each index is on exactly one rank; a rank may have none.

    Args:
        ranks: the ranks that shard the dimension.
        size: of the full dimension.
        runs: the spans of each rank.

    Raises:
        ValueError: the spans do not add up to `size`: an index is on no rank, or on several.
    """

    def __init__(self, ranks: Ranks, size: int, runs: tuple[Runs, ...]) -> None:
        self.ranks, self.size, self.runs = ranks, size, runs
        self.lengths = list(map(length_of, runs))
        self.length, self.longest = self.lengths[ranks.rank], max(self.lengths)
        self.own = runs[ranks.rank]
        if sum(self.lengths) != size:
            raise ValueError(
                f"ranks hold {self.lengths} elements of a dimension of {size}, but each belongs to one rank; "
                "replicate what several ranks need, as key heads if they are fewer than ranks"
            )
        chunk = size // ranks.count
        self.even = runs == tuple([((rank * chunk, rank * chunk + chunk),) for rank in range(ranks.count)])
        """Whether each rank has one chunk, all of the same length, in rank order."""
        self._derived: dict[tuple[str, int, int], Elements] = {}
        self._index: dict[tuple[str, torch.device], Tensor] = {}

    def same(self, other: Elements | None) -> bool:
        """Return whether the same ranks have the same elements; no `==`, for compilers compare objects by identity."""
        if other is None or self is other:
            return self is other
        return self.ranks is other.ranks and self.size == other.size and self.runs == other.runs

    def __repr__(self) -> str:
        spans = ", ".join(f"{start}-{stop - 1}" for start, stop in self.own) or "none"
        return f"{spans} of {self.size}"

    # ---------------------------------------------------------------- after a reshape

    def grown(self, k: int) -> Elements:
        """Return the elements after merging with the next dimension, of size `k`: (n, k) -> (n * k)."""
        return self._map("grown", k, 0, self.size * k, lambda runs: [(a * k, b * k) for a, b in runs])

    def shrunk(self, k: int) -> Elements | None:
        """Return the elements of groups of `k`: (n) -> (n / k, k); None if a rank has a part of a group."""
        if self.size % k or any(a % k or b % k for runs in self.runs for a, b in runs):
            return None
        return self._map("shrunk", k, 0, self.size // k, lambda runs: [(a // k, b // k) for a, b in runs])

    def tiled(self, m: int) -> Elements:
        """Return the elements after merging with the previous dimension, of size `m`: (m, n) -> (m * n)."""
        n = self.size
        return self._map("tiled", m, 0, n * m, lambda runs: [(i * n + a, i * n + b) for i in range(m) for a, b in runs])

    def untiled(self, m: int) -> Elements | None:
        """Return the elements of one of `m` parts: (n) -> (m, n / m); None unless a rank has the same of each part."""
        if self.size % m:
            return None
        part = self.cut(0, self.size // m)
        return part if part.tiled(m).same(self) else None

    def cut(self, start: int, stop: int) -> Elements:
        """Return the elements from `start` to before `stop`, renumbered from 0."""
        return self._map(
            "cut", start, stop, stop - start,
            lambda runs: [(max(a, start) - start, min(b, stop) - start) for a, b in runs if a < stop and b > start],
        )  # fmt: skip

    def before(self, index: int) -> int:
        """Return how many of this rank's elements lie before an index."""
        return sum(min(b, index) - a for a, b in self.own if a < index)

    def _map(self, how: str, x: int, y: int, size: int, change: Callable[[Runs], Sequence[Span]]) -> Elements:
        key = how, x, y
        if key not in self._derived:
            if len(self._derived) > KEPT:
                self._derived.clear()
            self._derived[key] = self.ranks.elements(size, [change(runs) for runs in self.runs])
        return self._derived[key]

    # ---------------------------------------------------------------- of tensors

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's elements of a full tensor, differentiable; a view if they are one span."""
        if len(self.own) == 1:
            return whole.narrow(dim, self.own[0][0], self.length)
        return whole.index_select(dim, self.numbers("index", whole.device))

    def numbers(self, name: str, device: torch.device) -> Tensor:
        """Return indices or rows for the layout in which the ranks' elements, padded to the longest, are concatenated.

        Args:
            name: "index" for this rank's indices, [length]; "order" for the row of each element, [size]; "of_all" for
                the element in each row, or `size` for padding, [count * longest].
            device: of the returned tensor, which is cached.
        """
        compiles = torch.compiler.is_dynamo_compiling()  # an autograd.Function in a graph must not change the cache
        if not compiles and (cached := self._index.get((name, device))) is not None:
            return cached
        if name == "index":
            numbers = indices(self.own)
        else:
            rows = torch.full((len(self.runs), self.longest), self.size)  # [ranks, longest]
            for rank, runs in enumerate(self.runs):
                rows[rank, : self.lengths[rank]] = indices(runs)
            numbers = rows.flatten() if name == "of_all" else rows.flatten().argsort(stable=True)[: self.size]
        numbers = numbers.to(device)
        if not compiles:
            self._index[name, device] = numbers
        return numbers
