"""The division of a pipeline's model waits for the first batch: it runs a step, which may read what hooks make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.data.randomness import RankRandomness
from lightning_parallel.strategies.lightning_package import Trainer
from lightning_parallel.strategies.model.sample import sample_of, take_sample, takes_index
from lightning_parallel.strategies.ranks.failures import add_note
from lightning_parallel.techniques.division import Sample


class Postponed:
    """The division of one run's model, from `setup` up to the first batch. All methods that divide are collective.

    Args:
        trainer: whose step is analyzed.
        mesh: over which the model is divided.
        host: all ranks.
        divide: divides the model, given what takes the step to analyze.
        batches: of the run, of which one may be read before its time.
    """

    def __init__(
        self,
        trainer: Trainer,
        mesh: ParallelMesh,
        host: dist.ProcessGroup,
        divide: Callable[[Callable[[], Sample]], None],
        batches: Batches,
    ) -> None:
        self._trainer, self._mesh, self._host, self._divide = trainer, mesh, host, divide
        self._batches = batches
        self._loaded: list[tuple[Optimizer, dict[str, Any]]] = []
        #: whether the step runs at the moment for its analysis
        self.analyzes = False

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Keeps the state of an optimizer for `states`; options of its groups, as the learning rate, are set now."""
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
            group.update({name: option for name, option in saved.items() if name != "params"})
        self._loaded.append((optimizer, state))

    def states(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """The loaded states of optimizers that the trainer still has, with the options that their groups have now."""
        present = [(optimizer, state) for optimizer, state in self._loaded if optimizer in self._trainer.optimizers]
        return [(optimizer, _with_groups_of(optimizer, state)) for optimizer, state in present]

    def divide_to_train(self, batch: Any, batch_idx: int) -> None:
        """Divides the model, whose training step is analyzed on the batch that it is about to get."""
        takes = takes_index(self._trainer.lightning_module.training_step)
        self.divide_at_step("training_step", (batch, batch_idx) if takes else (batch,))

    def divide_at_step(self, name: str, args: Sequence[Any]) -> None:
        """Divides the model, whose step is analyzed with the arguments that it is about to get."""
        self._divide_by(partial(sample_of, self._trainer, self._mesh, self._host, name, args))

    def divide_early(self, why: str) -> None:
        """Divides the model before the first batch; the step is analyzed on a batch that is read ahead."""
        try:
            self._divide_by(partial(take_sample, self._trainer, self._mesh, self._host, self._batches))
        except Exception as error:
            add_note(error, f"A pipeline ran the step before the first batch, and before hooks that precede it: {why}")
            raise

    def _divide_by(self, sample: Callable[[], Sample]) -> None:
        device = self._trainer.strategy.root_device
        drawn, self.analyzes = RankRandomness.now(device), True
        with torch.enable_grad():  # an evaluation has taken it off
            self._mesh.as_library(self._divide)(sample)
        drawn.restore(device)  # one device draws nothing here


def _with_groups_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    saved = [group["params"] for group in state["param_groups"]]
    free = itertools.count(1 + max((number for numbers in saved for number in numbers), default=-1))
    for group in optimizer.param_groups[len(saved) :]:  # a start hook added it, as finetuning callbacks do
        saved.append(list(itertools.islice(free, len(group["params"]))))
    groups = [{**group, "params": numbers} for group, numbers in zip(optimizer.param_groups, saved, strict=False)]
    return {**state, "param_groups": groups}
