"""Which heads of an attention each rank gets, whatever their number.

Ranks share out groups: heads of keys and values, each with the heads of queries that read them. Where there are fewer
groups than ranks they share out heads of queries, and the maps into keys and values stay whole: of 8 query heads and 2
key heads, rank 1 of 4 computes queries 2 and 3, and both key heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from torch import nn

from lightning_parallel.collectives.spans import Runs, Span, balanced, bounds, joined

COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_head", "attention_heads")
WIDTHS = ("head_dim", "head_size", "attention_head_size", "d_head", "d_kv", "dim_head", "head_width", "d_k")
COUNTS_OF_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_heads", "n_local_kv_heads")
QUERIES_OF_A_KEY = ("num_key_value_groups", "n_rep", "num_queries_per_kv")


@dataclass(frozen=True)
class Heads:
    """The heads of one attention.

    Args:
        count: of queries.
        width: features of one of them, as they enter the map out of the heads.
        groups: of heads that read the same keys and values.
    """

    count: int
    width: int
    groups: int

    def runs(self, size: int, ranks: int) -> list[Runs]:
        """The features of each rank, of `size` that lie head by head: of queries, of keys, or of all of a head."""
        if self.groups >= ranks and size % self.groups == 0:
            return _of_units(balanced(self.groups, ranks), size // self.groups)
        if self._are_queries(size):
            return _of_units(balanced(self.count, ranks), size // self.count)
        return [joined([bounds(size, ranks, rank)]) for rank in range(ranks)]

    def stay_whole(self, size: int, ranks: int) -> bool:
        """Whether these features are keys or values of which there are fewer heads than ranks."""
        keys, rest = divmod(size, self.width)
        return self.groups < ranks and not self._are_queries(size) and keys > 0 and not rest and self.count % keys == 0

    def _are_queries(self, size: int) -> bool:
        return size % self.count == 0 and size >= self.count * self.width


def _of_units(units: Iterable[Span], width: int) -> list[Runs]:
    return [joined([(start * width, stop * width)]) for start, stop in units]


def heads_of(owners: Iterable[nn.Module], inner: int, parts: Sequence[int]) -> Heads | None:
    """The heads of an attention, as its modules say.

    Args:
        owners: modules that may know how many heads there are, or how wide.
        inner: how many features enter the map out of the heads.
        parts: the sizes of the parts of the maps into them.
    """
    owners = list(owners)
    count = next((n for n in _numbers(owners, COUNTS) if inner % n == 0), None)
    count = count or next((inner // n for n in _numbers(owners, WIDTHS) if inner % n == 0), None)
    if count is None:
        return None
    width = inner // count
    keys = [size // width for size in parts if size < inner and size % width == 0]
    keys += list(_numbers(owners, COUNTS_OF_KEYS))[:1]
    keys += [count // n for n in _numbers(owners, QUERIES_OF_A_KEY) if count % n == 0][:1]
    return Heads(count, width, gcd(count, *keys))


def _numbers(owners: Iterable[nn.Module], names: tuple[str, ...]) -> Iterator[int]:
    for owner in owners:
        for name in names:
            value = vars(owner).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                yield value
