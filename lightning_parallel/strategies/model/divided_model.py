"""A module of which this rank holds a part: dividing it, and what it is as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.build import placement
from lightning_parallel.strategies.checkpoint.held import shown_to_hooks
from lightning_parallel.strategies.checkpoint.sharded import Source
from lightning_parallel.strategies.checkpoint.whole import whole_state_dict
from lightning_parallel.strategies.data.samplers import checksum
from lightning_parallel.strategies.lightning_package import LightningModule, is_overridden
from lightning_parallel.strategies.model.foreign_hooks import fault_of_hooks, hooked
from lightning_parallel.strategies.model.pipeline_group import PipelineGroup
from lightning_parallel.strategies.ranks.agreement import described, gather_objects, require_same
from lightning_parallel.strategies.refusals import has_states, refuse_logger_in_step, refuse_own_states
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.divided.whole_batch import WholeBatch
from lightning_parallel.techniques.division import Division, PartitionContext, Sample
from lightning_parallel.techniques.gradients.groups import exchange
from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer
from lightning_parallel.techniques.manual_optimization import ManualOptimizationStep, OwnBackwardStep
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.moved import current, is_moved
from lightning_parallel.techniques.tools.redirect import restore_forward
from lightning_parallel.techniques.tools.shards import gathered, is_sharded, whole_tensor

T = TypeVar("T")

log = logging.getLogger(__name__)

HOST = torch.device("cpu")


class DividedModel:
    """The user's module on a mesh.

    Args:
        module: whole; its parameters may be on meta.
        mesh: over which techniques divide it.
        host: all ranks, for messages of the host.
    """

    def __init__(self, module: LightningModule, mesh: ParallelMesh, host: dist.ProcessGroup) -> None:
        self.module, self.mesh, self.pipeline = module, mesh, PipelineGroup(mesh)
        self.model: nn.Module = module
        self._host = host
        self._names = list(module.state_dict())
        self._tied = _tied(module)
        self._hooked = hooked(dict(module.named_parameters()))
        self._divisions: list[Division] = []
        #: whether functions that compare samples see those of all ranks
        self.compares_samples = False

    def divide(self, techniques: Sequence[Technique], plan: ParallelPlan, sample: Callable[[], Sample]) -> None:
        """Lets every technique keep its part of the model.

        Args:
            techniques: in their order.
            plan: what the model's parts are.
            sample: takes a step for a technique that analyzes one.
        """
        self.plan, self.readers = plan, readers_of(self.mesh, techniques)
        ground = PartitionContext(self.mesh, plan, sample, self._divisions)
        if self.mesh.loss.size() > 1 and not any(technique.traits.averages_gradients for technique in techniques):
            techniques = (*techniques, DataParallel(1))
        for technique, seen in zip(techniques, self._looks(techniques, ground), strict=True):
            division = technique.divide(self.model, ground, seen)
            self.model = division.model
            self._divisions.append(division)
        self._compare_whole_batches(plan)

    def _compare_whole_batches(self, plan: ParallelPlan) -> None:
        """Lets functions that compare samples see those of all ranks, if they see all of this one at once."""
        if self.mesh.data.size() > 1 and all(division.losses_over_batch for division in self._divisions):
            whole = WholeBatch(self.module, Ranks(self.readers, "batch"), plan)
            self._divisions += [whole] if whole.acts else []
            self.compares_samples = whole.acts

    def _looks(self, techniques: Sequence[Technique], ground: PartitionContext) -> list[Any]:
        """Lets techniques look at the whole model; all ranks raise if one cannot look or they see different things."""
        looks: list[Any] = []
        failure: Exception | None = None
        try:
            looks = [technique.analyze(self.module, ground) for technique in techniques]
        except Exception as error:
            failure = error
        failed = "" if failure is None else f"{type(failure).__name__}: {failure}"
        said = gather_objects((checksum(list(map(described, looks))), failed), self._host)
        if failure is not None:
            raise failure
        for rank, (_, theirs) in enumerate(said):
            if theirs:
                raise RuntimeError(f"rank {rank} failed before the model was divided: {theirs}")
        prints = [each for each, _ in said]
        require_same(
            "what a look at the model and a sample step shows", prints, "build model and data alike everywhere"
        )
        return looks

    def refuse_foreign_hooks(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise on all ranks for hooks of torch on parameters and optimizers that would see parts of gradients."""
        with self.local():
            held = dict(self.module.named_parameters())
        batch = self.pipeline.ranks > 1 or self.mesh.loss.size() > 1
        fault = fault_of_hooks(self._hooked, held, batch, optimizers if self.in_parts else ())
        for theirs in gather_objects(fault, self._host):
            if theirs is not None:
                raise ValueError(theirs)

    # ---------------------------------------------------------------- the maps of all divisions

    def step(self) -> Step:
        """The step of all techniques, to be made when the parameters are real."""
        step = Step()
        for division in self._divisions:
            step = division.step(step)
        for division in self._divisions:
            step = division.settle(step)
        if self.module.automatic_optimization or self.pipeline.ranks > 1:  # whose step runs backward passes itself
            return OwnBackwardStep(step) if is_overridden("backward", self.module) else step
        return ManualOptimizationStep(step)

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """The user's step as techniques surround each call of it."""
        for division in self._divisions:
            run = division.run(run)
        return run

    def batch(self, batch: Any) -> Any:
        """This rank's part of a batch."""
        for division in self._divisions:
            batch = division.batch(batch)
        return batch

    def outputs(self, outputs: T) -> T:
        """What a step returned, as one device would return it for the batch."""
        for division in reversed(self._divisions):
            outputs = division.outputs(outputs)
        return outputs

    def full(self, name: str, given: T) -> T:
        """What a step gives to a logger, with full tensors; all ranks whose step calls the logger must call.

        Args:
            name: what the step calls.
            given: the arguments.
        """
        if self.pipeline.ranks > 1:
            refuse_logger_in_step(name, self.pipeline.ranks)
        with torch.no_grad():
            full: T = tree_map_only(Divided, Divided.whole, self.outputs(given))
        return full

    # ---------------------------------------------------------------- who holds what

    @property
    def in_parts(self) -> bool:
        """Whether ranks may hold only a part of the parameters; the same on all of them."""
        return self.pipeline.ranks > 1 or placement.has_sharded_parameters(self.module)

    def steps_parts(self, step: Step) -> bool:
        """Whether optimizers step parts of parameters, or will: what is frozen is divided when it learns."""
        stored = map(step.stored, self.module.parameters())
        return self.mesh.sizes["dp_shard"] > 1 or any(map(is_sharded, stored))

    def ranks_holding(self) -> Callable[[Tensor], int]:
        """A function that tells on how many ranks a parameter, or a part of it, is held."""
        with self.local():
            named = dict(self.module.named_parameters())
        stages, ranks = self.pipeline.stages_holding(named), self.mesh.world_size // self.pipeline.ranks
        counts = {id(parameter): stages[name] * ranks for name, parameter in named.items()}
        return lambda parameter: counts.get(id(parameter), ranks)

    # ---------------------------------------------------------------- the whole

    def begin(self) -> None:
        """From now on hooks find all parameters, which behave on every rank as on one device. Collective."""
        self.pipeline.attach(self.module)

    def end(self) -> None:
        """From now on the tree has what this rank holds."""
        if (tree := elsewhere.tree_of(self.module)) is not None:
            tree.close()

    def local(self) -> AbstractContextManager[None]:
        """Inside, the module's tree has the tensors of this rank only, as techniques need them."""
        tree = elsewhere.tree_of(self.module)
        return nullcontext() if tree is None else tree.local()

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the module's tree has all tensors: as hooks find them, or those of other stages on meta."""
        tree = elsewhere.tree_of(self.module)
        return nullcontext() if tree is None else tree.whole()

    def gradients_changed(self) -> None:
        """A backward pass has run."""
        if (tree := elsewhere.tree_of(self.module)) is not None:
            tree.gradients_changed()

    def follow_in(self, optimizers: Iterable[Optimizer], with_states: bool) -> None:
        """Lets optimizers made before the module was divided step the parameters that it has now.

        Args:
            optimizers: the trainer's.
            with_states: whether states follow too, as those that Adagrad makes when it is made; else optimizers that
                have states are left as they are, and refused by `refuse_old_parameters`.
        """
        with self.whole():
            for optimizer in optimizers:
                if with_states or not has_states(optimizer):
                    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                    pairs = [(each, current(each)) for each in held if is_moved(each)]
                    exchange(optimizer, [(old, now) for old, now in pairs if now is not None])
                    _move_states(optimizer)

    def stand_ins(self) -> set[nn.Parameter]:
        """The parameters of other stages, without memory, always the same objects."""
        tree = elsewhere.tree_of(self.module)
        return set() if tree is None else {p for p in tree.remote.values() if isinstance(p, nn.Parameter)}

    def bytes_of_parameters(self) -> int:
        """The bytes that the parameters of all ranks take, each counted once."""
        with self.whole():
            return sum(parameter.numel() * parameter.element_size() for parameter in self.module.parameters())

    def source(self) -> Source:
        """Facts that a checkpoint does not tell."""
        return Source(self.mesh.sizes, self._tied)

    def held(self) -> dict[nn.Parameter, None]:
        """The parameters that this rank holds, in the order of the module: that of a set differs between ranks."""
        with self.local():
            return dict.fromkeys(self.module.parameters())

    def steppable(self) -> set[nn.Parameter] | None:
        """The parameters that optimizers may step here, None for any: where all ranks compute alike."""
        alike = self.pipeline.ranks == 1 and self.mesh.loss.size() == 1
        return None if alike else self.known()

    def known(self) -> set[nn.Parameter]:
        """The module's parameters, as they are now: of what was divided no others are left."""
        return {*self.held(), *self.stand_ins()}

    def state_dict(self, in_parts: bool) -> dict[str, Any]:
        """Tensors under the user's names, which are the same on all ranks.

        Args:
            in_parts: whether each rank has what it holds; else rank 0 has the whole, and the others shapes.
        """
        keep, change = self._gathering(in_parts)
        with self.local():
            return self.pipeline.united(whole_state_dict(self.module, change), keep, order=self._names)

    def optimizer_state(self, stored: StoredOptimizer, in_parts: bool) -> dict[str, Any]:
        """The state that one device would have; see `state_dict`."""
        keep, change = self._gathering(in_parts)
        if self.pipeline.ranks > 1:
            refuse_own_states([stored.optimizer])
        with self.local():
            state = stored.state_dict(change)
        return state if self.pipeline.ranks == 1 else {**state, "state": self.pipeline.united(state["state"], keep)}

    def load_optimizer_state(self, stored: StoredOptimizer, state: dict[str, Any]) -> None:
        """Takes this rank's part of the state that one device would have."""
        with self.local():
            stored.load_state_dict(state)

    def _gathering(self, in_parts: bool) -> tuple[bool, Callable[[Tensor], Tensor]]:
        keep = self.mesh.leads_its_stage and not in_parts
        return keep, shown_to_hooks if in_parts else partial(gathered, keep=keep)

    def make_whole(self, copies: int) -> bool:
        """Gives the user's module all parameters, on the host, if the hosts have room for one on each rank.

        Args:
            copies: how many ranks this host has.
        """
        with self.whole():
            fits = all(gather_objects(placement.fits_on_host(self.module, copies), self._host))
        if fits:
            placement.make_whole(self.module)
            placement.move_whole_tensors(self.module, HOST)
            self.pipeline.complete(self.module)
        else:
            log.warning("The whole model does not fit on this host: the module stays divided after the run")
        return fits

    def leave(self) -> None:
        """The run is over: the module's forwards are its own again, and its parameters may be replaced by others."""
        for part in self.module.modules():
            restore_forward(part)


def _move_states(optimizer: Optimizer) -> None:
    """Moves states of parameters to where these are; numbers of steps stay, for most optimizers count on the host."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, GlobalShard):  # made for a parameter that was sharded over all ranks
                value = values[name] = whole_tensor(value)
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                values[name] = value.to(parameter.device)


def readers_of(mesh: ParallelMesh, techniques: Iterable[Technique]) -> dist.ProcessGroup:
    """The ranks whose steps see different samples, or different parts of them."""
    alike = all(technique.traits.steps_see_wholes for technique in techniques if "cp" in technique.axes)
    return (mesh.data if alike else mesh.loss).get_group()


def no_sample() -> Sample:
    """Raises: the model is divided before there is a batch."""
    raise RuntimeError("a technique analyzes a step, but only a pipeline is divided when there is one")


def _tied(module: nn.Module) -> dict[str, str]:
    """Of names of parameters that are another one, the name of that."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: known for name, parameter in named if (known := first.setdefault(id(parameter), name)) != name}
