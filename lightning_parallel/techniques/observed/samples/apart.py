"""Whether samples of a batch meet each other, as in a contrastive loss: microbatches would keep them apart.

The step runs in shapes on some samples, and on the same ones twice. Whatever it makes of each sample by itself is then
twice as large, and what it makes of pairs four times. A product that sums over samples sums over twice as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.observed.samples.operations import Look, Operation, look_at
from lightning_parallel.techniques.observed.samples.sums import growth_of_loss, mixed_count, no_sums
from lightning_parallel.techniques.tools import microbatches
from lightning_parallel.techniques.tools.telling import warn

CLOSE = 0.01
"""How much a loss may grow by numbers that a step adds to those of its samples, to be no sum over these."""
REMEDY = "use microbatches=1 or LayerParallelStrategy"
STATISTICS = {
    "meets": (
        "The step looks at all samples of a batch at once: {} with what it finds in all of them",
        "these are the samples of a microbatch, not the {} of the batch, so the curve is not that of one device",
    ),
    "multiplies": (
        "The step multiplies two values that it finds in all samples of a batch ({}), as losses of routers do that "
        "balance experts",
        "such a loss is that of each microbatch, averaged, and not quite that of the batch of {}",
    ),
    "bends": (
        "The loss is made of what the step finds in all samples of a batch, and is no sum over them: {}",
        "it is that of each microbatch, averaged, not that of the batch of {}, so the curve is not that of one device",
    ),
    "counts": (
        "The loss has a mean over what a mask or ignored targets leave ({}), and another part, or a number divides it",
        "losses of microbatches count as a whole, and not each part by what is left of the batch of {}, so the curve "
        "is not that of one device",
    ),
    "grows": (
        "Of twice as many samples the loss is {} times as large, as a sum that is not divided by the number of samples",
        "losses of microbatches are averaged, so that the loss and its gradients are not those of a batch of {}",
    ),
}
"""What the step does with values that it finds in all samples, and what becomes of that in a pipeline."""


@dataclass(frozen=True)
class Meeting:
    """An operation in which samples of a batch meet.

    Attributes:
        what: happens, for people.
        then: happens in microbatches.
        wrong: whether microbatches would train on another loss, not one that is close.
        in_blocks: whether it comes before the last block has returned.
        far: whether the loss that is told is far from the right one.
    """

    what: str
    then: str
    wrong: bool
    in_blocks: bool
    far: bool = False

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
    once, twice, half = _looks(model, sample, last)
    if complete:
        _require_any_number(model, sample, min(parts, sample.size or 1), last)
    if once.error is not None or twice.error is not None:
        warn(_unchecked(f"on {half} or {2 * half} samples the step failed: {once.error or twice.error!r}"))
    if not _do_the_same(once, twice):
        if _grows_faster(once, twice):
            warn(_unchecked(f"on {2 * half} samples the step does something else than on {half}"))
        return [*_uneven_lists(once, model, sample, half, last)]
    _warn_of_states(once)
    met = [*_pairs(once, twice, half), *_statistics(once, twice, sample, half)]
    return met or [*_uneven_lists(once, model, sample, half, last)]


def counts_apart(model: nn.Module, sample: Sample, last: nn.Module) -> bool:
    """Whether the loss has means that do not count as a whole, see `mixed_count`; for arguments see `meetings`."""
    once, twice, half = _looks(model, sample, last)
    return _do_the_same(once, twice) and mixed_count(once, twice, half, later=True) is not None


def _looks(model: nn.Module, sample: Sample, last: nn.Module) -> tuple[Look, Look, int]:
    """A step on half of a batch, and on the same twice; and how many samples that half has."""
    layout = sample.layout
    divided = (sample.size or 1) > 1
    some = microbatches.split(sample.batch, 2, layout)[-1] if divided else sample.batch  # the smaller one, if any is
    twice = microbatches.again(some, layout)
    half = microbatches.samples_in(some, layout) or 1
    return look_at(model, sample, some, last), look_at(model, sample, twice, last), half


def _require_any_number(model: nn.Module, sample: Sample, parts: int, last: nn.Module) -> None:
    """The step runs on a microbatch too, if it is one that a batch has at its end."""
    part = microbatches.split(sample.batch, parts, sample.layout)[-1]
    error = look_at(model, sample, part, last).error
    if error is not None:
        raise ValueError(
            f"the step runs on a batch of {sample.size} samples, but fails on a microbatch of "
            f"{microbatches.samples_in(part, sample.layout)} of "
            f"them ({type(error).__name__}: {error}); write it for any number of samples, or {REMEDY}"
        ) from error


def _do_the_same(once: Look, twice: Look) -> bool:
    names = [made.name for made in once.all], [made.name for made in twice.all]
    stopped = once.error is not None or twice.error is not None
    shorter = min(map(len, names)) if stopped else None
    return names[0][:shorter] == names[1][:shorter]


def _grows_faster(once: Look, twice: Look) -> bool:
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


def _pairs(once: Look, twice: Look, half: int) -> Iterator[Meeting]:
    """The first operation on pairs, or along the samples, in the blocks, and the first one after them."""
    found: set[bool] = set()
    for number, (one, two) in enumerate(zip(once.all, twice.all, strict=False)):
        in_blocks, pairs = number < once.in_blocks, _is_of_pairs(one, two)
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


def _warn_of_states(look: Look) -> None:
    changing = sorted(look.written & look.used)
    if changing:
        warn(
            f"The step computes with buffers that it changes, as a spectral norm or a moving average does: "
            f"{', '.join(changing[:4])}{', …' if len(changing) > 4 else ''}. In a pipeline every microbatch changes "
            f"them, so the curve is not that of one device; {REMEDY}"
        )


def _is_of_pairs(one: Operation, two: Operation) -> bool:
    sums = one.along > 0 and two.along == 2 * one.along and two.numel > 1
    return two.numel > 2 * one.numel or sums


def _uneven_lists(look: Look, model: nn.Module, sample: Sample, half: int, last: nn.Module) -> Iterator[Meeting]:
    """What a step puts together for its loss one by one, if of other samples that is not as much for each."""
    if not look.lists or (sample.size or 1) < 2:
        return
    others = microbatches.split(sample.batch, 2, sample.layout)[0]
    samples, lists = microbatches.samples_in(others, sample.layout) or 1, look_at(model, sample, others, last).lists
    pairs = zip(look.lists, lists, strict=True) if len(lists) == len(look.lists) else [(sum(look.lists), sum(lists))]
    for one, other in pairs:
        if one != other and one * samples != other * half:
            what, then = STATISTICS["counts"]
            made = f"a loop makes {one} elements of {half} samples, and {other} of {samples} others"
            yield Meeting(what.format(made), then.format(sample.size), False, False, far=True)
            return


def _statistics(once: Look, twice: Look, sample: Sample, half: int) -> Iterator[Meeting]:
    """What is made of sums over all samples, and is no sum itself: the first of each kind in the blocks, and behind."""
    first: dict[tuple[str, bool], Operation] = {}
    for number, kind, one in no_sums(once, twice):
        first.setdefault((kind, number <= once.in_blocks), one)
    if (counted := mixed_count(once, twice, half)) is not None:
        first["counts", False] = counted
    for (kind, in_blocks), one in first.items():
        what, then = STATISTICS[kind]
        what = what.format(f"{one.name} makes a tensor of shape {one.shape}")
        yield Meeting(what, then.format(sample.size), False, in_blocks, far=kind == "counts")
    growth = growth_of_loss(once, twice)
    if growth is not None and abs(growth - 1) > CLOSE:
        what, then = STATISTICS["grows"]
        yield Meeting(what.format(f"{growth:.3g}"), then.format(sample.size), False, False)
