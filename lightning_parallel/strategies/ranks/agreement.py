"""Agreement between ranks: a mistake on one is an error on all, and never a wait."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.collectives.functional import highest
from lightning_parallel.values import ATOMS, children_of, field_names

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """The values of all ranks of the group, in their order."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def together(act: Callable[[], T], what: str, group: dist.ProcessGroup) -> T:
    """What this rank gets by doing something that all ranks of the group do; where one fails, all raise.

    Args:
        act: what this rank does; it talks to no other.
        what: that is, for messages: "rank 1 could not ...".
        group: whose ranks all call.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:
        failure = error
    said = gather_objects("" if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(said):
        if theirs:
            raise RuntimeError(f"rank {rank} could not {what}: {theirs}")
    return result  # type: ignore[no-any-return]


def describe(batch: Any) -> str:
    """The structure of a batch: its containers, and the type, dtype and dimensions of what they hold.

    Of lists that may have an item for each sample, as of file names or targets, neither the length is told nor what one
    item has and another one has not: a rank's part of the last batch may be smaller.
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} tensor with {batch.dim()} dimensions"
    if isinstance(batch, ATOMS) or not (children := children_of(batch)):
        return type(batch).__name__
    parts = list(map(describe, children))
    if isinstance(batch, (list, tuple)):
        kinds = {type(child).__name__ for child in children}
        if all(isinstance(child, ATOMS) for child in children):
            held = "values"
        elif len({*parts}) == 1 and isinstance(children[0], Tensor):
            held = parts[0]
        else:
            held = f"{kinds.pop()}s" if len(kinds) == 1 and Tensor.__name__ not in kinds else f"[{', '.join(parts)}]"
        return f"{type(batch).__name__} of {held}"
    keys: Any = batch if isinstance(batch, Mapping) else field_names(batch.__class__)
    return (
        f"{type(batch).__name__} of {{{', '.join(f'{key!r}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
    )


def described(value: object) -> str:
    """Like `repr`, and the same in every process: there the members of a set come in another order."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{described(key)}: {described(member)}' for key, member in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(described, value))})"
    if is_dataclass(value):
        return f"{type(value).__name__}{described([getattr(value, field.name) for field in fields(value)])}"
    return repr(value)


def fingerprint_model(module: nn.Module) -> str:
    """A short name for the parameters' names, shapes and dtypes."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in module.named_parameters()]
    return f"{len(lines)} parameters, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}"


def require_same(what: str, values: Sequence[object], remedy: str) -> None:
    """Raises on every rank, naming ranks and values, unless all values are equal."""
    if len(set(map(str, values))) == 1:
        return
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(rank)
    listed = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {v}" for v, ranks in by_value.items()
    )
    raise ValueError(f"{what} must be the same on every rank, but they differ ({listed}); {remedy}")


LOGGED = "a step that logged"
RETURNED = "a step that returned"
BACKWARD = "a backward pass within a step"
BEGUN = "a step that began"
GIVEN = "loaders of "
NOT_KNOWN = float("-inf")
Mark = tuple[int, int, int, int]
Asked = tuple[float, float, float]
"""The signal that asks this process to stop, whether one asks to requeue it, whether a save in background failed."""
NOTHING: Asked = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Content:
    """A checksum of what this rank reads, where other ranks must read the same.

    Attributes:
        readers: the number of parts into which data is divided, each read by several ranks; 0 where each has one rank.
        reader: the part that this rank reads.
        checksum: of what it read; None where that cannot be known.
    """

    readers: int = 0
    reader: int = 0
    checksum: int | None = None

    def numbers(self) -> list[float]:
        """The checksum and its negative, each in the place of the part: the highest of both tell whether all agree."""
        numbers = [NOT_KNOWN] * (2 * self.readers)
        if self.checksum is not None and self.readers:
            numbers[self.reader], numbers[self.readers + self.reader] = self.checksum, -self.checksum
        return numbers

    def differs(self, highest: Sequence[float]) -> bool:
        """Whether ranks that must read the same do not, by the highest of their `numbers`."""
        pairs = zip(highest[: self.readers], highest[self.readers : 2 * self.readers], strict=True)
        return any(high != -low for high, low in pairs if high != NOT_KNOWN)


