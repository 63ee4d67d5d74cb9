"""Cut of a model into stages: which stage holds each parameter and buffer, and which values bypass the blocks.

A position is a place in the step, counted along the n blocks: 0 is before the first block, 2k + 1 inside block k,
2k + 2 between block k and the next one, and 2n after the last one. Code between two blocks belongs to the stage of the
second one: if blocks 0 and 1 are on stages 0 and 1, stage 0 has positions 0 and 1, stage 1 has 2 and 3.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch

from lightning_parallel.techniques.pipeline_parallel.balance import balance_stages

Call = tuple[str, int]
"""FQN of a block, a part (see `StepTrace.parts`) or a hooked module inside one, and the number of earlier calls."""

SMALL = 2**16
"""Buffers with at most so many elements are copied to every stage unless the step writes to them."""


class Skip(NamedTuple):
    """A tensor that a module returned and that is read after a later block, e.g. an encoder's output in a decoder."""

    call: Call  # of the module that returned it
    number: int  # index of the tensor among those that the call returned
    made: int  # position of the call
    used: int  # position at which the tensor is read


def _sets() -> defaultdict[str, set[int]]:
    return defaultdict(set)


@dataclass
class StepTrace:
    """Result of analyzing a step, see `trace_step`."""

    blocks: tuple[str, ...]  # FQNs of the blocks in the order in which they ran
    work: list[float]  # position -> FLOPs
    # FQN of a parameter -> positions at which it is read
    uses: defaultdict[str, set[int]] = field(default_factory=_sets)
    # FQN of a module -> positions at which it is called
    calls: defaultdict[str, set[int]] = field(default_factory=_sets)
    # tensors that modules returned and that bypass blocks: stages send them to later stages
    skips: set[Skip] = field(default_factory=set)
    # (made, used): positions of values that a module computes but does not return: stages cannot send them
    inner: set[tuple[int, int]] = field(default_factory=set)
    # FQN of a part (an outermost called module with parameters that is outside of the blocks) -> number of calls
    parts: Counter[str] = field(default_factory=Counter)
    complete: bool = True  # False if the analysis ended after the blocks: the code there may use any parameter
    # FQN of a parameter that a module casts in its first forward -> new dtype
    casts: dict[str, torch.dtype] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # FQNs of buffers that the step writes to
    # (FQN, position) of buffers that a block or a part writes to
    written_inside: set[tuple[str, int]] = field(default_factory=set)
    # (FQN, position) of parameters that the step writes to in place
    written_parameters: set[tuple[str, int]] = field(default_factory=set)
    tied_buffers: list[list[str]] = field(default_factory=list)  # groups of FQNs under which one buffer is registered
    hooked: set[str] = field(default_factory=set)  # FQNs of modules on which the step leaves forward hooks

    @property
    def end(self) -> int:
        """Position after the last block."""
        return 2 * len(self.blocks)


@dataclass(frozen=True)
class Carried:
    """Tensors of a call that stages send to later stages."""

    numbers: frozenset[int]  # indices among the tensors that the call returned
    last: int  # last stage that reads one of them


