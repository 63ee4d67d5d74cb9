"""Batches into microbatches, and what a step returned for each of them into what it would return for the batch.

A batch is any nesting of dicts, lists, tuples, named tuples and dataclasses. Tensors, and lists without tensors, whose
first dimension is that of the batch are divided; everything else goes to every microbatch as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.values import batch_size, children_of, like, rebuilt, tensors_of


def split(batch: Any, parts: int) -> list[Any]:
    """Divides a batch into parts whose sizes differ by one at most.

    Raises:
        TypeError: no tensor in the batch says how many samples it has.
    """
    size = batch_size(batch)
    if size is None:
        if parts == 1:
            return [batch]
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor with samples, so it cannot be divided into "
            "microbatches; use dicts, tuples, lists or dataclasses of tensors, or microbatches=1"
        )
    sizes = part_sizes(size, parts)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [_part(batch, slice(end - n, end), size) for n, end in zip(sizes, ends, strict=True)]


def part_sizes(size: int, parts: int) -> list[int]:
    """Sizes of so many parts of a batch, as even as can be, larger ones first."""
    base, extra = divmod(size, parts)
    return [base + (number < extra) for number in range(parts)]


def _part(value: Any, samples: slice, size: int) -> Any:
    if isinstance(value, Tensor):
        return _samples_of(value, samples) if value.dim() and len(value) == size else value
    if isinstance(value, (list, tuple)) and len(value) == size and not any(True for _ in tensors_of(value)):
        return like(value, list(value)[samples])
    children = children_of(value)
    return rebuilt(value, [_part(child, samples, size) for child in children]) if children else value


def _samples_of(tensor: Tensor, samples: slice) -> Tensor:
    """Some samples, in the batch's memory; a model may change them in place, as labels are by some.

    Views count the changes of each other: autograd would take what it saved of one microbatch for changed when the next
    one changes its own samples. `data` counts by itself.
    """
    return tensor[samples] if tensor.requires_grad else tensor.data[samples]


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
