"""Sees of what kind the values are that a step logs and keeps, while it computes them in the first batches.

`KindWatch` sees by which operations a value was made. A value counts as what it was reduced by over the samples:
`mean`, `sum`, `max`; what is done to it afterwards keeps that or makes it of another kind. What still has samples has
none, but for what was taken out of one of several samples, as in a loop over them: that is known as this sample's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.logged.functions import ERROR, FUNCTIONS, taken_by, undone
from lightning_parallel.strategies.logged.kinds import (
    ABOUT,
    ALIKE,
    ENTRIES,
    MOST_DIMS,
    MOST_PARTS,
    NEGATED,
    NUMBERS,
    OF_MULTIPLES,
    OVER,
    PLUS,
    TIMES,
    TOGETHER,
    Kind,
    entries,
    keeps,
    product_of,
    quotient_of,
    reduces_samples,
    reduction,
    row_taken,
    set_in,
    sum_of,
)
from lightning_parallel.techniques.tools.redirect import Listener
from lightning_parallel.values import tensors_of

MANY = -1
"""In place of the number of a sample: what was added up, or put together, of several, one by one."""


class KindWatch(Listener):
    """While active, sees of what kind the tensors are that are computed, and the numbers taken from them."""

    def __init__(self) -> None:
        super().__init__()
        #: how many the step has, where that is known
        self.samples: int | None = None
        self._known: dict[int, tuple[weakref.ref[Tensor], Kind]] = {}
        self._whose: dict[int, int] = {}
        #: of tensors, and of numbers that were read of them, the means of which they are multiples
        self._roots: dict[int, Tensor | None] = {}
        self._roots_of_numbers: dict[float, Tensor] = {}
        #: by their ids, functions of means: which, and of what
        self._functions: dict[int, tuple[str, Tensor]] = {}
        self._functions_of_numbers: dict[float, tuple[str, Tensor]] = {}
        self._numbers: dict[float, Kind | None] = {}
        self._counts = Counts()
        #: tensors that count samples because they were made of numbers that are like such a count, perhaps by chance
        self._by_value: set[int] = set()
        #: whether a mean was multiplied by a number that is like a count of samples, perhaps by chance, or a sum by one
        #: that is like one over it
        self.doubtful = False
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is seen: Lightning multiplies what it logs by the number of samples, too."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `Listener`."""
        kwargs = kwargs or {}
        name = func.__name__
        # Torch sets attributes while it holds a lock that some questions wait for, as for the leaf of a view.
        if torch.compiler.is_dynamo_compiling() or self._paused or name == "__set__":
            return func(*args, **kwargs)
        before = self._read(args, kwargs)
        result = func(*args, **kwargs)
        if name in ALIKE and args and result is args[0]:  # as a cast to the dtype that a tensor has
            return result
        if name == "__iter__":  # of a tensor: its rows one by one
            rows = list(result)
            self._know_rows(name, before, rows, args)
            return iter(rows)
        if Kind.ONE in before and isinstance(result, Tensor):
            self._know_of_one(name, {*before}, result, args, kwargs)
        elif not self._know_rows(name, before, result, args):
            self._know_result(name, before, result, args, kwargs)
            self._know_root(name, result, args, (*tensors_of(args), *tensors_of(kwargs)))
            self._know_function(name, result, args)
        return result

    def _know_result(self, name: str, before: list[Kind], result: Any, args: Any, kwargs: Any) -> None:
        if name == "__setitem__" and before[0] is not Kind.SAMPLES:
            is_one = before[-1] is Kind.ONE
            self._know(args[0], Kind.SAMPLES if is_one else set_in(before[0], self._kind(args[2])))
        elif isinstance(result, Tensor):
            self._know_tensor(name, self._made(name, before, result, args, kwargs), result, args, kwargs)
        elif name in NUMBERS:
            self._count(name, args, before, result)
        elif isinstance(result, (tuple, list)):
            for tensor in tensors_of(result):
                self._know(tensor, self._made(name, before, tensor, args, kwargs))

    def _know_tensor(self, name: str, kind: Kind, result: Tensor, args: Any, kwargs: Any) -> None:
        given = set(map(id, (*tensors_of(args), *tensors_of(kwargs))))
        of_many, by_value = MANY in map(self._whose.get, given), not given or not given.isdisjoint(self._by_value)
        if kind is Kind.SUM and of_many and name in OVER and args[1:] == (self.samples,):
            kind = Kind.MEAN  # `sum(losses) / len(losses)`
        self._know(result, kind)
        if kind is Kind.SUM and of_many:
            self._whose[id(result)] = MANY
        if kind is Kind.SUM and by_value:
            self._by_value.add(id(result))

    def take_as_same(self, tensors: Iterable[Tensor]) -> None:
        """States of a module have no samples, whatever their shape."""
        for tensor in tensors:
            self._know(tensor, Kind.SAME)

    def kind_of_number(self, value: float, before: float) -> Kind | None:
        """The kind of a number that was another one before."""
        added = value - before
        if isinstance(value, int):  # which are often alike by chance
            return None if added == 1 and added in self._numbers else self._of_number(value)
        goes_on = self._of_number(added, 4e-16 * max(abs(value), abs(before)))
        if goes_on in (Kind.SAME, None):
            return self._of_number(value)
        return Kind.SUMMED if goes_on is Kind.SUM else goes_on

    def kind_of(self, value: Any) -> Kind | None:
        """The kind of a tensor or number that was computed while this was active; None where values do not tell."""
        return Kind.OTHER if isinstance(value, Tensor) and id(value) in self._by_value else self._kind(value)

    def _kind(self, value: Any) -> Kind | None:
        if isinstance(value, Tensor):
            kind = self._of_tensor(value)
            return {Kind.ONE: Kind.OTHER, Kind.SHARES: Kind.SAMPLES}.get(kind, kind)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None if isinstance(value, (np.ndarray, np.generic)) else Kind.SAME
        return self._of_number(value)

    def root_of(self, value: Any) -> Tensor | None:
        """The mean of which a value is a multiple, perhaps itself; None where there is none, or several."""
        if not isinstance(value, Tensor):
            return self._roots_of_numbers.get(value) if isinstance(value, float) else None
        kind = self._of_tensor(value)
        if value.dim() or self._known.get(id(value)) is None:
            return None
        return self._roots.get(id(value), value if kind is Kind.MEAN else None)

    def _know_root(self, name: str, result: Any, args: Any, given: Sequence[Tensor]) -> None:
        """Of what was made of means: a sum of multiples of one, and of what all samples share, counts as it does.

        A quotient of two numbers may be a mean, too: who asks for it knows.
        """
        with_root = [each for each in given if self.root_of(each) is not None]
        of_two = len(given) == 2 and isinstance(result, Tensor) and not result.dim()
        if name in OVER and of_two and len(with_root) in (0, 2):
            self._roots[id(result)] = result
            return
        roots = {id(root): root for root in map(self.root_of, with_root)}
        others = [each for each in given if self.root_of(each) is None and self._of_tensor(each) is not Kind.SAME]
        if len(roots) > 1 and isinstance(result, Tensor):
            self._roots[id(result)] = None
        if name not in OF_MULTIPLES or others or len(roots) != 1:
            return
        (root,) = roots.values()
        assert root is not None
        if isinstance(result, float):
            self._roots_of_numbers[result] = root
        elif isinstance(result, Tensor) and not result.dim() and self._is_multiple(name, args, with_root):
            self._roots[id(result)] = root

    def function_of(self, value: Any) -> tuple[str, Any]:
        """Which function of a mean, or of a quotient, a value is, and of which; the value itself where it is none."""
        if isinstance(value, Tensor):
            known = self._known.get(id(value))
            is_known = known is not None and known[0]() is value
            return self._functions.get(id(value), ("", value)) if is_known else ("", value)
        if not isinstance(value, float):
            return "", value
        if value in self._functions_of_numbers:
            return self._functions_of_numbers[value]
        return self._by_python(value) if self._of_number(value) is Kind.SAME else ("", value)

    def _by_python(self, value: float) -> tuple[str, Any]:
        """Of a number that `math.exp` and the like made of one that was read."""
        for name in FUNCTIONS:
            before = undone(name, torch.tensor(value, dtype=torch.float64)).item()
            for number in self._roots_of_numbers:
                if abs(before - number) <= ERROR * max(1.0, abs(number)):
                    return name, number
        return "", value

    def _know_function(self, name: str, result: Any, args: Any) -> None:
        """Knows what is a function of a mean, also after it was copied, cast or read."""
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is None or given.dim() or (isinstance(result, Tensor) and result.dim()):
            return
        made = self.function_of(given) if name in ALIKE else (taken_by(name, args), given)
        if not made[0] or self.root_of(made[1]) is None:
            return
        if isinstance(result, Tensor):
            self._functions[id(result)] = made
        elif isinstance(result, float):
            self._functions_of_numbers[result] = made

    def _is_multiple(self, name: str, args: Any, with_root: Sequence[Tensor]) -> bool:
        if name in PLUS:
            numbers = [arg for arg in args if isinstance(arg, (int, float))]
            return not any(self._of_number(float(number)) is Kind.SUM for number in numbers)
        return len(with_root) == 1 and (name not in OVER or with_root[0] is args[0])

    # ---------------------------------------------------------------- what is known

    def _know(self, tensor: Tensor, kind: Kind) -> None:
        self._whose.pop(id(tensor), None)
        self._by_value.discard(id(tensor))
        self._roots.pop(id(tensor), None)
        self._functions.pop(id(tensor), None)
        if kind is Kind.SAMPLES:
            self._known.pop(id(tensor), None)
        else:
            self._known[id(tensor)] = weakref.ref(tensor), kind

    def _of_tensor(self, tensor: Tensor) -> Kind:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return Kind.SAME
        return Kind.SAMPLES if tensor.dim() else Kind.OTHER

    def _of_number(self, number: float, error: float = 0.0) -> Kind | None:
        """A number is known by its value; one that was made from two others, by what they make."""
        if self._number(number, error) is not Kind.SAME:
            return self._number(number, error)
        if isinstance(number, int) or abs(number) == 1.0:  # a quotient is no integer, and 1.0 may be one of any two
            return Kind.SAME if isinstance(number, int) or not self._numbers else None
        error = max(error, 4e-16 * abs(number))
        for count in [count for count, kind in self._numbers.items() if kind is Kind.SUM and count > 1]:
            if self._number(number / count, error) is Kind.MEAN:
                return Kind.SUM
            if self._number(number * count, error * count) is Kind.SUM:
                return Kind.MEAN
        return Kind.SAME

    def _number(self, number: float, error: float) -> Kind | None:
        if abs(number) <= error:
            return None
        if number in self._numbers or not error:
            return self._numbers.get(number, Kind.SAME)
        near = [kind for known, kind in self._numbers.items() if abs(known - number) <= error]
        return near[0] if near else Kind.SAME

    def _read(self, args: Any, kwargs: Any) -> list[Kind]:
        return [self._of_tensor(tensor) for tensor in (*tensors_of(args), *tensors_of(kwargs))]

    # ---------------------------------------------------------------- of one sample

    def _know_rows(self, name: str, before: Sequence[Kind], result: Any, args: Any) -> bool:
        """Knows the rows that an operation took out of a tensor with a row for each of several samples, if it did."""
        row = row_taken(name, args) if before[:1] == [Kind.SAMPLES] else None
        if row is None or self.samples is None or not 1 < self.samples == len(args[0]):
            return False
        for number, tensor in enumerate(tensors_of(result)):
            self._know_one(tensor, row % self.samples if isinstance(result, Tensor) else number)
        return True

    def _know_one(self, tensor: Tensor, number: int) -> None:
        self._know(tensor, Kind.ONE)
        self._whose[id(tensor)] = number

    def _know_of_one(self, name: str, before: set[Kind], result: Tensor, args: Any, kwargs: Any) -> None:
        """Of what was made of one sample's values, and perhaps of others: it is that one's, or a sum over several."""
        given = (*tensors_of(args), *tensors_of(kwargs))
        whose = {self._whose[id(each)] for each in given if self._of_tensor(each) is Kind.ONE}
        if name in TOGETHER:
            self._know(result, Kind.SAMPLES)
            self._whose[id(result)] = MANY
        elif name in PLUS and (len(whose) > 1 or Kind.SUM in before):
            self._know(result, Kind.SUM if before <= {Kind.ONE, Kind.SUM} else Kind.OTHER)
            self._whose[id(result)] = MANY
        elif name in OVER and len(args) == 2 and self._kind(args[1]) is Kind.SUM:
            self._know(result, Kind.MEAN)
        elif len(whose) == 1:
            self._know_one(result, whose.pop())
        else:
            self._know(result, Kind.OTHER)

    # ---------------------------------------------------------------- what is made

    def _made(self, name: str, before: Sequence[Kind], result: Tensor, args: Any, kwargs: Any) -> Kind:
        if ENTRIES.isdisjoint(before):
            return self._of_values(name, before, result, args, kwargs)
        if result.dim() and not reduces_samples(name, args, kwargs):
            divisor = self._kind(args[1]) if name in OVER and len(args) == 2 else None
            return entries(name, before, divisor, args, kwargs)
        return reduction(name, before, kwargs)

    def _of_values(self, name: str, before: Sequence[Kind], result: Tensor, args: Any, kwargs: Any) -> Kind:
        """The kind of what was made of values without samples."""
        kinds = set(before) - {Kind.SAME}
        if not kinds:
            return self._made_from_numbers(result, args) if not before else Kind.SAME
        if name in ("where", "ones_like", "zeros_like", "full_like"):
            chosen = set(before[1:]) - {Kind.SAME} if name == "where" else {Kind.SAME}
            return chosen.pop() if len(chosen) == 1 else Kind.OTHER
        numbers = [float(arg) for arg in args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        in_list = name in TOGETHER and not (args and isinstance(args[0], Tensor))
        of_all = in_list and self.samples == 1 == len(before)  # it may have an item for each sample
        if len(kinds) == 1 and not of_all and (name in ALIKE or keeps(name, next(iter(kinds)))):
            return next(iter(kinds)) if Kind.SAME not in before or kinds == {Kind.MEAN} else Kind.OTHER
        if name in PLUS:
            return sum_of(set(before), numbers)
        if name in TIMES:
            factors = [self._of_number(number) or Kind.OTHER for number in numbers]
            self.doubtful |= Kind.SUM in factors and Kind.MEAN in before
            self.doubtful |= Kind.SUM in before and any(map(self._is_one_over_count, numbers))
            return product_of([*before, *factors])
        if name in OVER and len(args) == 2:
            upper, lower = (self._kind(arg) or Kind.OTHER for arg in args)
            counted = (upper, lower) == (Kind.SUM, Kind.SAME) and args[1] in self._counts
            return quotient_of(upper, Kind.SUM if counted else lower)
        if name in NEGATED:
            (kind,) = kinds if len(kinds) == 1 else (Kind.OTHER,)
            return {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}.get(kind, kind)
        return Kind.OTHER

    def _made_from_numbers(self, result: Tensor, args: Any) -> Kind:
        if result.dim() or not args or not isinstance(args[0], (int, float)):
            return Kind.SAME
        return self._kind(args[0]) or Kind.OTHER

    def _is_one_over_count(self, number: float) -> bool:
        count = round(1 / number) if 0 < number < 0.5 else 0  # halves of sums are common
        counts = count in self._counts or self._numbers.get(float(count)) is Kind.SUM
        return counts and math.isclose(count * number, 1.0)

    def _count(self, name: str, args: Any, before: Sequence[Kind], result: Any) -> None:
        """Numbers that come out of tensors: their values, or how many samples they have."""
        number, kind = result, before[0] if before else Kind.SAME
        if name in ABOUT:
            kind = Kind.SUM if kind in ENTRIES and args[1:] in ((), (0,)) else Kind.SAME
            if kind is Kind.SUM:
                self._counts.read(name, result)
            number = result[0] if isinstance(result, torch.Size) and result else result
        if isinstance(number, (int, float)) and not isinstance(number, bool) and kind is not Kind.SAME:
            known = self._numbers.setdefault(float(number), kind)
            if known is not kind:
                self._numbers[float(number)] = None


class Counts:
    """Numbers that were made of the counts that a step read, by which it may divide a sum.

    These are products of the number of samples and other dimensions, `(batch * length)`, and sums of counts that were
    read one after the other, `count += part.numel()`.
    """

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._sums: dict[str, list[int]] = {}

    def __contains__(self, number: object) -> bool:
        return isinstance(number, (int, float)) and number in self._made

    def read(self, name: str, result: Any) -> None:
        """A count was read of a tensor with samples, by this method."""
        if isinstance(result, torch.Size):
            first, *others = [size for size in result if isinstance(size, int)] or (0,)  # compilers read symbols, too
            for some in range(1, min(len(others), MOST_DIMS) + 1):
                self._made.update(first * math.prod(chosen) for chosen in combinations(others, some))
        elif isinstance(result, int):
            before = self._sums.get(name, [])[-MOST_PARTS:]
            self._sums[name] = [*(sum_ + result for sum_ in before), result]
            self._made.update(self._sums[name][:-1])
