"""Where a block says which positions or features it means, and whether it means the same ones when it is divided.

A slice of the sequence, or positions counted from the length of what a block gets, are others on a part of the
sequence; so are heads or features that are counted.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Place = tuple[str, int]
"""A file and a line."""


@dataclass(frozen=True)
class Places:
    """One operation that takes or makes elements by their number.

    Args:
        name: of the operation.
        sizes: of what it takes from, and of what it takes.
        where: the model calls it.
        divided: whether ranks have different ones of what it takes from.
    """

    name: str
    sizes: tuple[int, ...]
    where: Place
    divided: bool = False


SLICES = {"slice", "select", "split", "split_with_sizes", "unbind", "index_select", "narrow", "unfold"}
COUNTS = {"arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices"}


def places_of(
    function: Any, args: tuple[Any, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Places | None:
    """What an operation means by its numbers, None where it has none."""
    name: str = function._opname
    if name in COUNTS and outputs:
        return Places(name, (outputs[0].numel(),), line())
    if name in ("tril", "triu"):
        return Places(name, tuple(inputs[0].shape[-2:]), line())
    if name == "constant_pad_nd":
        padded = [-1 - k // 2 for k, by in enumerate(args[1]) if by]
        return Places(name, (inputs[0].shape[padded[-1]], 0), line()) if padded else None
    if name not in SLICES or not inputs or not inputs[0].dim():
        return None
    dim = next((arg for arg in args[1:2] if isinstance(arg, int)), 0)
    if name in ("split", "split_with_sizes"):
        dim = args[2] if len(args) > 2 else 0
    before, after = inputs[0], outputs[0]
    return Places(name, (before.shape[dim], after.shape[dim] if after.dim() == before.dim() else 0), line())


def wrong_place(
    whole: Sequence[Places], divided: Sequence[Places], length: int | None, own_length: int | None
) -> str | None:
    """The first operation that would mean other elements than in the whole block.

    Those that loop over a rank's heads are more or fewer, and are not compared.
    """
    if len(whole) != len(divided):
        return None
    for wanted, found in zip(whole, divided, strict=True):
        if _is_wrong(wanted, found, length, own_length):
            return (
                f"{found.name} runs over {found.sizes[0]} elements where the whole block has {wanted.sizes[0]} "
                f"({told(found.where)})"
            )
    return None


def _is_wrong(wanted: Places, found: Places, length: int | None, own_length: int | None) -> bool:
    if not found.divided:
        return wanted.sizes != found.sizes
    along_sequence = length != own_length and (wanted.sizes[0], found.sizes[0]) == (length, own_length)
    takes_all = len({*wanted.sizes}) == 1 == len({*found.sizes})
    return along_sequence and not (found.name in SLICES and takes_all)


# ---------------------------------------------------------------- lines of the model


def line() -> Place:
    """Where the model is."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_model(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def told(where: Place) -> str:
    """The place with what is written there."""
    return f"{where[0]}:{where[1]}: {linecache.getline(*where).strip()}"


def is_model(filename: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not filename.startswith(_NOT_THE_MODEL)


_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
