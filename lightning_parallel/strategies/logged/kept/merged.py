"""What a step keeps on its module for a batch, from what it kept for the parts of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.strategies.logged.kept.values import Change, Path, Sent
from lightning_parallel.strategies.logged.kinds import Kind, common
from lightning_parallel.techniques.tools.microbatches import weighted_mean
from lightning_parallel.values import children_of, map_leaves, rebuilt


@dataclass(frozen=True)
class Part:
    """A part of a batch.

    Attributes:
        size: how many samples it has.
        share: what its means over targets count for.
        means: these means.
        changes: what the step kept of it.
        kinds: of which kind each leaf of that is.
        doubtful: whether a sum may be a mean times a number that is like a count of samples by chance.
    """

    size: int
    share: float
    means: Sequence[Tensor]
    changes: Mapping[Path, Change]
    kinds: Mapping[Path, Sequence[Kind | None]]
    doubtful: bool = False

    def leaves(self, path: Path) -> Any:
        """What was kept at a path, with its kinds."""
        kinds = iter(self.kinds[path])
        return map_leaves(lambda leaf: _Leaf(leaf, next(kinds), self), self.changes[path].value)


class _Leaf:
    def __init__(self, value: Any, kind: Kind | None, part: Part) -> None:
        self.value, self.kind, self.part = value, kind, part

    @property
    def size(self) -> int:
        return self.part.size

    def tensor(self) -> Tensor:
        value: Tensor = self.value if isinstance(self.value, Tensor) else torch.as_tensor(self.value)
        return value.detach()

    def weight(self) -> float | None:
        """Its share, if it is a mean over targets."""
        value = self.tensor()
        of_means = value.dim() == 0 and any(bool(mean.detach() == value) for mean in self.part.means)
        return self.part.share if of_means else None


class Merging:
    """Puts together what the parts of one batch kept.

    Args:
        parts: all of them, each from the same state.
        adding: paths of integers that are known to count samples; those found now are added.

    Attributes:
        guessed: the paths of values of which nobody knows for certain how they are put together.
    """

    def __init__(self, parts: Sequence[Part], adding: set[Path]) -> None:
        self._parts, self._adding = parts, adding
        self.guessed: set[Path] = set()
        self._path: Path = ()

    def merged(self) -> dict[Path, Change]:
        """What the step would have kept for the whole batch."""
        found: dict[Path, Change] = {}
        for path in dict.fromkeys(path for part in self._parts for path in part.changes):
            self._path = path
            parts = [part for part in self._parts if self._path in part.changes]
            first = parts[0].changes[self._path]
            value = first.value if len(self._parts) == 1 else self._merged(first, parts)
            found[self._path] = Change(map_leaves(_sent, value), grew=first.grew)
        return found

    def value(self, path: Path) -> Any:
        """What all parts have at a path, as one value for the whole batch."""
        self._path = path
        if len(self._parts) == 1:
            return self._parts[0].changes[path].value
        return self._value([part.leaves(path) for part in self._parts])

    def _merged(self, first: Change, parts: Sequence[Part]) -> Any:
        changes = [part.changes[self._path] for part in parts]
        if isinstance(first.value, set) and first.grew:
            return set().union(*(change.value for change in changes))
        values = [part.leaves(self._path) for part in parts]
        if first.grew:
            return self._items(values, [part.size for part in parts])
        whole = len(parts) == len(self._parts)
        first_steps = first.before is None and all(
            type(change.value) is int and change.value == 1 for change in changes
        )
        if type(first.value) is int and (type(first.before) is int or first_steps):
            return self._integer(values, first.before or 0, whole)
        if not whole:
            if len(parts) > 1:
                self._guess()
            return changes[-1].value
        if type(first.value) is float and type(first.before) is float:
            return self._float(values, first.before)
        if all(_like(leaf, first.before) for leaf in values):
            return self._state(first.before, values)
        return self._value(values)

    def _guess(self) -> None:
        self.guessed.add(self._path)

    # ---------------------------------------------------------------- lists

    def _items(self, values: Sequence[list[Any]], sizes: Sequence[int]) -> list[Any]:
        """One item for the batch, or one for each sample."""
        counts = [len(items) for items in values]
        apart = len(set(counts)) > 1 or (counts == list(sizes) and not _of_batch(values, sizes))
        if apart or len(values) < len(self._parts):
            return [map_leaves(_bare, item) for items in values for item in items]
        return [self._value(same) for same in zip(*values, strict=True)]

    # ---------------------------------------------------------------- values

    def _value(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(isinstance(value, _Leaf) for value in values):
            return self._leaf(values)
        if all(isinstance(value, Mapping) for value in values):
            keys = dict.fromkeys(key for value in values for key in value)
            merged = {key: self._value([value[key] for value in values if key in value]) for key in keys}
            return rebuilt(first, [merged[key] for key in first]) if len(keys) == len(first) else merged
        children = [children_of(value) for value in values]
        if all(type(value) is list for value in values):
            return self._items(values, [_size_in(value) for value in values])
        if len({len(some) for some in children}) > 1 or not children[0]:
            self._guess()
            return map_leaves(_bare, first)
        return rebuilt(first, [self._value(same) for same in zip(*children, strict=True)])

    def _leaf(self, leaves: Sequence[_Leaf]) -> Any:
        first, kind = leaves[0].value, _common(leaves)
        numeric = isinstance(first, (Tensor, np.ndarray, np.generic, int, float, complex)) and not isinstance(
            first, bool
        )
        if not numeric or len({type(leaf.value) for leaf in leaves}) > 1:
            if not all(_same(leaf.value, first) for leaf in leaves):
                self._guess()
            return first
        if kind is Kind.SUM and _by_chance(leaves):
            self._guess()
        merged = self._tensors(leaves, kind)
        if isinstance(first, Tensor):
            return merged
        return merged.numpy() if isinstance(first, np.ndarray) else merged.item()

    def _tensors(self, leaves: Sequence[_Leaf], kind: Kind | None) -> Tensor:
        tensors = [leaf.tensor() for leaf in leaves]
        if tensors[0].dim() and kind in (Kind.SAMPLES, None):
            joined = _joined(tensors, [leaf.size for leaf in leaves])
            if joined is not None:
                return joined
        if len({tensor.shape for tensor in tensors}) > 1:
            self._guess()
            return tensors[0]
        if kind in COMBINED:
            return COMBINED[kind](torch.stack(tensors)).to(tensors[0].dtype)
        if kind is not Kind.MEAN and all(torch.equal(tensor, tensors[0]) for tensor in tensors):
            return tensors[0]
        if kind is not Kind.MEAN:
            self._guess()
        if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            return torch.stack(tensors).sum(0).to(tensors[0].dtype)
        shares = [leaf.weight() for leaf in leaves]
        sizes = [float(leaf.size) for leaf in leaves]
        return weighted_mean(tensors, sizes if None in shares else [share or 0.0 for share in shares])

    # ---------------------------------------------------------------- what a step goes on counting
    def _integer(self, leaves: Sequence[_Leaf], before: int, whole: bool) -> int:
        """Steps are counted once, samples add up: a number that always grows by one counts steps."""
        added = [leaf.value - before for leaf in leaves]
        if min(added) < 0 and _common(leaves) is Kind.SUM:
            return int(sum(leaf.value for leaf in leaves))
        if not whole or set(added) != {1}:
            self._adding.add(self._path)
        if self._path in self._adding:
            return before + int(sum(added))
        if all(leaf.kind is None or leaf.size == 1 for leaf in leaves):
            self._guess()  # it may as well count what happened once in each part
        return before + 1

    def _float(self, leaves: Sequence[_Leaf], before: float) -> Any:
        kind = _common(leaves)
        if kind is Kind.SUMMED:
            return before + sum(leaf.value - before for leaf in leaves)
        if all(leaf.size == 1 for leaf in leaves):
            self._guess()  # means of one sample look like sums
        return self._leaf(leaves)

    def _state(self, before: Any, leaves: Sequence[_Leaf]) -> Any:
        """A tensor of the user's that stays: what is counted in it adds up, other values are averaged."""
        old, kind = torch.as_tensor(before), _common(leaves)
        if old.dim() == 0 and kind is not Kind.SUMMED and old.dtype in INTEGERS:
            counts = [_Leaf(int(leaf.value), leaf.kind, leaf.part) for leaf in leaves]
            count = torch.full_like(old, self._integer(counts, int(old), whole=True))
            return count.numpy() if isinstance(before, np.ndarray) else count
        tensors = [leaf.tensor() for leaf in leaves]
        if kind is Kind.SUMMED or (kind is None and not old.is_floating_point()):
            merged = old + torch.stack([tensor - old for tensor in tensors]).sum(0)
        else:
            merged = self._tensors(leaves, Kind.OTHER if kind in (Kind.SAMPLES, None) else kind)
        return merged.numpy() if isinstance(before, np.ndarray) else merged


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCED = (Kind.MEAN, Kind.SUM, Kind.MAX, Kind.MIN)
COMBINED: dict[Kind | None, Callable[[Tensor], Tensor]] = {
    Kind.SUM: lambda stacked: stacked.sum(0),
    Kind.MAX: lambda stacked: stacked.amax(0),
    Kind.MIN: lambda stacked: stacked.amin(0),
}


