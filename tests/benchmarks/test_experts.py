"""What a mixture of experts costs on two ranks, beside its share of the work on one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import DataParallel, ExpertParallel, ParallelPlan
from lightning_parallel.mesh import ParallelMesh, resolve_sizes
from lightning_parallel.techniques.division import Ground
from lightning_parallel.techniques.step import Run, Step
from tests.ranks import ranks

pytestmark = pytest.mark.benchmark
ROUNDS = 15


def cpu_time(forward: Callable[[Tensor], tuple[Tensor, Tensor]], tokens: Tensor) -> float:
    """Of all threads of this rank, those that send messages too, in seconds."""
    given, begin = tokens.clone().requires_grad_(), time.process_time()
    forward(given)[0].sum().backward()
    return time.process_time() - begin


@ranks(2)
def test_a_mixture_on_two_ranks_costs_little_more_than_its_share() -> None:
    """Every rank has 1,024 tokens and half of the experts; one process computes the same tokens with all of them."""
    from recipes.moe import MixtureOfExperts, MoEConfig

    sizes = {"vocab_size": 64, "context": 256, "dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    config = MoEConfig(**sizes, hidden_dim=1024, n_experts=8, top_k=2, expert_dim=512)
    whole, part = MixtureOfExperts(config), MixtureOfExperts(config)
    mesh = ParallelMesh(resolve_sizes([DataParallel(2).claim], 2), "cpu")
    ground = Ground(mesh, ParallelPlan(experts="experts"), lambda: None)  # type: ignore[arg-type, return-value]
    technique = ExpertParallel(2)
    step = technique.divide(part, ground, technique.look(part, ground)).step(Step())
    tokens = torch.randn(4, 256, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    variants = {"one": whole, "two": lambda x: step.forward(Run(part), x), "one again": whole}
    costs: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, forward in variants.items():
            dist.barrier()
            costs[name].append(cpu_time(forward, tokens))
    least = torch.tensor([min(found) for found in costs.values()])
    dist.all_reduce(least)
    one, two, again = least.tolist()
    print(f"{two / one:.2f} of its share of one process; the same again {again / one:.2f}")
    assert two / one < 1.25
