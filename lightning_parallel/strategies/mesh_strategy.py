"""Lightning's lifecycle on a mesh, in the order in which it happens. What to do on the mesh, techniques say."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.plan.find import check_plan, find_plan
from lightning_parallel.plan.plan import ParallelPlan, require_plan
from lightning_parallel.strategies import refusals
from lightning_parallel.strategies.checkpoint import auto
from lightning_parallel.strategies.checkpoint.resumption import Resumption
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.data.loaders import compared, divide
from lightning_parallel.strategies.data.randomness import decorrelate
from lightning_parallel.strategies.hooks.shown_hooks import ShownHooks
from lightning_parallel.strategies.hooks.whole_gradients import AFTER_BACKWARD
from lightning_parallel.strategies.lightning_package import LightningModule, Trainer, TrainerFn
from lightning_parallel.strategies.logged.logging import StepLog
from lightning_parallel.strategies.logged.parts import PartsRun, SeenRun
from lightning_parallel.strategies.model import start_table
from lightning_parallel.strategies.model.buffers import Buffers
from lightning_parallel.strategies.model.building import Building
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.model.nonfinite import NonFinite
from lightning_parallel.strategies.precision import adapt_precision, convert_before_loading, restore_precision, scale_of
from lightning_parallel.strategies.rank_strategy import RankStrategy
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.strategies.trainer.adoption import Adoption
from lightning_parallel.strategies.trainer.callback import MeshCallback
from lightning_parallel.strategies.trainer.optimizers import StoredOptimizers
from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer
from lightning_parallel.techniques.step import Run, Step
from lightning_parallel.techniques.technique import Technique

T = TypeVar("T")

log = logging.getLogger(__name__)


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
        self._ready = self._within_step = self._over = False
        self._step = Step()
        self._stored = StoredOptimizers(self, self._store)
        self._log: StepLog | None = None
        self._building = Building(self.techniques)
        self._divided: DividedModel | None = None
        self._batches: Batches | None = None
        self._callback: MeshCallback | None = None
        self._buffers: Buffers | None = None
        self._adopted: Adoption | None = None
        self._resumption = Resumption()
        self._latest: PartsRun[Any] | None = None
        self._detached = ExitStack()

    # ---------------------------------------------------------------- before the model

    def setup_environment(self) -> None:
        """Joins the process group and builds the mesh."""
        self._begin()
        super().setup_environment()
        mesh, trainer = self._mesh(), self._module().trainer
        if mesh.shares_samples:
            self._detached.callback(lightnings.switch_worlds(trainer, mesh.user_world, mesh.full_world))
        auto.offer(self._checkpoints, trainer, self._host_group())

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """`configure_model` builds on meta; every rank later makes only what it keeps, with the same values."""
        with self._building.recording(self.root_device):
            yield

    # ---------------------------------------------------------------- the model

    def setup(self, trainer: Trainer) -> None:
        """Divides the model, then makes optimizers for what this rank keeps."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._adopt_trainer(trainer)
        module, fitting = self._module(), trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self._adoption.normalise_over(self._mesh().data.get_group())
        with self._building.converting():
            self.precision_plugin.convert_module(module)
        self._parallelize(module)
        sharded = self._whole.in_parts or self._whole.steps_parts(self._step)
        refusals.refuse_callbacks(self._callbacks(), self._whole.in_parts)
        if fitting:
            needed = 0 if self._checkpoints.in_parts else self._whole.bytes_of_parameters()
            refusals.refuse_checkpoints(self._callbacks(), needed, self._host_group())
        hooks = ShownHooks(self._whole, self._callbacks(), self._host_group(), self._stored, sharded)
        self._detached.callback(hooks.close)
        self._nonfinite = NonFinite(self._policy, module, sharded, self._host_group(), self._mesh().world)
        manual, holding = not module.automatic_optimization, self._whole.ranks_holding()
        self._gradients, self._shows_groups = hooks.gradients, manual or hooks.ask_for_groups
        reduced = (lambda found: self._stored.reduced(self._step, found)) if manual else list
        world = self._mesh().world
        adapt_precision(self.precision_plugin, world, sharded, holding, reduced, self._gradients, self._nonfinite)
        if self.is_distributed:
            self._log = StepLog(module, self._whole.readers, self._host_group(), lambda: self._weight)
            self._detached.callback(self._log.close)
            self._buffers = Buffers(module, self._whole.readers, self._host_group())
        if fitting:
            self.setup_optimizers(trainer)
        self._whole.beside.tell_of_others()
        self.setup_precision_plugin()
        self._stored.reach_wrappers()
        decorrelate(self.root_device, self._readers().rank, self._host_group())
        self._ready = True

    def _adopt_trainer(self, trainer: Trainer) -> None:
        adopted = self._adopted = Adoption(trainer)
        adopted.save_checkpoints_by(self._saves())
        if not self.is_distributed:
            adopted.be_silent_on_syncing()
            return
        signals, acts = lambda: adopted.signals, (self._others_come, self._unite_buffers, self._unite_metrics)
        divided, saver = trainer if self._divides_batches and self._mesh().sizes["pp"] > 1 else None, self._saves()
        self._batches = Batches(self._readers(), self._host_group(), signals, saver, self._stored.settings, divided)
        self._callback = MeshCallback(self._batches, *acts, lambda: self._whole.shown(looks=True))
        adopted.call_first(self._callback)
        adopted.show_full_to_loggers(
            lambda: self._within_step and sys.exc_info()[0] is None, lambda *given: self._whole.full(*given)
        )
        adopted.keep_ranks_together(self.broadcast, self._batches.compare_loaders)

    def _parallelize(self, module: LightningModule) -> None:
        mesh = self._mesh()
        refusals.refuse_module(module, mesh, self.techniques)
        plan = find_plan(module, self._given_plan)
        check_plan(plan, module)
        if self.is_global_zero and plan != self._plan:
            log.info("Parallel plan from %s: %r", plan.source, plan)
        host, layouts = self._host_group(), None if self._batches is None else self._batches.layouts
        divided = self._divided = DividedModel(module, mesh, host, layouts)
        self._building.divide(divided, plan, self.root_device, host)
        self.model, self._plan, self._step = divided.model, plan, divided.step(self._differentiate)

    def model_to_device(self) -> None:
        """Nothing: `setup` moves what this rank keeps."""

    @property
    def _whole(self) -> DividedModel:
        assert self._divided is not None
        return self._divided

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Makes the user's optimizers; where parameters are stored in shards, they step the shards."""
        with self._whole.read():
            super().setup_optimizers(trainer)
            self._whole.follow_in(self.optimizers)
        refusals.refuse_old_parameters(self.optimizers, self._whole, self._host_group())
        self._stored.take(self._whole.steppable())

    def _store(self, optimizers: Sequence[Optimizer]) -> list[StoredOptimizer]:
        elsewhere, shards = self._whole.stand_ins(), self._whole.steps_parts(self._step)
        refusals.refuse_optimizers(optimizers, self._mesh(), shards, self._callbacks())
        manual = not self._module().automatic_optimization
        return [StoredOptimizer(each, self._step, self._mean_loss, shards, elsewhere, manual) for each in optimizers]

    def _mean_loss(self, loss: Any) -> Any:
        """The loss of the whole batch, for optimizers that decide by it how far to go, as LBFGS does."""
        log = self._log if isinstance(loss, Tensor) else None
        return loss if log is None else super().reduce(log.counted(loss) * self._weight, self._whole.readers)

    @property
    def _adoption(self) -> Adoption:
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
        return dataloader if self._batches is None else self._batches.watched(dataloader)

    def barrier(self, name: str | None = None) -> None:
        """See `RankStrategy.barrier`."""
        if name == "run-stage" and self._adopted is not None:  # Lightning has just installed its signal handlers
            self._adopted.begin(self.is_distributed)
            self._resumption.begin(self._module().trainer, self._step, self._readers().rank, self._host_group())
        super().barrier(name)

    def on_train_start(self) -> None:
        """The loops run from here."""
        trainer = self._module().trainer
        self._gradients.meet_foreign_hooks(self.optimizers)
        if self._callback is not None:
            self._callback.join(trainer)
            start_table.tell(trainer, self._whole, self._step, self._host_group())
        self._resumption.begin_training(trainer, self._readers().rank, self._host_group())

    # ---------------------------------------------------------------- one batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        self._saves().count_step()
        self._stored.take()
        module = self._module()
        run = self._stored.in_step(module) if self._shows_groups else module.training_step
        output = self._run(self.precision_plugin.train_step_context(), run, args, kwargs)
        if self._log is not None and (output is None or not module.automatic_optimization):
            self._log.settle()  # there is no backward to wait for
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.val_step_context(), self._module().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.test_step_context(), self._module().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, on this rank's part of the batch."""
        return self._evaluate(self.precision_plugin.predict_step_context(), self._module().predict_step, args, kwargs)

    def _evaluate(self, context: AbstractContextManager[None], run: Callable[..., T], args: Any, kwargs: Any) -> T:
        output = self._run(context, run, args, kwargs)
        if self._log is not None:
            self._log.settle()
        return output

    def _run(self, context: AbstractContextManager[None], run: Callable[..., T], args: Any, kwargs: Any) -> T:
        self._adoption.stepped = self._within_step = True
        if self._batches is None and self._saves().failed:
            self._saves().wait()
        whole = self._whole
        output = self._run_step(context, whole.mesh.as_user(run), whole.batch(args[0]), args[1:], kwargs)
        self._within_step = False  # not where it raised
        return output

    def _run_step(
        self, context: AbstractContextManager[None], run: Callable[..., T], batch: Any, rest: Any, kwargs: Any
    ) -> T:
        whole, batches, log, seen = self._whole, self._batches, self._log, self._gradients
        if log is None or batches is None:
            self._step.expect(seen.coming())
            with context:
                return whole.outputs(self._step.forward(whole.run(Run(run)), batch, *rest, **kwargs))
        weight, fewest = self._weight, batches.fewest_samples if self._meets_in_forward else None
        with context, log.counting(weight), whole.run(self._noted(run, log, batches.layout)) as steps:
            self._step.expect(seen.coming(scale_of(self.precision_plugin), weight, batches.layout, fewest, log.alone))
            output = whole.outputs(self._step.forward(steps, batch, *rest, **kwargs))
        log.reduce_step(weight, output)
        return output

    def _noted(self, run: Callable[..., T], log: StepLog, layout: Any) -> Run[T]:
        if self._whole.pipeline.ranks == 1:
            return SeenRun(run, log)
        self._latest = PartsRun(run, self._module(), log, self._whole.pipeline.rank, layout)
        return self._latest

    @property
    def _weight(self) -> float:
        return 1.0 if self._batches is None else self._batches.weight

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's backward inside the techniques' step."""
        module, plugin = self._module(), self.precision_plugin
        scaled = plugin.pre_backward(closure_loss, module)
        differentiate = self._mesh().as_library(self._differentiate)  # a manual backward comes from the user's step
        differentiate(closure_loss, scaled, lambda loss: plugin.backward(loss, module, optimizer, *args, **kwargs))
        with self._gradients.shown(AFTER_BACKWARD):
            return plugin.post_backward(scaled, module)

    def _differentiate(self, loss: Tensor, scaled: Tensor, backward: Callable[[Tensor], None]) -> None:
        """Runs the backward pass of a loss, which a plugin has scaled, by the weight of this rank's samples."""
        weight, log = self._weight, self._log
        scaled = self._nonfinite.seen(loss, scaled)
        with nullcontext() if log is None else log.around_backward(weight, loss, self._stored.look_at_loss):
            self._step.backward(lambda: backward(scaled if weight == 1.0 or self._step.weighs else scaled * weight))

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
        """Gradients of the batches inside are reduced with those of a later one."""
        return self._gradients.unsynced(self._step)

    # ---------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Tensors under the user's names: of a full checkpoint on rank 0, of a sharded one where they are."""
        if not self._others_come("state_dict"):
            return {}
        refusals.refuse_saving_in_a_step(self._ready and self._within_step, self._mesh())
        self._unite_buffers()
        state = self._whole.state_dict(self._checkpoints.in_parts)
        self._saves().model = dict(state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that one device would have."""
        if not self._others_come("optimizer_state"):
            return {}
        return self._whole.optimizer_state(self._stored.of(optimizer), self._checkpoints.in_parts)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Rank 0 writes, or all ranks do; the path is rank 0's on all ranks."""
        if not self._others_come("save_checkpoint"):
            if self.mesh is not None:
                log.warning(
                    "No checkpoint at %s: the parts of other ranks are missing, for not all came to it", filepath
                )
            return
        self._resumption.keep(checkpoint, self._module().trainer, self._step, self._host_group())
        self._saves().save(checkpoint, filepath, self._whole.source(), storage_options, waits=not self._ready)
        self._resumption.wrote = True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """See `RankStrategy.load_checkpoint`; there is no module where a file is read without a run."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        fitting = self.lightning_module is not None and self._module().trainer.state.fn == TrainerFn.FITTING
        self._resumption.loaded(checkpoint, checkpoint_path, fitting, self.global_rank)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads into the whole model; one that `configure_model` deferred waits until its shards exist."""
        with self._building.converting():
            convert_before_loading(self.precision_plugin, self._module())
        self._building.load(self._module(), checkpoint["state_dict"], strict, self._readers().rank == 0)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of the states of one device."""
        states = checkpoint["optimizer_states"]  # none where a run starts from weights alone
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            self._whole.load_optimizer_state(self._stored.of(optimizer), state)

    # ---------------------------------------------------------------- the end

    def teardown(self) -> None:
        """Gives the user's module back as it was: whole, on the host, without anything attached."""
        module, failing = self.lightning_module, sys.exc_info()[0] is not None
        if self._saver is not None and not self._is_alone:
            self._saver.finish(failing)
        if module is not None and self.mesh is not None and not self._over:  # it is, if a hook after this one fails
            self._detach(module)
        if module is not None and any(each.is_meta for each in (*module.parameters(), *module.buffers())):
            self._lightning_module = None  # it failed before it had values: Lightning must not move it to the host
        super().teardown()
        self._lightning_module = module
        if self._adopted is not None and not failing:
            self._adopted.require_begun()

    def _detach(self, module: LightningModule) -> None:
        self._detached.close()
        if self._ready and self._within_step:
            module.state_dict()  # a step failed: the hooks of `fully_shard` put the shards back
        self._step.close()
        if self._callback is not None:
            self._callback.close(module.trainer)
        if self._adopted is not None:
            self._adopted.close()
        restore_precision(self.precision_plugin)
        divided, together = self._divided, self._ready and not self._is_alone
        if divided is not None and (not divided.in_parts or (together and divided.make_whole(self.num_processes))):
            divided.leave()
        if self._layer_sync is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._layer_sync.revert(module)
        self.model, self._ready, self._over = module, False, True

    def _unite_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.unite()

    def _unite_metrics(self) -> None:
        self._whole.pipeline.share_metrics(self._module(), None if self._latest is None else self._latest.origin)

    def _begun(self) -> dict[str, int] | None:
        """Within a step of a pipeline, messages may be under way that nobody takes any more."""
        return None if self._within_step and self._whole.pipeline.ranks > 1 else super()._begun()
