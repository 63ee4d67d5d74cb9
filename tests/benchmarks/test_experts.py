"""What a mixture of experts costs: on two ranks beside its share on one, its products beside those of equal groups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel import DataParallel, ExpertParallel, ParallelPlan
from lightning_parallel.mesh import ParallelMesh, resolve_sizes
from lightning_parallel.techniques.division import PartitionContext
from lightning_parallel.techniques.step import Step
from recipes.moe import Experts, MixtureOfExperts, MoEConfig
from tests.ranks import ranks

pytestmark = pytest.mark.benchmark
ROUNDS = 15


def cpu_time(forward: Callable[[Tensor], tuple[Tensor, Tensor]], tokens: Tensor) -> float:
    """Of all threads of this rank, those that send messages too, in seconds."""
    given, begin = tokens.clone().requires_grad_(), time.process_time()
    forward(given)[0].sum().backward()
    return time.process_time() - begin


@ranks(2)
def test_mixture_on_two_ranks_costs_little_more_than_its_share() -> None:
    """Every rank has 1,024 tokens and half of the experts; one process computes the same tokens with all of them."""
    sizes = {"vocab_size": 64, "context": 256, "dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    config = MoEConfig(**sizes, hidden_dim=1024, n_experts=8, top_k=2, expert_dim=512)
    whole, part = MixtureOfExperts(config), MixtureOfExperts(config)
    mesh = ParallelMesh(resolve_sizes([DataParallel(2).claim], 2), "cpu")
    ground = PartitionContext(mesh, ParallelPlan(experts="experts"), lambda: None)  # type: ignore[arg-type, return-value]
    technique = ExpertParallel(2)
    step = technique.divide(part, ground, technique.analyze(part, ground)).step(Step())
    tokens = torch.randn(4, 256, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    variants = {"one": whole, "two": lambda x: step.forward(part, x), "one again": whole}
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(256, 512, 8, 256), (512, 1024, 8, 128), (256, 512, 32, 32)], ids=str)
def test_grouped_products_cost_no_more_than_batched_ones(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Experts with as many tokens each: groups that happen to be equal, for which one batched product would do."""
    dim, inner, count, tokens = sizes
    shape = {"vocab_size": 64, "context": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 4 * dim}
    config = MoEConfig(**shape, dim=dim, n_experts=count, top_k=1, expert_dim=inner)
    experts, x = Experts(config).to(dtype), torch.randn(count * tokens, dim).to(dtype).requires_grad_()
    ends = torch.arange(1, count + 1, dtype=torch.int32) * tokens

    def batched() -> Tensor:
        gate, up = torch.bmm(x.view(count, tokens, dim), experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, experts.down_proj.transpose(1, 2)).flatten(0, 1)

    torch.testing.assert_close(experts._grouped(x, ends), batched())
    variants = {"grouped": lambda: experts._grouped(x, ends), "batched": batched, "batched again": batched}
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(found := {})
        for name, forward in variants.items():
            times = [time.process_time()]
            y = forward()
            times.append(time.process_time())
            y.backward(torch.ones_like(y))
            found[name] = times[1] - times[0], time.process_time() - times[0]
    for number, what in enumerate(("forward", "forward and backward")):
        ratios = [[one[name][number] / one["batched"][number] for one in rounds[1:]] for name in variants]
        grouped, _, again = map(statistics.median, ratios)
        print(f"{sizes} {dtype} {what}: {grouped:.2f} of one batched product; the same again {again:.2f}")
