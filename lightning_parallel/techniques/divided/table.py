"""The table of rules: what each operation does with divided tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""What each operation does with divided tensors: `rule(func, args, kwargs)` returns the result, or NotImplemented for a
form of the arguments in which the operation gets the whole. The folder `rules/` fills the table."""

NAMES: dict[Any, str] = {}
"""The name of each of these operations. (A compiler that reads the rules can look a name up, but not ask for it.)"""


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Enters a rule in the table.

    Args:
        operations: functions and methods of torch that the rule is for.
    """

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operations, function))
        NAMES.update({operation: getattr(operation, "__name__", "") for operation in operations})
        return function

    return enter


def operations(*names: str) -> list[Any]:
    """The functions and methods of torch with these names, as far as this version of torch has them."""
    owners = (torch, Tensor, torch.nn.functional, torch.special)
    found = [getattr(owner, name, None) for owner in owners for name in names]
    return [each for each in found if callable(each)]  # torch.float and the like are none


def is_in_place(name: str) -> bool:
    """Whether an operation of this name changes its first argument."""
    operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or operator or (name.endswith("_") and not name.endswith("__"))
