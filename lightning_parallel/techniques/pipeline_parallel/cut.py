"""Cuts of models into stages, and the stages on which each parameter lives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lightning_parallel.techniques.observed.positions import Call, SkipTensor, Traversal
from lightning_parallel.techniques.observed.refusals import UNDIVIDED
from lightning_parallel.techniques.pipeline_parallel.balance import balanced


@dataclass(frozen=True)
class Carried:
    """The numbers of the tensors that a module returned and later stages use, and the last of these stages."""

    numbers: frozenset[int]
    last: int


@dataclass(frozen=True)
class Cut:
    """The stages of a model.

    Attributes:
        seen: what a forward of the model showed.
        sizes: how many blocks each stage has; none has the stage that computes the loss, where it has one of its own.
    """

    seen: Traversal
    sizes: tuple[int, ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.sizes)

    @cached_property
    def _stage_of_block(self) -> list[int]:
        return [stage for stage, size in enumerate(self.sizes) for _ in range(size)]

    def stage_at(self, position: int) -> int:
        """The stage that runs what happens at a position; what lies between two blocks goes with the second."""
        block = position // 2
        return self._stage_of_block[block] if block < len(self._stage_of_block) else self.stages - 1

    @cached_property
    def carried(self) -> dict[Call, Carried]:
        """The calls whose results go past the blocks, from the stage that makes them on."""
        found: dict[Call, Carried] = {}
        for skip in self.seen.skip_tensors:
            stage = self.stage_at(skip.used)
            for source in skip.made.sources or ():
                if self.stage_at(source.position) < stage:
                    before = found.get(source.call, Carried(frozenset(), 0))
                    found[source.call] = Carried(before.numbers | {source.number}, max(before.last, stage))
        return found

    @cached_property
    def _made_again(self) -> dict[str, frozenset[int]]:
        """The stages that make a value again which goes past the blocks, by the parameters in it."""
        stages: dict[str, frozenset[int]] = {}
        for skip in self.seen.skip_tensors:
            if self.stage_at(skip.made.position) != self.stage_at(skip.used):
                for name in skip.made.parameters:
                    stages[name] = stages.get(name, frozenset()) | {self.stage_at(skip.used)}
        return stages

    def stages_of(self, parameter: str) -> frozenset[int]:
        """The stages that use a parameter; an unused one goes with its block, with its part, or to the last stage."""
        positions = self.seen.uses.get(parameter)
        own = self.stage_holding(parameter)
        unknown = frozenset({self.stages - 1} if own is None and not self.seen.complete else ())
        if not positions:
            calling = frozenset[int]() if own is not None else self._stages_calling_part_of(parameter)
            return calling | unknown or frozenset({self.stages - 1 if own is None else own})
        return frozenset(map(self.stage_at, positions)) | self._made_again.get(parameter, frozenset()) | unknown

    def stage_holding(self, name: str) -> int | None:
        """The stage of the block in which a parameter or a buffer lies, None beside the blocks."""
        blocks = (number for number, block in enumerate(self.seen.blocks) if name.startswith(f"{block}."))
        return next((self._stage_of_block[number] for number in blocks), None)

    def stages_of_buffer(self, name: str) -> frozenset[int]:
        """The stages that have a buffer: those of its block or part and those that use it, or else all."""
        part, stages = self._with_buffer(name)
        unknown = frozenset({self.stages - 1} if part in self.seen.parts and not self.seen.complete else ())
        return stages | unknown or frozenset(range(self.stages))

    @cached_property
    def copied_buffers(self) -> dict[str, frozenset[int]]:
        """By the FQN of buffers of blocks and parts that several stages use, these stages."""
        found = {name: self._with_buffer(name)[1] for name in sorted(self.seen.buffers.uses)}
        return {name: stages for name, stages in found.items() if len(stages) > 1}

    def is_common(self, buffer: str) -> bool:
        """Whether a buffer lies in no block or part: all stages have it, and what the last one makes of it counts."""
        return not self._with_buffer(buffer)[1]

    def _with_buffer(self, name: str) -> tuple[str, frozenset[int]]:
        """In which part a buffer lies, and the stages that were seen to need it; none where it lies in no part."""
        using = frozenset(map(self.stage_at, self.seen.buffers.uses.get(name, ())))
        holding = [self.stage_holding(each) for each in self.seen.buffers.same.get(name, (name,))]
        own = frozenset(stage for stage in holding if stage is not None)
        if own:
            return "", using | own if len(own) == len(set(holding)) else frozenset()
        parts = self.seen.parts
        part = next((part for part in parts if name.startswith(f"{part}.")), name.rpartition(".")[0])
        stages = self.stages_calling(part)
        at_end = stages == {self.stages - 1} and using <= stages and name not in self.seen.buffers.written
        return part, stages | using if part in parts or at_end else frozenset()

    def _stages_calling_part_of(self, name: str) -> frozenset[int]:
        parts = (part for part in self.seen.parts if name.startswith(f"{part}."))
        return frozenset().union(*map(self.stages_calling, parts))

    def stages_calling(self, module: str) -> frozenset[int]:
        """The stages that call a module."""
        return frozenset(map(self.stage_at, self.seen.calls.get(module, ())))


def cut(seen: Traversal, stages: int, sizes: Sequence[int] | None = None, loss_stage: bool = False) -> Cut:
    """Cuts a model so that its most expensive stage costs as little as possible, or as told.

    Args:
        seen: what a forward of the model showed.
        stages: how many stages to make.
        sizes: how many blocks each is to have; None balances the work.
        loss_stage: whether what follows the blocks is one more stage.

    Raises:
        ValueError: there are fewer blocks than stages, sizes that do not add up, a value that a block or the loss
            takes past a cut, or a buffer that changes and that several stages use.
    """
    if len(seen.blocks) < stages:
        raise ValueError(
            f"{stages} stages need a block each, but the model has {len(seen.blocks)} blocks; "
            "use fewer ranks or stages per rank"
        )
    blocks = _given(sizes, stages, len(seen.blocks)) if sizes is not None else _balanced(seen, stages)
    made = Cut(seen, (*blocks, 0) if loss_stage else blocks)
    _refuse_changing(made)
    for skip in seen.skip_tensors:
        within = made.stage_at(skip.made.position) == made.stage_at(skip.used)
        if skip.made.sources is None and not within:
            raise ValueError(_past_a_cut(skip, seen))
    return made


def _refuse_changing(made: Cut) -> None:
    for name, positions in sorted(made.seen.buffers.inside.items()):
        alone = {made.stage_at(position) for position in positions} - {made.stages - 1}
        if alone and made.is_common(name):
            raise ValueError(
                f"stage {min(alone)} changes the buffer {name} in a block or another module, but it lies in none "
                f"of these, and other stages do not run them; register it on what changes it, or {UNDIVIDED}"
            )
    for name, stages in made.copied_buffers.items():
        if name in made.seen.buffers.written:
            raise ValueError(
                f"the step changes the buffer {name}, which stages {sorted(stages)} use: each would change a copy of "
                "its own; register it on the one module that changes and reads it, choose a split that leaves its uses "
                f"on one stage, or {UNDIVIDED}"
            )


def _given(sizes: Sequence[int], stages: int, blocks: int) -> tuple[int, ...]:
    if len(sizes) != stages or sum(sizes) != blocks or min(sizes) < 1:
        raise ValueError(
            f"split={tuple(sizes)} must give each of {stages} stages at least one of {blocks} blocks: "
            f"{stages} numbers that add up to {blocks}"
        )
    return tuple(sizes)


def _balanced(seen: Traversal, stages: int) -> tuple[int, ...]:
    work = seen.work if sum(seen.work) > 0 else tuple(float(position % 2) for position in range(seen.end + 1))
    costs = [work[2 * k + 1] + (work[2 * k] if k else 0.0) for k in range(len(seen.blocks))]
    return tuple(len(part) for part in balanced(costs, stages, work[0], work[seen.end], set(_together(seen))))


def _together(seen: Traversal) -> Iterator[int]:
    """The numbers of blocks before which there can be no cut: it would part a value from the block that reads it."""
    last = len(seen.blocks) - 1
    for skip in seen.skip_tensors:
        if skip.made.sources is None:
            yield from range(skip.made.position // 2 + 1, min(skip.used // 2, last) + 1)


def _past_a_cut(skip: SkipTensor, seen: Traversal) -> str:
    used, made = _place(skip.used, seen), _place(skip.made.position, seen, "in")
    return (
        f"{used} uses {skip.what} that was made {made}, but stages get from each other only what modules return; "
        "return the value from the module that makes it, or choose a split that leaves both on one stage"
    )


def _place(position: int, seen: Traversal, within: str = "") -> str:
    if position == 0:
        return "before the blocks"
    if position >= seen.end:
        return "what follows the blocks"
    where = f"block {seen.blocks[(position - 1) // 2]}"
    return f"{within} {where}".strip() if position % 2 else f"after {where}"


def names_elsewhere(model: nn.Module, made: Cut, here: Collection[int]) -> Iterator[str]:
    """The FQN of parameters and buffers that no stage of this rank holds."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not made.stages_of(name) & set(here):
            yield name
    for name, _ in model.named_buffers(remove_duplicate=False):
        if not made.stages_of_buffer(name) & set(here):
            yield name
