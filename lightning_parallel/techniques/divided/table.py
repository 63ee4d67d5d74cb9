"""Registry of the rules, which say what each operation does with `Divided` tensors, and the cache of their results.

A rule inspects its arguments at length, and reaches the same result in every step. If that is a single local call, the
rule returns it as a `LocalCall`; the next operation on tensors of the same forms makes this call without the rule.
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
"""Sharding of a tensor: its sharded dimensions, counted from the left, and which elements of them ranks have."""

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""The rule of each operation: `rule(func, args, kwargs)` returns the result, or a `LocalCall` that computes it, or
NotImplemented for arguments that the rule does not handle: the operation then runs on full tensors. The modules in
`rules/` fill the table."""

CACHEABLE: set[Any] = set()
"""Operations whose rule may return a `LocalCall`."""

NAMES: dict[Any, str] = {}
"""Name of each of these operations: a compiler that traces the rules can look it up here, but not read `__name__`."""


DEFAULTS: dict[Any, dict[str, Any]] = {}
"""For `by_name`: the parameters of functions by name, with their default values."""


def rule(
    *operations: Any, remembered: bool = False, named: bool = False, table: dict[Any, Rule] = RULES
) -> Callable[[Rule], Rule]:
    """Return a decorator that enters a rule in the table.

    Args:
        operations: functions and methods of torch that the rule is for.
        remembered: whether the rule may return a `LocalCall`.
        named: whether it reads its arguments with `by_name`; only for functions that torch has written in Python.
        table: the table to enter it in; another one for tensors of another class than `Divided`.
    """

    def enter(function: Rule) -> Rule:
        CACHEABLE.update(operations if remembered else ())
        for operation in operations if named else ():
            DEFAULTS[operation] = {name: param.default for name, param in signature(operation).parameters.items()}
        table.update(dict.fromkeys(operations, function))
        NAMES.update({each: getattr(each, "__name__", "").removeprefix("special_") for each in operations})
        return function

    return enter


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a function by name, including defaults; for rules that are `named`."""
    return {**DEFAULTS[func], **dict(zip(DEFAULTS[func], args, strict=False)), **kwargs}


def operations(*names: str) -> list[Any]:
    """Return the functions and methods of torch with these names, that this version of torch has."""
    owners = (torch, Tensor, torch.nn.functional, torch.special)
    candidates = [getattr(owner, name, None) for owner in owners for name in names]
    return [each for each in candidates if callable(each)]  # torch.float and the like are not callable


OF_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x1": "input", "x2": "other"}
"""NumPy names of arguments that torch accepts, and torch's own names for them."""

FIRST = ("condition", "input", "tensors", "x", "a")
"""Names of the first argument of functions that have a rule: `condition` for `torch.where`, `input` for most others."""

REORDERED = frozenset((*OF_NUMPY, *FIRST))


