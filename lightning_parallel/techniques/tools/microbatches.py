"""Splitting a batch into microbatches, and merging the outputs of a step for the microbatches into one for the batch.

A batch is any nesting of mappings, lists, tuples and dataclasses. Tensors, arrays and lists as long as the batch are
split; numbers, strings and tensors without dimensions are copied; anything else needs an entry in
`ParallelPlan(batch_dims=...)`, by a dotted path into the batch:

| entry          | effect                                                               |
|----------------|----------------------------------------------------------------------|
| `"mask": 1`    | split along dimension 1; dimension 0 of a list are its items         |
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
    is_list_of_one_kind,
    like,
    rebuilt,
    tensors_of,
)

Dims = Mapping[str, int | None]
NO_DIMS: Dims = {}


def samples_in(batch: Any, dims: Dims = NO_DIMS) -> int | None:
    """Return the number of samples in a batch; None if nothing in the batch tells it.

    This is the length of a value that `dims` names; else the size that most tensors have in dimension 0. Tensors in
    lists with one item per sample, such as the targets of a detector, do not count then.
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
    if len(lengths) > 1 and len({*map(len, lists)}) == 1:  # as images and targets of a detector, one item per sample
        return len(lists[0])
    return batch_size(others if dims else batch)


def _parts_in(value: Any, dims: Dims, path: str = "") -> dict[str, Any]:
    """Return by path the tensors, arrays, nested lists of items of one kind, and the values that `dims` names."""
    if (
        path in dims
        or (isinstance(value, (Tensor, np.ndarray)) and value.ndim)
        or (path and is_list_of_one_kind(value))
    ):
        return {path: value}
    parts: dict[str, Any] = {}
    for child_path, child in _children(value, path):
        parts |= _parts_in(child, dims, child_path)
    return parts


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return path and value of each item or field of a container; nothing for tensors, numbers and strings."""
    if isinstance(value, (Tensor, *ATOMS)):
        return []
    children = children_of(value)
    names = list(value) if isinstance(value, Mapping) else field_names(value.__class__) or range(len(children))
    return [(f"{path}.{name}" if path else str(name), child) for name, child in zip(names, children, strict=True)]


def split(batch: Any, parts: int, dims: Dims = NO_DIMS) -> list[Any]:
    """Split a batch into parts whose sizes differ by at most one.

    Raises:
        TypeError: nothing in the batch tells how many samples it has.
        ValueError: a value in it that is no scalar has a different number of samples.
    """
    if parts == 1:
        return [batch]
    size = samples_in(batch, dims)
    if size is None:
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor with samples, so it cannot be divided into "
            "microbatches; use dicts, tuples, lists or dataclasses of tensors, or microbatches=1"
        )
    bounds = np.cumsum([0, *part_sizes(size, parts)]).tolist()  # of 7 samples in 3 parts [0, 3, 5, 7]
    return [_selected(batch, [slice(*rows)], size, dims, "") for rows in pairwise(bounds)]


def part_sizes(size: int, parts: int) -> list[int]:
    """Return the sizes of the parts of a batch, as even as possible, larger ones first: 7 in 3 parts are [3, 2, 2]."""
    base, extra = divmod(size, parts)  # the first `extra` parts have one more
    return [base + (number < extra) for number in range(parts)]


def select(batch: Any, rows: Sequence[slice], dims: Dims = NO_DIMS) -> Any:
    """Return a batch of the samples in `rows` of another batch; see `split`."""
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
        if lengths != {size}:  # else its tensors have all samples each, such as a pair of tensors in a batch of two
            return _rows(value, rows, 0)
    children = _children(value, path)
    if not children and any(held_by_objects(value)):
        raise ValueError(_unlike(path, f"a {type(value).__name__} that holds tensors", size))
    parts = [_selected(child, rows, size, dims, child_path) for child_path, child in children]
    return rebuilt(value, parts) if children else value


def _unlike(path: str, what: str, size: int) -> str:
    """Return the message for a value without a dimension of samples."""
    return (
        f"batch[{path!r}] is {what} in a batch of {size} samples, so it is unknown how to split it into microbatches; "
        "pass the dimension of its samples, or None to copy it to every microbatch, as in "
        f"plan=ParallelPlan(batch_dims={{{path!r}: None}}), or use microbatches=1"
    )


def _rows(value: Any, rows: Sequence[slice], dim: int) -> Any:
    """Return some samples: views of the batch if they are contiguous, which a model may change in place."""
    if isinstance(value, (list, tuple)):
        return like(value, [item for span in rows for item in list(value)[span]])
    if isinstance(value, Tensor) and not value.requires_grad:
        # Views share a version counter: autograd would take all microbatches for changed when a step changes one.
        value = value.data
    parts = [value[(slice(None),) * dim + (span,)] for span in rows]  # for dim 1: value[:, span]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if isinstance(value, Tensor) else np.concatenate(parts, dim)


def merge(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    shares: Sequence[float] | None = None,
    means: Sequence[Sequence[Tensor]] = (),
) -> tuple[Any, list[str]]:
    """Merge the outputs of a step for the microbatches into the output for the batch.

    Tensors and lists with one row per sample are concatenated, and those whose lengths differ. Other numbers are
    averaged, weighted by samples or, if they count as the loss does, by `shares`; of anything else the first is taken.

    Returns:
        The output, and the paths in it of values for which this is a guess, such as `["hits", "pair.1"]`: of integer
        tensors, and of values that differ between microbatches but are neither rows nor a floating-point number.
    """
    merging = _Merging(sizes, shares, means)
    return outputs[0] if len(outputs) == 1 else merging.value(outputs, ""), merging.unclear


@dataclass
class _Merging:
    """State of a `merge`."""

    _sizes: Sequence[int]  # the number of samples of each microbatch
    _shares: Sequence[float] | None  # the weights of their losses
    _means: Sequence[Sequence[Tensor]]  # for each microbatch, the numbers to weight by `_shares`
    unclear: list[str] = field(default_factory=list)  # paths of values for which the merged one is a guess

    def value(self, same: Sequence[Any], path: str) -> Any:
        """Merge the values at one path of all outputs."""
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
        are_rows = lengths == list(self._sizes) or len({*lengths}) > 1  # one row per sample, or another number of rows
        if are_rows and all(lengths) and len({each.shape[1:] for each in same}) == 1:
            return torch.cat(list(same))
        if len({each.shape for each in same}) > 1 or first.dtype == torch.bool:
            return self._first(same, path)
        inexact, equal = first.is_floating_point() or first.is_complex(), all(torch.equal(first, each) for each in same)
        if not inexact or (first.dim() and not equal):  # equal integers may be equal by chance
            self.unclear.append(path or "a tensor")
        if equal:
            return first
        if not inexact:
            return weighted_mean([each.double() for each in same], self._sizes).to(torch.get_default_dtype())
        by_shares = self._shares is not None and all(
            not each.dim() and is_among(each, counted) for each, counted in zip(same, self._means, strict=True)
        )
        return weighted_mean(same, self._shares if self._shares is not None and by_shares else self._sizes)


def _are_rows(lists: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether lists have one item per sample, not tensors with all samples each, as a pair in a batch of two."""
    if not all(isinstance(each, list) for each in lists):
        return False
    if len({*map(len, lists)}) > 1:
        return True
    lengths = [{len(tensor) for tensor in tensors_of(each) if tensor.dim()} for each in lists]
    return all(len(each) == size and inner != {size} for each, size, inner in zip(lists, sizes, lengths, strict=True))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, as far as they can be compared."""
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return torch.equal(one, other)
        return bool(one is other or (type(one) is type(other) and one == other))
    except Exception:  # comparison may not yield a bool: data frames, for instance, compare entry by entry
        return False


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[float]) -> Tensor:
    """Return the mean of `values`, weighted by `sizes`: values [1, 4] of sizes [2, 1] have the mean 2."""
    return torch.stack([value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True)]).sum(0)
