"""Every operation of a step on some samples, in shapes: what it made, and of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.observed.buffers import memory_of
from lightning_parallel.techniques.observed.kept import tensors_kept
from lightning_parallel.techniques.observed.samples.data import OfData
from lightning_parallel.techniques.observed.shapes import ShapesOnly, Watch, mark_of
from lightning_parallel.techniques.tools.losses import NOTED_LOSSES, original
from lightning_parallel.values import tensors_of

PRODUCTS = {"mm", "bmm"}
ORDERS = {"roll", "flip", "rot90", "softmax", "log_softmax", "sort", "topk", "cumsum", "cumprod", "cummax", "cummin",
          "logcumsumexp"}  # fmt: skip
"""Operations of whose results each depends on others along a dimension, or stands where another one was."""
SELECTS = {"index", "masked_select"}
TOGETHER = {"stack", "cat"}
MEAN, SUM = 1, 2
"""How torch's loss functions are told to take the mean, and to add up."""


@dataclass(frozen=True)
class Operation:
    """An operation, and what it made.

    Attributes:
        name: of the operation.
        shapes: of its results.
        along: over how many elements a product ran.
        lengths: of the dimensions along which one of `ORDERS` goes.
        floating: whether the first result is of floating point.
        training: whether it behaves as in training, where that makes a difference.
        read: the numbers of the operations that made what it read.
        divisor: the number of the one that made what it divides by, None without one.
        factor: the known number by which it multiplies; 1 where it does not.
        by_tensor: whether that is a tensor's, as the sum of a mask.
        of_all: whether that was made of all samples, or another value of the batch's that it reads.
        selects: whether it takes what a mask leaves.
        targets: over how many the mean of a loss function goes that may ignore some or weigh them; else None.
        uneven: whether it does.
        of_model: whether what it reads, beside what other operations made, is the model's: nothing of the samples.
        adds: whether it is a loss function that adds up.
        noted: whether a function runs it whose means are noted, see `tools.losses`.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    along: int
    lengths: tuple[int, ...]
    floating: bool
    training: bool
    read: frozenset[int]
    divisor: int | None
    factor: float
    by_tensor: bool
    of_all: bool
    selects: bool
    targets: float | None
    uneven: bool
    of_model: bool
    adds: bool
    noted: bool

    def orders(self, twice: Operation) -> bool:
        """Whether it goes along the samples."""
        return any(two > one for one, two in zip(self.lengths, twice.lengths, strict=False))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first result."""
        return self.shapes[0] if self.shapes else ()

    @property
    def numel(self) -> int:
        """How many elements all results have."""
        return sum(map(prod, self.shapes))

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss function of torch's."""
        return "loss" in self.name or "entropy" in self.name


