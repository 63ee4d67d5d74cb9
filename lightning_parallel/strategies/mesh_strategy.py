"""Lightning's strategy lifecycle on a mesh, in call order. What happens on the mesh is defined by the techniques."""

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
from lightning_parallel.strategies.build import is_build_shard, shard_on_registration
from lightning_parallel.strategies.checkpoint.reading import newest_checkpoint
from lightning_parallel.strategies.checkpoint.resumption import Resumption
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
from lightning_parallel.strategies.logged.step_log import StepLog
from lightning_parallel.strategies.model import between_steps, start_table
from lightning_parallel.strategies.model.between_steps import BetweenSteps
from lightning_parallel.strategies.model.buffers import Buffers
from lightning_parallel.strategies.model.divided_model import DividedModel, no_sample
from lightning_parallel.strategies.model.postponed import Postponed
from lightning_parallel.strategies.optimization import FiniteCheck, MeshPrecision, StoredOptimizers
from lightning_parallel.strategies.rank_strategy import RankStrategy
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.ranks.failures import Signals
from lightning_parallel.strategies.refusals import refuse
from lightning_parallel.strategies.step_runner import StepRunner
from lightning_parallel.techniques.divided.step_parameters import optimizer_step_on_shards
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
"""Hooks that see gradients while batches accumulate; if any rank overrides one, ranks reduce gradients every batch."""


