"""A module of which this rank holds a part: dividing it, and what it is as a whole."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from lightning_parallel.checkpoint.hub import HubState
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import broadcast_tensors
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies import build
from lightning_parallel.strategies.checkpoint.module_state import hub_weights, load_whole_state_dict, saved_metrics
from lightning_parallel.strategies.data.loaders import checksum
from lightning_parallel.strategies.lightning_package import LightningModule, is_overridden
from lightning_parallel.strategies.model.pipeline_group import PipelineGroup
from lightning_parallel.strategies.ranks.agreement import (
    described,
    fingerprint_model,
    gather_objects,
    require_same,
    run_or_raise_on_all,
)
from lightning_parallel.strategies.refusals import faults_of_hooks, faults_of_own_states, hooked, refuse
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.divided.whole_batch import WholeBatch
from lightning_parallel.techniques.division import Division, PartitionContext, Sample
from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer, exchange
from lightning_parallel.techniques.manual_optimization import ManualOptimizationStep, OwnBackwardStep
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.global_shard import GlobalShard, global_of
from lightning_parallel.techniques.tools.moved import current, is_moved
from lightning_parallel.techniques.tools.shards import gathered, is_sharded, whole_tensor

T = TypeVar("T")

log = logging.getLogger(__name__)

HOST = torch.device("cpu")
Map = Callable[[Any], Any]


class DividedModel:
    """The user's module on a mesh: built, loaded, divided, and whole again.

    Args:
        module: the user's, which `configure_model` may be about to build.
        mesh: over which techniques divide it.
        host: all ranks, for messages of the host.
        techniques: by which it is divided, in their order.

    Attributes:
        model: what Lightning calls.
        readers: the ranks whose steps see different samples, or different parts of them.
        tree: what other stages of a pipeline have; None without one, and before the model is divided.
        batch_maps: of all divisions, but for identities: batch -> this rank's part of it.
        run_maps: the user's step -> the step as techniques surround each call of it.
        output_maps: what a step returned -> what one device would return for the batch.
        tied: of names of parameters that are another one, the name of that.
        compares_samples: whether functions that compare samples see those of all ranks.
    """

    def __init__(
        self, module: LightningModule, mesh: ParallelMesh, host: dist.ProcessGroup, techniques: Sequence[Technique]
    ) -> None:
        self.module, self.mesh, self.pipeline = module, mesh, PipelineGroup(mesh)
        self.model: nn.Module = module
        alike = all(technique.traits.steps_see_wholes for technique in techniques if "cp" in technique.axes)
        self.readers = (mesh.data if alike else mesh.loss).get_group()
        self.tree: elsewhere.StageTree | None = None
        self.batch_maps, self.run_maps, self.output_maps = list[Map](), list[Map](), list[Map]()
        self.compares_samples = False
        self._host, self._techniques, self._divisions = host, techniques, list[Division]()
        self._names, self.tied, self._hooked = list[str](), dict[str, str](), dict[str, bool]()
        self._waiting: tuple[Mapping[str, Any], bool, bool] | None = None

    # ---------------------------------------------------------------- before it is divided

    def load(self, state: Mapping[str, Any], strict: bool, first: bool) -> None:
        """Load into the full model, or its shards; into one on meta once it has values.

        Args:
            state: full tensors, under the names of the module or of the hub.
            strict: whether names must fit.
            first: whether this rank is the first of those that see different data.
        """
        if isinstance(state, HubState):
            state, strict = hub_weights(self.module, state, strict), False  # told of what is missing or left over
        # values come once `reset_parameters` has run, which would write over them
        if any(parameter.is_meta for parameter in self.module.parameters()):
            self._waiting = (state, strict, first)
            return
        load_whole_state_dict(self.module, state, strict)
        # of what all had summed or listed, only the first of the ranks that see different data starts
        for metric in () if first else saved_metrics(self.module):
            for name, saved in metric._persistent.items():
                if saved and metric._reductions[name] in (dim_zero_sum, dim_zero_cat):
                    default = metric._defaults[name]
                    fresh = default.clone().to(metric.device) if isinstance(default, Tensor) else list(default)
                    setattr(metric, name, fresh)

    def make_undivided(self) -> None:
        """Make on every rank's host a module that was not divided, as there was no batch. Collective."""
        build.Placement(self.module).finish(HOST, HOST, self._host)
        if self._waiting is not None:
            self.load(*self._waiting)

    def divide(self, plan: ParallelPlan, sample: Callable[[], Sample], device: torch.device) -> None:
        """Divide the model and make what this rank keeps, with the values of rank 0. Collective.

        Args:
            plan: what the model's parts are.
            sample: takes a step for a technique that analyzes one.
            device: this rank's.
        """
        module, mesh, self.plan = self.module, self.mesh, plan
        self._names, first = list(module.state_dict()), dict[int, str]()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if (known := first.setdefault(id(parameter), name)) != name:
                self.tied[name] = known
        self._hooked = hooked(dict(module.named_parameters()))
        # all ranks meet here first: an unlike model is an error rather than a hang in a later collective
        prints = gather_objects(fingerprint_model(module), self._host)
        require_same("the model", prints, "build it from the same configuration everywhere")
        # from here to `finish` parameters that were born sharded are on meta: techniques move no memory
        moving = build.Placement(module)
        if self._host.size() > 1:
            tensors = (*module.parameters(), *module.buffers())
            broadcast_tensors((it for it in tensors if not (it.is_meta or is_sharded(it))), mesh.world, device)
        techniques = self._techniques
        if mesh.loss.size() > 1 and not any(technique.traits.averages_gradients for technique in techniques):
            techniques = (*techniques, DataParallel(1))
        context = PartitionContext(mesh, plan, sample, self._divisions)

        def analyze() -> list[Any]:
            return [technique.analyze(module, context) for technique in techniques]

        # all raise if one cannot, or if they find different things
        analyses = run_or_raise_on_all(analyze, "analyze the model, to divide it", self._host)
        sums = gather_objects(checksum(list(map(described, analyses))), self._host)
        require_same("what the analysis of model and step shows", sums, "build model and data alike everywhere")
        context = PartitionContext(mesh, plan, no_sample, self._divisions)  # which holds no batch, and is kept
        for technique, analysis in zip(techniques, analyses, strict=True):
            division = technique.divide(self.model, context, analysis)
            self.model = division.model
            self._divisions.append(division)
        if mesh.data.size() > 1 and all(division.losses_over_batch for division in self._divisions):
            # functions that compare samples see those of all ranks, for they see all of this one at once
            whole = WholeBatch(module, Ranks(self.readers, "batch"), plan)
            self._divisions += [whole] if whole.acts else []
            self.compares_samples = whole.acts
        self.tree = elsewhere.tree_of(module)
        self.batch_maps = [each.batch for each in self._divisions if type(each).batch is not Division.batch]
        self.run_maps = [each.run for each in self._divisions if type(each).run is not Division.run]
        # the last technique that cut the batch is the first that joins outputs
        backwards = self._divisions[::-1]
        self.output_maps = [each.outputs for each in backwards if type(each).outputs is not Division.outputs]
        offloads = any(technique.traits.shards_on_host for technique in techniques)
        moving.finish(device, HOST if offloads else device, self._host)
        if self._waiting is not None:
            self.load(*self._waiting)
        build.move_whole_tensors(module, device)

    def refuse_foreign_hooks(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise on all ranks for hooks of torch on parameters and optimizers that would see parts of gradients."""
        with self.local():
            held = dict(self.module.named_parameters())
        batch = self.pipeline.ranks > 1 or self.mesh.loss.size() > 1
        refuse(faults_of_hooks(self._hooked, held, batch, optimizers if self.in_parts else ()), self._host)

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

    def outputs(self, outputs: T) -> T:
        """What a step returned, as one device would return it for the batch."""
        for join in self.output_maps:
            outputs = join(outputs)
        return outputs

    def full(self, name: str, given: T) -> T:
        """What a step gives to a logger, with full tensors; all ranks whose step calls the logger must call.

        Args:
            name: what the step calls.
            given: the arguments.
        """
        if self.pipeline.ranks > 1:  # the last stage ends the step, and loggers write on rank 0
            raise ValueError(
                f"{name} is called in a step, but each of the {self.pipeline.ranks} stages of a pipeline runs a part "
                "of the step, for each microbatch, and loggers write on rank 0 only, which does not have the rest; log "
                "numbers by self.log, return tensors from the step, and call the logger in "
                "on_train_batch_end(self, outputs, batch, batch_idx), which finds them, and weights, of the whole "
                "batch and model on every rank"
            )
        with torch.no_grad():
            full: T = tree_map_only(Divided, Divided.whole, self.outputs(given))
        return full

    # ---------------------------------------------------------------- who holds what

    @property
    def in_parts(self) -> bool:
        """Whether ranks may hold only a part of the parameters; the same on all of them."""
        return self.pipeline.ranks > 1 or any(map(is_sharded, self.module.parameters()))

    def steps_parts(self, step: Step) -> bool:
        """Whether optimizers step parts of parameters, or will: what is frozen is divided when it learns."""
        stored = map(step.stored, self.module.parameters())
        return self.mesh.sizes["dp_shard"] > 1 or any(map(is_sharded, stored))

    def ranks_holding(self) -> Callable[[Tensor], int]:
        """A function that tells on how many ranks a parameter, or a part of it, is held."""
        with self.local():
            named = dict(self.module.named_parameters())
        ranks = self.mesh.world_size // self.pipeline.ranks
        stages = Counter(name for held in self.pipeline.gathered(sorted(named)) for name in held)
        counts = {id(parameter): stages[name] * ranks for name, parameter in named.items()}
        return lambda parameter: counts.get(id(parameter), ranks)

    # ---------------------------------------------------------------- the whole

    def local(self) -> AbstractContextManager[None]:
        """Inside, the module's tree has the tensors of this rank only, as techniques need them."""
        return nullcontext() if self.tree is None else self.tree.local()

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the module's tree has all tensors: as hooks find them, or those of other stages on meta."""
        return nullcontext() if self.tree is None else self.tree.whole()

    def follow_in(self, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers made before the module was divided step the parameters that it has now, with their states."""
        with self.whole():
            for optimizer in optimizers:
                held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                pairs = [(each, current(each)) for each in held if is_moved(each)]
                exchange(optimizer, [(old, now) for old, now in pairs if now is not None])
                for parameter, values in optimizer.state.items():
                    for name, value in values.items() if isinstance(values, dict) else ():
                        if isinstance(value, GlobalShard):  # made for a parameter that was sharded over all ranks
                            value = values[name] = whole_tensor(value)
                        # numbers of steps stay: most optimizers count on the host
                        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                            values[name] = value.to(parameter.device)

    def stand_ins(self) -> set[nn.Parameter]:
        """The parameters of other stages, without memory, always the same objects."""
        return set() if self.tree is None else {p for p in self.tree.remote.values() if isinstance(p, nn.Parameter)}

    def held(self) -> dict[nn.Parameter, None]:
        """The parameters that this rank holds, in the order of the module: that of a set differs between ranks."""
        with self.local():
            return dict.fromkeys(self.module.parameters())

    def known(self) -> set[nn.Parameter]:
        """The module's parameters, as they are now: of what was divided no others are left."""
        return {*self.held(), *self.stand_ins()}

    def state_dict(self, in_parts: bool) -> dict[str, Any]:
        """Tensors under the user's names, which are the same on all ranks.

        Args:
            in_parts: whether each rank has what it holds; else rank 0 has the whole, and the others shapes.
        """
        keep = self.mesh.leads_its_stage and not in_parts
        change = global_of if in_parts else partial(gathered, keep=keep)
        with self.local():
            with torch.no_grad(), ExitStack() as after:
                for metric in saved_metrics(self.module):  # which are saved as what all ranks have seen
                    if dist.is_initialized() and not metric._is_synced:
                        metric.sync(process_group=metric.process_group, distributed_available=dist.is_initialized)
                        after.callback(metric.unsync)
                # tensors that may be shards are gathered one at a time, on all ranks, or stay as they are
                state: dict[str, Any] = self.module.state_dict()
                state = {name: change(it) if isinstance(it, Tensor) else it for name, it in state.items()}
            return self.pipeline.united(state, keep, order=self._names)

    def optimizer_state(self, stored: StoredOptimizer, in_parts: bool) -> dict[str, Any]:
        """The state that one device would have; see `state_dict`."""
        keep = self.mesh.leads_its_stage and not in_parts
        change = global_of if in_parts else partial(gathered, keep=keep)
        if self.pipeline.ranks > 1:
            refuse(faults_of_own_states([stored.optimizer]))
        with self.local():
            state = stored.state_dict(change)
        return state if self.pipeline.ranks == 1 else {**state, "state": self.pipeline.united(state["state"], keep)}

    def make_whole(self, optimizers: Sequence[StoredOptimizer], copies: int) -> bool:
        """Give the module all parameters, and its optimizers all states, on the host, if there is room. Collective.

        Args:
            optimizers: the trainer's.
            copies: how many ranks this host has.

        Returns:
            Whether the module is whole.
        """
        sharded, in_parts = [each for each in optimizers if each.has_shards], self.in_parts
        if not sharded and not in_parts:
            return True
        with self.whole():
            states = sum(each.whole_bytes() for each in sharded)
            needed = (sum(p.numel() * p.element_size() for p in self.module.parameters()) + states) * copies
            fits = "SC_AVPHYS_PAGES" not in os.sysconf_names  # macOS does not say
            if not fits:  # room to spare is a fifth
                fits = needed < 0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            fits = all(gather_objects(fits, self._host))
        if not fits:
            log.warning("The whole model and the states of its optimizers do not fit on this host: they stay divided")
            return not in_parts
        with self.local():
            # before the parameters are gathered: states are known by the shards that are stepped
            made = [each.whole_state() for each in sharded]
        if in_parts:
            build.make_whole(self.module)
            build.move_whole_tensors(self.module, HOST)
            self.pipeline.complete(self.module)
            self.tree = None
        self.follow_in([each.optimizer for each in sharded])
        for each, state in zip(sharded, made, strict=True):
            each.set_whole_state(state if self.pipeline.ranks == 1 else self.pipeline.completed(state))
        return True


def no_sample() -> Sample:
    """Raises: the model is divided before there is a batch."""
    raise RuntimeError("a technique analyzes a step, but only a pipeline is divided when there is one")
