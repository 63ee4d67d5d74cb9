"""Postpones dividing a pipeline's model to the first batch: that runs a step, which may read what hooks made before."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.data.first_batch import FirstPass
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import Trainer, is_param_in_hook_signature
from lightning_parallel.strategies.ranks.agreement import run_or_raise_on_all
from lightning_parallel.strategies.side_effects import HOST, restore_submodules, without_side_effects
from lightning_parallel.techniques.division import Sample
from lightning_parallel.values import add_note, map_tensors

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class Postponed:
    """Postponed division of a pipeline's model; lives from `setup` to the first batch.

    `divide_at_step` and `divide_early` are collective over all ranks.

    Args:
        trainer: of the run.
        mesh: the mesh over which the model is divided.
        host: all ranks.
        divide: divides the model; its argument returns the step to analyze.
        batches: of the run; `divide_early` reads one ahead.

    Attributes:
        analyzes: whether the step is running for its analysis.
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
        self.analyzes = False

    # ---------------------------------------------------------------- states of optimizers

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Store a loaded optimizer state for `states`; set options of its groups, such as the learning rate, now."""
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
            group.update({name: option for name, option in saved.items() if name != "params"})
        self._loaded.append((optimizer, state))

    def states(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Return the loaded states of optimizers that the trainer still has, with the current options of groups."""
        result: list[tuple[Optimizer, dict[str, Any]]] = []
        for optimizer, state in self._loaded:
            if optimizer not in self._trainer.optimizers:
                continue
            saved = [group["params"] for group in state["param_groups"]]  # numbers of parameters: [[0, 1], [2]]
            unused = itertools.count(1 + max((number for numbers in saved for number in numbers), default=-1))
            for group in optimizer.param_groups[len(saved) :]:  # a start hook added it, as finetuning callbacks do
                saved.append(list(itertools.islice(unused, len(group["params"]))))
            groups = [{**each, "params": numbers} for each, numbers in zip(optimizer.param_groups, saved, strict=False)]
            result.append((optimizer, {**state, "param_groups": groups}))
        return result

    # ---------------------------------------------------------------- the division

    def divide_at_step(self, name: str, args: Sequence[Any]) -> None:
        """Divide the model after analyzing its step on a copy of rank 0's batch.

        Args:
            name: of the step.
            args: arguments that Lightning is about to pass to the step: the batch, on this rank's device, and the
                indices of batch and loader.
        """
        training_step = self._trainer.lightning_module.training_step
        # Lightning passes the batch index only to a step with a second parameter, whatever its name
        if name == "training_step" and not is_param_in_hook_signature(training_step, "batch_idx", min_args=2):
            args = args[:1]

        def take() -> Sample:
            batch, *numbers = args
            on_host = self._trainer.lightning_module.transfer_batch_to_device(batch, HOST, 0)
            return self._sample(name, on_host, numbers)

        self._divide_by(take)

    def divide_early(self, why: str) -> None:
        """Divide the model before the loop reads the first batch, because of `why`. The loop gets that batch later.

        Raises:
            RuntimeError: another rank could not make its loaders or read a batch.
        """
        try:
            self._divide_by(self._read_ahead)
        except Exception as error:
            add_note(error, f"A pipeline ran the step before the first batch and the hooks that precede it: {why}")
            raise

    def _read_ahead(self) -> Sample:
        trainer, module = self._trainer, self._trainer.lightning_module
        assert trainer.state.fn is not None
        loop: Any = trainer.fit_loop if trainer.state.fn.value == "fit" else internals.running_evaluation(trainer)
        name = STEPS[trainer.state.fn.value]
        first = self._batches.first_pass = FirstPass(loop, self._batches.share_generators, self._host)
        combined = internals.combined_of(loop)
        in_turn = combined is not None and internals.reads_in_turn(combined) and len(combined.flattened) > 1
        with without_side_effects(module):
            batch = trainer.precision_plugin.convert_input(map_tensors(Tensor.clone, first.batch))
            batch = module._on_before_batch_transfer(batch, 0)
            batch = module._apply_batch_transfer_handler(batch, HOST, 0)
        takes_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)
        return self._sample(name, batch, [0] * (takes_index + in_turn))

    def _sample(self, name: str, on_host: Any, numbers: Sequence[int]) -> Sample:
        trainer, module, batch = self._trainer, self._trainer.lightning_module, on_host
        # all ranks take the batch of rank 0, or their own if that cannot be pickled
        message: list[Any] = [None]
        if self._host.rank() == 0:
            with suppress(Exception):  # cloned: pickling a view would send the full tensor that it views
                message = [pickle.dumps(map_tensors(Tensor.clone, on_host))]
        dist.broadcast_object_list(message, 0, group=self._host)
        if message[0] is not None:
            batch = run_or_raise_on_all(pickle.loads, "read the first batch of rank 0", self._host, message[0])
        step = self._mesh.as_user(getattr(module, name))

        def run(on: Any = batch) -> Any:
            with without_side_effects(module), trainer.precision_plugin.forward_context():
                return step(on, *numbers)

        return Sample(run, batch, HOST, partial(restore_submodules, module))

    def _divide_by(self, sample: Callable[[], Sample]) -> None:
        device = self._trainer.strategy.root_device
        random_state, self.analyzes = RandomState.now(device=device), True
        with torch.enable_grad():  # Lightning has disabled it in an evaluation
            self._mesh.as_library(self._divide)(sample)
        random_state.restore(device=device)  # a run on one device draws nothing here