def _same(one: Any, other: Any) -> bool:
    """Whether two values are alike, as far as they know it."""
    try:
        return bool(one is other or (type(one) is type(other) and one == other))
    except (ValueError, TypeError, RuntimeError):  # as tables of numbers, which compare entry by entry
        return False


def _by_chance(leaves: Sequence[_Leaf]) -> bool:
    """Whether what looks like a sum may be a number that is like a count, or a mean times such a number."""
    first = leaves[0].value
    if type(first) is int:
        return len({leaf.value for leaf in leaves}) == 1
    whole = isinstance(first, Tensor) and not first.is_floating_point()  # no mean is an integer
    return not whole and any(leaf.part.doubtful or type(leaf.value) is float for leaf in leaves)


def _common(leaves: Sequence[_Leaf]) -> Kind | None:
    return common((leaf.kind for leaf in leaves), by_value=not isinstance(leaves[0].value, Tensor))


def _of_batch(values: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Whether items, as many as there are samples, are for the batch all the same: they hold all samples, or a mean."""
    leaves = [[_leaves(item) for item in items] for items in values]
    everything = [leaf for items in leaves for item in items for leaf in item]
    if any(leaf.kind in REDUCED for leaf in everything):
        return True
    if max(sizes) == 1:
        return any(isinstance(leaf.value, (float, Tensor, np.ndarray)) for leaf in everything)
    return all(
        any(isinstance(leaf.value, (Tensor, np.ndarray)) and leaf.value.shape[:1] == (size,) for leaf in item)
        for items, size in zip(leaves, sizes, strict=True)
        for item in items
    )


def _leaves(value: Any) -> list[_Leaf]:
    found: list[_Leaf] = []
    map_leaves(lambda leaf: found.append(leaf), value)
    return [leaf for leaf in found if isinstance(leaf, _Leaf)]


def _size_in(value: Any) -> int:
    return next((leaf.size for leaf in _leaves(value)), 0)


def _joined(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """Tensors with the samples, or all tokens of samples, one after the other; None if they are something else."""
    alike = len({tensor.shape[1:] for tensor in tensors}) == 1
    ragged = len({len(tensor) for tensor in tensors}) > 1
    samples = len({len(tensor) / size for tensor, size in zip(tensors, sizes, strict=True)}) == 1
    whole = all(len(tensor) % size == 0 for tensor, size in zip(tensors, sizes, strict=True))
    return torch.cat(list(tensors)) if alike and (ragged or (samples and whole)) else None


def _like(leaf: Any, before: Any) -> bool:
    if not (isinstance(leaf, _Leaf) and isinstance(before, (Tensor, np.ndarray)) and type(leaf.value) is type(before)):
        return False
    return leaf.value.shape == before.shape and leaf.value.dtype == before.dtype


def _bare(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Leaf) else leaf


def _sent(leaf: Any) -> Any:
    return Sent(leaf) if isinstance(leaf, Tensor) else leaf
