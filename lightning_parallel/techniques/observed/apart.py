"""Whether samples of a batch meet each other, as in a contrastive loss: microbatches would keep them apart.

The step runs in shapes on some samples, and on the same ones twice. Whatever it makes of each sample by itself is then
twice as large, and what it makes of pairs four times. A product that sums over samples sums over twice as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.observed.buffers import memory_of
from lightning_parallel.techniques.observed.kept import tensors_kept
from lightning_parallel.techniques.observed.shapes import ShapesOnly, Watch, mark_of
from lightning_parallel.techniques.tools import microbatches
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import tensors_of

PRODUCTS = {"mm", "bmm"}
ORDERS = {"roll", "flip", "rot90", "softmax", "log_softmax", "sort", "cumsum", "cumprod", "cummax", "cummin",
          "logcumsumexp"}  # fmt: skip
"""Operations of whose results each depends on others along a dimension, or stands where another one was."""
SELECTIONS = {"select", "slice", "index", "index_select", "gather", "embedding", "split", "unbind", "diagonal"}
"""Operations with a result of a fixed size because they pick some samples; any other one computes it of all."""
MULTIPLIES = {"mul", "addcmul", "dot", "mv", *PRODUCTS}
REMEDY = "use microbatches=1 or LayerParallelStrategy"


@dataclass(frozen=True)
class _Operation:
    """An operation, and what it made.

    Attributes:
        name: of the operation.
        shapes: of its results.
        along: over how many elements a product ran.
        lengths: of the dimensions along which one of `ORDERS` goes.
        floating: whether the first result is of floating point.
        training: whether it behaves as in training, where that makes a difference.
        read: the numbers of the operations that made what it read.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    along: int
    lengths: tuple[int, ...]
    floating: bool
    training: bool
    read: frozenset[int]

    def is_of_pairs(self, twice: _Operation) -> bool:
        sums = self.along > 0 and twice.along == 2 * self.along and twice.numel > 1
        return twice.numel > 2 * self.numel or sums

    def orders(self, twice: _Operation) -> bool:
        """Whether it goes along the samples."""
        return any(two > one for one, two in zip(self.lengths, twice.lengths, strict=False))

    def normalises(self, twice: _Operation) -> bool:
        """Whether it divides by what it finds in all samples; of a single one it would keep as many statistics."""
        if "batch_norm" not in self.name or not self.training:
            return False
        return twice.numel > self.numel and self.shapes[1:] == twice.shapes[1:]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0] if self.shapes else ()

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


