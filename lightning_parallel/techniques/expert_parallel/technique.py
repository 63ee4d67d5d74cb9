"""Expert parallel: ranks that read different samples hold different experts, and tokens are sent to them.

Source: D. Lepikhin et al., GShard, ICLR 2021; S. Rajbhandari et al., DeepSpeed-MoE, ICML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lightning_parallel.arguments import whole_number
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.mesh import AXES, Axis, Size, expert_sizes
from lightning_parallel.plan.experts import STACK, Experts, find_experts
from lightning_parallel.techniques.divided.step import ComputingDivision, ComputingStep
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.expert_parallel.exchange import Exchange
from lightning_parallel.techniques.expert_parallel.full_weights import ExpertWeights
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.redirect import redirect_forward
from lightning_parallel.techniques.tools.shards import sharded_parameter
from lightning_parallel.techniques.tools.user_warnings import warn


@dataclass(frozen=True)
class ExpertParallel(Technique):
    """Shards the experts of a mixture over ranks that read different samples; it needs no additional ranks.

    `HybridStrategy(Zero(4), ExpertParallel(2))` runs on 4 ranks: two ranks hold each expert, and ZeRO shards it over
    these two.

    Args:
        size: number of ranks over which experts are sharded; "auto" takes as many as the layout and the experts allow.
            Tensor-parallel ranks hold different experts, too: the experts are sharded over size * tp ranks.

    Raises:
        ValueError: (when training starts) a size that does not fit the layout or the experts, a model without experts,
            or one with experts in a list.
    """

    size: Size = "auto"

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        whole_number("ExpertParallel", "size", self.size, "auto")

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(communicates_in_forward=True, replaces_parameters=True)

    @property
    def order(self) -> tuple[int, int, str]:
        """See `Technique.order`: before tensor parallel, which skips modules that are sharded already."""
        return self.phase, -len(AXES), repr(self)

    def check(self, sizes: Mapping[Axis, int]) -> None:
        """See `Technique.check`."""
        possible = expert_sizes(sizes)
        if self.size != "auto" and self.size not in possible:
            averaged = {axis: sizes[axis] for axis in ("dp_replicate", "dp_shard", "cp") if sizes[axis] > 1}
            ranks = " x ".join(f"{axis}={size}" for axis, size in averaged.items()) or "one rank"
            raise ValueError(
                f"{self!r} divides experts over data- and context-parallel ranks, here {ranks}; size must be one of "
                f"{', '.join(map(str, possible))}; choose one of these or 'auto', or give the strategy more such "
                f"ranks, as in DataParallel({self.size})"
            )

    def analyze(self, model: nn.Module, context: PartitionContext) -> tuple[int, list[Experts]]:
        """Find the experts; return the number of ranks over which they are sharded, and the experts."""
        experts = find_experts(model, context.plan)
        if not experts:
            raise ValueError(
                f"{self!r} finds no experts in {type(model).__name__}: {context.plan.source} names none, and no module "
                "has the form of stacked experts, called with (tokens, indices, weights). Name those that are stacked, "
                f"as in plan=ParallelPlan(blocks='net.layers.*', experts='net.layers.*.experts'); {STACK}"
            )
        exclusive = _exclusive_parameters(model, experts)
        for each in experts if context.mesh.sizes["tp"] > 1 else ():
            for name, parameter in model.get_submodule(each.name).named_parameters():
                if parameter.dim() > 1 and parameter not in exclusive:
                    raise ValueError(
                        f"{each.name}.{name} is shared by several experts, or by an expert and another module, so it "
                        "must be full on every rank, but tensor parallel might divide it; untie it, or leave out "
                        "tensor parallel"
                    )
        # The requested size, or the largest one that the layout and the numbers of experts allow.
        mesh = context.mesh
        tensor = mesh.sizes["tp"]
        common = reduce(math.gcd, (each.count for each in experts))
        fitting = [size for size in expert_sizes(mesh.sizes) if common % (size * tensor) == 0]
        if self.size == "auto" and fitting:
            if fitting[-1] == 1 < expert_sizes(mesh.sizes)[-1]:
                counts = ", ".join(f"{each.count} of {each.name}" for each in experts)
                warn(
                    f"{self!r} does not divide experts, as no number of data- and context-parallel ranks divides "
                    f"{counts}; choose another number of experts or of ranks, or leave it out"
                )
            return fitting[-1], experts
        if self.size in fitting:
            assert isinstance(self.size, int)
            return self.size, experts
        odd = next(each for each in experts if each.count % ((1 if self.size == "auto" else self.size) * tensor))
        fit = " or ".join(map(str, fitting))
        joined = f" x {tensor} of tensor parallel" if tensor > 1 else ""
        raise ValueError(
            f"{self!r}: the {odd.count} experts of {odd.name} do not divide over {self.size} ranks{joined}; "
            f"choose {fit or 'a smaller tensor parallel'}"
        )

    def divide(self, model: nn.Module, context: PartitionContext, analysis: tuple[int, list[Experts]]) -> Division:
        """Keep the local experts on each rank, and redirect calls of experts to `Exchange`."""
        (size, experts), mesh = analysis, context.mesh
        view = mesh.experts(size)
        if view["ep"].size() == 1:
            return Division(model)
        # `analysis` is of the full model; a pipeline stage has a part of its experts, or a weight that its loss reads
        experts_here = [each for each in experts if any(True for _ in model.get_submodule(each.name).parameters())]
        copies = [name for name in ("ep_replicate", "ep_shard") if view[name].size() > 1] or ["ep_shard"]
        expert_mesh, placements = view[(*copies, "ep")], [*[Replicate()] * len(copies), Shard(0)]
        ranks, exclusive = Ranks(view["ep"].get_group(), "ep"), _exclusive_parameters(model, experts_here)
        tensor_ranks = Ranks(mesh["tp"].get_group(), "tp") if mesh.sizes["tp"] > 1 else None
        shards = dict[nn.Parameter, nn.Parameter]()
        names = [each.name for each in experts_here]
        for number, each in enumerate(experts_here):
            module = model.get_submodule(each.name)
            for name, parameter in module._parameters.items():
                if parameter in exclusive and parameter.dim() >= 2:
                    if parameter not in shards:  # tied parameters stay tied
                        shards[parameter] = sharded_parameter(parameter, expert_mesh, placements)
                    module._parameters[name] = shards[parameter]
            redirect_forward(module, Exchange(module, number, names, each.count, ranks, tensor_ranks).wrap)
        return DividedExperts(model, ExpertWeights(model, ranks, mesh.sizes["tp"]))


@dataclass(eq=False)
class DividedExperts(ComputingDivision):
    """A model whose experts are sharded over ranks; code outside of the experts' modules reads all weights."""

    def step(self, step: Step) -> Step:
        """Wrap the step so that user code sees the weights of all experts."""
        return ComputingStep(step, self.parameters)


def _exclusive_parameters(model: nn.Module, found: Sequence[Experts]) -> set[nn.Parameter]:
    """Return the parameters of experts' modules that no other module has; tied ones are replicated, not sharded."""
    modules = {model.get_submodule(each.name) for each in found}
    others = {parameter for part in model.modules() if part not in modules for parameter in part._parameters.values()}
    return {
        parameter for module in modules for parameter in module._parameters.values() if parameter is not None
    } - others
