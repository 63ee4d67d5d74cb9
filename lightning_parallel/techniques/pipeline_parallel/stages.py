"""Runs one stage: the user's own step, in which only this stage's part of the model is really there.

Every stage runs the whole step on a microbatch. Blocks of earlier stages return what was received, or zeros of its
shape; what runs before the blocks exists for its shapes only; and when the first block of the next stage is called, the
step is left with what the stage's last block returned. Only the last stage runs the step to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.pipeline_parallel.cut import Cut
from lightning_parallel.techniques.pipeline_parallel.nested import map_tensors
from lightning_parallel.techniques.pipeline_parallel.shapes_only import ShapesOnly, zeros_for_shapes
from lightning_parallel.techniques.redirect import Forward, plain_forwards, redirect_call, restore_call


class StageEndedError(BaseException):
    """Leaves the user's step at the end of a stage. No error, so that no `except Exception` of the user's stops it."""


@dataclass
class _Now:
    """The stage that runs."""

    stage: int
    received: Any
    position: int = 0
    result: Any = None


@dataclass(frozen=True)
class Handed:
    """What the last block of a stage returned."""

    value: Any


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
        modules = dict(model.named_modules())
        for number, name in enumerate(made.seen.blocks):
            redirect_call(modules[name], lambda call, k=number: self._block(k, call))  # type: ignore[misc]
        for name in made.seen.parts:
            redirect_call(modules[name], lambda call, m=modules[name]: self._part(m, call))  # type: ignore[misc]
        self._redirected = [modules[name] for name in (*made.seen.blocks, *made.seen.parts)]

    def close(self) -> None:
        """Gives the modules their own calls back."""
        for module in self._redirected:
            restore_call(module)

    def run(self, stage: int, received: Any, step: Callable[[], Any]) -> Any:
        """Runs the user's step for one stage.

        Args:
            stage: which one; this rank holds it.
            received: what the last block of the stage before returned; anything for the first stage.
            step: runs the user's step on a microbatch.

        Returns:
            What the step returned, or `Handed` if there is a stage after this one.
        """
        self._now = _Now(stage, received)
        try:
            output = step()
        except StageEndedError:
            return Handed(self._now.result)
        finally:
            self._now = None
        if stage < self.cut.stages - 1:
            raise RuntimeError(
                f"the step ended before block {self.cut.blocks_of(stage + 1)[0]} was called, though it was in the "
                "sample that was looked at; a pipeline needs steps that run all blocks"
            )
        return output

    # ---------------------------------------------------------------- the model's parts

    def _block(self, number: int, call: Forward) -> Forward:
        mine = self.cut.stage_at(2 * number + 1)

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None:  # a recomputation during backward
                return call(*args, **kwargs)
            self._require_order(now, number)
            now.position = 2 * number + 2
            if mine > now.stage:
                raise StageEndedError
            if mine < now.stage:
                last = self.cut.stage_at(2 * number + 3) == now.stage
                return now.received if last else _zeros_like(now.received)
            now.result = call(*args, **kwargs)
            return now.result

        return run

    def _require_order(self, now: _Now, number: int) -> None:
        if now.position != 2 * number:
            wanted = self.cut.seen.blocks[min(now.position // 2, len(self.cut.seen.blocks) - 1)]
            raise RuntimeError(
                f"block {self.cut.seen.blocks[number]} was called where {wanted} was in the sample that was looked at; "
                "a pipeline needs blocks that run in one order"
            )

    def _part(self, module: nn.Module, call: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None or self.cut.stage_at(now.position) == now.stage:
                return call(*args, **kwargs)
            with torch.no_grad(), plain_forwards(module), ShapesOnly(_tensors_of(module), self._device):
                return zeros_for_shapes(call(*args, **kwargs), self._device)

        return run


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """All parameters, and those elsewhere that stand as plain attributes."""
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    return [*module.parameters(), *plain]


def _zeros_like(value: Any) -> Any:
    return map_tensors(lambda t: torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape), value)
