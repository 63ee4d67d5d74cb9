"""The user's module, of which this rank holds a part: dividing it, saving it, and making it full again."""

from __future__ import annotations

import logging
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
from lightning_parallel.strategies.checkpoint.module_state import hub_weights, load_full_state_dict, saved_metrics
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
from lightning_parallel.strategies.refusals import custom_state_faults, faults_of_hooks, hooked, memory_of_host, refuse
from lightning_parallel.strategies.side_effects import HOST
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.divided.whole_batch import WholeBatch
from lightning_parallel.techniques.division import Division, PartitionContext, Sample
from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer, exchange
from lightning_parallel.techniques.manual_optimization import ManualOptimizationStep, UserBackwardStep
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tools import stage_tree
from lightning_parallel.techniques.tools.global_shard import GlobalShard, as_global_shard
from lightning_parallel.techniques.tools.replaced_parameters import current, is_replaced
from lightning_parallel.techniques.tools.shards import full_tensor_of, gathered, is_sharded

T = TypeVar("T")

log = logging.getLogger(__name__)

Map = Callable[[Any], Any]


class DividedModel:
    """The user's module during a run: loaded, divided over a mesh, saved, and made full again.

    Args:
        module: the user's; `configure_model` may build its layers later.
        mesh: the mesh over which techniques divide the module.
        host: all ranks; the group sends from host memory.
        techniques: divide the module, in this order.

    Attributes:
        model: the module that Lightning calls: the user's, or a wrapper of it that a technique made.
        readers: the ranks whose steps get different samples, or different parts of samples.
        tree: tensors of other pipeline stages; None without a pipeline, and before the model is divided.
        batch_maps: `Division.batch` of each division that overrides it: batch -> this rank's part of the batch.
        run_maps: `Division.run`, likewise: the user's step -> the step with what a technique does around each call.
        output_maps: `Division.outputs`, likewise: output of a step -> output of one device for the batch.
        tied: name of a tied parameter -> the first name of the same parameter.
        compares_samples: whether functions that compare samples get those of all ranks.
    """

    def __init__(
        self, module: LightningModule, mesh: ParallelMesh, host: dist.ProcessGroup, techniques: Sequence[Technique]
    ) -> None:
        self.module, self.mesh, self.pipeline = module, mesh, PipelineGroup(mesh)
        self.model: nn.Module = module
        same_values = all(technique.traits.replicates_steps for technique in techniques if "cp" in technique.axes)
        self.readers = (mesh.data if same_values else mesh.loss).get_group()
        self.tree: stage_tree.StageTree | None = None
        self.batch_maps, self.run_maps, self.output_maps = list[Map](), list[Map](), list[Map]()
        self.compares_samples = False
        self._host, self._techniques, self._divisions = host, techniques, list[Division]()
        self._names, self.tied, self._hooked = list[str](), dict[str, str](), dict[str, bool]()
        self._waiting: tuple[Mapping[str, Any], bool, bool] | None = None

    # ---------------------------------------------------------------- before it is divided

    def load(self, state: Mapping[str, Any], strict: bool, first: bool) -> None:
        """Load a state into the full model or its shards; later if parameters are still on meta. No communication.

        Args:
            state: full tensors, under the names of the module or of the hub.
            strict: whether missing and unexpected names are errors.
            first: whether this rank is the first of those that read different samples.
        """
        if isinstance(state, HubState):
            # it reports missing and unexpected names itself
            state, strict = hub_weights(self.module, state, strict), False
        # load after `reset_parameters` has run, which would overwrite the values
        if any(parameter.is_meta for parameter in self.module.parameters()):
            self._waiting = (state, strict, first)
            return
        load_full_state_dict(self.module, state, strict)
        # a saved sum or list has the samples of all ranks: the first rank continues it, others start from the default
        for metric in () if first else saved_metrics(self.module):
            for name, saved in metric._persistent.items():
                if saved and metric._reductions[name] in (dim_zero_sum, dim_zero_cat):
                    default = metric._defaults[name]
                    initial = default.clone().to(metric.device) if isinstance(default, Tensor) else list(default)
                    setattr(metric, name, initial)

    def materialize_undivided(self) -> None:
        """Make the full module in host memory of every rank, because no batch divided it. Collective over all ranks."""
        build.ParameterMove(self.module).finish(HOST, HOST, self._host)
        if self._waiting is not None:
            self.load(*self._waiting)

    def divide(self, plan: ParallelPlan, sample: Callable[[], Sample], device: torch.device) -> None:
        """Divide the model by all techniques, with the values of rank 0. Collective over all ranks.

        Args:
            plan: names and styles of the model's parts.
            sample: returns a sample step for a technique that analyzes one.
            device: this rank's.

        Raises:
            ValueError: ranks have different models, or their analyses differ.
        """
        module, mesh, self.plan = self.module, self.mesh, plan
        self._names, first_names = list(module.state_dict()), dict[int, str]()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if (known := first_names.setdefault(id(parameter), name)) != name:
                self.tied[name] = known
        self._hooked = hooked(dict(module.named_parameters()))
        # before other collectives: models that differ between ranks raise here instead of hanging there
        fingerprints = gather_objects(fingerprint_model(module), self._host)
        require_same("the model", fingerprints, "build it from the same configuration everywhere")
        # until `finish`, parameters that `configure_model` built as shards are on meta: techniques move no memory
        placement = build.ParameterMove(module)
        if self._host.size() > 1:
            tensors = (*module.parameters(), *module.buffers())
            broadcast_tensors((each for each in tensors if not (each.is_meta or is_sharded(each))), mesh.world, device)
        techniques = self._techniques
        if mesh.loss.size() > 1 and not any(technique.traits.averages_gradients for technique in techniques):
            techniques = (*techniques, DataParallel(1))
        context = PartitionContext(mesh, plan, sample, self._divisions)

        def analyze() -> list[Any]:
            return [technique.analyze(module, context) for technique in techniques]

        # all ranks raise if one of them does, or if their analyses differ
        analyses = run_or_raise_on_all(analyze, "analyze the model, to divide it", self._host)
        checksums = gather_objects(checksum(list(map(described, analyses))), self._host)
        require_same("the analysis of model and step", checksums, "build the same model and data on all ranks")
        context = PartitionContext(mesh, plan, no_sample, self._divisions)  # divisions keep it: without the batch
        for technique, analysis in zip(techniques, analyses, strict=True):
            division = technique.divide(self.model, context, analysis)
            self.model = division.model
            self._divisions.append(division)
        if mesh.data.size() > 1 and all(division.losses_over_batch for division in self._divisions):
            # functions that compare samples get all of this rank at once here, so they can get those of all ranks
            whole_batch = WholeBatch(module, Ranks(self.readers, "batch"), plan)
            self._divisions += [whole_batch] if whole_batch.acts else []
            self.compares_samples = whole_batch.acts
        self.tree = stage_tree.tree_of(module)
        self.batch_maps = [each.batch for each in self._divisions if type(each).batch is not Division.batch]
        self.run_maps = [each.run for each in self._divisions if type(each).run is not Division.run]
        # outputs are joined in reverse order: the last technique that split the batch joins first
        backwards = self._divisions[::-1]
        self.output_maps = [each.outputs for each in backwards if type(each).outputs is not Division.outputs]
        offloads = any(technique.traits.shards_on_host for technique in techniques)
        placement.finish(device, HOST if offloads else device, self._host)
        if self._waiting is not None:
            self.load(*self._waiting)
        build.move_unsharded_tensors(module, device)

    def refuse_foreign_hooks(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise on all ranks if a torch hook on a parameter or optimizer would get a shard or partial of a gradient."""
        with self.local():
            parameters = dict(self.module.named_parameters())
        batch = self.pipeline.ranks > 1 or self.mesh.loss.size() > 1
        refuse(faults_of_hooks(self._hooked, parameters, batch, optimizers if self.in_parts else ()), self._host)

    # ---------------------------------------------------------------- the maps of all divisions

    def step(self) -> Step:
        """Return the step of all techniques. Called when the parameters have values and are in place."""
        step = Step()
        for division in self._divisions:
            step = division.step(step)
        for division in self._divisions:
            step = division.outermost_step(step)
        if self.module.automatic_optimization or self.pipeline.ranks > 1:  # a pipeline's step runs backward itself
            return UserBackwardStep(step) if is_overridden("backward", self.module) else step
        return ManualOptimizationStep(step)

    def outputs(self, outputs: T) -> T:
        """Return the output of a step as one device would return it for the batch."""
        for join in self.output_maps:
            outputs = join(outputs)
        return outputs

    def full(self, name: str, given: T) -> T:
        """Return the arguments of a logger's method with full tensors. All ranks that run the step must call it.

        Args:
            name: the method that the step calls, for errors.
            given: its arguments.

        Raises:
            ValueError: in a pipeline.
        """
        if self.pipeline.ranks > 1:  # the last stage finishes the step, but loggers write on rank 0
            raise ValueError(
                f"{name} is called in a step, but loggers write on rank 0 only, which runs one of the "
                f"{self.pipeline.ranks} stages of the pipeline, one microbatch at a time. Log numbers by self.log. "
                "Return tensors from the step, and call the logger in on_train_batch_end(self, outputs, batch, "
                "batch_idx), where every rank has the outputs of the whole batch and the full weights"
            )
        with torch.no_grad():
            full: T = tree_map_only(Divided, Divided.whole, self.outputs(given))
        return full

    # ---------------------------------------------------------------- who holds which parameters

    @property
    def in_parts(self) -> bool:
        """Whether ranks may hold only a part of the parameters; the same on all ranks."""
        return self.pipeline.ranks > 1 or any(map(is_sharded, self.module.parameters()))

    def has_sharded_optimizers(self, step: Step) -> bool:
        """Whether optimizers step shards, now or later: ZeRO shards a frozen parameter once it is trained."""
        stored = map(step.stored, self.module.parameters())
        return self.mesh.sizes["dp_shard"] > 1 or any(map(is_sharded, stored))

    def ranks_holding(self) -> Callable[[Tensor], int]:
        """Return a function: parameter -> number of ranks with it or a shard of it. Collective over the pipeline."""
        with self.local():
            named = dict(self.module.named_parameters())
        ranks = self.mesh.world_size // self.pipeline.ranks
        stages = Counter(name for names in self.pipeline.gathered(sorted(named)) for name in names)
        counts = {id(parameter): stages[name] * ranks for name, parameter in named.items()}
        return lambda parameter: counts.get(id(parameter), ranks)

    # ---------------------------------------------------------------- the full module

    def local(self) -> AbstractContextManager[None]:
        """Inside, the module's tree has only this rank's tensors, in the form that techniques need."""
        return nullcontext() if self.tree is None else self.tree.local()

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the module's tree has all tensors: as in hooks, or those of other stages without values."""
        return nullcontext() if self.tree is None else self.tree.whole()

    def replace_parameters_in(self, optimizers: Iterable[Optimizer]) -> None:
        """Replace parameters by current ones, with their states, in optimizers made before the module was divided."""
        with self.whole():
            for optimizer in optimizers:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                pairs = [(old, current(old)) for old in parameters if is_replaced(old)]
                exchange(optimizer, [(old, now) for old, now in pairs if now is not None])
                for parameter, values in optimizer.state.items():
                    for name, value in values.items() if isinstance(values, dict) else ():
                        if isinstance(value, GlobalShard):  # made while the parameter was sharded over all ranks
                            value = values[name] = full_tensor_of(value)
                        # step counters stay where they are: most optimizers keep them on the host
                        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                            values[name] = value.to(parameter.device)

    def stand_ins(self) -> set[nn.Parameter]:
        """Return the stand-ins for parameters of other stages: without memory, always the same objects."""
        return set() if self.tree is None else {p for p in self.tree.remote.values() if isinstance(p, nn.Parameter)}

    def held(self) -> dict[nn.Parameter, None]:
        """Return this rank's parameters as keys, in module order: the order of a set would differ between ranks."""
        with self.local():
            return dict.fromkeys(self.module.parameters())

    def known(self) -> set[nn.Parameter]:
        """Return all current parameters of the module: this rank's, and stand-ins for those of other stages."""
        return {*self.held(), *self.stand_ins()}

    def state_dict(self, in_parts: bool) -> dict[str, Any]:
        """Return tensors under the user's names, which are the same on all ranks. Collective over all ranks.

        Args:
            in_parts: if True, each rank returns its shards; else rank 0 returns full tensors, others meta tensors.
        """
        keep = self.mesh.is_first_of_stage and not in_parts
        change = as_global_shard if in_parts else partial(gathered, keep=keep)
        with self.local():
            with torch.no_grad(), ExitStack() as after:
                for metric in saved_metrics(self.module):  # saved states are those of all ranks
                    if dist.is_initialized() and not metric._is_synced:
                        metric.sync(process_group=metric.process_group, distributed_available=dist.is_initialized)
                        after.callback(metric.unsync)
                # gather shards one at a time, on all ranks, or keep them as shards
                state: dict[str, Any] = self.module.state_dict()
                state = {name: change(value) if isinstance(value, Tensor) else value for name, value in state.items()}
            return self.pipeline.united(state, keep, order=self._names)

    def optimizer_state(self, stored: StoredOptimizer, in_parts: bool) -> dict[str, Any]:
        """Return the state that an optimizer would have on one device; see `state_dict`. Collective over all ranks."""
        keep = self.mesh.is_first_of_stage and not in_parts
        change = as_global_shard if in_parts else partial(gathered, keep=keep)
        if self.pipeline.ranks > 1:
            refuse(custom_state_faults([stored.optimizer]))
        with self.local():
            state = stored.state_dict(change)
        return state if self.pipeline.ranks == 1 else {**state, "state": self.pipeline.united(state["state"], keep)}

    def make_whole(self, optimizers: Sequence[StoredOptimizer], copies: int) -> bool:
        """Gather all parameters and optimizer states to the host, if they fit. Collective over all ranks.

        Args:
            optimizers: the trainer's.
            copies: number of ranks on this host: each gets a copy.

        Returns:
            Whether the module is full.
        """
        sharded, in_parts = [stored for stored in optimizers if stored.has_shards], self.in_parts
        if not sharded and not in_parts:
            return True
        with self.whole():
            states = sum(stored.full_bytes() for stored in sharded)
            needed = (sum(p.numel() * p.element_size() for p in self.module.parameters()) + states) * copies
            free = memory_of_host("SC_AVPHYS_PAGES")  # macOS does not report it: assume that they fit
            # a fifth of free memory stays free
            fits = all(gather_objects(free is None or needed < 0.8 * free, self._host))
        if not fits:
            log.warning("The full model and its optimizer states do not fit on this host: they stay divided")
            return not in_parts
        with self.local():
            # before the parameters are gathered: states are keyed by the shards that are stepped
            full_states = [stored.full_state() for stored in sharded]
        if in_parts:
            build.restore_full_parameters(self.module)
            build.move_unsharded_tensors(self.module, HOST)
            self.pipeline.complete(self.module)
            self.tree = None
        self.replace_parameters_in([stored.optimizer for stored in sharded])
        for stored, state in zip(sharded, full_states, strict=True):
            # an optimizer's own state_dict may be anything; a pipeline refuses such optimizers
            united = state if self.pipeline.ranks == 1 else self.pipeline.united(state, keep=True, to_all=True)
            stored.set_full_state(united)
        return True


def no_sample() -> Sample:
    """Raise: without a pipeline the model is divided before there is a batch, so there is no sample step."""
    raise RuntimeError("only a pipeline has a step to analyze when the model is divided")
