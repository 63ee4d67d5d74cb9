"""Host cost of tensor parallelism: a block's forward and backward with tiny tensors, on a group that sends nothing.

Beside ours: the same block written by hand with Megatron's two functions, the recipe of DTensor's documentation, and
the block as it is. All take turns in one process; the ratio is taken within a round. With a split sequence it is a
ratio to what is written by hand for that: three blocks, of which the first splits, and the last joins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel import Compile, ParallelMesh, ParallelPlan, TensorParallel
from lightning_parallel.mesh import AXES
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Technique
from tests.grounds import ground
from tests.ranks import run_on_ranks

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

RANKS, WIDTH, HEAD = 2, 64, 16
ROUNDS, CALLS = 15, 40


class Attention(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in maps)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, ranks: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, width // ranks)
        self.mlp = FeedForward(width, 4 * width // ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def function(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Any:
    """A function of autograd that keeps nothing."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(gradient)

    return Made


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def gather(x: Tensor) -> Tensor:
    parts = x.new_empty(RANKS, *x.shape)
    dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1))
    return parts.movedim(0, 1).flatten(1, 2)


def scatter(x: Tensor) -> Tensor:
    parts = x.unflatten(1, (RANKS, -1)).movedim(1, 0).contiguous()
    own = x.new_empty(parts.shape[1:])
    dist.reduce_scatter_tensor(own.view(-1), parts.view(-1))
    return own


def own_part(x: Tensor) -> Tensor:
    return x.chunk(RANKS, 1)[dist.get_rank()].contiguous()


def summed_in_place(gradient: Tensor) -> Tensor:
    gradient = gradient.contiguous()
    dist.all_reduce(gradient)
    return gradient


Copy, Sum = function(lambda x: x.view_as(x), summed_in_place), function(summed, lambda gradient: gradient)
Gather, Scatter = function(gather, scatter), function(scatter, gather)
Split, Join = function(own_part, gather), function(gather, own_part)


class ByHand(Block):
    """Megatron's functions at the entrance and the exit of each region."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(RANKS, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + Sum.apply(self.attention(Copy.apply(self.norm1(x))))
        return x + Sum.apply(self.mlp(Copy.apply(self.norm2(x))))


class SplitByHand(Block):
    """The same with a split sequence; each rank has half of it already."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(RANKS, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + Scatter.apply(self.attention(Gather.apply(self.norm1(x))))
        return x + Scatter.apply(self.mlp(Gather.apply(self.norm2(x))))


class SplitTower(nn.Module):
    """Such blocks as a model has them: they split the sequence, join it, and add up the gradients of norms."""

    def __init__(self, blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SplitByHand(width) for _ in range(blocks)))
        self.norms = [p for block in self.blocks for norm in (block.norm1, block.norm2) for p in norm.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return Join.apply(self.blocks(Split.apply(x)))

    def add_up(self) -> None:
        gradients = [p.grad for p in self.norms if p.grad is not None]
        message = torch.cat(gradients)
        dist.all_reduce(message)
        torch._foreach_copy_(gradients, list(message.split([g.numel() for g in gradients])))


RECIPE = {
    **dict.fromkeys(("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.up"), ColwiseParallel()),
    **dict.fromkeys(("attention.o_proj", "mlp.down"), RowwiseParallel()),
}


BY_HAND, SPLIT_BY_HAND, COMPILED_BY_HAND = "by hand", "by hand, split sequence", "by hand, compiled"
WHOLE, SPLIT, COMPILED = "TensorParallel(sequence_parallel=False)", "TensorParallel()", "the whole form, compiled"
BASES = {SPLIT: SPLIT_BY_HAND, COMPILED: COMPILED_BY_HAND}


def mesh_of_ranks() -> ParallelMesh:
    return ParallelMesh({**dict.fromkeys(AXES, 1), "tp": RANKS}, "cpu")


def runs() -> dict[str, Callable[[], float]]:
    mesh = mesh_of_ranks()

    def ours(*further: Technique, **options: Any) -> Callable[[], float]:
        return backward_of(divided(mesh, [Block() for _ in range(3)], *further, **options), blocks=3)

    return {
        BY_HAND: backward_of(ByHand()),
        "by hand again": backward_of(ByHand()),
        SPLIT_BY_HAND: backward_of(SplitTower(3), blocks=3),
        "not divided": backward_of(Block()),
        WHOLE: ours(sequence_parallel=False),
        SPLIT: ours(),
        "DTensor's recipe": backward_of(parallelize_module(Block(), mesh["tp"], RECIPE)),
        COMPILED_BY_HAND: backward_of(torch.compile(nn.Sequential(*(ByHand() for _ in range(3)))), blocks=3),
        COMPILED: ours(Compile(), sequence_parallel=False),
    }


def divided(mesh: ParallelMesh, blocks: list[Block], *further: Technique, **options: Any) -> Stepped:
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    on = ground(model, mesh, ParallelPlan(blocks="blocks.*"))
    techniques = [TensorParallel(RANKS, **options), *further]
    return Stepped(model, [technique.divide(model, on, technique.analyze(model, on)) for technique in techniques])


class Stepped(nn.Module):
    """Blocks one after the other in the steps of techniques, as a strategy runs them."""

    def __init__(self, model: nn.Module, divisions: list[Division]) -> None:
        super().__init__()
        self.model, self.divisions, self.step = model, divisions, Step()
        for division in divisions:
            self.step = division.step(self.step)
        for division in divisions:
            self.step = division.outermost_step(self.step)

    def forward(self, x: Tensor) -> Tensor:
        run = self.through
        for division in self.divisions:
            run = division.run(run)
        return self.step.forward(run, x)

    def through(self, x: Tensor) -> Tensor:
        for block in self.model.blocks:
            x = block(x)
        return x


def go_back(model: nn.Module, loss: Tensor) -> None:
    if isinstance(model, Stepped):
        model.step.backward(loss.backward)
    else:
        loss.backward()
    if isinstance(model, SplitTower):
        model.add_up()


def backward_of(block: nn.Module, positions: int = 8, blocks: int = 1) -> Callable[[], float]:
    """One forward and backward; tells how many blocks they are of."""
    x, parameters = torch.randn(1, positions, WIDTH, requires_grad=True), list(block.parameters())

    def run() -> float:
        go_back(block, block(x).sum())
        for parameter in parameters:
            parameter.grad = None
        return blocks

    return run


def test_host_cost_of_a_block(world: None, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    variants = runs()
    costs: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-1, ROUNDS):
        for name in list(variants)[:: -1 if round_ % 2 else 1]:
            start = time.thread_time()
            blocks = sum(variants[name]() for _ in range(CALLS))
            if round_ >= 0:
                costs[name].append((time.thread_time() - start) / blocks * 1e6)
    with capsys.disabled():
        print()
        for name, times in costs.items():
            base = BASES.get(name, BY_HAND)
            ratios = [mine / hand for mine, hand in zip(times, costs[base], strict=True)]
            low, *_, high = statistics.quantiles(ratios, n=10)
            said = f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}], best {min(times) / min(costs[base]):.2f}"
            print(f"{name:42} {statistics.median(times):7.0f} us   {said}")


