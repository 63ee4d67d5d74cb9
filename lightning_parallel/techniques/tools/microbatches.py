"""Batches into microbatches, and what a step returned for each of them into what it would return for the batch.

A batch is any nesting of mappings, lists, tuples and dataclasses. Tensors, arrays and lists as long as the batch are
divided, numbers, strings and tensors without dimensions are copied; anything else needs an entry in
`ParallelPlan(batch_dims=...)`, by a dotted path into the batch:

| entry          | what becomes of it                                                   |
|----------------|----------------------------------------------------------------------|
| `"mask": 1`    | divided on dimension 1; of a list, dimension 0 are its items         |
| `"table": None`| copied to every microbatch                                           |
| `"": 0`        | the batch itself is a list of samples                                |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.techniques.tools.means import is_among
from lightning_parallel.values import (
    ATOMS,
    batch_size,
    children_of,
    field_names,
    held_by_objects,
    holds_alike,
    like,
    rebuilt,
    tensors_of,
)

Dims = Mapping[str, int | None]
NO_DIMS: Dims = {}


def samples_in(batch: Any, dims: Dims = NO_DIMS) -> int | None:
    """The number of samples in a batch; None where nothing tells.

    That is the length of a part that `dims` names, or else the first dimension that most tensors have that are not in
    lists with an item for each sample, as the targets of a detector.
    """
    parts = _parts_in(batch, dims)
    for path, dim in dims.items():
        if path in parts and dim is not None:
            return len(parts[path]) if dim == 0 else int(parts[path].shape[dim])
    others = [value for path, value in parts.items() if path not in dims]
    lists = [value for value in others if isinstance(value, (list, tuple))]
    if len(lists) < len(others):
        sizes = Counter(len(value) for value in others if not isinstance(value, (list, tuple)))
        return sizes.most_common(1)[0][0]
    lengths = {len(tensor) for tensor in tensors_of(lists) if tensor.dim()}
    if len(lengths) > 1 and len({*map(len, lists)}) == 1:  # pictures and targets of a detector
        return len(lists[0])
    return batch_size(others if dims else batch)


def _parts_in(value: Any, dims: Dims, path: str = "") -> dict[str, Any]:
    """The tensors, arrays, nested lists of values alike, and what `dims` names, by their paths."""
    if path in dims or (isinstance(value, (Tensor, np.ndarray)) and value.ndim) or (path and holds_alike(value)):
        return {path: value}
    found: dict[str, Any] = {}
    for child_path, child in _children(value, path):
        found |= _parts_in(child, dims, child_path)
    return found


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, (Tensor, *ATOMS)):
        return []
    children = children_of(value)
    names = list(value) if isinstance(value, Mapping) else field_names(value.__class__) or range(len(children))
    return [(f"{path}.{name}" if path else str(name), child) for name, child in zip(names, children, strict=True)]


def split(batch: Any, parts: int, dims: Dims = NO_DIMS) -> list[Any]:
    """Divides a batch into parts whose sizes differ by one at most.

    Raises:
        TypeError: nothing in the batch says how many samples it has.
        ValueError: something in it is no scalar and has another number of samples.
    """
    if parts == 1:
        return [batch]
    size = samples_in(batch, dims)
    if size is None:
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor with samples, so it cannot be divided into "
            "microbatches; use dicts, tuples, lists or dataclasses of tensors, or microbatches=1"
        )
    ends = np.cumsum([0, *part_sizes(size, parts)]).tolist()  # of 7 samples in 3 parts [0, 3, 5, 7]
    return [_selected(batch, [slice(*rows)], size, dims, "") for rows in pairwise(ends)]


def part_sizes(size: int, parts: int) -> list[int]:
    """Sizes of so many parts of a batch, as even as can be, larger ones first."""
    base, extra = divmod(size, parts)  # the first `extra` parts have one more
    return [base + (number < extra) for number in range(parts)]


def select(batch: Any, rows: Sequence[slice], dims: Dims = NO_DIMS) -> Any:
    """A batch of some samples of another one; see `split`."""
    return _selected(batch, rows, samples_in(batch, dims) or 1, dims, "")


def _selected(value: Any, rows: Sequence[slice], size: int, dims: Dims, path: str) -> Any:
    if path in dims:
        dim = dims[path]
        return value if dim is None else _rows(value, rows, dim)
    if isinstance(value, ATOMS):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim and len(value) != size:
            raise ValueError(_unlike(path, f"a tensor of shape {tuple(value.shape)}", size))
        return _rows(value, rows, 0) if value.ndim else value
    if isinstance(value, (list, tuple)) and path and len(value) == size:
        lengths = {len(tensor) for tensor in tensors_of(value) if tensor.dim()}
        if lengths != {size}:  # else it holds tensors of all samples, as a pair does in a batch of two
            return _rows(value, rows, 0)
    children = _children(value, path)
    if not children and any(held_by_objects(value)):
        raise ValueError(_unlike(path, f"a {type(value).__name__} that holds tensors", size))
    parts = [_selected(child, rows, size, dims, child_path) for child_path, child in children]
    return rebuilt(value, parts) if children else value


def _unlike(path: str, what: str, size: int) -> str:
    return (
        f"batch[{path!r}] is {what} in a batch of {size} samples, so nothing tells which of it belongs to which "
        "microbatch; pass the dimension of its samples, or None to copy it to every microbatch, as in "
        f"plan=ParallelPlan(batch_dims={{{path!r}: None}}), or use microbatches=1"
    )


def _rows(value: Any, rows: Sequence[slice], dim: int) -> Any:
    """Some samples, in the batch's memory where they follow each other; a model may change them in place."""
    if isinstance(value, (list, tuple)):
        return like(value, [item for some in rows for item in list(value)[some]])
    if isinstance(value, Tensor) and not value.requires_grad:
        # Views share a version, by which autograd would find one microbatch changed when a step changes another one.
        value = value.data
    parts = [value[(slice(None),) * dim + (some,)] for some in rows]  # of dim 1: value[:, some]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if isinstance(value, Tensor) else np.concatenate(parts, dim)


