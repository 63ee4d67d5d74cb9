"""Expert parallel: ranks that read different samples hold different experts, and tokens travel to them.

Source: D. Lepikhin et al., GShard, ICLR 2021; S. Rajbhandari et al., DeepSpeed-MoE, ICML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import ClassVar

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lightning_parallel.arguments import true_or_false, whole_number
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.mesh import Axis, ParallelMesh, Size, expert_sizes
from lightning_parallel.plan.experts import Experts, find_experts
from lightning_parallel.techniques.division import Division, Ground
from lightning_parallel.techniques.expert_parallel.capacity import Capacity
from lightning_parallel.techniques.expert_parallel.stacked import StackedExperts
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.redirect import redirect_forward
from lightning_parallel.techniques.tools.shards import parameter_part


@dataclass(frozen=True)
class ExpertParallel(Technique):
    """Divides the experts of a mixture over ranks that read different samples; it takes no ranks of its own.

    `HybridStrategy(Zero(4), ExpertParallel(2))` runs on 4 ranks: two copies of each expert, which ZeRO shards over the
    two ranks that hold it.

    Args:
        size: over how many ranks experts are divided; "auto" takes as many as the layout and the experts allow. Ranks
            of tensor parallel hold different experts too, beside that.
        capacity_factor: how many times its even share of tokens an expert takes; None drops nothing.
        send_once: whether a token that chose several experts of one rank is sent there once, or once for each.

    Raises:
        ValueError: a capacity below 1; or, when training starts, a size that does not fit the layout or the experts, or
            a model without experts.
    """

    size: Size = "auto"
    _: KW_ONLY
    capacity_factor: float | None = None
    send_once: bool = True

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        whole_number("ExpertParallel", "size", self.size, "auto")
        true_or_false("ExpertParallel", send_once=self.send_once)
        factor = self.capacity_factor
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if factor is not None and not (number and 1 <= factor < math.inf):
            raise ValueError(
                f"ExpertParallel(capacity_factor={factor!r}): below 1 even tokens that are spread evenly would be "
                "dropped; give 1 or more, or None to drop nothing"
            )

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`: none, for experts are divided over ranks that others claim."""
        return {}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(meets_in_forward=True)

    def check(self, sizes: Mapping[Axis, int]) -> None:
        """See `Technique.check`."""
        possible = expert_sizes(sizes)
        if self.size != "auto" and self.size not in possible:
            averaged = {axis: sizes[axis] for axis in ("dp_replicate", "dp_shard", "cp") if sizes[axis] > 1}
            ranks = " x ".join(f"{axis}={size}" for axis, size in averaged.items()) or "one rank"
            raise ValueError(
                f"{self!r} divides experts over ranks that read different samples, here {ranks}: size is one of "
                f"{', '.join(map(str, possible))}; choose one of these or 'auto', or give the strategy more such ranks, "
                f"as in DataParallel({self.size})"
            )

    def look(self, model: nn.Module, ground: Ground) -> tuple[int, list[Experts]]:
        """Finds the experts, and over how many ranks they are divided."""
        experts = find_experts(model, ground.plan)
        if not experts:
            raise ValueError(_no_experts(self, model, ground.plan.source))
        return self._size(experts, ground.mesh), experts

    def _size(self, experts: Sequence[Experts], mesh: ParallelMesh) -> int:
        tensor = mesh.sizes["tp"]
        common = reduce(math.gcd, (each.count for each in experts))
        fitting = [size for size in expert_sizes(mesh.sizes) if common % (size * tensor) == 0]
        if self.size == "auto" and fitting:
            return fitting[-1]
        if self.size in fitting:
            assert isinstance(self.size, int)
            return self.size
        odd = next(each for each in experts if each.count % ((1 if self.size == "auto" else self.size) * tensor))
        joined = f" x {tensor} of tensor parallel" if tensor > 1 else ""
        raise ValueError(
            f"{self!r}: the {odd.count} experts of {odd.name} do not divide over {self.size} ranks{joined}; "
            f"choose {_or(fitting) or 'a smaller tensor parallel'}"
        )

    def divide(self, model: nn.Module, ground: Ground, seen: tuple[int, list[Experts]]) -> Division:
        """Keeps this rank's experts, and leads calls of them over the ranks."""
        size, mesh = seen[0], ground.mesh
        view = mesh.experts(size)
        if view["ep"].size() == 1 and self.capacity_factor is None:
            return Division(model)
        copies = [name for name in ("ep_replicate", "ep_shard") if view[name].size() > 1] or ["ep_shard"]
        own = view[(*copies, "ep")]
        alike = Ranks(mesh["tp"].get_group(), "tp") if mesh.sizes["tp"] > 1 else None
        capacity = Capacity(self.capacity_factor, mesh.loss.get_group())
        for each in find_experts(model, ground.plan):
            module = model.get_submodule(each.name)
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.shape[0] == each.count:
                    placements = [*[Replicate()] * len(copies), Shard(0)]
                    module._parameters[name] = parameter_part(parameter, own, placements)
            stacked = StackedExperts(each.name, module, view["ep"], alike, capacity, self.send_once)
            redirect_forward(module, stacked.wrap)
        return Division(model)


def _or(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _no_experts(technique: ExpertParallel, model: nn.Module, source: str) -> str:
    return (
        f"{technique!r} finds no experts in {type(model).__name__}: {source} names none, and no module has the form of "
        "stacked experts, called with (tokens, indices, weights), or of a list of experts beside a router. Name them, "
        "as in plan=ParallelPlan(blocks='net.layers.*', experts='net.layers.*.experts'), or leave ExpertParallel out"
    )
