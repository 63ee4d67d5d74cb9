"""Lightning's lifecycle on a mesh, in the order in which it happens. What to do on the mesh, techniques say."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_parallel.checkpoint.hub import is_hub_folder
from lightning_parallel.plan.find import check_plan, find_plan
from lightning_parallel.plan.plan import ParallelPlan, require_plan
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies import refusals
from lightning_parallel.strategies.build import born_sharded, is_born
from lightning_parallel.strategies.checkpoint.reading import newest_checkpoint
from lightning_parallel.strategies.checkpoint.resumption import Resumption
from lightning_parallel.strategies.checkpoint.saver import Source
from lightning_parallel.strategies.data.batches import Batches, MeshCallback
from lightning_parallel.strategies.data.loaders import compared, divide
from lightning_parallel.strategies.data.randomness import RandomState, seed_per_data_rank
from lightning_parallel.strategies.lightning_package import (
    VERSION,
    DoublePrecision,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    TrainerFn,
)
from lightning_parallel.strategies.logged.loggers import with_full_arguments
from lightning_parallel.strategies.logged.logging import StepLog
from lightning_parallel.strategies.model import between_steps, start_table
from lightning_parallel.strategies.model.between_steps import BetweenSteps
from lightning_parallel.strategies.model.buffers import Buffers
from lightning_parallel.strategies.model.divided_model import DividedModel, no_sample
from lightning_parallel.strategies.model.postponed import Postponed
from lightning_parallel.strategies.optimization import MeshPrecision, NonFinite, StoredOptimizers
from lightning_parallel.strategies.rank_strategy import RankStrategy
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.ranks.failures import Signals
from lightning_parallel.strategies.refusals import refuse
from lightning_parallel.strategies.step_runner import StepRunner
from lightning_parallel.techniques.divided.parts import as_stored
from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.redirect import restore_forward
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
        refuse(refusals.technique_faults(self.techniques))
        self._given_plan = None if plan is None else require_plan(plan, "plan=")
        self._plan: ParallelPlan | None = None
        self._begin()

    def _begin(self) -> None:
        self._ready = self._over = False
        #: runs steps, once the model is divided
        self._runner: StepRunner | None = None
        #: the division of the model, where it waits for the first batch
        self._postponed: Postponed | None = None
        self._step = Step()
        self._stored = StoredOptimizers(self, self._store)
        self._log: StepLog | None = None
        self._divided: DividedModel | None = None
        self._between: BetweenSteps | None = None
        self._reduces_each = False
        self._batches: Batches | None = None
        self._callback: MeshCallback | None = None
        self._buffers: Buffers | None = None
        #: notes signals, once ranks are about to run
        self._signals: Signals | None = None
        #: whether the user wants data divided by rank; None before `setup`
        self._divides_data: bool | None = None
        #: whether Lightning has said that the loops are about to run
        self._runs_stage = False
        self._resumption = Resumption()
        #: gives back what the run changed of trainer, module, plugins and optimizers, the latest change first
        self._give_back = ExitStack()

    # ---------------------------------------------------------------- before the model

    def setup_environment(self) -> None:
        """Joins the process group and builds the mesh."""
        self._begin()
        super().setup_environment()
        mesh, trainer = self._mesh(), self._module().trainer
        self._divided = DividedModel(self._module(), mesh, self._host_group(), self.techniques)
        if mesh.shares_samples:
            internals.switch_worlds(trainer, mesh.users, mesh.everybody, self._give_back)
        if self._checkpoints.resume == "auto" and trainer.state.fn == TrainerFn.FITTING:
            vars(trainer._checkpoint_connector)["_restore_modules_and_callbacks"] = self._restore_chosen

    def _restore_chosen(self, named: Any = None, weights_only: bool | None = None) -> None:
        """Restore the checkpoint that the user names, else the newest valid one, else weights of the hub.

        So a run that begins with weights of the hub and is started again goes on.
        """
        connector: Any = self._module().trainer._checkpoint_connector
        del vars(connector)["_restore_modules_and_callbacks"]
        if named is None or ("://" not in str(named) and is_hub_folder(Path(named))):
            named = newest_checkpoint(self._module().trainer, self._host_group()) or named
        connector._restore_modules_and_callbacks(named, weights_only)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """`configure_model` makes parameters that are sharded over all ranks, with the values of one process."""
        mesh = self._mesh()
        with born_sharded(mesh.world, self._host_group(), mesh.device):
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
        module, fitting = self._module(), trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self._patch_trainer(trainer)
        # before the model is divided: shards are cut in the dtype in which they train
        self.precision_plugin.convert_module(module)
        refuse(refusals.module_faults(module, self._mesh(), self.techniques))
        if self.is_distributed:
            assert self._batches is not None
            options = self._batches, self._mesh().sizes["pp"] > 1, self._give_back
            self._log = StepLog(module, self._whole.readers, self._host_group(), *options)
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
        plan = find_plan(module, self._given_plan)
        check_plan(plan, module)
        if self.is_global_zero and plan != self._plan:
            log.info("Parallel plan from %s: %r", plan.source, plan)
        if self._batches is not None:
            self._batches.batch_dims = plan.batch_dims
        # from here on the module holds what this rank keeps
        self._whole.divide(plan, sample, self.root_device)
        self.model, self._plan, self._step = self._whole.model, plan, self._whole.step()
        self._give_back.callback(self._close_step)
        sharded = self._whole.in_parts or self._whole.steps_parts(self._step)
        refuse(refusals.callback_faults(self._callbacks(), self._whole.in_parts))
        if fitting:
            with self._whole.whole():
                parameters = () if self._checkpoints.in_parts else tuple(module.parameters())
                needed = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            refusals.refuse_checkpoints(self._callbacks(), needed, self._host_group())
        self._let_hooks_see_wholes(module)
        nonfinite = NonFinite(self._policy, module, sharded, self._host_group(), self._mesh().world)
        reduced = partial(self._stored.reduced, self._step)
        MeshPrecision(self.precision_plugin, self._whole, sharded, reduced, nonfinite, self._give_back)
        # Lightning calls it within the hook `optimizer_step`
        self._step_optimizer = self._mesh().as_library(self._stored.step)
        observed = self._batches, self._log, self._between
        self._runner = StepRunner(self, self._whole, self._step, *observed, nonfinite)
        if self.is_distributed:
            self._buffers = Buffers(module, self._whole.readers, self._host_group())
        postponed, self._postponed = self._postponed, None
        if self._whole.tree is not None:
            self._give_back.callback(self._whole.tree.close)
        self._whole.pipeline.attach(module)  # from now on hooks find all parameters, as on one device
        if fitting and postponed is None:
            self.setup_optimizers(trainer)
        elif fitting:
            self._take_optimizers()
        if postponed is None:
            self.setup_precision_plugin()
        self._stored.reach_wrappers()
        # what batches before the checkpoint have shown, by which later ones round otherwise
        self._step.recall(self._resumption.findings)
        for optimizer, state in [] if postponed is None else postponed.states():
            stored = self._stored.of(optimizer)
            with self._whole.local():
                stored.load_state_dict(state)
        self._ready = True

    def _let_hooks_see_wholes(self, module: LightningModule) -> None:
        if self._whole.in_parts:
            self._between = BetweenSteps(module)
            self._give_back.callback(self._between.enter_step)
            between_steps.shard_averages(module, self._callbacks())
        overrides = (internals.somebody_overrides(it, module, self._callbacks()) for it in AROUND_BACKWARD)
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
        if self._in_step:
            raise RuntimeError("full_parameters() is called in a step; call it in a hook, such as on_train_batch_end")
        of = self._module() if module is None else module
        with between_steps.full_parameters(of.modules(), gradients, writable):
            yield

    def _divide_early(self, why: str) -> None:
        if self._postponed is not None:
            self._postponed.divide_early(why)

    def _patch_trainer(self, trainer: Trainer) -> None:
        """Change what Lightning would do to data, signals, loggers and checkpoints, until the run is over."""
        back, saver, mesh = self._give_back, self._saves(), self._mesh()
        self._runs_stage = False
        self._divides_data = internals.leave_data_alone(trainer, lambda: RandomState.now().replayed(), back)
        saver.callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]

        def link(*args: Any) -> None:  # a function, for who copies the callback does not copy the saver
            saver.link(*args)

        for callback in saver.callbacks:
            # Lightning removes one link to a last checkpoint before it makes the next
            back.enter_context(internals.replaced(callback, "_link_checkpoint", link))
        for norm in self._module().modules():
            # they combine the ranks that read other samples, not those that hold other layers
            if isinstance(norm, nn.SyncBatchNorm) and norm.process_group is None:
                norm.process_group = mesh.data.get_group()
                back.callback(setattr, norm, "process_group", None)
        if not self.is_distributed:
            # Lightning recommends sync_dist wherever there is a process group, even of one rank
            warnings.filterwarnings("ignore", ".*sync_dist=True.*")
            filters: list[Any] = warnings.filters  # type: ignore[assignment]
            entry = filters[0]
            back.callback(lambda: filters.remove(entry) if entry in filters else None)
            return
        self._signals, host = Signals(trainer), self._host_group()
        self._batches = Batches(self._readers(), host, self._signals, saver, self._stored.settings)
        acts = self._others_come, self._unite_buffers, self._unite_metrics
        self._callback = MeshCallback(self._batches, *acts, self._divide_early)
        internals.callbacks_of(trainer).insert(0, self._callback)  # it is called before all others
        back.callback(self._callback.close, trainer)
        for logger in trainer.loggers:
            back.callback(setattr, logger, "__class__", type(logger))
            logger.__class__ = with_full_arguments(type(logger), self._runs_users_step, self._whole.full)
        internals.keep_ranks_together(trainer, self.broadcast, self._batches.compare_loaders, host, back)

    def _runs_users_step(self) -> bool:
        """Whether the user's step runs, and has not raised."""
        return self._in_step and sys.exc_info()[0] is None

    def model_to_device(self) -> None:
        """Nothing: `setup` moves what this rank keeps."""

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
        self._take_optimizers()

    def _take_optimizers(self) -> None:
        self._whole.follow_in(self.optimizers)
        if self._whole.in_parts:
            faults = refusals.faults_of_old_parameters(self.optimizers, self._whole.known())
            refuse(faults, self._host_group())
        # where all ranks compute alike, optimizers may step whatever they have
        alike = self._mesh().sizes["pp"] == 1 and self._mesh().loss.size() == 1
        self._stored.take(None if alike else self._whole.known())

    def _store(self, optimizers: Sequence[Optimizer]) -> list[StoredOptimizer]:
        local = self._whole.local if self._whole.pipeline.ranks > 1 else nullcontext
        with local():
            elsewhere, shards = self._whole.stand_ins(), self._whole.steps_parts(self._step)
            refuse(refusals.optimizer_faults(optimizers, self._mesh(), shards, self._callbacks()))
            options = shards, elsewhere, not self._module().automatic_optimization, local
            return [StoredOptimizer(each, self._step, self._mean_loss, *options) for each in optimizers]

    def _mean_loss(self, loss: Any) -> Any:
        """The loss of the whole batch, for optimizers that decide by it how far to go, as LBFGS does."""
        log = self._log if isinstance(loss, Tensor) else None
        if log is None or self._runner is None:
            return loss
        return super().reduce(log.counted(loss) * self._runner.latest.weight, self._whole.readers)

    @property
    def _in_step(self) -> bool:
        """Whether the user's step runs on the divided model, or has raised."""
        return self._runner is not None and self._runner.batch is not None

    # ---------------------------------------------------------------- data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divides a loader: each rank reads its part, in the user's own order."""
        if self._batches is not None:
            self._batches.register(dataloader)
        if self._divides_data:
            progress: Any = self._module().trainer.fit_loop.epoch_loop.batch_progress
            dataloader = divide(dataloader, self._readers(), lambda: int(progress.current.processed))
        elif self._divides_data is not None:
            dataloader = compared(dataloader, self._readers())
        return dataloader

    def barrier(self, name: str | None = None) -> None:
        """See `RankStrategy.barrier`."""
        if name == "run-stage" and self._divides_data is not None:
            self._runs_stage = True
            if self._signals is not None:
                self._signals.install(self._give_back)
                # ranks tell each other of SIGTERM with their batches, not by the fit loop
                epoch_loop = self._module().trainer.fit_loop.epoch_loop
                self._give_back.enter_context(internals.replaced(epoch_loop, "_broadcast_sigterm_tensor", bool))
            self._resumption.begin(self._module().trainer, self._readers().rank, self._host_group())
        super().barrier(name)

    def on_train_start(self) -> None:
        """The loops run from here."""
        trainer = self._module().trainer
        if self._callback is not None and self._callback not in self._callbacks():
            self._callbacks().append(self._callback)  # Lightning's Tuner has put others in place; it reads the first
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
            self._postponed.divide_at_step("training_step", (batch, batch_idx))
            self._begin_training(self._module().trainer)

    # ---------------------------------------------------------------- one batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        module, log, runner, saver = self.lightning_module, self._log, self._runner, self._saver
        assert module is not None
        assert runner is not None
        assert saver is not None
        # an error up to the first of these names the checkpoint
        saver.steps_since_read += 1
        if log is None and saver.failed:  # ranks tell each other of that with their batches
            saver.wait()
        step = module.training_step if module.automatic_optimization else self._stored.in_step(module)
        output = runner.run(self.precision_plugin.train_step_context(), step, args, kwargs)
        if log is not None and (output is None or not module.automatic_optimization):
            log.settle()  # there is no backward to wait for
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
        assert self._runner is not None
        output = self._runner.run(context, getattr(self._module(), name), args, kwargs)
        if self._log is not None:
            self._log.settle()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's backward inside the techniques' step."""
        assert self._runner is not None
        return self._runner.differentiate(closure_loss, optimizer, self._stored.look_at_loss, args, kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Lightning's, of an optimizer that a hook may have put in the place of another."""
        step = partial(self._step_optimizer, optimizer, super().optimizer_step)
        return as_stored(step, closure, *args, **kwargs) if self._in_step else step(closure, *args, **kwargs)

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
        source = Source(self._mesh().sizes, self._whole.tied)
        self._saves().save(checkpoint, filepath, source, storage_options, waits=not self._ready)
        self._resumption.wrote = True

    def _can_save(self, what: str) -> bool:
        """Whether all ranks are there to save, and what they save exists. Divides the model where it is not yet.

        A run that failed before its first batch saves nothing: the analysis may be what failed.
        """
        if not self._others_come(what):
            return False
        analyzes = self._postponed is not None and self._postponed.analyzes
        refuse(refusals.faults_of_saving(analyzes or (self._ready and self._in_step), self._mesh()))
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
        if isinstance(self.precision_plugin, DoublePrecision):
            # Lightning converts modules after that, by when values would have lost half of their digits
            self.precision_plugin.convert_module(self._module())
        self._whole.load(checkpoint["state_dict"], strict, self._readers().rank == 0)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of the states of one device."""
        states = checkpoint["optimizer_states"]  # none where a run starts from weights alone
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            if self._postponed is not None:
                self._postponed.load(optimizer, state)
            else:
                stored = self._stored.of(optimizer)
                with self._whole.local():
                    stored.load_state_dict(state)

    # ---------------------------------------------------------------- the end

    def teardown(self) -> None:
        """Gives the user's module back as it was: whole, on the host, without anything attached."""
        module, failing = self.lightning_module, sys.exc_info()[0] is not None
        if self._saver is not None and not self._is_alone:
            self._saver.finish(failing)
        if module is not None and self.mesh is not None and not self._over:  # it is, if a hook after this one fails
            self._give_back.close()
            if self._postponed is not None and sys.exc_info()[0] is None:
                self._whole.make_undivided()
            divided, together = self._divided, self._ready and not self._is_alone
            # after an error ranks may have states of different parameters
            optimizers = [*self._stored.known.values()] if sys.exc_info()[0] is None else []
            # if it is not whole again, it stays divided, and `module_faults` refuses it in the next run
            if divided is not None and (
                divided.make_whole(optimizers, self.num_processes) if together else not divided.in_parts
            ):
                for part in module.modules():  # forwards are their own again, and parameters may be replaced by others
                    restore_forward(part)
            if self._layer_sync is not None and module.trainer.state.fn == TrainerFn.FITTING:
                self._layer_sync.revert(module)
            self.model, self._ready, self._over, self._postponed = module, False, True, None
        if module is not None and any(
            each.is_meta or is_born(each) for each in (*module.parameters(), *module.buffers())
        ):
            # it failed before it was divided: Lightning must not move it to the host, nor states of optimizers
            self._lightning_module, self.optimizers = None, []
        super().teardown()
        self._lightning_module = module
        if self._runner is not None and self._runner.ran and not (self._runs_stage or failing):
            raise RuntimeError(
                f"Lightning {VERSION} does not call strategy.barrier('run-stage') before a run, by which "
                "signals are taken over and loaders resumed; install the version that lightning_parallel requires"
            )

    def _close_step(self) -> None:
        if self._in_step:
            self._module().state_dict()  # a step failed: the hooks of `fully_shard` put the shards back
        self._step.close()
        self._stored.close()

    def _unite_buffers(self) -> None:
        if self._buffers is not None:
            with self._whole.local():
                self._buffers.unite()

    def _unite_metrics(self) -> None:
        if not self._ready or self._log is None:  # there was no batch
            return
        with self._whole.local():
            self._whole.pipeline.share_metrics(self._module(), self._log.metrics.last_stage)

    def _begun(self) -> dict[str, int] | None:
        """Within a step of a pipeline, messages may be under way that nobody takes any more."""
        return None if self._in_step and self._whole.tree is not None else super()._begun()
