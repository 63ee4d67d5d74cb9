"""What experts over ranks cost: bytes and memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel import (
    DataParallel,
    ExpertParallel,
    ExpertParallelStrategy,
    HybridStrategy,
    ParallelPlan,
    Zero,
)
from lightning_parallel.mesh import AXES, ParallelMesh
from recipes.moe import Experts, MoEConfig
from tests.grounds import ground
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.techniques.context_parallel.test_work import counted
from tests.tiers import sampled
from tests.trainers import trainer

E, K, TOKENS = 8, 3, 20


def scores(rank: int) -> Tensor:
    return torch.rand(TOKENS, E, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def divided(experts: nn.Module, technique: ExpertParallel) -> nn.Module:
    """Experts over all ranks, which share nothing else."""
    model = nn.ModuleDict({"experts": experts})
    mesh = ParallelMesh(dict.fromkeys(AXES, 1) | {"dp_replicate": torch.distributed.get_world_size()}, "cpu")
    on = ground(model, mesh, ParallelPlan(experts="experts"))
    technique.divide(model, on, technique.analyze(model, on))
    return experts


RECIPE = MoEConfig(vocab_size=8, context=8, dim=32, n_layers=1, n_heads=1, n_kv_heads=1, hidden_dim=8,
                   n_experts=E, top_k=K, expert_dim=16)  # fmt: skip


def bytes_of_a_call(dtype: torch.dtype, weights_dtype: torch.dtype) -> tuple[int, int, int]:
    torch.manual_seed(0)
    experts = divided(Experts(RECIPE).to(dtype), ExpertParallel())
    weights, index = scores(torch.distributed.get_rank()).topk(K)
    tokens = torch.randn(TOKENS, RECIPE.dim, dtype=dtype, requires_grad=True)
    weights = weights.to(weights_dtype).requires_grad_()
    with counted() as first:  # it also measures, with own experts only
        experts(tokens, index, weights)
    with counted() as forward:
        made = experts(tokens, index, weights)
    with counted() as backward:
        made.sum().backward()
    return sum(first), sum(forward), sum(backward)


def closed_form(rank: int, count: int, width: int, weight_width: int) -> tuple[int, int]:
    """Bytes that a rank sends, forward and backward, for tokens and weights of so many bytes an element."""
    rows = torch.zeros(count, count, dtype=torch.long)  # from, to
    for sender in range(count):
        for there in (scores(sender).topk(K).indices // (E // count)).flatten():
            rows[sender, there] += 1
    rows.fill_diagonal_(0)
    out, back, token = int(rows[rank].sum()), int(rows[:, rank].sum()), RECIPE.dim * width
    counts = (E // count + 1) * 8 * (count - 1)
    return counts + out * (token + weight_width) + back * token, out * token + back * (token + weight_width)


def test_bytes_are_those_of_the_closed_form() -> None:
    for dtypes in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        found = run_on_ranks(4, bytes_of_a_call, *dtypes)
        expected = [closed_form(rank, 4, *(d.itemsize for d in dtypes)) for rank in range(4)]
        assert [(forward, backward) for _, forward, backward in found] == expected
        assert all(first - forward <= 16 for first, forward, _ in found), "the first call gathers no experts"


def experts_first(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [{"params": [p for p in every if (p.dim() == 3) is stacked]} for stacked in (True, False)]
    return torch.optim.AdamW(groups, lr=1e-2)


def elements(tensors: Iterable[Any]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors if isinstance(t, Tensor))


class Held(Callback):
    """Counts the elements of experts after the last batch, by what the optimizer was given."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        experts = optimizer.param_groups[0]["params"]
        states = [value for p in experts for value in optimizer.state[p].values()]
        gradients = [p.grad for p in experts]
        self.counts = [elements(each) for each in (experts, gradients, [s for s in states if s.dim()])]


def held(*techniques: Any) -> list[float]:
    """What a rank holds of experts, in units of their parameters: parameters, gradients, states."""
    sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "experts_implementation": "eager"}
    module, watch = build("mixtral", optimizer=experts_first, **sizes), Held()
    whole = sum(p.numel() for p in module.parameters() if p.dim() == 3)
    trainer(HybridStrategy(*techniques), max_steps=2, limit_val_batches=0, callbacks=[watch]).fit(
        module, *loaders("mixtral", 1)
    )
    return [count / whole for count in watch.counts]


EP2 = ExpertParallel(2)
HELD = {
    "zero 3": (4, [Zero(4), EP2], [1 / 4, 1 / 4, 2 / 4]),
    "data parallel": (2, [DataParallel(2), EP2], [1 / 2, 1 / 2, 2 / 2]),
    "zero 2": (4, [Zero(4, stage=2), EP2], [1 / 2, 1 / 4, 2 / 4]),
}


@sampled(1, "layout", HELD)
def test_rank_holds_its_part_of_the_experts(layout: str) -> None:
    count, techniques, expected = HELD[layout]
    for found in run_on_ranks(count, held, *techniques):
        assert found == pytest.approx(expected, rel=0.02)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = (each.untyped_storage().nbytes() // each.element_size() for each in tree_leaves(made)
                 if type(each) in (Tensor, nn.Parameter))  # fmt: skip
        self.most = max([self.most, *sizes])
        return made


class Watched(Callback):
    """Watches the second batch."""

    def __init__(self) -> None:
        self.mode = Largest()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, number: int) -> None:
        if number == 1:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if args[-1] == 1:
            self.mode.__exit__(None, None, None)


def largest(tokens: int) -> int:
    watch, data = Watched(), loaders("banked_experts", 2, samples=16, length=tokens // 2)
    run = trainer(ExpertParallelStrategy(2), max_steps=2, limit_val_batches=0, callbacks=[watch])
    run.fit(build("banked_experts", n=E), *data)
    return watch.mode.most


def test_largest_tensor_has_no_capacity_dimension() -> None:
    tokens, k, features = 128, 2, 64  # the most features are those of the vocabulary
    capacity = 2 * tokens * k // E
    for found in run_on_ranks(2, largest, tokens):
        assert tokens * E < found <= 2 * tokens * k * features < tokens * E * capacity
