"""What a step makes of all samples: sums over them, of which those of microbatches are parts, or something else."""

from __future__ import annotations

from collections.abc import Iterator, Set
from math import isfinite, prod

from lightning_parallel.techniques.observed.samples.operations import PRODUCTS, Look, Operation

SELECTIONS = {"select", "slice", "index", "index_select", "gather", "embedding", "split", "unbind", "diagonal"}
"""Operations with a result of a fixed size because they pick some samples; any other one computes it of all."""
MULTIPLIES = {"mul", "addcmul", "dot", "mv", *PRODUCTS}
ADDS = {"sum", "nansum", "count_nonzero", "dot", "vdot", "mv", *PRODUCTS}
SUMS = {"mean", "addmv", "addmm", "baddbmm", "trace", "linear", "index_add", "scatter_add", "index_put", "histc",
        "bincount", *ADDS}  # fmt: skip
"""Operations that add up over samples, as loss functions do; of any other one microbatches make something else."""
SCATTERS = {"index_add", "index_put", "index_copy", "scatter", "scatter_add", "scatter_reduce", "masked_scatter"}
"""Operations that put what was selected back where it came from."""
LINEAR = {"add", "sub", "rsub", "neg", "div", "addcdiv", "lerp", "to_copy", "copy", "clone", "detach", "alias", "view",
          "unsafe_view", "reshape_alias", "expand", "permute", "transpose", "t", "squeeze", "unsqueeze", "stack", "cat",
          "repeat", "unsafe_split", "split_with_sizes", "constant_pad_nd", "masked_fill", "tril", "triu",
          *SUMS, *MULTIPLIES, *SELECTIONS}  # fmt: skip
"""Operations on sums over samples, with one such operand, that give sums over samples."""
CLOSE = 1e-6
"""How far a number may be from a whole one that was divided by, and multiplied again."""


def no_sums(once: Look, twice: Look) -> Iterator[tuple[int, str, Operation]]:
    """The operations on sums over all samples that make none, by their numbers, each with what it does with them.

    "meets": every sample meets such a sum. "multiplies": two of them. "bends": anything else, for the loss.
    """
    reduced, made_loss = set[int](), once.made_loss
    for number, (one, two) in enumerate(zip(once.all, twice.all, strict=False), start=1):
        grows, of_reduced = two.numel > one.numel, one.read & reduced
        if _normalises(one, two) or (grows and one.floating and (of_reduced or two.of_all)):
            yield number, "meets", one
        if grows or not (of_reduced or _is_of_samples(one, once, twice)):
            continue
        if one.name in MULTIPLIES and len(of_reduced) > 1:
            yield number, "multiplies", one
        elif number in made_loss and not _adds_up(one, reduced):
            yield number, "bends", one
        if one.floating or not one.shape:
            reduced.add(number)


def _normalises(one: Operation, two: Operation) -> bool:
    """Whether it divides by what it finds in all samples; of a single one it would keep as many statistics."""
    if "batch_norm" not in one.name or not one.training:
        return False
    return two.numel > one.numel and one.shapes[1:] == two.shapes[1:]


def _is_of_samples(one: Operation, once: Look, twice: Look) -> bool:
    """Whether it reads what single samples have, and all of them."""
    picks = one.name in SELECTIONS or one.name.startswith("new_")
    return not picks and any(twice.all[read - 1].numel > once.all[read - 1].numel for read in one.read)


def _adds_up(one: Operation, reduced: Set[int]) -> bool:
    """Whether it makes a sum over samples, if it reads single samples, or `reduced`: sums that others made."""
    of_sums = one.read & reduced
    if not of_sums:
        return one.name in SUMS or one.is_loss
    alone = len(of_sums) == 1 or one.name not in MULTIPLIES
    return alone and one.name in LINEAR and one.divisor not in reduced


# -------------------------------------------------------------------- counts