def positional_first(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of an operation as rules read them: torch's own names, and the first one by position."""
    if func not in RULES:
        return args, kwargs
    named = {OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
    first = next((name for name in FIRST if name in named), None)
    if args or first is None:
        return args, named
    return (named.pop(first),), named


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to by its schema, such as one of `torch.library.custom_op`."""
    schema: Any = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    if not written:
        return []
    named = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
    return tree_leaves([named[name] for name in written if name in named])


# ---------------------------------------------------------------- the cache of results of rules


class LocalCall(NamedTuple):
    """The local operation chosen by a rule. It depends only on forms, plain shapes and numbers, so it can be cached.

    Attributes:
        run: called with local shards in place of `Divided` tensors; returns the local shard of the result. The other
            arguments stay as they are, except replicated parameters, whose gradient is marked to be reduced later.
        cuts: of the result; None if `run` returns the result of the operation itself.
        rest: arguments of `run` after the first one, if they are not those of the operation.
        takes_divided: whether `run` gets the `Divided` tensors themselves, as it does if `cuts` is None.
    """

    run: Callable[..., Any]
    cuts: Cuts | None
    rest: tuple[Any, ...] | None = None
    takes_divided: bool = False


class TensorMeta(NamedTuple):
    """See `Form.tensor_meta`: torch defines these names."""

    shape: torch.Size
    stride: tuple[int, ...]


class Form:
    """Metadata of `Divided` tensors; one object for all that have the same, so that it serves as a cache key.

    Attributes:
        shape: of the full tensor.
        cuts: which elements ranks have.
        stride: of the full tensor on one device.
        calls: cache of rules' results for operations whose first `Divided` tensor has this form: by operation and
            further arguments, the local call and the form of the result.
        tensor_meta: the shape and stride that torch reads when it creates a tensor of this form.
        viewed: see `Ranks.viewed`.
    """

    __slots__ = ("calls", "cuts", "shape", "stride", "tensor_meta", "viewed")

    def __init__(self, shape: torch.Size, cuts: Cuts, stride: tuple[int, ...], viewed: list[Any]) -> None:
        self.shape, self.cuts, self.stride, self.viewed = shape, cuts, stride, viewed
        self.tensor_meta = TensorMeta(shape, stride)
        self.calls: dict[Any, Any] = {}

    def remember(self, key: Key, known: Any) -> None:
        """Cache what was found for a call; bounded, as a number among its arguments may change with every step."""
        if len(self.calls) >= KEPT:
            self.calls.clear()
        self.calls[key] = known


Again = Callable[[Any, Any], Any]
"""Runs a cached call: takes the operation's args and kwargs, returns the local shard of the result."""

KEPT = 1000
"""How many calls a form caches, and how many forms `Ranks` cache."""


def form_of(own: torch.Size, cuts: Cuts, ranks: Ranks, stride: tuple[int, ...] | None = None) -> Form:
    """Return the form of tensors with these cuts; the same object for the same arguments.

    Args:
        own: the shape of the local shard.
        cuts: which elements of the full tensor it has.
        ranks: the ranks that cache the form.
        stride: of the full tensor; None if it is contiguous.
    """
    key = own, stride, *cuts.items()
    form: Form | None = ranks.forms.get(key)
    if form is None:
        if len(ranks.forms) >= KEPT:
            ranks.forms.clear()
        shape = global_shape(own, cuts)
        dense = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1][: len(shape)]
        if stride == dense:
            form = form_of(own, cuts, ranks)
        else:
            form = Form(shape, cuts, dense if stride is None else stride, ranks.viewed)
        ranks.forms[key] = form
    return form


def stride_like(own: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Return the stride of a dense full tensor with the dimensions in the same memory order as those of the shard."""
    strides, step = [0] * own.dim(), 1
    for dim in sorted(range(own.dim()), key=lambda dim: (own.stride(dim), -dim)):
        if own.stride(dim) or own.shape[dim] < 2:
            strides[dim] = step
            step *= shape[dim]
    return tuple(strides)


def global_shape(own: torch.Size, cuts: Cuts) -> torch.Size:
    """Return the shape of the full tensor from that of the local shard: [4, 8] of 2 equal shards of dim 0 is [8, 8]."""
    shape = list(own)
    for dim, elements in cuts.items():
        shape[dim] = elements.size
    return torch.Size(shape)


def same_cuts(one: Cuts, other: Cuts) -> bool:
    """Whether two shardings give each rank the same elements."""
    return len(one) == len(other) and all(elements.same(other.get(dim)) for dim, elements in one.items())


VALUES = frozenset((int, bool, float, str, type(None), torch.dtype, torch.Size))
"""Types of arguments that are part of a cache key by their value."""


class Pattern:
    """Roles of the arguments of an operation, by their types; one object for all calls with such arguments.

    Attributes:
        alone: whether the first argument is a `Divided` tensor, and all others are values.
        first: index of the first `Divided` tensor, whose form caches the call.
        values: returns, of the arguments, those that are part of the cache key by their value.
    """

    __slots__ = ("_others", "_plain", "_tuples", "alone", "first", "values")

    def __init__(self, wrapper: type, kinds: Sequence[type]) -> None:
        self.first, *self._others = divided_indices = [index for index, kind in enumerate(kinds) if kind is wrapper]
        self._plain = [index for index, kind in enumerate(kinds) if kind is Tensor or kind is nn.Parameter]
        self._tuples = [index for index, kind in enumerate(kinds) if kind is tuple]
        self.alone = divided_indices == [0] and not self._plain and not self._tuples
        value_indices = sorted({*range(len(kinds))} - {*divided_indices, *self._plain})
        self.values: Callable[[Any], Any] = itemgetter(*value_indices) if value_indices else itemgetter(slice(0))

    def further(self, key: Key, given: Any) -> Key:
        """Extend a cache key by all arguments other than values: further `Divided` tensors, and plain tensors.

        Args:
            key: this pattern, and `values` of the arguments.
            given: the arguments, keyword arguments last.

        Returns:
            The extended key; () if the call cannot be cached, as a tuple contains something else than integers.
        """
        for index in self._tuples:
            if not {int}.issuperset(map(type, given[index])):
                return ()
        for index in self._others:
            key = *key, given[index].form
        for index in self._plain:
            plain = given[index]
            key = *key, plain.shape, plain.requires_grad and torch.is_grad_enabled(), "_replicated_path" in vars(plain)
        return key


Key = tuple[Any, ...]
"""Cache key of a call: the pattern of its arguments, their values, and the forms and shapes of further tensors."""


@cache
def pattern_of(operation: Any, names: tuple[str, ...] | None, wrapper: type, *kinds: type) -> Pattern | None:
    """Return the pattern of arguments of these types. Cached, as a Python call for each argument would be slow.

    Args:
        operation: the operation that is called.
        names: of the keyword arguments, which come last.
        wrapper: the type of `Divided` tensors with a `form`; calls with other types of them are not cached.
        kinds: the types of the arguments.

    Returns:
        The pattern; None if an argument is known neither by form nor by value, or none is a `Divided` tensor.
    """
    cacheable = VALUES.union((wrapper, Tensor, nn.Parameter, tuple))
    return Pattern(wrapper, kinds) if wrapper in kinds and cacheable.issuperset(kinds) else None
