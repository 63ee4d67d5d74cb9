"""Whether ranks that hold the same parameters still do when the first step has run.

Averaged gradients keep alike what was alike before. A step may set parameters itself, as a layer does that takes its
scale from the first batch; where ranks read different samples their copies part, and no gradient brings them together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.functional import highest
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.tools.holders import Holders, holders_of
from lightning_parallel.techniques.tools.shards import local

ROUNDING = 1e-4
"""How much copies of a parameter may differ, of its size: hosts of other kinds round otherwise."""
SHOWN = 4


class Replicas:
    """Compares the copies of a model's parameters, once."""

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self._copies: dict[Holders, dict[str, nn.Parameter]] = {}
        for name, parameter in model.named_parameters() if mesh.loss.size() > 1 else ():
            self._copies.setdefault(holders_of(parameter, mesh), {})[name] = parameter

    @torch.no_grad()
    def require_alike(self) -> None:
        """Raises ValueError if copies differ. Collective over all ranks, after the first forward of training."""
        for holders, parameters in self._copies.items():
            sums = torch.stack([_sums(local(parameter)) for parameter in parameters.values()], dim=1)  # (2, parameters)
            most = torch.cat([sums, -sums[:1]]).nan_to_num()
            highest(most, holders.all.get_group()).wait()
            differ = (most[0] + most[2] > ROUNDING * most[1]).tolist()
            names = [name for name, differs in zip(parameters, differ, strict=True) if differs]
            if names:
                raise ValueError(
                    f"{', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}: the {holders.all.size()} ranks "
                    "that hold copies hold different values after the first training_step, as each rank set them from "
                    "its own samples; set them from those of all ranks, in a module that the plan names "
                    "(ParallelPlan(whole_batch=...)) or by self.all_gather(), or before the run"
                )


def _sums(tensor: Tensor) -> Tensor:
    numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    return torch.stack([numbers.sum(), numbers.abs().sum()])
