"""The division of a pipeline's model waits for the first batch: it runs a step, which may read what hooks make."""

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
from lightning_parallel.strategies.traces import HOST, parts_unchanged, without_traces
from lightning_parallel.techniques.division import Sample
from lightning_parallel.values import add_note, map_tensors

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class Postponed:
    """The division of one run's model, from `setup` up to the first batch. All methods that divide are collective.

    Args:
        trainer: whose step is analyzed.
        mesh: over which the model is divided.
        host: all ranks.
        divide: divides the model, given what takes the step to analyze.
        batches: of the run, of which one may be read before its time.

    Attributes:
        analyzes: whether the step runs at the moment for its analysis.
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
        """Keep the state of an optimizer for `states`; options of its groups, as the learning rate, are set now."""
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
            group.update({name: option for name, option in saved.items() if name != "params"})
        self._loaded.append((optimizer, state))

    def states(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """The loaded states of optimizers that the trainer still has, with the options that their groups have now."""
        found: list[tuple[Optimizer, dict[str, Any]]] = []
        for optimizer, state in self._loaded:
            if optimizer not in self._trainer.optimizers:
                continue
            saved = [group["params"] for group in state["param_groups"]]
            free = itertools.count(1 + max((number for numbers in saved for number in numbers), default=-1))
            for group in optimizer.param_groups[len(saved) :]:  # a start hook added it, as finetuning callbacks do
                saved.append(list(itertools.islice(free, len(group["params"]))))
            groups = [{**each, "params": numbers} for each, numbers in zip(optimizer.param_groups, saved, strict=False)]
            found.append((optimizer, {**state, "param_groups": groups}))
        return found

    # ---------------------------------------------------------------- the division

    def divide_at_step(self, name: str, args: Sequence[Any]) -> None:
        """Divide the model, whose step is analyzed on a copy of the batch of rank 0.

        Args:
            name: of the step.
            args: what Lightning is about to give it: the batch, on this rank's device, and numbers. A training step
                gets its index if it takes one.
        """
        training_step = self._trainer.lightning_module.training_step
        # Lightning gives a step the batch's index if it takes one, whatever it calls it
        if name == "training_step" and not is_param_in_hook_signature(training_step, "batch_idx", min_args=2):
            args = args[:1]

        def take() -> Sample:
            batch, *numbers = args
            on_host = self._trainer.lightning_module.transfer_batch_to_device(batch, HOST, 0)
            return self._sample(name, on_host, numbers)

        self._divide_by(take)

    def divide_early(self, why: str) -> None:
        """Divide the model before the first batch, on which the step is analyzed; the loop gets the batch later.

        Raises:
            RuntimeError: another rank could not make its loaders, or read a batch.
        """
        try:
            self._divide_by(self._read_ahead)
        except Exception as error:
            add_note(error, f"A pipeline ran the step before the first batch, and before hooks that precede it: {why}")
            raise

    def _read_ahead(self) -> Sample:
        trainer, module = self._trainer, self._trainer.lightning_module
        assert trainer.state.fn is not None
        loop: Any = trainer.fit_loop if trainer.state.fn.value == "fit" else internals.running_evaluation(trainer)
        name = STEPS[trainer.state.fn.value]
        first = self._batches.first_pass = FirstPass(loop, self._batches.share_generators, self._host)
        combined = internals.combined_of(loop)
        in_turn = combined is not None and internals.reads_in_turn(combined) and len(combined.flattened) > 1
        with without_traces(module):
            batch = trainer.precision_plugin.convert_input(map_tensors(Tensor.clone, first.batch))
            batch = module._on_before_batch_transfer(batch, 0)
            batch = module._apply_batch_transfer_handler(batch, HOST, 0)
        takes_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)
        return self._sample(name, batch, [0] * (takes_index + in_turn))

    def _sample(self, name: str, on_host: Any, numbers: Sequence[int]) -> Sample:
        trainer, module, batch = self._trainer, self._trainer.lightning_module, on_host
        # all ranks take the batch of rank 0; each its own where that cannot be sent
        sent: list[Any] = [None]
        if self._host.rank() == 0:
            with suppress(Exception):  # a view would bring all of the tensor that it is a part of
                sent = [pickle.dumps(map_tensors(Tensor.clone, on_host))]
        dist.broadcast_object_list(sent, 0, group=self._host)
        if sent[0] is not None:
            batch = run_or_raise_on_all(pickle.loads, "read the first batch of rank 0", self._host, sent[0])
        step = self._mesh.as_user(getattr(module, name))

        def run(on: Any = batch) -> Any:
            with without_traces(module), trainer.precision_plugin.forward_context():
                return step(on, *numbers)

        return Sample(run, batch, HOST, partial(parts_unchanged, module))

    def _divide_by(self, sample: Callable[[], Sample]) -> None:
        device = self._trainer.strategy.root_device
        drawn, self.analyzes = RandomState.now(device=device), True
        with torch.enable_grad():  # an evaluation has taken it off
            self._mesh.as_library(self._divide)(sample)
        drawn.restore(device=device)  # one device draws nothing here
