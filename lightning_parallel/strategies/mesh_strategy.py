"""Lightning's lifecycle on a mesh, in the order in which it happens. What to do on the mesh, techniques say."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import SyncBatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_parallel.plan.find import check_plan, find_plan
from lightning_parallel.plan.plan import ParallelPlan, require_plan
from lightning_parallel.strategies import refusals
from lightning_parallel.strategies.build.born_sharded import is_born
from lightning_parallel.strategies.checkpoint import auto
from lightning_parallel.strategies.checkpoint.resumption import Resumption
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.data.loaders import compared, divide
from lightning_parallel.strategies.data.randomness import seed_per_data_rank
from lightning_parallel.strategies.lightning_package import LightningModule, Trainer, TrainerFn
from lightning_parallel.strategies.logged.logging import ObservedStep, StepLog
from lightning_parallel.strategies.logged.microbatch_step import MicrobatchStep
from lightning_parallel.strategies.logged.probing import ProbingRun, silent
from lightning_parallel.strategies.model import between_steps, start_table
from lightning_parallel.strategies.model.between_steps import BetweenSteps
from lightning_parallel.strategies.model.buffers import Buffers
from lightning_parallel.strategies.model.building import Building
from lightning_parallel.strategies.model.divided_model import DividedModel, no_sample, readers_of
from lightning_parallel.strategies.model.nonfinite import NonFinite
from lightning_parallel.strategies.model.postponed import Postponed
from lightning_parallel.strategies.precision import adapt_precision, convert_before_loading, restore_precision, scale_of
from lightning_parallel.strategies.rank_strategy import RankStrategy
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.run.callback import MeshCallback
from lightning_parallel.strategies.run.patches import TrainerPatches
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.strategies.trainer.optimizers import StoredOptimizers
from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer
from lightning_parallel.techniques.step import BatchContext, BatchRecords, Step, StepFn
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.shards import gathered
from lightning_parallel.techniques.tools.staged import Staged, full

T = TypeVar("T")

log = logging.getLogger(__name__)

AROUND_BACKWARD = ("on_before_backward", "backward"), ("on_after_backward",)
"""Hooks that see gradients of single batches while they accumulate, which ranks reduce where somebody overrides one."""


class MeshStrategy(RankStrategy):
    """Trains an unchanged LightningModule on a mesh of ranks by a set of techniques.

    Args:
        techniques: how training is divided; none means a single device.
        plan: what the model's parts are; found by itself where it is not given.
        lightning: Lightning's own arguments, see `RankStrategy`.
    """

    def __init__(
        self, techniques: Sequence[Technique] = (), plan: ParallelPlan | None = None, **lightning: Any
    ) -> None:
        super().__init__(techniques, **lightning)
        refusals.refuse_combinations(self.techniques)
        self._given_plan = None if plan is None else require_plan(plan, "plan=")
        self._plan: ParallelPlan | None = None
        self._begin()

    def _begin(self) -> None:
        self._ready = self._over = False
        #: of the step that runs, or that raised
        self._batch: BatchContext | None = None
        #: of the step that ran last
        self._latest = BatchContext()
        #: the division of the model, where it waits for the first batch
        self._postponed: Postponed | None = None
        self._probes = True
        self._step = Step()
        self._stored = StoredOptimizers(self, self._store)
        self._log: StepLog | None = None
        self._building = Building(self.techniques)
        self._divided: DividedModel | None = None
        self._between: BetweenSteps | None = None
        self._reduces_each = False
        self._batches: Batches | None = None
        self._callback: MeshCallback | None = None
        self._buffers: Buffers | None = None
        self._adopted: TrainerPatches | None = None
        self._resumption = Resumption()
        self._detached = ExitStack()

    # ---------------------------------------------------------------- before the model

    def setup_environment(self) -> None:
        """Joins the process group and builds the mesh."""
        self._begin()
        super().setup_environment()
        mesh, trainer = self._mesh(), self._module().trainer
        if mesh.shares_samples:
            self._detached.callback(lightnings.switch_worlds(trainer, mesh.users, mesh.everybody))
        auto.offer(self._checkpoints, trainer, self._host_group())

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """`configure_model` makes parameters that are sharded over all ranks, with the values of one process."""
        with self._building.sharded(self._mesh(), self._host_group()):
            yield

    # ---------------------------------------------------------------- the model

    def setup(self, trainer: Trainer) -> None:
        """Divides the model, then makes optimizers for what this rank keeps.

        A pipeline analyzes a step before it divides the model, and the step may read what optimizers, schedulers and
        the hooks up to `on_train_batch_start` make. So its optimizers are made for the undivided model, and the model
        is divided at the first batch. Until then every rank has the whole module, on the host; what `configure_model`
        built is sharded over all ranks, and computes as the whole.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._adopt_trainer(trainer)
        module, fitting = self._module(), trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self._adoption.normalise_over(self._mesh().data.get_group())
        self.precision_plugin.convert_module(module)
        refusals.refuse_module(module, self._mesh(), self.techniques)
        if self.is_distributed:
            assert self._batches is not None
            readers = readers_of(self._mesh(), self.techniques)
            pipelined = self._mesh().sizes["pp"] > 1
            self._log = StepLog(module, readers, self._host_group(), self._batches, pipelined)
            self._detached.callback(self._log.close)
        if self._mesh().sizes["pp"] == 1:
            self._divide_model(no_sample)
        else:
            assert self._batches is not None
            self._postponed = Postponed(trainer, self._mesh(), self._host_group(), self._divide_model, self._batches)
            if fitting:
                self.setup_optimizers(trainer)
            self.setup_precision_plugin()
        seed_per_data_rank(self.root_device, self._readers().rank, self._host_group())

    def _divide_model(self, sample: Callable[[], Sample]) -> None:
        """Divides the model, attaches what acts on this rank's part, and lets optimizers step that. Collective.

        Args:
            sample: takes the step that a pipeline analyzes.
        """
        module, trainer = self._module(), self._module().trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._parallelize(module, sample)
        sharded = self._whole.in_parts or self._whole.steps_parts(self._step)
        refusals.refuse_callbacks(self._callbacks(), self._whole.in_parts)
        if fitting:
            needed = 0 if self._checkpoints.in_parts else self._whole.bytes_of_parameters()
            refusals.refuse_checkpoints(self._callbacks(), needed, self._host_group())
        self._let_hooks_see_wholes(module)
        self._nonfinite = NonFinite(self._policy, module, sharded, self._host_group(), self._mesh().world)
        reduced, holding = partial(self._stored.reduced, self._step), self._whole.ranks_holding()
        world, local, plugin = self._mesh().world, self._whole.local, self.precision_plugin
        adapt_precision(plugin, world, sharded, holding, reduced, self._nonfinite, local)
        if self.is_distributed:
            self._buffers = Buffers(module, self._whole.readers, self._host_group())
        postponed, self._postponed = self._postponed, None
        self._whole.begin()
        if fitting and postponed is None:
            self.setup_optimizers(trainer)
        elif fitting:
            self._take_optimizers(with_states=True)
        if postponed is None:
            self.setup_precision_plugin()
        self._stored.reach_wrappers()
        self._resumption.recall(self._step)
        for optimizer, state in [] if postponed is None else postponed.states():
            self._whole.load_optimizer_state(self._stored.of(optimizer), state)
        self._ready = True

    def _let_hooks_see_wholes(self, module: LightningModule) -> None:
        if self._whole.in_parts:
            self._between = BetweenSteps(module)
            self._detached.callback(self._between.enter_step)
            averages = lightnings.averages_of(self._callbacks())
            between_steps.shard_averages(module, [average.module for average in averages])
        overrides = (lightnings.somebody_overrides(it, module, self._callbacks()) for it in AROUND_BACKWARD)
        self._reduces_each = any(gather_objects(any(overrides), self._host_group()))

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, gradients: bool = False, writable: bool = False
    ) -> Iterator[None]:
        """Inside, parameters are plain whole tensors on this rank. Collective: all ranks must enter it.

        Between steps sharded parameters compute as the whole anyway, and gather what an operation needs. Inside this
        context everything is gathered at once, so that code below PyTorch, or on one rank only, may read it.

        Args:
            module: whose parameters are gathered; the whole model by default.
            gradients: whether gradients are gathered too.
            writable: whether what is written to them is kept. All ranks must write the same.
        """
        if self._batch is not None:
            raise RuntimeError("full_parameters() is called in a step; call it in a hook, such as on_train_batch_end")
        of = self._module() if module is None else module
        with between_steps.full_parameters(of.modules(), gradients, writable):
            yield

    def _divide_early(self, why: str) -> None:
        if self._postponed is None:
            return
        self._postponed.divide_early(why)
        if self._callback is not None and not self._adoption.begun:
            self._callback.show_whole()

    def _adopt_trainer(self, trainer: Trainer) -> None:
        adopted = self._adopted = TrainerPatches(trainer)
        adopted.save_checkpoints_by(self._saves())
        if not self.is_distributed:
            adopted.ignore_sync_dist_warning()
            return
        signals, acts = lambda: adopted.signals, (self._others_come, self._unite_buffers, self._unite_metrics)
        self._batches = Batches(self._readers(), self._host_group(), signals, self._saves(), self._stored.settings)
        early = partial(self._divide_early, "a validation comes first; Trainer(num_sanity_val_steps=0) runs none then")
        self._callback = MeshCallback(self._batches, *acts, self._shown, early)
        adopted.call_first(self._callback)
        adopted.show_full_to_loggers(
            lambda: self._batch is not None and sys.exc_info()[0] is None, lambda *given: self._whole.full(*given)
        )
        adopted.keep_ranks_together(self.broadcast, self._batches, self._host_group())

    def _parallelize(self, module: LightningModule, sample: Callable[[], Sample]) -> None:
        plan = find_plan(module, self._given_plan)
        check_plan(plan, module)
        if self.is_global_zero and plan != self._plan:
            log.info("Parallel plan from %s: %r", plan.source, plan)
        if self._batches is not None:
            self._batches.batch_dims = plan.batch_dims
        divided = self._divided = DividedModel(module, self._mesh(), self._host_group())
        self._building.divide(divided, plan, sample, self.root_device, self._host_group())
        self.model, self._plan, self._step = divided.model, plan, divided.step()

    def model_to_device(self) -> None:
        """Nothing: `setup` moves what this rank keeps."""

    def _shown(self) -> AbstractContextManager[None]:
        """Inside, the module's tree is whole, as it is anyway before the model is divided."""
        return nullcontext() if self._divided is None else self._divided.whole()

    @property
    def _whole(self) -> DividedModel:
        assert self._divided is not None
        return self._divided

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Makes the user's optimizers; where parameters are stored in shards, they step the shards."""
        if self._postponed is not None:
            super().setup_optimizers(trainer)
            return
        with self._whole.whole():
            super().setup_optimizers(trainer)
        self._take_optimizers(with_states=False)

    def _take_optimizers(self, with_states: bool) -> None:
        self._whole.follow_in(self.optimizers, with_states)
        refusals.refuse_old_parameters(self.optimizers, self._whole, self._host_group())
        self._stored.take(self._whole.steppable())

    def _store(self, optimizers: Sequence[Optimizer]) -> list[StoredOptimizer]:
        local = self._whole.local if self._whole.pipeline.ranks > 1 else nullcontext
        with local():
            elsewhere, shards = self._whole.stand_ins(), self._whole.steps_parts(self._step)
            refusals.refuse_optimizers(optimizers, self._mesh(), shards, self._callbacks())
            options = shards, elsewhere, not self._module().automatic_optimization, local
            return [StoredOptimizer(each, self._step, self._mean_loss, *options) for each in optimizers]

    def _mean_loss(self, loss: Any) -> Any:
        """The loss of the whole batch, for optimizers that decide by it how far to go, as LBFGS does."""
        log = self._log if isinstance(loss, Tensor) else None
        return loss if log is None else super().reduce(log.counted(loss) * self._latest.weight, self._whole.readers)

    @property
    def _adoption(self) -> TrainerPatches:
        assert self._adopted is not None
        return self._adopted

    # ---------------------------------------------------------------- data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divides a loader: each rank reads its part, in the user's own order."""
        if self._batches is not None:
            self._batches.register(dataloader)
        if self._adopted is not None and self._adopted.divides_data:
            progress: Any = self._module().trainer.fit_loop.epoch_loop.batch_progress
            dataloader = divide(dataloader, self._readers(), lambda: int(progress.current.processed))
        elif self._adopted is not None:
            dataloader = compared(dataloader, self._readers())
        return dataloader

    def barrier(self, name: str | None = None) -> None:
        """See `RankStrategy.barrier`."""
        if name == "run-stage" and self._adopted is not None:  # Lightning has just installed its signal handlers
            self._adopted.begin(self.is_distributed)
            self._resumption.begin(self._module().trainer, self._readers().rank, self._host_group())
        super().barrier(name)

    def on_train_start(self) -> None:
        """The loops run from here."""
        trainer = self._module().trainer
        if self._callback is not None:
            self._callback.join(trainer)
        if self._ready:
            self._begin_training(trainer)
        self._resumption.begin_training(trainer, self._readers().rank, self._host_group())

    def _begin_training(self, trainer: Trainer) -> None:
        self._whole.refuse_foreign_hooks(self.optimizers)
        if self._callback is not None:
            with self._whole.local():
                start_table.tell(trainer, self._whole, self._step, self._host_group())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """All hooks that start training have run: the model is divided now, where it is not yet."""
        if self._postponed is not None:
            self._postponed.divide_to_train(batch, batch_idx)
            self._begin_training(self._module().trainer)

    # ---------------------------------------------------------------- one batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        self._saves().count_step()
        self._stored.take()
        module = self._module()
        run = module.training_step if module.automatic_optimization else self._stored.in_step(module)
        output = self._run(self.precision_plugin.train_step_context(), run, args, kwargs)
        if self._log is not None and (output is None or not module.automatic_optimization):
            self._log.settle()  # there is no backward to wait for
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.val_step_context(), "validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.test_step_context(), "test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.predict_step_context(), "predict_step", args, kwargs)

    def _evaluate(self, context: AbstractContextManager[None], name: str, args: Any, kwargs: Any) -> Any:
        if self._postponed is not None:
            self._postponed.divide_at_step(name, args)
        output = self._run(context, getattr(self._module(), name), args, kwargs)
        if self._log is not None:
            self._log.settle()
        return output

    def _run(self, context: AbstractContextManager[None], run: Callable[..., T], args: Any, kwargs: Any) -> T:
        self._adoption.stepped = True
        if self._batches is None and self._saves().failed:
            self._saves().wait()
        whole, log = self._whole, self._log
        with self._in_step():
            batch, run = whole.batch(args[0]), whole.mesh.as_user(run)
            self._batch = BatchContext()
            if log is None or self._batches is None:
                self._step.begin_batch(self._batch)
                with context:
                    output = whole.outputs(self._step.forward(whole.run(run), batch, *args[1:], **kwargs))
            else:
                observed, self._batch = self._begin_batch(run, log, self._batches)
                with context, log.step(self._batch):
                    self._step.begin_batch(self._batch)
                    steps = self._probing(whole.run(observed), self._batch)
                    output = whole.outputs(self._step.forward(steps, batch, *args[1:], **kwargs))
                log.reduce_step(self._batch, output)
        self._latest, self._batch = self._batch, None  # not where it raised
        return output

    def _begin_batch(self, run: Callable[..., T], log: StepLog, batches: Batches) -> tuple[StepFn[T], BatchContext]:
        """The user's step, whose logs are taken, and what is known of the batch."""
        module, pipeline = self._module(), self._whole.pipeline
        in_pipeline = pipeline.ranks > 1
        observed = (
            MicrobatchStep(run, module, log, pipeline.rank, batches.batch_dims)
            if in_pipeline
            else ObservedStep(run, log)
        )
        context = BatchContext(
            index=module.trainer.fit_loop.total_batch_idx if in_pipeline else 0,
            weight=batches.weight,
            samples=batches.fewest_samples if self._meets_in_forward else None,
            scale=scale_of(self.precision_plugin),
            alone=log.alone,
            records=observed if isinstance(observed, MicrobatchStep) else BatchRecords(),
            silent=partial(silent, module, observed, self.root_device),
        )
        return observed, context

    def _probing(self, steps: StepFn[T], batch: BatchContext) -> StepFn[T]:
        """The step, which measures its loss in the first batch of training; a pipeline does so by itself."""
        module, batches = self._module(), self._batches
        if not (self._probes and module.trainer.training) or batches is None or self._log is None:
            return steps
        self._probes, samples = False, batches.fewest_samples or 1
        alone = self._readers().ranks == 1 or self._whole.pipeline.ranks > 1
        synced = any(isinstance(each, SyncBatchNorm) for each in module.modules()) or self._whole.compares_samples
        if alone or synced or samples < 2 or not module.automatic_optimization:
            return steps
        self.has_gathered = False
        return ProbingRun(
            steps, module, samples, batches.batch_dims, batch.silent, lambda: self.has_gathered, self._log
        )

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's backward inside the techniques' step."""
        module, plugin = self._module(), self.precision_plugin
        scaled = plugin.pre_backward(closure_loss, module)
        differentiate = self._mesh().as_library(self._differentiate)  # a manual backward comes from the user's step
        differentiate(closure_loss, scaled, lambda loss: plugin.backward(loss, module, optimizer, *args, **kwargs))
        return plugin.post_backward(scaled, module)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        with self._whole.local(), nullcontext() if self._between is None else self._between.in_step():
            yield

    def _differentiate(self, loss: Tensor, scaled: Tensor, backward: Callable[[Tensor], None]) -> None:
        """Runs the backward pass of a loss, which a plugin has scaled, by the weight of this rank's samples."""
        batch, log = self._batch or self._latest, self._log
        scaled, weight = self._nonfinite.seen(loss, scaled), batch.weight
        around = nullcontext() if log is None else log.around_backward(batch, loss, self._stored.look_at_loss)
        self._whole.gradients_changed()
        with self._in_step(), around:
            self._step.backward(
                lambda: backward(scaled if weight == 1.0 or self._step.applies_sample_weight else scaled * weight)
            )

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, of an optimizer that a hook may have put in the place of another."""
        step = self._mesh().as_library(self._stored.step)  # Lightning calls this within the hook `optimizer_step`
        return step(optimizer, super().optimizer_step, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See `RankStrategy.reduce`; the values of a step that is being logged wait for each other."""
        if self._log is not None and self._log.defers:
            return tensor
        return super().reduce(tensor, group or (self._divided and self._divided.readers), reduce_op)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Gradients of the batches inside are reduced with those of a later one, unless hooks look at them there."""
        return nullcontext() if self._reduces_each else self._step.unsynced()

    # ---------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Tensors under the user's names: of a full checkpoint on rank 0, of a sharded one where they are."""
        if not self._can_save("state_dict"):
            return {}
        self._unite_buffers()
        state = self._whole.state_dict(self._checkpoints.in_parts)
        self._saves().model = dict(state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that one device would have."""
        if not self._can_save("optimizer_state"):
            return {}
        return self._whole.optimizer_state(self._stored.of(optimizer), self._checkpoints.in_parts)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Rank 0 writes, or all ranks do; the path is rank 0's on all ranks."""
        if not self._can_save("save_checkpoint"):
            if self.mesh is not None:
                log.warning(
                    "No checkpoint at %s: the parts of other ranks are missing, for not all came to it", filepath
                )
            return
        if self._whole.pipeline.ranks > 1:
            checkpoint.update(tree_map_only(Staged, full, checkpoint))
        if not self._checkpoints.in_parts:  # averages of weights, which callbacks keep
            keep = self.is_global_zero
            checkpoint.update(tree_map_only(GlobalShard, lambda each: gathered(each, keep), checkpoint))
        self._resumption.keep(checkpoint, self._module().trainer, self._step, self._host_group())
        self._saves().save(checkpoint, filepath, self._whole.source(), storage_options, waits=not self._ready)
        self._resumption.wrote = True

    def _can_save(self, what: str) -> bool:
        """Whether all ranks are there to save, and what they save exists. Divides the model where it is not yet.

        A run that failed before its first batch saves nothing: the analysis may be what failed.
        """
        if not self._others_come(what):
            return False
        analyzes = self._postponed is not None and self._postponed.analyzes
        refusals.refuse_saving_in_a_step(analyzes or (self._ready and self._batch is not None), self._mesh())
        if sys.exc_info()[0] is None:
            self._divide_early("a checkpoint is saved before it; save after the first batch")
        return self._postponed is None

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """See `RankStrategy.load_checkpoint`; there is no module where a file is read without a run."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        fitting = self.lightning_module is not None and self._module().trainer.state.fn == TrainerFn.FITTING
        self._resumption.loaded(checkpoint, checkpoint_path, fitting, self.global_rank)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads into the whole model, or its shards; one that the user built on meta waits until it has values."""
        convert_before_loading(self.precision_plugin, self._module())
        self._building.load(self._module(), checkpoint["state_dict"], strict, self._readers().rank == 0)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of the states of one device."""
        states = checkpoint["optimizer_states"]  # none where a run starts from weights alone
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            if self._postponed is not None:
                self._postponed.load(optimizer, state)
            else:
                self._whole.load_optimizer_state(self._stored.of(optimizer), state)

    # ---------------------------------------------------------------- the end

    def teardown(self) -> None:
        """Gives the user's module back as it was: whole, on the host, without anything attached."""
        module, failing = self.lightning_module, sys.exc_info()[0] is not None
        if self._saver is not None and not self._is_alone:
            self._saver.finish(failing)
        if module is not None and self.mesh is not None and not self._over:  # it is, if a hook after this one fails
            self._detach(module)
        if module is not None and any(
            each.is_meta or is_born(each) for each in (*module.parameters(), *module.buffers())
        ):
            # it failed before it was divided: Lightning must not move it to the host, nor states of optimizers
            self._lightning_module, self.optimizers = None, []
        super().teardown()
        self._lightning_module = module
        if self._adopted is not None and not failing:
            self._adopted.require_begun()

    def _detach(self, module: LightningModule) -> None:
        if self._divided is not None:
            self._divided.end()
        self._detached.close()
        if self._ready and self._batch is not None:
            module.state_dict()  # a step failed: the hooks of `fully_shard` put the shards back
        self._step.close()
        if self._callback is not None:
            self._callback.close(module.trainer)
        if self._adopted is not None:
            self._adopted.close()
        restore_precision(self.precision_plugin)
        if self._postponed is not None and sys.exc_info()[0] is None:
            self._building.make_whole(module, self._host_group())
        divided, together = self._divided, self._ready and not self._is_alone
        if divided is not None and (not divided.in_parts or (together and divided.make_whole(self.num_processes))):
            divided.leave()
        if self._layer_sync is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._layer_sync.revert(module)
        self.model, self._ready, self._over, self._postponed = module, False, True, None

    def _unite_buffers(self) -> None:
        if self._buffers is not None:
            with self._whole.local():
                self._buffers.unite()

    def _unite_metrics(self) -> None:
        if self._divided is None or self._log is None:  # there was no batch
            return
        with self._whole.local():
            self._whole.pipeline.share_metrics(self._module(), self._log.metrics.last_stage)

    def _begun(self) -> dict[str, int] | None:
        """Within a step of a pipeline, messages may be under way that nobody takes any more."""
        return None if self._batch is not None and self._whole.pipeline.ranks > 1 else super()._begun()