class Comparison:
    """One small message by which ranks find out whether they are at the same place, and what any of them was asked.

    All comparisons are alike, so that ranks that are at different places compare with each other, and know it.

    Args:
        mark: where this rank is: loader, batch, whether it is the last, and a checksum of the rest.
        asked: what was asked of this rank; `anybody` then says what was asked of any.
        group: all ranks.
        content: what this rank reads; on all ranks with as many `readers`.
        samples: how many this rank has; `fewest` then says how many any of them has at least.
        means: what stands for the means that a step computed, by which ranks may differ; `same_means` then says of each
            number whether they do not.
    """

    def __init__(
        self,
        mark: Mark,
        asked: Asked,
        group: dist.ProcessGroup,
        content: Content | None = None,
        samples: int = 0,
        means: tuple[int, int] = (0, 0),
    ) -> None:
        self._group, self._content = group, content
        read = [] if content is None else content.numbers()
        one, other = means
        numbers = [*read, *asked, one, other, -one, -other, -samples, *mark, *[-number for number in mark]]
        self._numbers = torch.from_numpy(np.array(numbers, dtype=np.float64))  # torch reads lists four times as slowly
        self._work = highest(self._numbers, group)
        self._places = len(mark)
        self.anybody: list[float] = []
        self.fewest = samples
        self.same_means = True, True

    def finish(self, where: Callable[[], str], what: Callable[[], str], how: Callable[[], str] = str) -> None:
        """Waits for the others.

        Args:
            where: tells the place in words; called only if ranks differ, as is `what`.
            what: tells what the checksum is of.
            how: tells by which numbers optimizers step, of which it is too.

        Raises:
            ValueError: on every rank, if they are at different places or hold different things.
        """
        self._work.wait()
        numbers, places = self._numbers.tolist(), self._places
        readers = 0 if self._content is None else self._content.readers
        *self.anybody, one, other, least_one, least_other, fewest = numbers[2 * readers : -2 * places]
        self.same_means, self.fewest = (one == -least_one, other == -least_other), -int(fewest)
        if numbers[-2 * places : -places] != [-lowest for lowest in numbers[-places:]]:
            self._explain(gather_objects((where(), what(), how()), self._group))
        if self._content is not None and self._content.differs(numbers):
            self._explain_content(self._content, where())

    def _explain_content(self, content: Content, where: str) -> None:
        said = gather_objects((content.reader, content.checksum), self._group)
        for reader in range(content.readers):
            ranks = [rank for rank, (part, _) in enumerate(said) if part == reader]
            if len({said[rank][1] for rank in ranks}) > 1:
                raise ValueError(
                    f"{where} differs between ranks {', '.join(map(str, ranks))}, which must read the same samples: "
                    "each holds a part of the model for them. Where data is made at random, call seed_everything(N) "
                    "before it is made, with one N on all ranks. Otherwise make what is random in the dataset or in "
                    "loader workers depend on the sample, or leave out seed_everything(workers=True), which seeds "
                    "workers by rank; a loader that divides itself takes the part in "
                    "trainer.distributed_sampler_kwargs, not by its rank"
                )

    def _explain(self, said: list[tuple[str, str, str]]) -> None:
        places = [place for place, *_ in said]
        if any(place.startswith(GIVEN) for place in places):
            remedy = "give every rank equally many loaders, to fit as by the hooks that return them"
            require_same("which loaders are read next", places, remedy)
        if any(place.startswith(RETURNED) for place in places):
            remedy = "Lightning cannot skip a batch on several ranks: return a loss times zero"
            require_same(
                "whether a step returns a loss", [f"{place} {what}".rstrip() for place, what, _ in said], remedy
            )
        if any(place.startswith(LOGGED) for place in places):
            remedy = "log on all ranks alike, or on one with rank_zero_only=True"
            require_same("what is logged", [f"{place} {what}".rstrip() for place, what, _ in said], remedy)
        if BACKWARD in places:
            require_same("what ranks do next", places, "call self.manual_backward equally often on all ranks")
        if BEGUN in places:
            remedy = (
                "on_train_batch_start returns -1 on all ranks or on none: decide it by batch_idx, or by what all have"
            )
            require_same("whether an epoch goes on", places, remedy)
        require_same("the end of the data", places, f"{EVENLY}, or set trainer.should_stop when all others do")
        require_same("the structure of a batch", [what for _, what, _ in said], "look at the dataset there")
        require_same("learning rates, momenta and weight decays of optimizers", [how for *_, how in said], ALIKE)


ALIKE = (
    "set them where all ranks come, such as on_train_batch_end, by what all of them have: trainer.callback_metrics, or "
    "self.all_gather(loss).mean()"
)
EVENLY = "every rank must read equally many batches"