@dataclass(frozen=True)
class StageLayout:
    """The stages of a model, and what each of them holds."""

    trace: StepTrace
    sizes: tuple[int, ...]  # number of blocks of each stage; 0 for a stage that only computes the loss

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.sizes)

    @cached_property
    def _stage_of_block(self) -> list[int]:
        return [stage for stage, size in enumerate(self.sizes) for _ in range(size)]

    def stage_at(self, position: int) -> int:
        """Return the stage that a position belongs to; code between two blocks belongs to the second one's."""
        block = position // 2
        return self._stage_of_block[block] if block < len(self._stage_of_block) else self.stages - 1

    @cached_property
    def carried(self) -> Mapping[Call, Carried]:
        """The calls whose results are sent to later stages, from the stage that runs the call on."""
        carried: dict[Call, Carried] = {}
        for skip in sorted(self.trace.skips, key=attrgetter("call", "number", "used")):
            last = self.stage_at(skip.used)
            if self.stage_at(skip.made) < last:
                previous = carried.get(skip.call, Carried(frozenset(), 0))
                carried[skip.call] = Carried(previous.numbers | {skip.number}, max(previous.last, last))
        return carried

    def stages_of(self, parameter: str) -> frozenset[int]:
        """Return the stages that read a parameter; if none does, that of its block, those of its part, or the last."""
        positions = self.trace.uses.get(parameter)
        block_stage = self.stage_holding(parameter)
        last = frozenset({self.stages - 1})
        assumed = last if block_stage is None and not self.trace.complete else frozenset[int]()
        if positions:
            return frozenset(map(self.stage_at, positions)) | assumed
        if block_stage is not None:
            return frozenset({block_stage})
        return self._stages_calling(self.part_of(parameter)) | assumed or last

    def stages_of_buffer(self, buffer: str, elements: int) -> frozenset[int]:
        """Return the stages that hold a buffer.

        All stages if it is small and the step does not write to it, or if it is in no block or part; else the stage of
        its block, or those that call its part.
        """
        names = next((group for group in self.trace.tied_buffers if buffer in group), [buffer])
        all_stages = frozenset(range(self.stages))
        if elements <= SMALL and self.trace.written.isdisjoint(names):
            return all_stages
        stages = frozenset[int]()
        for name in names:
            block_stage, part = self.stage_holding(name), self.part_of(name)
            stages |= frozenset({block_stage}) if block_stage is not None else self._stages_calling(part) or all_stages
            if part and not self.trace.complete:
                stages |= {self.stages - 1}
        return stages

    def stage_holding(self, name: str) -> int | None:
        """Return the stage of the block that contains a parameter or buffer; None if no block contains it."""
        blocks = (number for number, block in enumerate(self.trace.blocks) if name.startswith(f"{block}."))
        return next((self._stage_of_block[number] for number in blocks), None)

    def part_of(self, name: str) -> str:
        """Return the part that contains a parameter or buffer; "" if no part contains it."""
        return next((part for part in self.trace.parts if name.startswith(f"{part}.")), "")

    def _stages_calling(self, module: str) -> frozenset[int]:
        return frozenset(map(self.stage_at, self.trace.calls.get(module, ()))) if module else frozenset()


def cut(trace: StepTrace, stages: int, sizes: Sequence[int] | None = None, loss_stage: bool = False) -> StageLayout:
    """Cut a model so that its most expensive stage costs as little as possible, or into stages of `sizes` blocks.

    `loss_stage`: add one more stage for the code after the blocks.

    Raises:
        ValueError: there are fewer blocks than stages, `sizes` do not add up to the blocks, a value would have to cross
            a cut but cannot be sent, or a stage holds a tensor but does not run the code that writes to it.
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
        # no cut before these blocks: it would separate a value that cannot be sent from the code that reads it
        uncut = {k for made, used in trace.inner for k in range(made // 2 + 1, used // 2 + 1)}
        sizes = [len(part) for part in balance_stages(costs, stages, work[0], work[trace.end], uncut)]
    layout = StageLayout(trace, (*sizes, 0) if loss_stage else tuple(sizes))
    for made, used in sorted(trace.inner):
        if layout.stage_at(made) != layout.stage_at(used):
            raise ValueError(
                f"a tensor that was made {_place(made, trace)} is used {_place(used, trace)}, on another stage, but "
                "stages send each other only what modules return; return it from its module (hooks and attributes "
                "cannot), choose a split with both on one stage, or use ZeroStrategy"
            )
    for name, position in sorted(trace.written_inside):
        holders, here = layout.stages_of_buffer(name, SMALL + 1), layout.stage_at(position)
        if holders != {here}:
            raise ValueError(
                f"the buffer {name} is changed {_place(position, trace)}, on stage {here}, but stages "
                f"{sorted(holders)} have it, and each would change its own copy; register it on the one module that "
                "changes and reads it, choose a split with all its uses on one stage, or use ZeroStrategy"
            )
    for name, position in sorted(trace.written_parameters):
        # Code in a block runs on its stage only; code between blocks runs on the next block's stage and all later ones.
        holders, here = layout.stages_of(name), layout.stage_at(min(position, trace.end - 1))
        missing = holders - {here} if position % 2 else {stage for stage in holders if stage < here}
        if missing:
            raise ValueError(
                f"In a pipeline, the step changes the parameter {name} in place {_place(position, trace)}, on stage "
                f"{here}, but stages {sorted(missing)} have it and do not run this code. Make such changes (averages, "
                "noise, clamping) in hooks like on_train_batch_start and on_train_batch_end, or use ZeroStrategy"
            )
    return layout


def _place(position: int, trace: StepTrace) -> str:
    if position == 0:
        return "before the blocks"
    if position >= trace.end:
        return "after the blocks"
    return f"{'in' if position % 2 else 'after'} block {trace.blocks[(position - 1) // 2]}"
