"""What a step computes from the values of its batch alone: masks, how much these leave, statistics of all samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.techniques.observed.buffers import memory_of
from lightning_parallel.values import tensors_of

REDUCTIONS = {"sum", "nansum", "count_nonzero", "mean", "std", "var", "std_mean", "var_mean", "max", "min", "amax",
              "amin", "prod", "norm", "linalg_vector_norm", "logsumexp", "median", "dot"}  # fmt: skip
"""Operations that make one value of those along dimensions, or of all."""


class OfData:
    """Tensors and numbers that come of the values of a batch, by their memory.

    Args:
        batch: what the step runs on.
    """

    def __init__(self, batch: Any) -> None:
        self._kept = list(tensors_of(batch))  # memory that is freed may become that of other tensors
        self._of_samples = set(map(memory_of, self._kept))
        self._of_all: set[int] = set()
        self._sized: set[int] = set()
        self._numbers: set[float] = set()

    def made(self, func: Any, args: Sequence[Any], kwargs: Any, inputs: Sequence[Tensor], result: Any) -> None:
        """An operation on tensors with values made a result."""
        given = set(map(memory_of, inputs))
        if given.isdisjoint(self._of_samples) or _looks_at_shapes(func._opname):
            return
        of_all = not given.isdisjoint(self._of_all) or _reduces_first(func, args, kwargs)
        made = [*tensors_of(result)]
        self._note(self._of_samples, made)
        if of_all:
            self._note(self._of_all, made)
        if torch.Tag.dynamic_output_shape in func.tags or not given.isdisjoint(self._sized):
            self._note(self._sized, (each for each in made if each.dim()))
        if of_all and isinstance(result, (int, float)):
            self._numbers.add(float(result))

    def _note(self, where: set[int], tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._kept.append(tensor)
            where.add(memory_of(tensor))

    def sizes(self, tensor: Tensor) -> bool:
        """Whether as many elements as there are depends on values, as of the positions that a mask leaves."""
        return memory_of(tensor) in self._sized

    def is_of_all(self, number: Tensor | float) -> bool:
        """Whether a tensor was made of all samples, as the sum of a mask is; a number, or one over it."""
        if isinstance(number, Tensor):
            return memory_of(number) in self._of_all
        return any(math.isclose(each, number) or math.isclose(each * number, 1.0) for each in self._numbers)


def _looks_at_shapes(name: str) -> bool:
    return name.endswith("_like") or name.startswith("new_")


def _reduces_first(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether an operation makes one value of those along the first dimension, which has the samples."""
    if func._opname not in REDUCTIONS or not args[0].dim() or len(args[0]) < 2:
        return False
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    dims = named.get("dim")
    return dims in (None, []) or not {0, -args[0].dim()}.isdisjoint([dims] if isinstance(dims, int) else dims)