def merge(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    shares: Sequence[float] | None = None,
    means: Sequence[Sequence[Tensor]] = (),
) -> tuple[Any, list[str]]:
    """The output of a step for a batch, of its outputs for the microbatches.

    Tensors and lists with a row for each sample are joined, and those whose lengths differ. Other numbers are averaged,
    by samples or by the weight of the loss; of everything else the first is taken.

    Returns:
        Beside the output, the paths in it of integer tensors, and of what differs between microbatches and is neither
        rows nor one floating-point number: `["hits", "pair.1"]`.
    """
    merging = _Merging(sizes, shares, means)
    return outputs[0] if len(outputs) == 1 else merging.value(outputs, ""), merging.unclear


@dataclass
class _Merging:
    """See `merge`."""

    _sizes: Sequence[int]  # the samples of the microbatches
    _shares: Sequence[float] | None  # the weights of their losses
    _means: Sequence[Sequence[Tensor]]  # by microbatch, the numbers that count by these
    unclear: list[str] = field(default_factory=list)

    def value(self, same: Sequence[Any], path: str) -> Any:
        first = same[0]
        if all(isinstance(each, Tensor) for each in same):
            return self._tensor(same, path)
        if all(isinstance(each, (int, float, complex)) and not isinstance(each, bool) for each in same):
            if all(each == first for each in same):
                return first
            if isinstance(first, int):
                self.unclear.append(path or "a number")
            return sum(each * size for each, size in zip(same, self._sizes, strict=True)) / sum(self._sizes)
        if _are_rows(same, self._sizes):
            return like(first, [item for each in same for item in each])
        children = [_children(each, path) for each in same]
        if children[0] and len({*map(len, children)}) == 1:
            parts = [[child for _, child in each] for each in zip(*children, strict=True)]
            return rebuilt(first, [self.value(part, name) for part, (name, _) in zip(parts, children[0], strict=True)])
        return self._first(same, path)

    def _first(self, same: Sequence[Any], path: str) -> Any:
        if not all(is_same(same[0], each) for each in same):
            self.unclear.append(path or "a value")
        return same[0]

    def _tensor(self, same: Sequence[Tensor], path: str) -> Any:
        first, lengths = same[0], [len(each) if each.dim() else 0 for each in same]
        are_rows = lengths == list(self._sizes) or len({*lengths}) > 1  # for each sample, or in other numbers
        if are_rows and all(lengths) and len({each.shape[1:] for each in same}) == 1:
            return torch.cat(list(same))
        if len({each.shape for each in same}) > 1 or first.dtype == torch.bool:
            return self._first(same, path)
        learns, alike = first.is_floating_point() or first.is_complex(), all(torch.equal(first, each) for each in same)
        if not learns or (first.dim() and not alike):  # equal counts may be equal by chance
            self.unclear.append(path or "a tensor")
        if alike:
            return first
        if not learns:
            return weighted_mean([each.double() for each in same], self._sizes).to(torch.get_default_dtype())
        by_shares = self._shares is not None and all(
            not each.dim() and is_among(each, counted) for each, counted in zip(same, self._means, strict=True)
        )
        return weighted_mean(same, self._shares if self._shares is not None and by_shares else self._sizes)


def _are_rows(lists: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists have an item for each sample: not tensors that have all samples, as a pair in a batch of two."""
    if not all(isinstance(each, list) for each in lists):
        return False
    if len({*map(len, lists)}) > 1:
        return True
    lengths = [{len(tensor) for tensor in tensors_of(each) if tensor.dim()} for each in lists]
    return all(len(each) == size and own != {size} for each, size, own in zip(lists, sizes, lengths, strict=True))


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are alike, as far as they know it."""
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return torch.equal(one, other)
        return bool(one is other or (type(one) is type(other) and one == other))
    except Exception:  # values compare themselves in a way of their own, as tables of numbers do entry by entry
        return False


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[float]) -> Tensor:
    """The mean of means over so many samples each."""
    return torch.stack([value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True)]).sum(0)