# ---------------------------------------------------------------- steps of two ranks that really talk

HIDDEN, TOKENS, LAYERS, STEPS = 256, (4, 128), 4, 5
BY_RECIPE, RECIPE_AGAIN = "DTensor's recipe", "the recipe again"
COMPARED = (
    (RECIPE_AGAIN, BY_RECIPE),
    (WHOLE, BY_RECIPE),
    (WHOLE, BY_HAND),
    (SPLIT, SPLIT_BY_HAND),
    (COMPILED, COMPILED_BY_HAND),
)


def steps_on_gloo() -> list[dict[str, float]]:
    """CPU time of a step of this rank, all threads, in each round."""
    torch.manual_seed(0)
    mesh = mesh_of_ranks()
    steps = {
        WHOLE: step_of(divided(mesh, tower(), sequence_parallel=False)),
        BY_RECIPE: step_of(by_recipe(mesh)),
        RECIPE_AGAIN: step_of(by_recipe(mesh)),
        SPLIT: step_of(divided(mesh, tower())),
        BY_HAND: step_of(nn.Sequential(*(ByHand(HIDDEN) for _ in range(LAYERS)))),
        SPLIT_BY_HAND: step_of(SplitTower(LAYERS, HIDDEN)),
        COMPILED_BY_HAND: step_of(nn.Sequential(*(torch.compile(ByHand(HIDDEN)) for _ in range(LAYERS)))),
        COMPILED: step_of(divided(mesh, tower(), Compile(), sequence_parallel=False)),
    }
    rounds = [{name: timed(steps[name]) for name in list(steps)[:: -1 if r % 2 else 1]} for r in range(ROUNDS + 1)]
    return rounds[1:]


def by_recipe(mesh: ParallelMesh) -> nn.Module:
    return nn.Sequential(*(parallelize_module(block, mesh["tp"], RECIPE) for block in tower()))


def tower() -> list[Block]:
    return [Block(width=HIDDEN) for _ in range(LAYERS)]


def step_of(model: nn.Module) -> Callable[[], None]:
    x = torch.randn(*TOKENS, HIDDEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        go_back(model, model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - start) / STEPS


def test_steps_of_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = run_on_ranks(RANKS, steps_on_gloo, limit=400)
    rounds = [{name: statistics.mean(r[k][name] for r in ranks) for name in ranks[0][k]} for k in range(ROUNDS)]
    with capsys.disabled():
        print()
        for name, base in COMPARED:
            ratios = [each[name] / each[base] for each in rounds]
            low, *_, high = statistics.quantiles(ratios, n=10)
            ms, of_base = (1e3 * statistics.median(each[one] for each in rounds) for one in (name, base))
            ratio = f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
            print(f"{name:50} {ms:6.1f} ms   {ratio} of {base}, {of_base:.1f} ms")
