"""Tensor parallel: every rank holds some features of each layer and computes with them.

Source: M. Shoeybi et al., Megatron-LM, 2019; V. Korthikanti et al., MLSys 2023 (sequence parallel).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.arguments import true_or_false
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import by_kind
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.plan.styles import find_styles
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.parts import Parameters, Part, computing
from lightning_parallel.techniques.divided.step import ComputingStep, DividedStep, DividedTensors
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tensor_parallel.layout import (
    DividedModule,
    divide_parameters,
    find_divided,
    is_undivided,
)
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.shards import local

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Divides the features of linear maps, the heads of attention and the vocabulary over ranks.

    Args:
        size: number of ranks that share one copy of the model and read the same samples; "auto" takes the ranks that
            no other technique claims.
        sequence_parallel: whether each rank keeps only its part of the sequence between divided layers, norms and
            dropout included: the same bytes on the wire, activations divided by `size`.
        overlap: with a split sequence, lets torch's compiler overlap products of compiled blocks with the collective
            before or after them, on GPUs that reach each other's memory. Without `Compile` it changes nothing.

    Raises:
        ValueError: switches that contradict each other, or (when training starts) a model without a known way to divide
            it, or sizes that do not divide.
    """

    size: Size = "auto"
    _: KW_ONLY
    sequence_parallel: bool = True
    overlap: bool = False

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        true_or_false("TensorParallel", sequence_parallel=self.sequence_parallel, overlap=self.overlap)
        if self.overlap and not self.sequence_parallel:
            raise ValueError(
                "TensorParallel(sequence_parallel=False, overlap=True): only a split sequence can do that; leave "
                "sequence_parallel at True, or overlap at False"
            )

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"tp": self.size}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(replaces_tensors=True, replaces_parameters=True)

    def analyze(self, model: nn.Module, ground: PartitionContext) -> list[DividedModule]:
        """Finds out on the whole model what is divided and how, and whether its sizes allow it."""
        ranks = ground.mesh.sizes["tp"]
        if ranks == 1:
            return []
        styles = ground.plan.styles or find_styles(model, ground.plan)
        divided = find_divided(model, styles, bool(ground.plan.styles))
        if not divided:
            raise ValueError(
                f"{self!r} finds nothing to divide in {type(model).__name__}: {ground.plan.source} names no tensor "
                "styles, and there is no linear map or embedding. Give it a plan, such as ParallelPlan("
                f"blocks={ground.plan.blocks!r}, styles={{'net.layers.*.up': 'colwise', "
                "'net.layers.*.down': 'rowwise'}), with the names of the maps into and out of the features to be "
                "divided; for models without such pairs, as conv nets, use ZeroStrategy or DataParallelStrategy"
            )
        for each in divided:
            if each.features % sum(each.style.ratio):
                raise ValueError(
                    f"{each.name} has {each.features} features, which are no parts in the ratio "
                    f"{':'.join(map(str, each.style.ratio))}; correct its style in the plan"
                )
        # Where there are fewer heads of keys in a module than ranks every rank keeps it whole.
        divided = [
            each for each in divided
            if each.heads is None or not any(each.heads.stay_whole(part, ranks) for part in each.parts)
        ]  # fmt: skip
        if dist.get_rank() == 0:
            log.info("Tensor parallel divides %s", dict(styles))
        return divided

    def divide(self, model: nn.Module, ground: PartitionContext, seen: list[DividedModule]) -> Division:
        """Keeps this rank's part of every weight that the styles name."""
        if not seen:
            return Division(model)
        # A stage of a pipeline may have one parameter of a layer alone, where its loss reads it. How that is divided
        # the whole model tells, as on the stage that runs the layer.
        mesh, modules = ground.mesh, dict(model.named_modules())
        here = [replace(each, module=modules[each.name]) for each in seen if each.name in modules]
        divide_parameters(model, [each for each in here if is_undivided(each.module)], mesh["tp"])
        sequence_dim = ground.plan.sequence_dim if self.sequence_parallel else None
        ranks = Ranks(mesh["tp"].get_group(), "tp", sequence_dim)
        if self.overlap and ranks.group.name() == "nccl":
            # A pass of inductor splits products into parts that start as they arrive, or leave as they are made.
            # Source: S. Wang et al., ASPLOS 2023; torch.ops.symm_mem.
            import torch._inductor.config
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(ranks.group.group_name)
            torch._inductor.config._micro_pipeline_tp = True
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and elsewhere.SHARED not in vars(parameter):
                vars(parameter)["_replicated_path"] = name  # one that another stage has too is summed where it is used
        return DividedFeatures(model, ranks, Parameters(model, ranks, Divided))


@dataclass(eq=False)
class DividedFeatures(DividedTensors):
    """A model of whose features, heads and vocabulary each rank has a part."""

    parameters: Parameters

    def outputs(self, outputs: Any) -> Any:
        """Makes whole what ranks have parts of."""
        return tree_map_only((Divided, Part), lambda each: computing(each).whole("what a step returns"), outputs)

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Forgets, before each call, what was made of the tensors of the call before."""

        def forgetting(*args: Any, **kwargs: Any) -> T:
            self.ranks.made_of.forget()
            return run(*args, **kwargs)

        return forgetting

    def show(self) -> None:
        """See `Division.show`."""
        self.parameters.find()

    def settle(self, step: Step) -> Step:
        """Averages gradients that ranks have summands of; the module keeps whole tensors."""
        return DividedStep(TensorParallelStep(step, self.model, self.parameters), self.model, self.ranks)


class TensorParallelStep(ComputingStep):
    """Runs a step on divided modules.

    Of parameters that are whole but met divided tensors, such as norms while the sequence is split, ranks have unlike
    gradients, of which the mean is right: what a rank computed for its own elements counts as often as there are ranks.
    They become means in one message, after all other reductions; a mean of what is alike already changes nothing.

    Args:
        inner: the step to wrap.
        model: as it is stored between steps.
        parameters: of it.
    """

    def __init__(self, inner: Step, model: nn.Module, parameters: Parameters) -> None:
        super().__init__(inner, parameters)
        self._stored = dict(model.named_parameters())

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        super().backward(run)
        if self.synced:
            # A step may run several forwards before its backwards, so what was noted stays.
            met = sorted(self.parameters.ranks.met)
            with torch.no_grad():
                for same in by_kind([self._stored[name] for name in met if name in self._stored]):
                    self._average(same)

    def _average(self, same: Sequence[Tensor]) -> None:
        """One message, of parameters of one dtype: all gradients, and for each whether this rank has it."""
        gradients = [parameter.grad for parameter in same]
        unused = [place for place, gradient in enumerate(gradients) if gradient is None]
        for place in unused:
            gradients[place] = torch.zeros_like(same[place])
        own = [local(gradient) for gradient in gradients if gradient is not None]
        flags = own[0].new_ones(len(own))  # 1 for each gradient that this rank has
        if unused:
            flags[unused] = 0
        message = torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in (*own, flags)])
        dist.all_reduce(message, group=self.parameters.ranks.group)
        message /= self.parameters.ranks.count
        *means, flags = torch.split(message, [each.numel() for each in (*own, flags)])
        torch._foreach_copy_(own, [s if s.shape == o.shape else s.view_as(o) for s, o in zip(means, own, strict=True)])
        for place, used in zip(unused, flags[unused].tolist() if unused else (), strict=True):
            if used:
                same[place].grad = gradients[place]
