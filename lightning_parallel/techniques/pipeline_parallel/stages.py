"""Runs one stage: the user's own step, in which only this stage's part of the model is really there.

Every stage runs the whole step on a microbatch. Blocks of earlier stages return what was received, or zeros of its
shape; what runs before the blocks exists for its shapes only; and the
step is left when the stage's last block has returned. Only the last stage runs the step to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.techniques.observed.draws import StepsDraws
from lightning_parallel.techniques.observed.hooked import owner_of_part
from lightning_parallel.techniques.observed.kept import in_place
from lightning_parallel.techniques.observed.positions import Call
from lightning_parallel.techniques.observed.refusals import UNDIVIDED
from lightning_parallel.techniques.observed.shapes import ShapesOnly, zeros_for_shapes
from lightning_parallel.techniques.pipeline_parallel.absent import AbsentReads, answering, mark_absent, mark_hidden
from lightning_parallel.techniques.pipeline_parallel.cut import Cut
from lightning_parallel.techniques.pipeline_parallel.exchange import Unsent
from lightning_parallel.techniques.pipeline_parallel.stage.changes import StepsChanges
from lightning_parallel.techniques.pipeline_parallel.stage.hooks import (
    Hooks,
    PassingHooks,
    Taken,
    without_objects_with_tensors,
)
from lightning_parallel.techniques.pipeline_parallel.ties import CopiedBuffers
from lightning_parallel.techniques.tools.elsewhere import is_elsewhere
from lightning_parallel.techniques.tools.losses import unwatched
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.techniques.tools.redirect import Forward, plain_forwards, redirect_call, restore_call
from lightning_parallel.values import map_leaves, map_tensors, tensors_of


class StageEndedError(BaseException):
    """Leaves the user's step at the end of a stage. No error, so that no `except Exception` of the user's stops it."""


@dataclass
class HandedOn:
    """What a stage gives to the next one.

    Attributes:
        result: what its last block returned.
        carried: what goes past the blocks.
        shapes: of each block so far, what it returned, with `Unsent` for its tensors.
        taken: by blocks and calls of parts, what hooks in them got.
    """

    result: Any = None
    carried: dict[Call, Any] = field(default_factory=dict)
    shapes: dict[int, Any] = field(default_factory=dict)
    taken: dict[str, list[Taken]] = field(default_factory=dict)


@dataclass
class _Now:
    """The stage that runs."""

    stage: int
    received: Any
    carried: dict[Call, Any]
    shapes: dict[int, Any]
    taken: dict[str, list[Taken]]
    position: int = 0
    result: Any = None
    calls: Counter[str] = field(default_factory=Counter)
    depth: int = 0  # within parts
    in_block: bool = False  # one that this stage has


class Stages:
    """The stages of one rank.

    Args:
        model: of which this rank holds its stages' part.
        made: where the model is cut.
        device: where the model runs.
    """

    def __init__(self, model: nn.Module, made: Cut, device: torch.device) -> None:
        self.cut, self._device = made, device
        self._now: _Now | None = None
        self._reads = AbsentReads(self._refuse_absent, self._changed)
        self.draws = StepsDraws(model, device)
        mark_hidden(model)
        self._copied, self.changes = CopiedBuffers(model, made), StepsChanges(model, made)
        self._emptied = [module for module in model.modules() if is_elsewhere(module)]
        modules = dict(model.named_modules())
        self._hooks = Hooks(modules, made, device)
        self._passing = PassingHooks(modules, made.seen.lasting)
        for number, name in enumerate(made.seen.blocks):
            redirect_call(modules[name], lambda call, k=number: self._block(k, modules[made.seen.blocks[k]], call))  # type: ignore[misc]
        for name in made.seen.parts:
            redirect_call(modules[name], lambda call, n=name: self._part(n, modules[n], call))  # type: ignore[misc]
        self._redirected = [modules[name] for name in (*made.seen.blocks, *made.seen.parts)]

    def close(self) -> None:
        """Gives the modules their own calls back."""
        self._hooks.close()
        for module in self._redirected:
            restore_call(module)

    def run(
        self, stage: int, received: Any, step: Callable[[], Any], means: Means | None = None, microbatch: int = 0
    ) -> Any:
        """Runs the user's step for one stage.

        Args:
            stage: which one; this rank holds it.
            received: what the stage before handed on; anything for the first stage.
            step: runs the user's step on a microbatch.
            means: watches what is computed outside of the blocks.
            microbatch: which one; in the first one it is looked for what the step reads that other stages have.

        Returns:
            What the step returned, or `HandedOn` if there is a stage after this one.

        Raises:
            RuntimeError: the step needs on this stage what the one that was looked at did not need there.
        """
        given = received if stage else HandedOn()
        self._now = _Now(stage, given.result, given.carried, given.shapes, given.taken)
        copies, before, since = self._copied.now(), self.changes.now(), RemovableHandle.next_id
        self.draws.begin_microbatch(microbatch)
        if means is not None:
            means.begin()
        try:
            with (
                torch.compiler.set_stance("force_eager"),  # means and what is absent are not seen in compiled code
                answering(self._emptied, self._device),
                self._reads if microbatch == 0 else nullcontext(),
            ):
                output = step()
        except StageEndedError:
            if RemovableHandle.next_id > since:
                self._passing.take_back(since)
            self.changes.take_back(before, microbatch == 0)
            self._copied.require_unchanged(copies, stage)
            carried = {c: value for c, value in self._now.carried.items() if self.cut.carried[c].last > stage}
            taken = self._hooks.going_on(self._now.taken, stage)
            return HandedOn(self._now.result, carried, self._now.shapes, taken)
        except StopIteration as error:  # Lightning would take it for the end of the data, on this rank alone
            raise RuntimeError(
                f"the step raised StopIteration on stage {stage}: code that takes the first of some parameters finds "
                f"none where other stages have them all; ask a tensor that the step has, or {UNDIVIDED}"
            ) from error
        finally:
            if means is not None:
                means.end()
            position, self._now = self._now.position, None
        if stage < self.cut.stages - 1:
            missing = self.cut.seen.blocks[position // 2]
            raise RuntimeError(
                f"the step ended before block {missing} was called, though it was in the sample that was looked at; a "
                "pipeline needs steps that run all blocks; to skip a batch, run them and return the loss times zero"
            )
        self._copied.require_unchanged(copies, stage)
        self.changes.ended(before, microbatch == 0)
        self.draws.end_microbatch()
        return output

    # ---------------------------------------------------------------- the model's parts

    def _block(self, number: int, block: nn.Module, call: Forward) -> Forward:
        mine, name = self.cut.stage_at(2 * number + 1), self.cut.seen.blocks[number]

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None:
                self._require_here(name, block)
                return call(*args, **kwargs)
            if now.position != 2 * number:
                self._refuse_order(now, number)
            now.position = 2 * number + 2
            ends = self.cut.stage_at(2 * number + 3) > mine
            if mine < now.stage:
                return self._of_earlier_stage(now, number, ends)
            now.in_block, drawn = True, self.draws.depart(number)
            with (
                self._hooks.noting(name, now.taken),
                self._reads.resting(args, kwargs),
                unwatched(),
                torch.compiler.set_stance("default"),
            ):
                now.result = call(*args, **kwargs)
            now.in_block = False
            self.draws.come_back(drawn)
            if (name, 0) in self.cut.carried:
                self._keep(now, (name, 0), now.result)
            now.shapes[number] = map_tensors(Unsent.of, now.result)
            if ends:  # at once: what follows may change the result in place
                raise StageEndedError
            return now.result

        return run

    def _of_earlier_stage(self, now: _Now, number: int, ends: bool) -> Any:
        """What a block returned, as far as it is here; `ends`: it was the last one of its stage."""
        name = self.cut.seen.blocks[number]
        self._hooks.call_again(now.taken.get(name, ()), now.stage)
        if ends and self.cut.stage_at(2 * number + 3) == now.stage:
            return now.received
        if (name, 0) in now.carried:
            return self._carried(now, (name, 0))
        return self._zeros(now.shapes[number], name)

    def _require_here(self, name: str, module: nn.Module) -> None:
        """No step runs: so this is a recomputation during a backward, or else the user's own call."""
        if torch._C._current_graph_task_id() == -1 and is_elsewhere(module):
            raise RuntimeError(
                f"{name} was called outside of a step, but its parameters are on another rank of the pipeline; between "
                "steps a rank has the layers of its own stages only. Call the model in a step (validation_step and "
                "predict_step are such), or in the code of a hook itself, as self.net(x) or pl_module(x) in "
                "on_train_epoch_end, where every rank is given the whole model"
            )

    def _refuse_order(self, now: _Now, number: int) -> None:
        wanted = self.cut.seen.blocks[min(now.position // 2, len(self.cut.seen.blocks) - 1)]
        raise RuntimeError(
            f"block {self.cut.seen.blocks[number]} was called where {wanted} was in the sample that was looked at; "
            "a pipeline needs blocks that run in one order"
        )

    def _part(self, name: str, module: nn.Module, call: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None:
                self._require_here(name, module)
                return call(*args, **kwargs)
            if now.in_block:  # of which it is a part, too
                return call(*args, **kwargs)
            if now.depth:
                return self._part_here(now, name, module, call, args, kwargs)
            this = (name, now.calls[name])
            now.calls[name] += 1
            owner = owner_of_part(*this)
            if self.cut.stage_at(now.position) < now.stage:
                self._hooks.call_again(now.taken.get(owner, ()), now.stage)
            if this in now.carried:
                return self._carried(now, this)
            self._require_at_hand(now, name, module)
            now.depth += 1
            drawn = self.draws.depart(crc32(repr(this).encode()))
            with self._hooks.noting(owner, now.taken):
                output = self._part_here(now, name, module, call, args, kwargs)
            self.draws.come_back(drawn)
            now.depth -= 1
            if this in self.cut.carried and self.cut.stage_at(now.position) == now.stage:
                self._keep(now, this, output)
            return output

        return run

    def _require_at_hand(self, now: _Now, name: str, module: nn.Module) -> None:
        if self.cut.stage_at(now.position) == now.stage and is_elsewhere(module):
            raise RuntimeError(
                f"{name} was called on stage {now.stage}, but in the sample that was looked at only on another one, "
                "which has its parameters; a pipeline needs steps that run the model once, in the order of that "
                f"sample: use what the first run returned again, or {UNDIVIDED}"
            )

    def _part_here(
        self, now: _Now, name: str, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.cut.stage_at(now.position) == now.stage:
            return call(*args, **kwargs)
        with (
            torch.no_grad(),
            unwatched(),
            self._hooks.silent(module),
            plain_forwards(module),
            in_place(module),
            ShapesOnly(_parameters_everywhere(module), self._device),
        ):
            shapes = call(*args, **kwargs)
            output = zeros_for_shapes(shapes, self._device)
        for shape, tensor in zip(tensors_of(shapes), tensors_of(output), strict=True):
            if shape is not tensor:
                mark_absent(tensor, f"what {name} returned")
        return output

    # ---------------------------------------------------------------- what goes past the blocks

    def _keep(self, now: _Now, call: Call, output: Any) -> None:
        """Keeps what later stages will use, as it is now: what follows may change it in place."""
        wanted, number = self.cut.carried[call].numbers, count()
        kept = map_tensors(lambda t: t.clone() if next(number) in wanted else Unsent.of(t), output)
        now.carried[call] = without_objects_with_tensors(kept)

    def _carried(self, now: _Now, call: Call) -> Any:
        """What a module returned on an earlier stage, with zeros for what nobody will use."""
        goes_on = self.cut.carried[call].last > now.stage
        value = now.carried[call]
        return self._zeros(map_tensors(Tensor.clone, value) if goes_on else value, call[0])

    def _zeros(self, value: Any, module: str) -> Any:
        def zeros(leaf: Any) -> Any:
            return (
                mark_absent(leaf.zeros(self._device), f"what {module} returned") if isinstance(leaf, Unsent) else leaf
            )

        return map_leaves(zeros, value)

    def _changed(self, tensors: list[Tensor], flags: bool) -> None:
        """Code changes tensors in place, or whether they learn; what modules do there, they do wherever they run."""
        now = self._now
        if now is not None and not now.depth:
            if flags:
                self.changes.toggled(tensors)
            else:
                self.changes.wrote(tensors, now.position)

    def _refuse_absent(self, what: str, asked: bool) -> None:
        """Raises where an absent value counts; what Python gets may count anywhere."""
        now = self._now
        if now is None:
            return
        if now.in_block or self.cut.stage_at(now.position) == now.stage or (asked and not now.depth):
            raise RuntimeError(
                f"{what} is used on stage {now.stage}, but another one has it: the step that was looked at before the "
                "run was not seen to use it there, and stages have what that step uses (of a fit, training_step is "
                f"looked at); use it at the same places in every step, or {UNDIVIDED}"
            )


def _parameters_everywhere(module: nn.Module) -> list[Tensor]:
    """All parameters, and those elsewhere that stand as plain attributes."""
    tables = [table for part in module.modules() for table in (part._parameters, vars(part))]
    return [value for table in tables for value in table.values() if isinstance(value, Tensor)]
