"""Tensor parallel: every rank holds a shard of the features of each layer and computes with it.

Source: M. Shoeybi et al., Megatron-LM, 2019; V. Korthikanti et al., MLSys 2023 (sequence parallel).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.arguments import true_or_false
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import group_by_dtype_and_device
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.plan.styles import find_styles
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.step import ComputingDivision, ComputingStep, DividedStep, DividedTensors
from lightning_parallel.techniques.divided.step_parameters import Parameters
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tensor_parallel.layout import (
    DividedModule,
    divide_parameters,
    find_divided,
    is_undivided,
)
from lightning_parallel.techniques.tools import stage_tree
from lightning_parallel.techniques.tools.shards import local

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Shards the features of linear maps, the heads of attention and the vocabulary over ranks.

    Args:
        size: number of ranks that share one copy of the model and read the same samples; "auto" takes the ranks that
            no other technique claims.
        sequence_parallel: whether the sequence is sharded between sharded layers, in norms and dropout: the ranks
            communicate as many bytes, and activations take 1/size of the memory there.
        overlap: with `sequence_parallel`, lets torch's compiler overlap matrix products of compiled blocks with the
            collective before or after them, on GPUs with peer-to-peer access. Without `Compile` it changes nothing.

    Raises:
        ValueError: options that contradict each other, or (when training starts) a model with no known tensor styles,
            or sizes that do not divide.
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
                "TensorParallel(sequence_parallel=False, overlap=True): overlap needs a divided sequence; leave "
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

    def analyze(self, model: nn.Module, context: PartitionContext) -> list[DividedModule]:
        """Find the modules of the full model to shard and how, and check that their sizes allow it."""
        ranks = context.mesh.sizes["tp"]
        if ranks == 1:
            return []
        styles = context.plan.styles or find_styles(model, context.plan)
        divided = find_divided(model, styles, bool(context.plan.styles))
        if not divided:
            raise ValueError(
                f"{self!r} finds nothing to divide in {type(model).__name__}: {context.plan.source} names no tensor "
                "styles, and there is no linear layer or embedding. Pass a plan, such as "
                f"ParallelPlan(blocks={context.plan.blocks!r}, styles={{'net.layers.*.up': 'colwise', "
                "'net.layers.*.down': 'rowwise'}), with the names of the layers into and out of the features to "
                "divide; for models without such pairs, e.g. conv nets, use ZeroStrategy or DataParallelStrategy"
            )
        for each in divided:
            if each.features % sum(each.style.ratio):
                raise ValueError(
                    f"{each.name} has {each.features} features, which cannot be split "
                    f"{':'.join(map(str, each.style.ratio))}; correct its style in the plan"
                )
        # Projections of keys and values with fewer heads than ranks are replicated.
        divided = [
            each for each in divided
            if each.heads is None or not any(each.heads.stay_replicated(part, ranks) for part in each.parts)
        ]  # fmt: skip
        if dist.get_rank() == 0:
            log.info("Tensor parallel divides %s", dict(styles))
        return divided

    def divide(self, model: nn.Module, context: PartitionContext, analysis: list[DividedModule]) -> Division:
        """Replace every weight that the styles name by this rank's shard."""
        if not analysis:
            return Division(model)
        # A pipeline stage may have a single parameter of a layer, which its loss reads. `analysis` comes from the full
        # model, so that it is sharded as on the stage that runs the layer.
        mesh, modules = context.mesh, dict(model.named_modules())
        here = [replace(each, module=modules[each.name]) for each in analysis if each.name in modules]
        divide_parameters(model, [each for each in here if is_undivided(each.module)], mesh["tp"])
        sequence_dim = context.plan.sequence_dim if self.sequence_parallel else None
        ranks = Ranks(mesh["tp"].get_group(), "tp", sequence_dim)
        if self.overlap and ranks.group.name() == "nccl":
            # An inductor pass splits matrix products into chunks, which start as inputs arrive or are sent when done.
            # Source: S. Wang et al., ASPLOS 2023; torch.ops.symm_mem.
            import torch._inductor.config
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(ranks.group.group_name)
            torch._inductor.config._micro_pipeline_tp = True
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and stage_tree.SHARED not in vars(parameter):
                vars(parameter)["_replicated_path"] = name  # not if pipeline stages share it: summed where it is used
        return DividedFeatures(model, Parameters(model, ranks, Divided), ranks)


@dataclass(eq=False)
class DividedFeatures(DividedTensors, ComputingDivision):
    """A model whose features, heads and vocabulary are sharded over ranks."""

    def outermost_step(self, step: Step) -> Step:
        """Wrap the step: average the gradients of replicated parameters, and leave full tensors in the module."""
        return DividedStep(TensorParallelStep(step, self.model, self.parameters), self.model, self.ranks)


class TensorParallelStep(ComputingStep):
    """Runs a step on sharded modules.

    Replicated parameters that were used with sharded tensors, such as norms on a sharded sequence, get a different
    gradient on each rank. Each rank's partial gradient is multiplied by the number of ranks, so the mean is the full
    gradient; a mean of equal gradients changes nothing. One message averages all of them, after all other reductions.

    Args:
        inner: the step to wrap.
        model: the model, as it is stored between steps.
        parameters: the parameters of the model.
    """

    def __init__(self, inner: Step, model: nn.Module, parameters: Parameters) -> None:
        super().__init__(inner, parameters)
        self._stored = dict(model.named_parameters())

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        super().backward(run)
        if self.synced:
            # A step may run several forwards before its backward passes, so `met` is not cleared.
            met = sorted(self.parameters.ranks.met)
            with torch.no_grad():
                for same in group_by_dtype_and_device([self._stored[name] for name in met if name in self._stored]):
                    self._average(same)

    def _average(self, same: Sequence[Tensor]) -> None:
        """Average gradients of one dtype by one all-reduce over `tp`, with a flag for each that this rank has."""
        unused = [index for index, parameter in enumerate(same) if parameter.grad is None]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in same]
        shards = list(map(local, gradients))
        flags = shards[0].new_ones(len(shards))
        if unused:
            flags[unused] = 0
        message = torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in (*shards, flags)])
        dist.all_reduce(message, group=self.parameters.ranks.group)
        message /= self.parameters.ranks.count
        *means, flags = torch.split(message, [each.numel() for each in (*shards, flags)])
        torch._foreach_copy_(
            shards, [s if s.shape == o.shape else s.view_as(o) for s, o in zip(means, shards, strict=True)]
        )
        for index, used in zip(unused, flags[unused].tolist() if unused else (), strict=True):
            if used:  # on another rank
                same[index].grad = gradients[index]