@dataclass
class _Look(Watch):
    """All that the step made on some samples, up to the error that ended it, if one did."""

    states: dict[int, str] = field(default_factory=dict)
    """The names of the model's floating-point buffers, by their memory."""
    all: list[_Operation] = field(default_factory=list)
    in_blocks: int = 0
    """How many of these came before the last block had returned."""
    written: set[str] = field(default_factory=set)
    """Buffers that some operation changed, ..."""
    used: set[str] = field(default_factory=set)
    """... and those that another one read."""
    error: Exception | None = None

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor]) -> int:
        """See `Watch.made`; the mark is the operation's number, from 1."""
        results = list(tensors_of(result))
        along = args[0].shape[-1] if func._opname in PRODUCTS else 0
        floating = bool(results) and results[0].is_floating_point()
        read = frozenset(mark for mark in map(mark_of, inputs) if mark is not None)
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        training = bool(named.get("training", "_no_" not in func._opname))
        shapes, lengths = tuple(tuple(each.shape) for each in results), _lengths(func._opname, named)
        self.all.append(_Operation(func._opname, shapes, along, lengths, floating, training, read))
        return len(self.all)

    def touched(self, inputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """See `Watch.touched`."""
        changed = set(map(id, written))
        for each in inputs:
            if (name := self.states.get(memory_of(each))) is not None:
                (self.written if id(each) in changed else self.used).add(name)

    def blocks_end(self, *_: Any) -> None:
        """The last block has returned."""
        self.in_blocks = len(self.all)


def _lengths(name: str, named: Mapping[str, Any]) -> tuple[int, ...]:
    """How long the dimensions are along which an operation goes; numbers of experts, say, may be sorted."""
    given, dims = named.get("self"), named.get("dims", named.get("dim", -1))
    ordered = name.strip("_").removesuffix("_helper") in ORDERS
    if not ordered or not isinstance(given, Tensor) or not given.is_floating_point() or not given.dim():
        return ()
    chosen = [dims] if isinstance(dims, int) else dims
    return tuple([given.shape[dim] for dim in chosen or range(given.dim())])


@dataclass(frozen=True)
class Meeting:
    """An operation in which samples of a batch meet.

    Attributes:
        what: happens, for people.
        then: happens in microbatches.
        wrong: whether microbatches would train on another loss, not one that is close.
        in_blocks: whether it comes before the last block has returned.
    """

    what: str
    then: str
    wrong: bool
    in_blocks: bool

    def refuse(self) -> None:
        """Raises, or warns.

        Raises:
            ValueError: microbatches would train on another loss.
        """
        said = f"{self.what}. In a pipeline {self.then}; {REMEDY}"
        if self.wrong:
            raise ValueError(said)
        warn(said)


def meetings(model: nn.Module, sample: Sample, parts: int, complete: bool, last: nn.Module) -> list[Meeting]:
    """Finds where the samples of a batch meet: none does if each sample counts by itself.

    Args:
        model: whole.
        sample: a step on a batch.
        parts: into how many microbatches the batch is to be divided.
        complete: whether the step could be followed to its end on the whole batch.
        last: the last block.

    Raises:
        ValueError: the step fails on a part of a batch.
    """
    size = sample.size or 1
    layout = sample.layout
    some = microbatches.split(sample.batch, 2, layout)[-1] if size > 1 else sample.batch  # the smaller one, if any is
    half = microbatches.samples_in(some, layout) or 1
    once = _look(model, sample, some, last)
    twice = _look(model, sample, microbatches.again(some, layout), last)
    if complete:
        _require_any_number(model, sample, min(parts, size), last)
    if once.error is not None or twice.error is not None:
        warn(_unchecked(f"on {half} or {2 * half} samples the step failed: {once.error or twice.error!r}"))
    if not _do_the_same(once, twice):
        if _grows_faster(once, twice):
            warn(_unchecked(f"on {2 * half} samples the step does something else than on {half}"))
        return []
    _warn_of_states(once)
    return [*_pairs(once, twice, half), *_statistics(once, twice, sample)]


def _require_any_number(model: nn.Module, sample: Sample, parts: int, last: nn.Module) -> None:
    """The step runs on a microbatch too, if it is one that a batch has at its end."""
    part = microbatches.split(sample.batch, parts, sample.layout)[-1]
    error = _look(model, sample, part, last).error
    if error is not None:
        raise ValueError(
            f"the step runs on a batch of {sample.size} samples, but fails on a microbatch of "
            f"{microbatches.samples_in(part, sample.layout)} of "
            f"them ({type(error).__name__}: {error}); write it for any number of samples, or {REMEDY}"
        ) from error


def _do_the_same(once: _Look, twice: _Look) -> bool:
    names = [made.name for made in once.all], [made.name for made in twice.all]
    stopped = once.error is not None or twice.error is not None
    shorter = min(map(len, names)) if stopped else None
    return names[0][:shorter] == names[1][:shorter]


def _grows_faster(once: _Look, twice: _Look) -> bool:
    """Whether some operation makes more than twice as much; a loop over samples makes twice as much of everything."""
    sizes: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for counter, look in zip(sizes, (once, twice), strict=True):
        for made in look.all:
            counter[made.name] += made.numel
    return any(sizes[1][name] > 2 * sizes[0][name] for name in sizes[1])


def _unchecked(why: str) -> str:
    return (
        f"Whether samples of a batch meet each other, as in a contrastive loss, could not be checked, because {why}. "
        f"If they do, {REMEDY}: in a pipeline each microbatch meets its own samples only"
    )


def _pairs(once: _Look, twice: _Look, half: int) -> Iterator[Meeting]:
    """The first operation on pairs, or along the samples, in the blocks, and the first one after them."""
    found: set[bool] = set()
    for number, (one, two) in enumerate(zip(once.all, twice.all, strict=False)):
        in_blocks, pairs = number < once.in_blocks, one.is_of_pairs(two)
        if (pairs or one.orders(two)) and in_blocks not in found:
            found.add(in_blocks)
            makes = f"makes a tensor of shape {one.shape} of {half} samples and one of shape {two.shape} of {2 * half}"
            yield Meeting(
                f"samples of a batch meet each other in the step: {one.name} {makes}, "
                + ("as a contrastive loss does" if pairs else "each of which depends on others of them"),
                "each microbatch would meet its own samples only",
                True,
                in_blocks,
            )


def _warn_of_states(look: _Look) -> None:
    changing = sorted(look.written & look.used)
    if changing:
        warn(
            f"The step computes with buffers that it changes, as a spectral norm or a moving average does: "
            f"{', '.join(changing[:4])}{', …' if len(changing) > 4 else ''}. In a pipeline every microbatch changes "
            f"them, so the curve is not that of one device; {REMEDY}"
        )


def _statistics(once: _Look, twice: _Look, sample: Sample) -> Iterator[Meeting]:
    """What is reduced over all samples and then meets each of them, or is multiplied by another such value."""
    reduced: set[int] = set()
    meets: dict[bool, _Operation] = {}  # the first one in the blocks, and the first one after them
    multiplies: dict[bool, _Operation] = {}
    for number, (one, two) in enumerate(zip(once.all, twice.all, strict=False), start=1):
        grows, in_blocks = two.numel > one.numel, number <= once.in_blocks
        if one.normalises(two) or (grows and one.floating and one.read & reduced):
            meets.setdefault(in_blocks, one)
        if not grows and one.name in MULTIPLIES and len(one.read & reduced) > 1:
            multiplies.setdefault(in_blocks, one)
        from_samples = not (one.name in SELECTIONS or one.name.startswith("new_")) and any(
            twice.all[read - 1].numel > once.all[read - 1].numel for read in one.read
        )
        if not grows and one.floating and (from_samples or one.read & reduced):
            reduced.add(number)
    for in_blocks, one in meets.items():
        yield Meeting(
            f"The step looks at all samples of a batch at once: {one.name} makes a tensor of shape {one.shape} with "
            "what it finds in all of them",
            f"these are the samples of a microbatch, not the {sample.size} of the batch, so the curve is not that of "
            "one device",
            False,
            in_blocks,
        )
    for in_blocks, one in multiplies.items():
        yield Meeting(
            f"The step multiplies two values that it finds in all samples of a batch ({one.name} makes a tensor of "
            f"shape {one.shape}), as losses of routers do that balance experts",
            f"such a loss is that of each microbatch, averaged, and not quite that of the batch of {sample.size}",
            False,
            in_blocks,
        )


def _look(model: nn.Module, sample: Sample, batch: Any, last: nn.Module) -> _Look:
    buffers = {memory_of(each): name for name, each in model.named_buffers() if each.is_floating_point()}
    look = _Look(buffers)
    handle = last.register_forward_hook(look.blocks_end)
    shapes = ShapesOnly(model.parameters(), sample.device, look)
    with torch.no_grad(), sample.unchanged(), tensors_kept(model), shapes:
        try:
            sample.run(batch)
        except Exception as error:
            look.error = error
        finally:
            handle.remove()
    return look