def mixed_count(once: Look, twice: Look, samples: int, later: bool = False) -> Operation | None:
    """The first mean over what masks leave in a loss that has other parts, or such a mean over others.

    The share of a microbatch in such a mean is that in what masks leave; in other parts it has another one. Of a mean
    that is the whole loss the share is known where a step notes it, or divides by a tensor. So it is of a
    cross-entropy beside what the model alone makes, as a penalty on weights: all shares in that add up to it.

    Args:
        once: a step.
        twice: on each sample twice.
        samples: of the first one.
        later: whether targets count that no sample here ignores, but one of a later batch may.
    """
    counted, uneven = _counted(once, twice, samples, later)
    of_model = set[int]()
    for number, one in enumerate(once.all, start=1):
        if one.of_model and one.read <= of_model:
            of_model.add(number)
    ahead, found, alone, beside = [*once.losses], set[int](), True, False
    while ahead:
        number = ahead.pop()
        one = once.all[number - 1]
        if number in counted:
            found.add(number)
            divides = one.name in ("mul", "div")
            alone = alone and (one.by_tensor and one.name == "div" if divides else one.noted)
        elif number in of_model:
            beside = True
        elif one.read and not _is_of_samples(one, once, twice):
            ahead.extend(one.read)
        else:
            alone = False
    by_hand = any(once.all[number - 1].targets is None for number in found)
    alone = alone and not (by_hand and beside)  # the step's own means rest beside what else learns
    over = {counted[number] for number in found}
    alike = len(found) == 1 or (len(over) == 1 and None not in over)
    return once.all[min(found & uneven) - 1] if found & uneven and not (alone and alike) else None


def _counted(once: Look, twice: Look, samples: int, later: bool) -> tuple[dict[int, float | None], set[int]]:
    """The means that count, by their numbers, and over how many; None where that is not known. And the masked ones."""
    found: dict[int, float | None] = {}
    uneven, selected = set[int](), set[int]()
    for number, (one, two) in enumerate(zip(once.all, twice.all, strict=False), start=1):
        keeps = two.numel > one.numel or not (one.name in SUMS or one.is_loss)  # one element, of a mask without values
        if one.selects or (one.read & selected and keeps and one.name not in SCATTERS):
            selected.add(number)
        elif two.numel > one.numel:
            continue
        elif one.targets is not None:
            found[number] = None if later and not one.uneven else one.targets
            if one.uneven or later:
                uneven.add(number)
        elif one.read & selected and (one.name == "mean" or (one.is_loss and not one.adds)):
            found[number] = None
            uneven.add(number)
        elif _divides(one, two, samples):
            found[number] = 1 / one.factor if one.name == "div" and one.by_tensor and one.factor else None
            uneven.add(number)
    return found, uneven


def _divides(one: Operation, two: Operation, samples: int) -> bool:
    """Whether it divides by a number that depends on the samples, unless by one of Python's that is of each as much."""
    each = 1 / one.factor / samples if one.factor else 0.0
    evenly = not one.by_tensor and isfinite(each) and abs(each - round(each)) < CLOSE
    by_all = two.of_all and one.name in ("mul", "div")
    return by_all or (abs(two.factor) < abs(one.factor) and not evenly)


# -------------------------------------------------------------------- growth


def growth_of_loss(once: Look, twice: Look) -> float | None:
    """How many times as large the loss is of twice as many samples: 1 of a mean, 2 of a sum; None where none can tell.

    Only sums tell, and the known numbers by which the step multiplies and divides.
    """
    growths: list[float | None] = []
    for one, two in zip(once.all, twice.all, strict=False):
        growths.append(_growth(one, two, _is_of_samples(one, once, twice), [growths[read - 1] for read in one.read]))
    found = {growths[number - 1] for number in once.losses}
    return found.pop() if len(found) == 1 else None


def _growth(one: Operation, two: Operation, of_samples: bool, of: list[float | None]) -> float | None:
    """How many times as large each element is that an operation makes, by the growths of what it reads."""
    known = [each for each in of if each is not None]
    if len(known) < len(of) or not one.factor:
        return None
    linear = one.name in LINEAR and one.divisor is None
    if not linear and any(each != 1 for each in known):
        return None
    reduces = of_samples and two.numel == one.numel
    if reduces and not (one.name in ADDS or one.name == "mean" or one.is_loss):
        return None
    own = prod(known) if one.name in MULTIPLIES else max(known, key=lambda each: abs(each - 1), default=1.0)
    return own * two.factor / one.factor * (2 if reduces and (one.name in ADDS or one.adds) else 1)
