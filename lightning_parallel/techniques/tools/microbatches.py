"""Batches into microbatches, and what a step returned for each of them into what it would return for the batch.

A batch is any nesting of dicts, lists, tuples, named tuples and dataclasses. Where its samples are, a `Layout` says,
which is seen in batches of which one sample was left out. Where nobody could look, tensors, and lists without tensors,
whose first dimension is that of the batch are divided; everything else goes to every microbatch as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.values import ATOMS, batch_size, children_of, field_names, like, rebuilt, tensors_of

SAMPLES, WHOLE, SEVERAL = "samples", "whole", "several"
Layout = Any
"""Where samples are in a batch, as nested as the batch itself: a dict for a mapping, a tuple for what has other
children, and for what has none

| `SAMPLES` | one of it for each, along the first dimension |
| `WHOLE`   | it is not made of samples, or does not grow with them, as a mask or the length of the longest |
| `SEVERAL` | it is made of all of them, and nothing tells which part is whose, as the nodes of several graphs |

None for what nobody has seen, as where the first batch has None.
"""


# ---------------------------------------------------------------- where samples are


def layout_of(batch: Any, others: Sequence[Any], size: int) -> Layout:
    """Where samples are in a batch.

    A `collate_fn` may leave samples out, or make several rows of each: then all that has rows has as many.

    Args:
        batch: any value.
        others: what was made in the same way of all its samples but one, another one for each. What is as long as the
            longest sample is the same in all of them but one.
        size: how many samples it has.
    """
    values = [batch, *others]
    found, usual = {*_lengths_of(values)}, (size, *[size - 1 for _ in others])
    rows = usual if usual in found or len(found) != 1 else found.pop()
    return _layout(values, rows)


def _lengths_of(values: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """The lengths, one for each value, of what has other lengths where samples were left out."""
    batch = values[0]
    if isinstance(batch, (Tensor, np.ndarray)):
        if all(isinstance(value, (Tensor, np.ndarray)) and value.ndim for value in values) and _changes(values):
            yield tuple(map(len, values))
    elif not isinstance(batch, ATOMS):
        for _, children in _together(values):
            yield from _lengths_of(children)


def _changes(values: Sequence[Any]) -> bool:
    """Whether arrays have another shape in more than one case than in the first."""
    return sum(tuple(value.shape) != tuple(values[0].shape) for value in values) > 1


def _layout(values: Sequence[Any], rows: tuple[int, ...]) -> Layout:
    batch = values[0]
    if batch is None or any(type(value) is not type(batch) for value in values):
        return None
    if isinstance(batch, (Tensor, np.ndarray)):
        if not _changes(values):
            return WHOLE
        return SAMPLES if batch.ndim and tuple(map(len, values)) == rows else SEVERAL
    if isinstance(batch, ATOMS):
        return WHOLE
    is_sized = all(isinstance(value, Sized) for value in values) and tuple(map(len, values)) == rows
    if is_sized and isinstance(batch, (list, tuple)):
        return SAMPLES
    children = _together(values)
    if not children:
        return SEVERAL if is_sized or _holds_tensors(batch) else WHOLE
    layouts = {name: _layout(own, rows) for name, own in children}
    if isinstance(batch, Mapping):
        return layouts
    return tuple(layouts.values()) if len({len(children_of(value)) for value in values}) == 1 else SEVERAL


def _together(values: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """The children of containers by their names or places, each with those of the others; None for what one lacks."""
    if isinstance(values[0], Mapping):
        return [(key, [each.get(key) if isinstance(each, Mapping) else None for each in values]) for key in values[0]]
    children = [children_of(value) for value in values]
    return list(enumerate(map(list, zip(*children, strict=False))))


def _parts(batch: Any, layout: Layout) -> list[tuple[Any, Any, Layout]] | None:
    """The children of a batch with their names and layouts; None where it is not what the layout is of."""
    children = children_of(batch)
    if isinstance(batch, Mapping) and isinstance(layout, dict):
        return [(key, child, layout.get(key)) for key, child in zip(batch, children, strict=True)]
    if isinstance(batch, Mapping) or not isinstance(layout, tuple) or len(layout) != len(children):
        return None
    names = field_names(batch.__class__) or range(len(children))
    return list(zip(names, children, layout, strict=True))


def _holds_tensors(value: Any) -> bool:
    """Whether an object of which nothing is known, as a batch of graphs, has tensors."""
    return any(isinstance(each, (Tensor, np.ndarray)) for each in getattr(value, "__dict__", {}).values())


def samples_in(batch: Any, layout: Layout) -> int | None:
    """The number of samples in a batch; None where nothing tells."""
    if layout is None:
        return batch_size(batch)
    return next(iter(lengths_in(batch, layout)), None)


def lengths_in(batch: Any, layout: Layout) -> Iterator[int]:
    """Of how many samples each part of a batch is."""
    if layout == SAMPLES and (rows := _rows_of(batch)) is not None:
        yield rows
    elif (parts := _parts(batch, layout)) is not None:
        for _, child, own in parts:
            yield from lengths_in(child, own)
    elif layout not in (WHOLE, SEVERAL):
        yield from (len(tensor) for tensor in tensors_of(batch) if tensor.dim())


def _rows_of(value: Any) -> int | None:
    """How many rows or items there are to divide; None for what has neither, as what is not in every batch."""
    is_array = isinstance(value, (Tensor, np.ndarray)) and value.ndim
    return len(value) if is_array or isinstance(value, (list, tuple)) else None


def _of_several(batch: Any, layout: Layout, name: str = "batch") -> Iterator[str]:
    """The names of what is made of several samples."""
    if layout == SEVERAL:
        yield name
    for key, child, own in _parts(batch, layout) or ():
        yield from _of_several(child, own, f"{name}[{key!r}]")


# ---------------------------------------------------------------- into parts


def split(batch: Any, parts: int, layout: Layout = None) -> list[Any]:
    """Divides a batch into parts whose sizes differ by one at most.

    Args:
        batch: any value.
        parts: how many.
        layout: where its samples are.

    Raises:
        TypeError: nothing in the batch says how many samples it has.
        ValueError: something in it is made of several samples, and cannot be divided.
    """
    if parts == 1:
        return [batch]
    several = list(_of_several(batch, layout))
    if several:
        raise ValueError(
            f"{', '.join(several)}: nothing tells which part of it is whose in a batch, for it has the rows of all "
            "samples one after the other, or samples in another dimension than the first, so the batch cannot be "
            "divided into microbatches; collate samples so that each has a row, or an item of a list, or use "
            "microbatches=1, or LayerParallelStrategy"
        )
    size = samples_in(batch, layout)
    if size is None:
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor with samples, so it cannot be divided into "
            "microbatches; use dicts, tuples, lists or dataclasses of tensors, or microbatches=1"
        )
    sizes = part_sizes(size, parts)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [_part(batch, slice(end - n, end), size, layout) for n, end in zip(sizes, ends, strict=True)]


def part_sizes(size: int, parts: int) -> list[int]:
    """Sizes of so many parts of a batch, as even as can be, larger ones first."""
    base, extra = divmod(size, parts)
    return [base + (number < extra) for number in range(parts)]


def _part(value: Any, samples: slice, size: int, layout: Layout) -> Any:
    rows = _rows_of(value) if layout == SAMPLES else size
    if layout == WHOLE or rows not in (size, None):  # of several loaders one may have ended
        return value
    if layout != SAMPLES and (parts := _parts(value, layout)) is not None:
        return rebuilt(value, [_part(child, samples, size, own) for _, child, own in parts])
    if isinstance(value, Tensor):
        return _samples_of(value, samples) if value.dim() and len(value) == size else value
    if layout == SAMPLES and rows is not None:
        return value[samples] if isinstance(value, np.ndarray) else like(value, list(value)[samples])
    if isinstance(value, (list, tuple)) and len(value) == size and not any(True for _ in tensors_of(value)):
        return like(value, list(value)[samples])
    children = children_of(value)
    return rebuilt(value, [_part(child, samples, size, None) for child in children]) if children else value


def _samples_of(tensor: Tensor, samples: slice) -> Tensor:
    """Some samples, in the batch's memory; a model may change them in place, as labels are by some.

    Views count the changes of each other: autograd would take what it saved of one microbatch for changed when the next
    one changes its own samples. `data` counts by itself.
    """
    return tensor[samples] if tensor.requires_grad else tensor.data[samples]


def again(batch: Any, layout: Layout) -> Any:
    """A batch that has each sample of another one twice."""
    if layout is None:
        size = batch_size(batch) or 1
        return merge([batch, batch], [size, size])
    if layout == SAMPLES:
        if isinstance(batch, (Tensor, np.ndarray)):
            return torch.cat([batch, batch]) if isinstance(batch, Tensor) else np.concatenate([batch, batch])
        return like(batch, [*batch, *batch])
    parts = _parts(batch, layout)
    return batch if parts is None else rebuilt(batch, [again(child, own) for _, child, own in parts])


def merge(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Makes of what a step returned for each part what it would have returned for the whole batch.

    Tensors and lists with the samples of a microbatch are joined; numbers are averaged by the number of samples; of
    everything else the first is taken.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return _merged_tensors(outputs, sizes)
    if isinstance(first, (float, complex)) and not isinstance(first, bool):
        return sum(output * size for output, size in zip(outputs, sizes, strict=True)) / sum(sizes)
    holds_samples = all(isinstance(o, list) and len(o) == n for o, n in zip(outputs, sizes, strict=True))
    if holds_samples and not any(True for _ in tensors_of(first)):
        return [item for output in outputs for item in output]
    children = [children_of(output) for output in outputs]
    if not children[0] or len({len(some) for some in children}) > 1:
        return first
    return rebuilt(first, [merge(same, sizes) for same in zip(*children, strict=True)])


def _merged_tensors(outputs: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    if all(output.dim() and len(output) == size for output, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    same_shape = len({output.shape for output in outputs}) == 1
    if same_shape and (outputs[0].is_floating_point() or outputs[0].is_complex()):
        return weighted_mean(outputs, sizes)
    return outputs[0]


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[float]) -> Tensor:
    """The mean over samples of what are means over so many of them."""
    weights = [size / sum(sizes) for size in sizes]
    return torch.stack([value * weight for value, weight in zip(values, weights, strict=True)]).sum(0)
