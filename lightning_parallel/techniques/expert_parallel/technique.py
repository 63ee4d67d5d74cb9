"""Expert parallel: ranks that read different samples hold different experts, and tokens travel to them.

Source: D. Lepikhin et al., GShard, ICLR 2021; S. Rajbhandari et al., DeepSpeed-MoE, ICML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_map_only

from lightning_parallel.arguments import whole_number
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.mesh import AXES, Axis, Size, expert_sizes
from lightning_parallel.plan.experts import STACK, Experts, find_experts
from lightning_parallel.techniques.divided.parts import computing
from lightning_parallel.techniques.divided.step import ComputingStep
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.expert_parallel.exchange import Exchange
from lightning_parallel.techniques.expert_parallel.outside import ExpertPart, ExpertWeights, Outside
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.redirect import redirect_forward
from lightning_parallel.techniques.tools.shards import parameter_part
from lightning_parallel.techniques.tools.telling import warn


@dataclass(frozen=True)
class ExpertParallel(Technique):
    """Divides the experts of a mixture over ranks that read different samples; it takes no ranks of its own.

    `HybridStrategy(Zero(4), ExpertParallel(2))` runs on 4 ranks: two copies of each expert, which ZeRO shards over the
    two ranks that hold it.

    Args:
        size: over how many ranks experts are divided; "auto" takes as many as the layout and the experts allow. Ranks
            of tensor parallel hold different experts too, beside that.

    Raises:
        ValueError: when training starts: a size that does not fit the layout or the experts, a model without experts,
            or one with experts in a list.
    """

    size: Size = "auto"

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        whole_number("ExpertParallel", "size", self.size, "auto")

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`: none, for experts are divided over ranks that others claim."""
        return {}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(meets_in_forward=True, replaces_parameters=True)

    @property
    def order(self) -> tuple[int, int, str]:
        """See `Technique.order`: before tensor parallel, which leaves experts that are divided already as they are."""
        return self.phase, -len(AXES), repr(self)

    def check(self, sizes: Mapping[Axis, int]) -> None:
        """See `Technique.check`."""
        possible = expert_sizes(sizes)
        if self.size != "auto" and self.size not in possible:
            averaged = {axis: sizes[axis] for axis in ("dp_replicate", "dp_shard", "cp") if sizes[axis] > 1}
            ranks = " x ".join(f"{axis}={size}" for axis, size in averaged.items()) or "one rank"
            raise ValueError(
                f"{self!r} divides experts over ranks that read different samples, here {ranks}: size is one of "
                f"{', '.join(map(str, possible))}; choose one of these or 'auto', or give the strategy more "
                f"such ranks, as in DataParallel({self.size})"
            )

    def analyze(self, model: nn.Module, ground: PartitionContext) -> tuple[int, list[Experts]]:
        """Finds the experts, and over how many ranks they are divided."""
        experts = find_experts(model, ground.plan)
        if not experts:
            raise ValueError(
                f"{self!r} finds no experts in {type(model).__name__}: {ground.plan.source} names none, and no module "
                "has the form of stacked experts, called with (tokens, indices, weights). Name those that are stacked, "
                f"as in plan=ParallelPlan(blocks='net.layers.*', experts='net.layers.*.experts'); {STACK}"
            )
        own = _own_parameters(model, experts)
        for each in experts if ground.mesh.sizes["tp"] > 1 else ():
            for name, parameter in model.get_submodule(each.name).named_parameters():
                if parameter.dim() > 1 and parameter not in own:
                    raise ValueError(
                        f"{each.name}.{name} is shared by several experts, or by an expert and another module, so "
                        "every rank keeps it whole, but tensor parallel might divide it; untie it, or leave tensor "
                        "parallel out"
                    )
        # The largest size that the layout and the experts allow, or the one that is asked for.
        mesh = ground.mesh
        tensor = mesh.sizes["tp"]
        common = reduce(math.gcd, (each.count for each in experts))
        fitting = [size for size in expert_sizes(mesh.sizes) if common % (size * tensor) == 0]
        if self.size == "auto" and fitting:
            if fitting[-1] == 1 < expert_sizes(mesh.sizes)[-1]:
                counts = ", ".join(f"{each.count} of {each.name}" for each in experts)
                warn(
                    f"{self!r} divides no experts over ranks that read different samples, for no number of these "
                    f"divides {counts}; choose another number of experts or of ranks, or leave it out"
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

    def divide(self, model: nn.Module, ground: PartitionContext, seen: tuple[int, list[Experts]]) -> Division:
        """Keeps this rank's experts, and leads calls of them over the ranks."""
        (size, experts), mesh = seen, ground.mesh
        view = mesh.experts(size)
        if view["ep"].size() == 1:
            return Division(model)
        # as the whole model tells: a stage of a pipeline may have one weight of them, where its loss reads it
        found = [each for each in experts if any(True for _ in model.get_submodule(each.name).parameters())]
        copies = [name for name in ("ep_replicate", "ep_shard") if view[name].size() > 1] or ["ep_shard"]
        kept, placements = view[(*copies, "ep")], [*[Replicate()] * len(copies), Shard(0)]
        ranks, own = Ranks(view["ep"].get_group(), "ep"), _own_parameters(model, found)
        alike = Ranks(mesh["tp"].get_group(), "tp") if mesh.sizes["tp"] > 1 else None
        parts = dict[nn.Parameter, nn.Parameter]()
        names = [each.name for each in found]
        for number, each in enumerate(found):
            module = model.get_submodule(each.name)
            for name, parameter in module._parameters.items():
                if parameter in own and parameter.dim() >= 2:
                    if parameter not in parts:  # tied stay tied
                        parts[parameter] = parameter_part(parameter, kept, placements)
                    module._parameters[name] = parts[parameter]
            redirect_forward(module, Exchange(module, number, names, each.count, ranks, alike).wrap)
        return DividedExperts(model, ExpertWeights(model, ranks, mesh.sizes["tp"]))


@dataclass(eq=False)
class DividedExperts(Division):
    """A model of whose experts each rank has some; code outside of them reads all."""

    weights: ExpertWeights

    def outputs(self, outputs: Any) -> Any:
        """Makes whole what ranks have parts of."""
        return tree_map_only((Outside, ExpertPart), lambda each: computing(each).whole(), outputs)

    def show(self) -> None:
        """See `Division.show`."""
        self.weights.find()

    def step(self, step: Step) -> Step:
        """Shows the user's own code all experts."""
        return ComputingStep(step, self.weights)


def _own_parameters(model: nn.Module, found: Sequence[Experts]) -> set[nn.Parameter]:
    """The parameters that no module but those of experts has; one that is tied to another's stays whole."""
    modules = {model.get_submodule(each.name) for each in found}
    others = {parameter for part in model.modules() if part not in modules for parameter in part._parameters.values()}
    return {
        parameter for module in modules for parameter in module._parameters.values() if parameter is not None
    } - others
