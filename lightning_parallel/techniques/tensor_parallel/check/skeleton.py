"""Copies of blocks without values, to be tried."""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import CellType, FunctionType
from typing import Any

from torch import nn


def skeleton_of(block: nn.Module) -> nn.Module:
    """The block without values or hooks."""
    memo: dict[int, Any] = {}
    for tensor in (*block.parameters(), *block.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    for module in block.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            memo[id(hooks)] = OrderedDict()
    made = copy.deepcopy(block, memo)
    for module in made.modules():
        functions = {name: value for name, value in vars(module).items() if isinstance(value, FunctionType)}
        vars(module).update({name: _with_copies(function, memo) for name, function in functions.items()})
    return made


def _with_copies(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A function that a module keeps, which `deepcopy` leaves as it is, over the copies of what it closes over."""
    if not function.__closure__:
        return function
    cells = tuple(CellType(memo.get(id(cell.cell_contents), cell.cell_contents)) for cell in function.__closure__)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
