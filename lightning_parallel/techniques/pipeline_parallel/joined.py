"""What the last block returned for each microbatch, as it would be for the batch.

A loss that compares samples, or divides by what it finds in all of them, must see those of all microbatches. So what
follows the blocks runs once, as a stage of its own: see `Schedule.with_loss_stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.techniques.observed.positions import Call, Traversal
from lightning_parallel.techniques.pipeline_parallel.exchange import has_gradients
from lightning_parallel.techniques.pipeline_parallel.stages import HandedOn
from lightning_parallel.values import TensorSpec, children_of, rebuilt

Shape = tuple[int, ...]
Dims = Mapping[Call, Mapping[int, int | None]]
"""Of the tensors that a call returned, by their numbers, the dimension that runs over samples; None without one."""


def sample_dims(one: Traversal, two: Traversal, sizes: tuple[int, int]) -> Dims:
    """Finds the dimensions of samples in what modules return, from two steps on different numbers of samples.

    Args:
        one: a step.
        two: the same on another number of samples.
        sizes: the two numbers.

    Raises:
        ValueError: a tensor of which that cannot be told.
    """
    dims = {
        call: {number: _sample_dim(call, shape, two.shapes[call][number], sizes) for number, shape in shapes.items()}
        for call, shapes in one.shapes.items()
        if call in two.shapes and shapes.keys() == two.shapes[call].keys()
    }
    hidden = (one.blocks[-1], 0)
    flattened = set(dims[hidden].values()) <= {0, None}  # of samples that come first: a view keeps them together
    for call in dims:
        for number, dim in dims[call].items():
            shape = one.shapes[call][number]
            if dim is not None and shape[dim] > sizes[0] and (call == hidden or not flattened):
                raise ValueError(
                    f"{call[0]} returns a tensor of shape {shape} of {sizes[0]} samples, each of which has several "
                    "places in it, and whose they are cannot be told; return one row for each sample, with views or "
                    "tokens in a dimension of their own behind it"
                )
    return dims


def _sample_dim(call: Call, one: Shape, two: Shape, sizes: tuple[int, int]) -> int | None:
    differ = [dim for dim, (here, there) in enumerate(zip(one, two, strict=False)) if here != there]
    if len(one) == len(two) and not differ:
        return None
    if len(one) != len(two) or len(differ) > 1 or one[differ[0]] * sizes[1] != two[differ[0]] * sizes[0]:
        raise ValueError(
            f"{call[0]} returns a tensor of shape {one} of {sizes[0]} samples and one of shape {two} of {sizes[1]}, "
            "which does not tell where the samples are"
        )
    return differ[0]


def joined(parts: Sequence[HandedOn], sizes: Sequence[int], dims: Dims, blocks: Sequence[str]) -> HandedOn:
    """What a stage would have handed on that had the whole batch; gradients go back to what is given.

    Args:
        parts: what the stage of the last block handed on, for each microbatch.
        sizes: how many samples these have.
        dims: where samples are.
        blocks: the FQN of the blocks.
    """
    first = parts[0]

    def along(call: Call, values: Sequence[Any]) -> Any:
        known, number = dims.get(call, {}), count()
        return _joined(values, lambda same: _one(same, sizes, known.get(next(number)), call[0]))

    taken = {
        owner: [
            replace(one, given=along(one.call, [part.taken[owner][place].given for part in parts]))
            for place, one in enumerate(noted)
        ]
        for owner, noted in first.taken.items()
    }
    return HandedOn(
        along((blocks[-1], 0), [part.result for part in parts]),
        {call: along(call, [part.carried[call] for part in parts]) for call in first.carried},
        {number: along((blocks[number], 0), [part.shapes[number] for part in parts]) for number in first.shapes},
        taken,
    )


def _joined(values: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """The structure of the values, with what stands in one place of them joined."""
    if isinstance(values[0], (Tensor, TensorSpec)):
        return join(values)
    children = [children_of(value) for value in values]
    if not children[0]:
        return values[0]
    return rebuilt(values[0], [_joined(same, join) for same in zip(*children, strict=True)])


def _one(same: Sequence[Any], sizes: Sequence[int], dim: int | None, name: str) -> Any:
    """One tensor, or its shape, of those of the microbatches."""
    first = same[0]
    if isinstance(first, TensorSpec):
        return first if dim is None else _longer(first, dim, sum(spec.shape[dim] for spec in same))
    if dim is not None:
        return torch.cat(list(same), dim)
    if not has_gradients(first):
        if not all(torch.equal(first, other) for other in same):
            raise ValueError(
                f"{name} returns a tensor of shape {tuple(first.shape)} and {first.dtype} that differs between "
                "microbatches, and no dimension of it runs over samples: return it as floating point, of which the "
                "loss gets the mean over microbatches, or use microbatches=1"
            )
        return first.clone()
    # The mean over samples; where all are equal it is what they are, to the last bit.
    weights = [size / sum(sizes) for size in sizes]
    return first + sum(weight * (other - first) for weight, other in zip(weights[1:], same[1:], strict=True))


def _longer(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    return type(spec)((*spec.shape[:dim], size, *spec.shape[dim + 1 :]), spec.dtype)
