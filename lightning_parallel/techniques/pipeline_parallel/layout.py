"""Cuts of models into stages: which stage holds each parameter and buffer, and what is sent past the blocks.

Positions count along the blocks: 0 is before the first one, 2k+1 inside block k, 2k+2 after block k and before the
next one, 2n after the last. A pipeline cuts between positions; code between two blocks runs with the second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch

from lightning_parallel.techniques.pipeline_parallel.balance import balanced

Call = tuple[str, int]
"""The FQN of a block, a part (see `StepTrace.parts`) or a hooked module in one, and how many calls came before."""

SMALL = 2**16
"""Elements of buffers of which every stage may have a copy."""


class Skip(NamedTuple):
    """A tensor that a module returned, and that is read past the next block."""

    call: Call  # of the module
    number: int  # of the tensor, among those that the call returned
    made: int  # the position of the call
    used: int  # a position at which the tensor is read


def _sets() -> defaultdict[str, set[int]]:
    return defaultdict(set)


@dataclass
class StepTrace:
    """The analysis of a step."""

    blocks: tuple[str, ...]  # the FQN of the blocks in the order in which they ran
    work: list[float]  # FLOPs at each position
    # FQN of a parameter -> the positions at which it is read
    uses: defaultdict[str, set[int]] = field(default_factory=_sets)
    # FQN of a module -> the positions at which it is called
    calls: defaultdict[str, set[int]] = field(default_factory=_sets)
    # tensors that go past the blocks and that modules returned: stages send them on
    skips: set[Skip] = field(default_factory=set)
    # (made, used) of values from within a module that are read at another position: they cannot be sent
    inner: set[tuple[int, int]] = field(default_factory=set)
    # FQN of the outermost modules beside the blocks that have parameters and are called -> how often
    parts: Counter[str] = field(default_factory=Counter)
    complete: bool = True  # whether the step was followed to its end. If not, what follows the blocks may use anything
    # FQN of parameters that modules cast for themselves -> their new dtype
    casts: dict[str, torch.dtype] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # FQN of buffers that the step changed
    # (FQN, position) of buffers that a block or a part changed
    written_inside: set[tuple[str, int]] = field(default_factory=set)
    # (FQN, position) of parameters that the step changed in place
    written_parameters: set[tuple[str, int]] = field(default_factory=set)
    same_buffers: list[list[str]] = field(default_factory=list)  # groups of FQN of one buffer
    hooked: set[str] = field(default_factory=set)  # FQN of modules on which the step left forward hooks

    @property
    def end(self) -> int:
        """The position after the last block."""
        return 2 * len(self.blocks)


@dataclass(frozen=True)
class Carried:
    """Results of a call that later stages read: the numbers of these tensors, and the last of the stages."""

    numbers: frozenset[int]
    last: int


@dataclass(frozen=True)
class StageLayout:
    """The stages of a model."""

    trace: StepTrace  # the analysis of a step
    sizes: tuple[int, ...]  # how many blocks each stage has; 0 for a stage that only computes the loss

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.sizes)

    @cached_property
    def _stage_of_block(self) -> list[int]:
        return [stage for stage, size in enumerate(self.sizes) for _ in range(size)]

    def stage_at(self, position: int) -> int:
        """The stage that runs a position; code between two blocks runs with the second."""
        block = position // 2
        return self._stage_of_block[block] if block < len(self._stage_of_block) else self.stages - 1

    @cached_property
    def carried(self) -> Mapping[Call, Carried]:
        """The calls whose results are sent past the blocks, from the stage that makes them on."""
        found: dict[Call, Carried] = {}
        for skip in sorted(self.trace.skips, key=attrgetter("call", "number", "used")):
            last = self.stage_at(skip.used)
            if self.stage_at(skip.made) < last:
                before = found.get(skip.call, Carried(frozenset(), 0))
                found[skip.call] = Carried(before.numbers | {skip.number}, max(before.last, last))
        return found

    def stages_of(self, parameter: str) -> frozenset[int]:
        """The stages that use a parameter; an unused one goes with its block, with its part, or to the last stage."""
        positions = self.trace.uses.get(parameter)
        holding = self.stage_holding(parameter)
        last = frozenset({self.stages - 1})
        unknown = last if holding is None and not self.trace.complete else frozenset[int]()
        if positions:
            return frozenset(map(self.stage_at, positions)) | unknown
        if holding is not None:
            return frozenset({holding})
        return self._stages_calling(self.part_of(parameter)) | unknown or last

    def stages_of_buffer(self, buffer: str, elements: int) -> frozenset[int]:
        """The stages that have a buffer.

        The stage of its block, or those that call its part, and all stages where the step does not change it and it is
        small, or where it is in no block or part.
        """
        names = next((group for group in self.trace.same_buffers if buffer in group), [buffer])
        everywhere = frozenset(range(self.stages))
        if elements <= SMALL and self.trace.written.isdisjoint(names):
            return everywhere
        stages = frozenset[int]()
        for name in names:
            holding, part = self.stage_holding(name), self.part_of(name)
            stages |= frozenset({holding}) if holding is not None else self._stages_calling(part) or everywhere
            if part and not self.trace.complete:
                stages |= {self.stages - 1}
        return stages

    def stage_holding(self, name: str) -> int | None:
        """The stage of the block in which a parameter or a buffer lies, None beside the blocks."""
        blocks = (number for number, block in enumerate(self.trace.blocks) if name.startswith(f"{block}."))
        return next((self._stage_of_block[number] for number in blocks), None)

    def part_of(self, name: str) -> str:
        """The part in which a parameter or a buffer lies, "" outside of parts."""
        return next((part for part in self.trace.parts if name.startswith(f"{part}.")), "")

    def _stages_calling(self, module: str) -> frozenset[int]:
        return frozenset(map(self.stage_at, self.trace.calls.get(module, ()))) if module else frozenset()


def cut(trace: StepTrace, stages: int, sizes: Sequence[int] | None = None, loss_stage: bool = False) -> StageLayout:
    """Cut a model so that its most expensive stage costs as little as possible, or into stages of `sizes` blocks.

    `loss_stage`: whether code behind the blocks is one more stage.

    Raises:
        ValueError: there are fewer blocks than stages, sizes that do not add up, a value that cannot be sent past a
            cut, or a write that some stages with a copy do not run.
    """
    if len(trace.blocks) < stages:
        raise ValueError(
            f"{stages} stages need a block each, but the model has {len(trace.blocks)} blocks; "
            "use fewer ranks or stages per rank"
        )
    if sizes is not None and (len(sizes) != stages or sum(sizes) != len(trace.blocks) or min(sizes) < 1):
        raise ValueError(
            f"split={tuple(sizes)} must give each of {stages} stages at least one of {len(trace.blocks)} blocks: "
            f"{stages} numbers that add up to {len(trace.blocks)}"
        )
    if sizes is None:
        work = trace.work if sum(trace.work) > 0 else [float(position % 2) for position in range(trace.end + 1)]
        costs = [work[2 * k + 1] + (work[2 * k] if k else 0.0) for k in range(len(trace.blocks))]
        # blocks before which a cut would part a value from its reader
        together = {k for made, used in trace.inner for k in range(made // 2 + 1, used // 2 + 1)}
        sizes = [len(part) for part in balanced(costs, stages, work[0], work[trace.end], together)]
    layout = StageLayout(trace, (*sizes, 0) if loss_stage else tuple(sizes))
    for made, used in sorted(trace.inner):
        if layout.stage_at(made) != layout.stage_at(used):
            raise ValueError(
                f"a tensor that was made {_place(made, trace)} is used {_place(used, trace)}, on another stage, "
                "but stages send each other only what modules return: return it from its module (as "
                "hooks and attributes cannot), or choose a split that leaves both on one stage, or use ZeroStrategy"
            )
    for name, position in sorted(trace.written_inside):
        holders, here = layout.stages_of_buffer(name, SMALL + 1), layout.stage_at(position)
        if holders != {here}:
            raise ValueError(
                f"the buffer {name} is changed {_place(position, trace)}, on stage {here}, but stages "
                f"{sorted(holders)} have it: each would change a copy of its own; register it on the one module that "
                "changes and reads it, choose a split that leaves its uses on one stage, or use ZeroStrategy"
            )
    for name, position in sorted(trace.written_parameters):
        # Code between blocks runs on the stage of the next block and on later ones, that in a block on its stage alone.
        holders, here = layout.stages_of(name), layout.stage_at(min(position, trace.end - 1))
        missing = holders - {here} if position % 2 else {stage for stage in holders if stage < here}
        if missing:
            raise ValueError(
                f"In a pipeline, the step changes the parameter {name} in place, as an average, noise or clamped "
                f"weights, {_place(position, trace)}, on stage {here}, but stages {sorted(missing)} have it and do not "
                "run this code: change it in hooks, as on_train_batch_start and on_train_batch_end, or use ZeroStrategy"
            )
    return layout


def _place(position: int, trace: StepTrace) -> str:
    if position == 0:
        return "before the blocks"
    if position >= trace.end:
        return "behind the blocks"
    return f"{'in' if position % 2 else 'behind'} block {trace.blocks[(position - 1) // 2]}"
