"""The table of rules: what each operation does with divided tensors, and the memory of what rules decided.

A rule looks at many things to find out something simple, and finds the same in every step. Where that is one call, it
returns a `LocalCall`, and the next time that tensors of these forms meet in this operation the call is made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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


DEFAULTS: dict[Any, dict[str, Any]] = {}
"""What `by_name` reads: the arguments of functions by name, and what they are by default."""


def rule(
    *operations: Any, remembered: bool = False, named: bool = False, table: dict[Any, Rule] = RULES
) -> Callable[[Rule], Rule]:
    """Enters a rule in the table.

    Args:
        operations: functions and methods of torch that the rule is for.
        remembered: whether it may return a `LocalCall`.
        named: whether it reads its arguments with `by_name`; only for functions that torch has written in Python.
        table: that of another class of tensors than `Divided`.
    """

    def enter(function: Rule) -> Rule:
        REMEMBERED.update(operations if remembered else ())
        for each in operations if named else ():
            DEFAULTS[each] = {name: given.default for name, given in signature(each).parameters.items()}
        table.update(dict.fromkeys(operations, function))
        NAMES.update({each: getattr(each, "__name__", "").removeprefix("special_") for each in operations})
        return function

    return enter


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a function by name, also those that are not given; for rules that are `named`."""
    return {**DEFAULTS[func], **dict(zip(DEFAULTS[func], args, strict=False)), **kwargs}


def operations(*names: str) -> list[Any]:
    """The functions and methods of torch with these names, as far as this version of torch has them."""
    owners = (torch, Tensor, torch.nn.functional, torch.special)
    found = [getattr(owner, name, None) for owner in owners for name in names]
    return [each for each in found if callable(each)]  # torch.float and the like are none


OF_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x1": "input", "x2": "other"}
"""Names that torch takes in place of its own."""

FIRST = ("condition", "input", "tensors", "x", "a")
"""Names of the first argument of functions that have a rule; of `torch.where` the condition is, of others the input."""

REORDERED = frozenset((*OF_NUMPY, *FIRST))