@dataclass
class Look(Watch):
    """All that the step made on some samples, up to the error that ended it, if one did."""

    states: dict[int, str] = field(default_factory=dict)
    """The names of the model's floating-point buffers, by their memory."""
    held: frozenset[int] = frozenset()
    """The memory of its parameters and buffers."""
    data: OfData = field(default_factory=lambda: OfData(()))
    """What comes of the values of the batch."""
    all: list[Operation] = field(default_factory=list)
    in_blocks: int = 0
    """How many of these came before the last block had returned."""
    written: set[str] = field(default_factory=set)
    """Buffers that some operation changed, ..."""
    used: set[str] = field(default_factory=set)
    """... and those that another one read."""
    losses: frozenset[int] = frozenset()
    """The numbers of the operations that made what the step returned as its loss."""
    error: Exception | None = None
    notes: bool = False
    """Whether the function that runs is one whose means a step notes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Look:
        """A copy of the model has the hook of its last block, too: it looks at nothing.

        What this one keeps is not copied: it would be seen while it is, and kept, without an end.
        """
        return Look()

    def called(self, func: Any, args: Any, kwargs: Any) -> None:
        """See `Watch.called`."""
        of_all = len(args) == 1 and not kwargs
        self.notes = func.__name__ in NOTED_LOSSES or (of_all and original(func) is torch._C.TensorBase.mean)

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor]) -> int:
        """See `Watch.made`; the mark is the operation's number, from 1."""
        results = list(tensors_of(result))
        name = func._opname.strip("_").removesuffix("_helper")
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        read = frozenset(mark for mark in map(mark_of, inputs) if mark is not None)
        factor, by_tensor, of_all = self._factor(name, args, inputs)
        targets, uneven = _targets(named, inputs)
        operation = Operation(
            name,
            shapes=tuple(tuple(each.shape) for each in results),
            along=args[0].shape[-1] if name in PRODUCTS else 0,
            lengths=_lengths(name, named),
            floating=bool(results) and results[0].is_floating_point(),
            training=bool(named.get("training", "_no_" not in func._opname)),
            read=read,
            divisor=mark_of(inputs[1]) if name == "div" and len(inputs) > 1 else None,
            factor=factor,
            by_tensor=by_tensor,
            of_all=of_all or any(each.is_floating_point() and self.data.is_of_all(each) for each in inputs),
            selects=(name in SELECTS and any(each.dtype == torch.bool for each in inputs))
            or any(map(self.data.sizes, inputs)),
            targets=targets,
            uneven=uneven,
            of_model=all(mark_of(each) is not None or memory_of(each) in self.held for each in inputs),
            adds=named.get("reduction") == SUM,
            noted=self.notes,
        )
        self.all.append(operation)
        return len(self.all)

    def computed(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], result: Any) -> None:
        """See `Watch.computed`."""
        self.data.made(func, args, kwargs, inputs, result)

    def touched(self, inputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """See `Watch.touched`."""
        changed = set(map(id, written))
        for each in inputs:
            if (name := self.states.get(memory_of(each))) is not None:
                (self.written if id(each) in changed else self.used).add(name)

    def blocks_end(self, *_: Any) -> None:
        """The last block has returned."""
        self.in_blocks = len(self.all)

    def returned(self, result: Any) -> None:
        """The step returned this: its loss, or one beside other values."""
        loss = result.get("loss") if isinstance(result, Mapping) else result
        self.losses = frozenset(mark for mark in map(mark_of, tensors_of(loss)) if mark is not None)

    def _factor(self, name: str, args: Sequence[Any], inputs: Sequence[Tensor]) -> tuple[float, bool, bool]:
        """See `Operation.factor`, `by_tensor` and `of_all`; the number depends on no parameter."""
        if name not in ("mul", "div") or len(args) < 2:
            return 1.0, False, False
        known = [each for each in inputs if each.numel() == 1 and not each.is_meta and mark_of(each) is None]
        numbers = [*known, *(each for each in args[:2] if isinstance(each, (int, float)))]
        if len(numbers) != 1:
            return 1.0, False, False
        number = float(numbers[0])
        factor = 1 / number if name == "div" and number else number
        told = bool(known) or not inputs[0].dim()  # numbers of Python are often alike by chance
        return factor, bool(known), told and self.data.is_of_all(numbers[0])

    @property
    def made_loss(self) -> frozenset[int]:
        """The numbers of the operations that went into the loss."""
        ahead, found = [*self.losses], set[int]()
        while ahead:
            if (number := ahead.pop()) not in found:
                found.add(number)
                ahead.extend(self.all[number - 1].read)
        return frozenset(found)

    @property
    def lists(self) -> list[int]:
        """How many elements each tensor has that was put together behind the blocks for the loss."""
        made = (self.all[number - 1] for number in sorted(self.made_loss) if number > self.in_blocks)
        return [one.numel for one in made if one.name in TOGETHER]


def _lengths(name: str, named: Mapping[str, Any]) -> tuple[int, ...]:
    """How long the dimensions are along which an operation goes; numbers of experts, say, may be sorted."""
    given, dims = named.get("self"), named.get("dims", named.get("dim", -1))
    if name not in ORDERS or not isinstance(given, Tensor) or not given.is_floating_point() or not given.dim():
        return ()
    chosen = [dims] if isinstance(dims, int) else dims
    return tuple([given.shape[dim] for dim in chosen or range(given.dim())])


def _targets(named: Mapping[str, Any], inputs: Sequence[Tensor]) -> tuple[float | None, bool]:
    """See `Operation.targets` and `uneven`."""
    if "ignore_index" not in named or named["reduction"] != MEAN or any(each.is_meta for each in inputs[1:]):
        return None, False
    _, target, *weight = inputs
    counted = target[target != named["ignore_index"]]
    if weight:
        return float(weight[0][counted].sum()), True
    return float(counted.numel()), counted.numel() < target.numel()


def look_at(model: nn.Module, sample: Sample, batch: Any, last: nn.Module) -> Look:
    """Runs the step on some samples; `last` is the last block."""
    buffers = {memory_of(each): name for name, each in model.named_buffers() if each.is_floating_point()}
    held = frozenset(memory_of(each) for each in (*model.parameters(), *model.buffers()))
    look = Look(buffers, held, OfData(batch))
    shapes = ShapesOnly(model.parameters(), sample.device, look)
    with torch.no_grad(), sample.unchanged(), tensors_kept(model), shapes:
        handle = last.register_forward_hook(look.blocks_end)
        try:
            look.returned(sample.run(batch))
        except Exception as error:
            look.error = error
        finally:
            handle.remove()
    return look
