"""Run the user's steps on the divided model: from this rank's part of a batch to the gradients of its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.optim import Optimizer

from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.logged.microbatch_step import MicrobatchStep
from lightning_parallel.strategies.logged.probing import MeasuredStep, silent
from lightning_parallel.strategies.logged.step_log import ObservedStep, StepLog
from lightning_parallel.strategies.model.between_steps import BetweenSteps
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.optimization import FiniteCheck, scale_of
from lightning_parallel.strategies.rank_strategy import RankStrategy
from lightning_parallel.techniques.step import BatchContext, BatchRecords, Step, StepFn

T = TypeVar("T")


class StepRunner:
    """Runs steps and backward passes of one run, from the division of the model to the end of the run.

    The constructor makes all decisions that depend on the layout only, so that a step runs just what it needs.

    Args:
        strategy: the strategy of the run.
        divided: the divided model.
        step: the actions of techniques around a batch.
        batches: the batch on which ranks have agreed, and its weight; None for a single process.
        log: reduces logged values; None for a single process.
        between: changes the class of shards at the start and end of a step; None if no parameter is sharded.
        nonfinite: checks losses for nan and inf.

    Attributes:
        batch: context of the step that is running, or that raised; None between steps.
        latest: context of the last step that finished.
        ran: whether a step has begun.
    """

    def __init__(
        self,
        strategy: RankStrategy,
        divided: DividedModel,
        step: Step,
        batches: Batches | None,
        log: StepLog | None,
        between: BetweenSteps | None,
        nonfinite: FiniteCheck,
    ) -> None:
        self._strategy, self._divided, self._module, self._step = strategy, divided, divided.module, step
        self._batches, self._log, self._between, self._nonfinite = batches, log, between, nonfinite
        self._communicates_in_forward = any(
            technique.traits.communicates_in_forward for technique in strategy.techniques
        )
        self._pipelined = divided.pipeline.ranks > 1
        self._alone, self._probes = log is None or log.alone, True
        is_plain = between is None and divided.tree is None
        self._in_step: Callable[[], AbstractContextManager[None]] = nullcontext if is_plain else self._inside
        # with manual optimization, Lightning calls this within the user's step, where the default group is the user's
        self.differentiate = divided.mesh.as_library(self._differentiate)
        self.batch: BatchContext | None = None
        self.latest, self.ran = BatchContext(), False

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Context of a step: the module holds this rank's tensors only, in the form that techniques need."""
        with self._divided.local(), nullcontext() if self._between is None else self._between.in_step():
            yield

    def run(self, precision: AbstractContextManager[None], run: Callable[..., T], args: Any, kwargs: Any) -> T:
        """Run the user's step on this rank's part of a batch.

        Args:
            precision: the precision plugin's context for this kind of step.
            run: the step, such as `training_step`.
            args: its arguments, the batch first.
            kwargs: its keyword arguments.
        """
        divided, log, batches, pipelined = self._divided, self._log, self._batches, self._pipelined
        batch, *numbers = args
        self.ran = True
        with self._in_step():
            for divide_batch in divided.batch_maps:
                batch = divide_batch(batch)
            run = divided.mesh.as_user(run) if divided.mesh.shares_samples else run
            context = self.batch = BatchContext()
            if log is None or batches is None:
                with precision:
                    output = self._forward(run, context, batch, numbers, kwargs)
            else:
                observed: Any = ObservedStep(run, log)
                if pipelined:
                    observed = MicrobatchStep(run, self._module, log, divided.pipeline.rank, batches.batch_dims)
                context = self.batch = BatchContext(
                    index=self._module.trainer.fit_loop.total_batch_idx if pipelined else 0,
                    weight=batches.weight,
                    samples=batches.fewest_samples if self._communicates_in_forward else None,
                    scale=(pipelined and scale_of(self._strategy.precision_plugin)) or 1.0,
                    alone=self._alone,
                    records=observed if pipelined else BatchRecords(),
                    silent=partial(silent, self._module, observed, self._step, self._strategy.root_device),
                )
                with precision, log.step(context):
                    output = self._forward(observed, context, batch, numbers, kwargs)
                log.reduce_step(context, output)
        self.latest, self.batch = context, None  # after an exception `batch` stays set: the step has not ended
        return output

    def _forward(self, run: StepFn[T], context: BatchContext, batch: Any, numbers: Any, kwargs: Any) -> T:
        self._step.begin_batch(context)
        for wrap in self._divided.run_maps:
            run = wrap(run)
        module, strategy, batches, log = self._module, self._strategy, self._batches, self._log
        if self._probes and module.trainer.training:
            # On the first training batch, compare the loss of a few samples as one batch and as two; pipelines do this
            # by themselves, and ranks that all read the same samples need not.
            self._probes, samples = False, 0 if batches is None else batches.fewest_samples or 1
            alone = strategy.data_parallel_size == 1 or self._pipelined
            synced = any(isinstance(each, SyncBatchNorm) for each in module.modules()) or self._divided.compares_samples
            if batches and log and samples >= 2 and module.automatic_optimization and not (alone or synced):
                # `self.all_gather` in the step sets this to True: then the loss may compare samples of all ranks
                strategy.has_gathered = False
                run = MeasuredStep(run, module, samples, batches.batch_dims, context.silent, self._step, strategy, log)
        return self._divided.outputs(self._step.forward(run, batch, *numbers, **kwargs))

    def _differentiate(
        self, loss: Tensor, optimizer: Optimizer | None, asked: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Run the backward pass of a loss times the weight of this rank's samples, inside the techniques' step.

        Args:
            loss: the loss that the user's step returned.
            optimizer: see Lightning's `Strategy.backward`.
            asked: whether an optimizer may use the loss that its closure returns, see `StoredOptimizers.uses_loss`.
            args: see Lightning's `Strategy.backward`.
            kwargs: see Lightning's `Strategy.backward`.
        """
        plugin, module, step = self._strategy.precision_plugin, self._module, self._step
        batch, log, tree = self.batch or self.latest, self._log, self._divided.tree
        scaled = plugin.pre_backward(loss, module)
        final_loss = self._nonfinite.seen(loss, scaled)
        # ranks average gradients equally: a rank with 3 of the 5 samples of 2 ranks has the weight 3 * 2 / 5
        if batch.weight != 1.0 and not step.applies_sample_weight:
            final_loss = final_loss * batch.weight
        if tree is not None:
            tree.gradients_changed()
        with self._in_step(), nullcontext() if log is None else log.around_backward(batch, loss, asked):
            step.backward(partial(plugin.backward, final_loss, module, optimizer, *args, **kwargs))
        return plugin.post_backward(scaled, module)
