"""Linear maps of a model: their sizes, and the map within a wrapper such as LoRA's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class LinearMap(NamedTuple):
    """A linear map: its name, and how many features go in and come out."""

    name: str
    inputs: int
    outputs: int


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in the Conv1D of Hugging Face's GPT-2."""
    return type(module).__name__ == "Conv1D" and "nf" in vars(module)


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """How many features go into a linear map and come out; None for any other module."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not (isinstance(module, nn.Linear) or is_transposed(module)):
        return None
    outputs, inputs = weight.shape[::-1] if is_transposed(module) else weight.shape
    return inputs, outputs


def linear_maps(module: nn.Module, prefix: str = "") -> Iterator[LinearMap]:
    """All linear maps in a module, by name."""
    for name, part in module.named_modules(prefix=prefix):
        if (sizes := sizes_of(part)) is not None:
            yield LinearMap(name, *sizes)


def wrapped_map(module: nn.Module) -> LinearMap | None:
    """The linear map in a module that is one itself for its callers: the only one, or one with adapters of low rank.

    An adapter is a pair of maps, from the same inputs to few features and from those to the same outputs.
    """
    maps = list(linear_maps(module))
    for base in maps:
        others = [other for other in maps if other is not base]
        into = sorted(other.outputs for other in others if other.inputs == base.inputs)
        out = sorted(other.inputs for other in others if other.outputs == base.outputs and other.inputs in into)
        few = all(rank < min(base.inputs, base.outputs) for rank in into)
        if into == out and len(into) + len(out) == len(others) and few:
            return base
    return None