class MeshStrategy(RankStrategy):
    """Train an unchanged LightningModule on a mesh of ranks by a set of techniques.

    Args:
        techniques: how training is parallelized, e.g. `[Zero(4), TensorParallel(2)]`; none means a single device.
        plan: the blocks, styles and experts of the model; found from the model if it is None.
        lightning: arguments of `RankStrategy`.
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
        #: the division of a pipeline's model, until the first batch
        self._postponed: Postponed | None = None
        self._step = Step()
        self._stored = StoredOptimizers(self, self._store)
        self._log: StepLog | None = None
        self._divided: DividedModel | None = None
        self._between: BetweenSteps | None = None
        self._reduces_every_batch = False
        self._batches: Batches | None = None
        self._callback: MeshCallback | None = None
        self._buffers: Buffers | None = None
        #: records signals, once the loops are about to run
        self._signals: Signals | None = None
        #: whether loaders are divided among ranks, by `Trainer(use_distributed_sampler=...)`; None before `setup`
        self._divides_data: bool | None = None
        #: whether Lightning has called `barrier("run-stage")`: the loops are about to run
        self._runs_stage = False
        self._resumption = Resumption()
        #: undoes the changes of the run to trainer, module, plugins and optimizers, the latest change first
        self._cleanup = ExitStack()

    # ---------------------------------------------------------------- before the model

    def setup_environment(self) -> None:
        """Join the process group and build the mesh. Collective over all ranks."""
        self._begin()
        super().setup_environment()
        mesh, trainer = self._mesh(), self._module().trainer
        self._divided = DividedModel(self._module(), mesh, self._host_group(), self.techniques)
        if mesh.shares_samples:
            internals.switch_worlds(trainer, mesh.users, mesh.everybody, self._cleanup)
        if self._checkpoints.resume == "auto" and trainer.state.fn == TrainerFn.FITTING:
            vars(trainer._checkpoint_connector)["_restore_modules_and_callbacks"] = self._restore_chosen

    def _restore_chosen(self, named: Any = None, weights_only: bool | None = None) -> None:
        """Restore the checkpoint that the user names; if that is a hub folder or None, the newest valid one if any.

        So a run that starts from hub weights continues from its own checkpoint when it is started again.
        """
        connector: Any = self._module().trainer._checkpoint_connector
        del vars(connector)["_restore_modules_and_callbacks"]
        if named is None or ("://" not in str(named) and is_hub_folder(Path(named))):
            named = newest_checkpoint(self._module().trainer, self._host_group()) or named
        connector._restore_modules_and_callbacks(named, weights_only)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Context of `configure_model`: parameters are sharded over all ranks, with the values of a single process."""
        mesh = self._mesh()
        with shard_on_registration(mesh.world, self._host_group(), mesh.device):
            yield

    # ---------------------------------------------------------------- the model

    def setup(self, trainer: Trainer) -> None:
        """Divide the model, then create optimizers for the parameters that this rank holds. Collective over all ranks.

        A pipeline analyzes a step before it divides the model, and that step may read what optimizers, schedulers and
        the hooks up to `on_train_batch_start` create. So a pipeline's optimizers are created for the undivided model,
        which is divided at the first batch. Until then every rank holds the full module on the CPU; parameters made in
        `configure_model` are sharded over all ranks and compute as full tensors.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, fitting = self._module(), trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self._patch_trainer(trainer)
        # before the model is divided, so that shards have the dtype in which they train
        self.precision_plugin.convert_module(module)
        refuse(refusals.module_faults(module, self._mesh(), self.techniques))
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
        """Divide the model, attach gradient and buffer handling, and connect optimizers. Collective, all ranks.

        Args:
            sample: runs the step that a pipeline analyzes, see `Sample`.
        """
        module, trainer = self._module(), self._module().trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        plan = find_plan(module, self._given_plan)
        check_plan(plan, module)
        if self.is_global_zero and plan != self._plan:
            log.info("Parallel plan from %s: %r", plan.source, plan)
        if self._batches is not None:
            self._batches.batch_dims = plan.batch_dims
        # from here on the module holds the shards or layers of this rank
        self._whole.divide(plan, sample, self.root_device)
        self.model, self._plan, self._step = self._whole.model, plan, self._whole.step()
        self._cleanup.callback(self._close_step)
        sharded = self._whole.in_parts or self._whole.has_sharded_optimizers(self._step)
        refuse(refusals.callback_faults(self._callbacks(), self._whole.in_parts))
        if fitting:
            with self._whole.whole():
                parameters = () if self._checkpoints.in_parts else tuple(module.parameters())
                needed = sum(parameter.numel() * parameter.element_size() for parameter in parameters)  # bytes
            refusals.refuse_checkpoints(self._callbacks(), needed, self._host_group())
        self._prepare_hooks(module)
        nonfinite = FiniteCheck(self._policy, module, sharded, self._host_group(), self._mesh().world)
        reduced = partial(self._stored.reduced, self._step)
        MeshPrecision(self.precision_plugin, self._whole, sharded, reduced, nonfinite, self._cleanup)
        observed = self._batches, self._log, self._between
        self._runner = StepRunner(self, self._whole, self._step, *observed, nonfinite)
        if self.is_distributed:
            self._buffers = Buffers(module, self._whole.readers, self._host_group())
        postponed, self._postponed = self._postponed, None
        if self._whole.tree is not None:
            self._cleanup.callback(self._whole.tree.close)
        self._whole.pipeline.attach(module)  # from now on hooks see all parameters, as on one device
        if fitting and postponed is None:
            self.setup_optimizers(trainer)
        elif fitting:
            self._register_optimizers()
        if postponed is None:
            self.setup_precision_plugin()
        self._stored.reach_wrappers()
        for optimizer, state in [] if postponed is None else postponed.states():
            stored = self._stored.of(optimizer)
            with self._whole.local():
                stored.load_state_dict(state)
        self._ready = True

    def _prepare_hooks(self, module: LightningModule) -> None:
        """Let shards compute as full tensors in hooks; find hooks that see every batch's gradients. Collective."""
        if self._whole.in_parts:
            self._between = BetweenSteps(module)
            self._cleanup.callback(self._between.enter_step)
            between_steps.shard_averages(module, self._callbacks())
        overrides = (internals.any_overrides(it, module, self._callbacks()) for it in AROUND_BACKWARD)
        self._reduces_every_batch = any(gather_objects(any(overrides), self._host_group()))

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, gradients: bool = False, writable: bool = False
    ) -> Iterator[None]:
        """Context in which parameters are plain full tensors on every rank. Collective: all ranks must enter it.

        Between steps, sharded parameters compute as full tensors anyway, and gather what an operation needs. This
        context gathers all of them at once, so that code below PyTorch, or on one rank only, can read them.

        Args:
            module: the module whose parameters are gathered; the full model by default.
            gradients: whether to gather gradients too.
            writable: whether to copy changes back to the shards. All ranks must write the same values.
        """
        if self._in_step:
            raise RuntimeError("full_parameters() is called in a step; call it in a hook, such as on_train_batch_end")
        root = self._module() if module is None else module
        with between_steps.full_parameters(root, gradients, writable):
            yield

    def _divide_early(self, why: str) -> None:
        if self._postponed is not None:
            self._postponed.divide_early(why)

    def _patch_trainer(self, trainer: Trainer) -> None:
        """Change how Lightning handles data, signals, logs and checkpoints; `_cleanup` undoes it after the run."""
        back, saver, mesh = self._cleanup, self._saves(), self._mesh()
        self._runs_stage = False
        self._divides_data = internals.disable_data_changes(trainer, lambda: RandomState.now().replayed(), back)
        saver.callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]

        def link(*args: Any) -> None:  # a function, so that a copy of the callback does not copy the saver
            saver.link(*args)

        for callback in saver.callbacks:
            # Lightning removes the link to the last checkpoint before it makes the next one
            back.enter_context(internals.replaced(callback, "_link_checkpoint", link))
        for norm in self._module().modules():
            # combine statistics over ranks that read different samples, not over ranks that hold other layers
            if isinstance(norm, nn.SyncBatchNorm) and norm.process_group is None:
                norm.process_group = mesh.data.get_group()
                back.callback(setattr, norm, "process_group", None)
        if not self.is_distributed:
            # Lightning recommends sync_dist wherever there is a process group, even for a single rank
            warnings.filterwarnings("ignore", ".*sync_dist=True.*")
            filters: list[Any] = warnings.filters  # type: ignore[assignment]
            entry = filters[0]
            back.callback(lambda: filters.remove(entry) if entry in filters else None)
            return
        self._signals, host = Signals(trainer), self._host_group()
        self._batches = Batches(self._readers(), host, self._signals, saver, self._stored.settings)
        actions = self._all_ranks_come, self._sync_buffers, self._sync_metrics
        self._callback = MeshCallback(self._batches, *actions, self._divide_early)
        internals.callbacks_of(trainer).insert(0, self._callback)  # called before all other callbacks
        back.callback(self._callback.close, trainer)
        for logger in trainer.loggers:
            back.callback(setattr, logger, "__class__", type(logger))
            logger.__class__ = with_full_arguments(type(logger), self._runs_users_step, self._whole.full)
        internals.synchronize_decisions(trainer, self.broadcast, self._batches.compare_loaders, host, back)
        self._log = StepLog(self._module(), self._whole.readers, host, self._batches, mesh.sizes["pp"] > 1, back)

    def _runs_users_step(self) -> bool:
        """Return whether the user's step is running, and no exception is being handled."""
        return self._in_step and sys.exc_info()[0] is None

    def model_to_device(self) -> None:
        """Do nothing: `setup` moves what this rank holds."""

    @property
    def _whole(self) -> DividedModel:
        """The divided model; exists once `setup_environment` has run."""
        assert self._divided is not None
        return self._divided

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the user's optimizers; where parameters are sharded, optimizers step the shards."""
        if self._postponed is not None:
            super().setup_optimizers(trainer)
            return
        with self._whole.whole():
            super().setup_optimizers(trainer)
        self._register_optimizers()

    def _register_optimizers(self) -> None:
        """Put the divided module's parameters into the trainer's optimizers, and let these step shards. Collective."""
        self._whole.replace_parameters_in(self.optimizers)
        if self._whole.in_parts:
            faults = refusals.stale_parameter_faults(self.optimizers, self._whole.known())
            refuse(faults, self._host_group())
        # where all ranks compute the same gradients, optimizers may step any parameter, also one made later
        same_gradients = self._mesh().sizes["pp"] == 1 and self._mesh().loss.size() == 1
        self._stored.take(None if same_gradients else self._whole.known())

    def _store(self, optimizers: Sequence[Optimizer]) -> list[StoredOptimizer]:
        """Make a `StoredOptimizer` of each optimizer; raise ValueError for one that cannot step shards."""
        local = self._whole.local if self._whole.pipeline.ranks > 1 else nullcontext
        with local():
            remote, shards = self._whole.stand_ins(), self._whole.has_sharded_optimizers(self._step)
            refuse(refusals.optimizer_faults(optimizers, self._mesh(), shards, self._callbacks()))
            options = shards, remote, not self._module().automatic_optimization, local
            return [StoredOptimizer(each, self._step, self._mean_loss, *options) for each in optimizers]

    def _mean_loss(self, loss: Any) -> Any:
        """Return the loss of the global batch, for optimizers that choose their step length by it, such as LBFGS."""
        log = self._log if isinstance(loss, Tensor) else None
        if log is None or self._runner is None:
            return loss
        return super().reduce(log.counted(loss) * self._runner.latest.weight, self._whole.readers)

    @property
    def _in_step(self) -> bool:
        """Whether the user's step is running on the divided model, or has raised there."""
        return self._runner is not None and self._runner.batch is not None

    # ---------------------------------------------------------------- data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide a loader among ranks, in the user's order. Collective over all ranks: they compare its length."""
        if self._batches is not None:
            self._batches.register(dataloader)
        if self._divides_data:
            progress: Any = self._module().trainer.fit_loop.epoch_loop.batch_progress
            dataloader = divide(dataloader, self._readers(), lambda: int(progress.current.processed))
        elif self._divides_data is not None:
            dataloader = compared(dataloader, self._readers())
        return dataloader

    def barrier(self, name: str | None = None) -> None:
        """See `RankStrategy.barrier`. At "run-stage", before the loops, also take over signals and begin to resume."""
        if name == "run-stage" and self._divides_data is not None:
            self._runs_stage = True
            if self._signals is not None:
                self._signals.install(self._cleanup)
                # ranks exchange SIGTERM with the message about each batch; the fit loop must not do so again
                epoch_loop = self._module().trainer.fit_loop.epoch_loop
                self._cleanup.enter_context(internals.replaced(epoch_loop, "_broadcast_sigterm_tensor", bool))
            self._resumption.begin(self._module().trainer, self._readers().rank, self._host_group())
        super().barrier(name)

    def on_train_start(self) -> None:
        """Prepare training, which begins here, and finish resuming. Collective over all ranks."""
        trainer = self._module().trainer
        if self._callback is not None and self._callback not in self._callbacks():
            # Lightning's Tuner has replaced the list of callbacks, and reads its results from the first: append
            self._callbacks().append(self._callback)
        if self._ready:
            self._begin_training(trainer)
        self._resumption.begin_training(trainer, self._readers().rank, self._host_group())

    def _begin_training(self, trainer: Trainer) -> None:
        self._whole.refuse_foreign_hooks(self.optimizers)
        if self._callback is not None:
            with self._whole.local():
                start_table.print_table(trainer, self._whole, self._step, self._host_group())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Divide a pipeline's model at its first batch: all hooks that precede training have run. Collective."""
        if self._postponed is not None:
            self._postponed.divide_at_step("training_step", (batch, batch_idx))
            self._begin_training(self._module().trainer)

    # ---------------------------------------------------------------- one batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `training_step` on this rank's part of the batch."""
        module, log, runner, saver = self._module(), self._log, self._runner, self._saves()
        assert runner is not None
        # an error before the first step is complete names the checkpoint that was read
        saver.steps_since_read += 1
        if log is None and saver.failure is not None:  # several ranks exchange this with the message about each batch
            saver.wait()
        step = module.training_step if module.automatic_optimization else self._stored.in_step(module)
        output = runner.run(self.precision_plugin.train_step_context(), step, args, kwargs)
        if log is not None and (output is None or not module.automatic_optimization):
            log.wait()  # no backward pass follows that could hide the reduction
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `validation_step` on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.val_step_context(), "validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `test_step` on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.test_step_context(), "test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `predict_step` on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.predict_step_context(), "predict_step", args, kwargs)

    def _evaluate(self, context: AbstractContextManager[None], name: str, args: Any, kwargs: Any) -> Any:
        if self._postponed is not None:
            self._postponed.divide_at_step(name, args)
        assert self._runner is not None
        output = self._runner.run(context, getattr(self._module(), name), args, kwargs)
        if self._log is not None:
            self._log.wait()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass inside the techniques' step, which reduces gradients."""
        assert self._runner is not None
        return self._runner.differentiate(closure_loss, optimizer, self._stored.uses_loss, args, kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """See Lightning; the optimizer may be new: a hook may have replaced the one of `configure_optimizers`."""
        # Lightning steps optimizers inside the user hook `optimizer_step`, where the default group is the user's
        step = partial(self._mesh().as_library(self._stored.step), optimizer, super().optimizer_step)
        if self._in_step:
            return optimizer_step_on_shards(step, closure, *args, **kwargs)
        return step(closure, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See `RankStrategy.reduce`; a value that a step logs is returned unreduced: `StepLog` reduces it later."""
        if self._log is not None and self._log.defers:
            return tensor
        return super().reduce(tensor, group or (self._divided and self._divided.readers), reduce_op)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Context in which backward passes only accumulate gradients, unless hooks see them after each batch."""
        return nullcontext() if self._reduces_every_batch else self._step.unsynced()

    # ---------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return tensors under the user's names. Collective over all ranks.

        For a full checkpoint rank 0 gets full tensors, others meta tensors; for a sharded one each rank gets shards.
        """
        if not self._can_save("state_dict"):
            return {}
        self._sync_buffers()
        state = self._whole.state_dict(self._checkpoints.in_parts)
        self._saves().model = dict(state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state in single-device form, full or sharded like the checkpoint. Collective over all ranks."""
        if not self._can_save("optimizer_state"):
            return {}
        return self._whole.optimizer_state(self._stored.of(optimizer), self._checkpoints.in_parts)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint: rank 0 a full one, all ranks a sharded one, to rank 0's path. Collective, all ranks."""
        if not self._can_save("save_checkpoint"):
            if self.mesh is not None:
                log.warning(
                    "No checkpoint at %s: shards of other ranks are missing, as only some ranks saved", filepath
                )
            return
        if self._whole.pipeline.ranks > 1:
            checkpoint.update(tree_map_only(Staged, full, checkpoint))
        if not self._checkpoints.in_parts:  # shards in the states of callbacks, such as averages of weights
            keep = self.is_global_zero
            checkpoint.update(tree_map_only(GlobalShard, lambda each: gathered(each, keep), checkpoint))
        self._resumption.keep(checkpoint, self._module().trainer, self._host_group())
        layout, tied, waits = self._mesh().sizes, self._whole.tied, not self._ready
        self._saves().save(checkpoint, filepath, layout, tied, storage_options, waits)
        self._resumption.wrote = True

    def _can_save(self, what: str) -> bool:
        """Return whether all ranks come to save a divided model; divide a pipeline's model now if it is not yet.

        A run that failed before its first batch saves nothing: the analysis of the step may be what failed.
        """
        if not self._all_ranks_come(what):
            return False
        analyzes = self._postponed is not None and self._postponed.analyzes
        refuse(refusals.faults_of_saving(analyzes or (self._ready and self._in_step), self._mesh()))
        if sys.exc_info()[0] is None:
            self._divide_early("a checkpoint is saved before that batch; save after it")
        return self._postponed is None

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """See `RankStrategy.load_checkpoint`. There may be no module: a file can be read without a run."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        fitting = self.lightning_module is not None and self._module().trainer.state.fn == TrainerFn.FITTING
        self._resumption.loaded(checkpoint, checkpoint_path, fitting, self.global_rank)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full tensors into the model or its shards; into a model on meta only once it is materialized."""
        if isinstance(self.precision_plugin, DoublePrecision):
            # Lightning converts the module later, when float64 values would have been rounded to float32
            self.precision_plugin.convert_module(self._module())
        self._whole.load(checkpoint["state_dict"], strict, self._readers().rank == 0)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states in single-device form; each rank keeps its shards of them."""
        states = checkpoint["optimizer_states"]  # empty where a run starts from weights alone
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            if self._postponed is not None:
                self._postponed.load(optimizer, state)
            else:
                stored = self._stored.of(optimizer)
                with self._whole.local():
                    stored.load_state_dict(state)

    # ---------------------------------------------------------------- the end

    def teardown(self) -> None:
        """Restore the user's module: full parameters on the CPU if they fit there, all patches undone. Collective."""
        module, failing = self.lightning_module, sys.exc_info()[0] is not None
        if self._saver is not None and not self._is_alone:
            self._saver.finish(failing)
        # Lightning calls this a second time if a hook after it raises
        if module is not None and self.mesh is not None and not self._over:
            self._cleanup.close()
            if self._postponed is not None and not failing:
                self._whole.materialize_undivided()
            divided, together = self._divided, self._ready and not self._is_alone
            # after an error, ranks may have optimizer states for different parameters
            optimizers = [] if failing else [*self._stored.known.values()]
            # a module that does not fit on the CPU in full stays divided; `module_faults` refuses it in the next run
            if divided is not None and (
                divided.make_whole(optimizers, self.num_processes) if together else not divided.in_parts
            ):
                for submodule in module.modules():  # undo redirected forwards; parameters may be replaced again
                    restore_forward(submodule)
            if self._layer_sync is not None and module.trainer.state.fn == TrainerFn.FITTING:
                self._layer_sync.revert(module)
            self.model, self._ready, self._over, self._postponed = module, False, True, None
        if module is not None and any(
            tensor.is_meta or is_build_shard(tensor) for tensor in (*module.parameters(), *module.buffers())
        ):
            # the run failed before the division: Lightning must not move the module or optimizer states to the CPU
            self._lightning_module, self.optimizers = None, []
        super().teardown()
        self._lightning_module = module
        if self._runner is not None and self._runner.ran and not (self._runs_stage or failing):
            raise RuntimeError(
                f"Lightning {VERSION} does not call strategy.barrier('run-stage') before a run, where signal handlers "
                "are set and loaders resumed; install the version that lightning_parallel requires"
            )

    def _close_step(self) -> None:
        if self._in_step:
            self._module().state_dict()  # a step failed: state-dict hooks of `fully_shard` put the shards back
        self._step.close()
        self._stored.close()

    def _sync_buffers(self) -> None:
        """Make buffers the same on all ranks. Collective over all ranks."""
        if self._buffers is not None:
            with self._whole.local():
                self._buffers.unite()

    def _sync_metrics(self) -> None:
        """Give all ranks of a pipeline the metric states of the last stage. Collective over the pipeline's ranks."""
        if not self._ready or self._log is None:  # there was no batch
            return
        with self._whole.local():
            self._whole.pipeline.broadcast_metrics(self._module(), self._log.metrics.last_stage)

    def _begun(self) -> dict[str, int] | None:
        """Return counts of begun collectives; None in a pipeline step, whose pending messages may never be received."""
        return None if self._in_step and self._whole.tree is not None else super()._begun()