def in_order(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an operation as rules read them: under torch's own names, and the first one without its name."""
    if func not in RULES:
        return args, kwargs
    named = {OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
    first = next((name for name in FIRST if name in named), None)
    if args or first is None:
        return args, named
    return (named.pop(first),), named


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What an operation with a schema says that it writes to, as those of `torch.library.custom_op` do."""
    schema: Any = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    if not written:
        return []
    named = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
    return tree_leaves([named[name] for name in written if name in named])


def viewed(whole: Tensor, result: Any) -> bool:
    """Whether a result is this tensor, or has a view of it, which may be changed in place."""
    base = whole if whole._base is None else whole._base
    return any(leaf is base or leaf._base is base for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


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


class TensorMeta(NamedTuple):
    """See `Form.tensor_meta`: these names are torch's."""

    shape: torch.Size
    stride: tuple[int, ...]


class Form:
    """What a divided tensor looks like; one object for all that look so.

    Attributes:
        shape: of the whole.
        cuts: which elements ranks have; none of a parameter that they have alike.
        stride: of the whole on one device.
        calls: by operation and further arguments: what rules decided where a tensor of this form came first, and the
            form of the result.
        tensor_meta: what torch is told of shape and stride as it makes a tensor of this form.
        viewed: see `Ranks.viewed`.
    """

    __slots__ = ("calls", "cuts", "shape", "stride", "tensor_meta", "viewed")

    def __init__(self, shape: torch.Size, cuts: Cuts, stride: tuple[int, ...], viewed: Any = None) -> None:
        self.shape, self.cuts, self.stride = shape, cuts, stride
        self.viewed: list[Any] = [] if viewed is None else viewed
        self.tensor_meta = TensorMeta(shape, stride)
        self.calls: dict[Any, Any] = {}

    def remember(self, key: Key, known: Any) -> None:
        """Keeps what was found for a call; of numbers that change with every step not without end."""
        if len(self.calls) >= KEPT:
            self.calls.clear()
        self.calls[key] = known


Again = Callable[[Any, Any], Any]
"""Gives, of what an operation gets, and gets by name, this rank's own elements of the result."""

KEPT = 1000
"""How many calls a form remembers, and forms the ranks."""


def form_of(own: torch.Size, cuts: Cuts, ranks: Ranks, stride: tuple[int, ...] | None = None) -> Form:
    """The form of what has these cuts.

    Args:
        own: the shape of what this rank has.
        cuts: which elements that are.
        ranks: that keep it in mind.
        stride: of the whole; None where it is contiguous.
    """
    key = own, stride, *cuts.items()
    found: Form | None = ranks.forms.get(key)
    if found is None:
        if len(ranks.forms) >= KEPT:
            ranks.forms.clear()
        shape = whole_shape(own, cuts)
        dense = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1][: len(shape)]
        if stride is None or stride == dense:
            contiguous = own, None, *cuts.items()
            found = ranks.forms.get(contiguous) or Form(shape, cuts, dense, ranks.viewed)
            ranks.forms[contiguous] = found
        else:
            found = Form(shape, cuts, stride, ranks.viewed)
        ranks.forms[key] = found
    return found


def stride_like(own: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """The stride of a whole that lies densely in memory, its dimensions in the order of those of what a rank has."""
    strides, step = [0] * own.dim(), 1
    for dim in sorted(range(own.dim()), key=lambda dim: (own.stride(dim), -dim)):
        if own.stride(dim) or own.shape[dim] < 2:
            strides[dim] = step
            step *= shape[dim]
    return tuple(strides)


def whole_shape(own: torch.Size, cuts: Cuts) -> torch.Size:
    """The shape of the whole of which a rank has these elements, in this shape."""
    shape = list(own)
    for dim, elements in cuts.items():
        shape[dim] = elements.size
    return torch.Size(shape)


def same_cuts(one: Cuts, other: Cuts) -> bool:
    """Whether ranks have the same elements."""
    return len(one) == len(other) and all(elements.same(other.get(dim)) for dim, elements in one.items())


VALUES = frozenset((int, bool, float, str, type(None), torch.dtype, torch.Size))
"""What decides by its type and value."""

WHOLE_NUMBERS = frozenset((int,))


class Pattern:
    """Which arguments of an operation are what, as their types tell; one object for all calls with such arguments.

    Attributes:
        alone: whether a divided tensor comes first, and the rest are values.
        first: the place of the first divided tensor, whose form remembers the call.
        values: what decides by its value, of the arguments.
    """

    __slots__ = ("_others", "_plain", "_tuples", "alone", "first", "values")

    def __init__(self, wrapper: type, kinds: Sequence[type]) -> None:
        self.first, *self._others = divided = [place for place, kind in enumerate(kinds) if kind is wrapper]
        self._plain = [place for place, kind in enumerate(kinds) if kind is Tensor or kind is nn.Parameter]
        self._tuples = [place for place, kind in enumerate(kinds) if kind is tuple]
        self.alone = divided == [0] and not self._plain and not self._tuples
        rest = sorted({*range(len(kinds))} - {*divided, *self._plain})
        self.values: Callable[[Any], Any] = itemgetter(*rest) if rest else itemgetter(slice(0))

    def further(self, key: Key, given: Any) -> Key:
        """By what the form of the first divided tensor remembers a call of more than this one and values.

        Args:
            key: this pattern, and `values`.
            given: the arguments, those by name last.

        Returns:
            Nothing where a tuple has something that is not known by its value. (Whole numbers are.)
        """
        for place in self._tuples:
            if not WHOLE_NUMBERS.issuperset(map(type, given[place])):
                return ()
        for place in self._others:
            key = *key, given[place].form
        for place in self._plain:
            each = given[place]
            key = *key, each.shape, each.requires_grad and torch.is_grad_enabled(), "_replicated_path" in vars(each)
        return key


Key = tuple[Any, ...]
"""The pattern of an operation's arguments, and what of these decides beside the form that remembers it."""


@cache
def pattern_of(operation: Any, names: tuple[str, ...] | None, wrapper: type, *kinds: type) -> Pattern | None:
    """The pattern of arguments of these types: it is looked up, and no function of Python is called for an argument.

    Args:
        operation: that is called.
        names: of the arguments that are given by name, which come last.
        wrapper: the type of divided tensors, which have a `form`; those of other types are not remembered.
        kinds: the types of the arguments.

    Returns:
        None where one of them is not known by a form or a value, or none is divided.
    """
    known = VALUES.union((wrapper, Tensor, nn.Parameter, tuple))
    return Pattern(wrapper, kinds) if wrapper in kinds and known.issuperset(kinds) else None
