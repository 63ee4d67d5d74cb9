"""The table of rules: what each operation does with divided tensors, and the memory of what rules decided.

A rule looks at many things to find out something simple, and finds the same in every step. Where that is one call, it
returns a `LocalCall`, and the next time that tensors of these forms meet in this operation the call is made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.elements import Elements, Ranks

Cuts = Mapping[int, Elements]
"""Which dimensions are divided, by their number from the left, and which elements ranks have of them."""

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""What each operation does with divided tensors: `rule(func, args, kwargs)` returns the result, or a `LocalCall` that
gives it, or NotImplemented for a form of the arguments in which the operation gets the whole. The folder `rules/` fills
the table."""

REMEMBERED: set[Any] = set()
"""The operations of which a rule may return a `LocalCall`."""

NAMES: dict[Any, str] = {}
"""The name of each of these operations. (A compiler that reads the rules can look a name up, but not ask for it.)"""


def rule(*operations: Any, remembered: bool = False) -> Callable[[Rule], Rule]:
    """Enters a rule in the table.

    Args:
        operations: functions and methods of torch that the rule is for.
        remembered: whether it may return a `LocalCall`.
    """

    def enter(function: Rule) -> Rule:
        REMEMBERED.update(operations if remembered else ())
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


# ---------------------------------------------------------------- what rules decided


class LocalCall(NamedTuple):
    """What a rank calls for an operation. Forms, plain shapes and numbers decide it: not values, modes or dtypes.

    Attributes:
        run: gets this rank's own elements in place of divided tensors, and returns those of the result. What else
            meets in it must stay as it is; of alike parameters it gets a use that is reduced later.
        cuts: of the result; None where `run` returns what the operation does.
        rest: what `run` gets after the first argument, if that is not what the operation gets.
        of_themselves: whether `run` gets the tensors themselves, as it does without `cuts`.
    """

    run: Callable[..., Any]
    cuts: Cuts | None
    rest: tuple[Any, ...] | None = None
    of_themselves: bool = False


class Form:
    """What a divided tensor looks like; one object for all that look so.

    Attributes:
        shape: of the whole.
        cuts: which elements ranks have; none of a parameter that they have alike.
        calls: by operation and further arguments: what rules decided where a tensor of this form came first, and the
            form of the result.
    """

    __slots__ = ("calls", "cuts", "shape")

    def __init__(self, shape: torch.Size, cuts: Cuts) -> None:
        self.shape, self.cuts = shape, cuts
        self.calls: dict[Any, Remembered] = {}

    def remember(self, key: Any, call: LocalCall, result: Form | None, meets_alike: bool) -> None:
        """Keeps a call; of numbers that change with every step not without end.

        Args:
            key: of the operation and what it gets.
            call: that a rule decided on.
            result: the form of the result, if the call has `cuts`.
            meets_alike: whether there are alike parameters among what it gets.
        """
        if len(self.calls) >= KEPT:
            self.calls.clear()
        self.calls[key] = call.run, call.rest, result, call.of_themselves, meets_alike


Remembered = tuple[Callable[..., Any], "tuple[Any, ...] | None", "Form | None", bool, bool]
"""See `Form.remember`."""

KEPT = 1000
"""How many calls a form remembers, and forms the ranks."""


def form_of(own: torch.Size, cuts: Cuts, ranks: Ranks) -> Form:
    """The form of what has these cuts.

    Args:
        own: the shape of what this rank has.
        cuts: which elements that are.
        ranks: that keep it in mind.
    """
    key = own, *cuts.items()
    found: Form | None = ranks.forms.get(key)
    if found is None:
        if len(ranks.forms) >= KEPT:
            ranks.forms.clear()
        found = ranks.forms[key] = Form(whole_shape(own, cuts), cuts)
    return found


def whole_shape(own: torch.Size, cuts: Cuts) -> torch.Size:
    """The shape of the whole of which a rank has these elements, in this shape."""
    shape = list(own)
    for dim, elements in cuts.items():
        shape[dim] = elements.size
    return torch.Size(shape)


def same_cuts(one: Cuts, other: Cuts) -> bool:
    """Whether ranks have the same elements."""
    return len(one) == len(other) and all(elements.same(other.get(dim)) for dim, elements in one.items())


VALUES = frozenset((int, bool, str, type(None), torch.dtype, torch.Size))
"""What decides by its value, and is equal only to what decides the same."""


def key_of(func: Any, args: Any, kwargs: Any, wrapper: type) -> tuple[Form, Any, list[Any]] | None:
    """By what a call is remembered.

    Args:
        func: the operation.
        args: of it.
        kwargs: of it.
        wrapper: the type of divided tensors, which have a `form`; those of other types are not remembered.

    Returns:
        The form that remembers, the key, and the arguments with own elements in place of divided tensors, but not of
        alike parameters; None if there is something that is not known by a form or a value.
    """
    first: Form | None = None
    key, given = [func], []
    for each in (*args, *kwargs.values()) if kwargs else args:
        kind = type(each)
        if kind is wrapper:
            form = each.form
            key.append(form)
            first = first or form
            each = each.own if form.cuts else each
        elif kind is Tensor or kind is nn.Parameter:
            key += each.shape, each.requires_grad and torch.is_grad_enabled()
        elif kind in VALUES or (kind is tuple and all(type(size) is int for size in each)):
            key.append(each)
        elif kind is float:  # 1.0 is no size
            key += kind, each
        else:
            return None
        given.append(each)
    if first is None:
        return None
    if kwargs:
        key += len(args), *kwargs
    return first, tuple(key), given
