"""Marks of the block that ends a stage: the next one may run elsewhere, or later, on what this one returned."""

from __future__ import annotations

from torch import nn

_MARK = "_ends_stage"


def mark_end(block: nn.Module) -> None:
    """Notes that a block is the last one of its stage."""
    vars(block)[_MARK] = True


def ends_stage(block: nn.Module) -> bool:
    """Whether what the block returns leaves its stage."""
    return vars(block).get(_MARK, False) is True


def forget_ends(model: nn.Module) -> None:
    """Takes all marks back."""
    for module in model.modules():
        vars(module).pop(_MARK, None)
