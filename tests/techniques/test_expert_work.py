"""What experts over ranks cost, bytes and memory, and which tokens a capacity drops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
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
    TensorParallel,
    Zero,
)
from lightning_parallel.mesh import AXES, ParallelMesh
from lightning_parallel.techniques.expert_parallel import own_experts
from recipes.moe import Experts, MoEConfig, MoEModule
from tests.curves import compare, train
from tests.further.experts import WIDTH, Bank
from tests.grounds import ground
from tests.live import GROUPED
from tests.models import build, loaders
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.techniques.tensor_layouts import SHORT, hybrid
from tests.techniques.test_context_work import counted
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


# ---------------------------------------------------------------- bytes

RECIPE = MoEConfig(vocab_size=8, context=8, dim=32, n_layers=1, n_heads=1, n_kv_heads=1, hidden_dim=8,
                   n_experts=E, top_k=K, expert_dim=16)  # fmt: skip


def bytes_of_a_call(once: bool, dtype: torch.dtype, weights_dtype: torch.dtype) -> tuple[int, int]:
    torch.manual_seed(0)
    experts = divided(Experts(RECIPE).to(dtype), ExpertParallel(send_once=once))
    weights, index = scores(torch.distributed.get_rank()).topk(K)
    tokens = torch.randn(TOKENS, RECIPE.dim, dtype=dtype, requires_grad=True)
    weights = weights.to(weights_dtype).requires_grad_()
    experts(tokens, index, weights)  # the first call also compares
    with counted() as forward:
        made = experts(tokens, index, weights)
    with counted() as backward:
        made.sum().backward()
    return sum(forward), sum(backward)


def closed_form(rank: int, count: int, once: bool, width: int, weight_width: int) -> tuple[int, int]:
    """Bytes that a rank sends, forward and backward, for tokens and weights of so many bytes an element."""
    rows = torch.zeros(count, count, dtype=torch.long)  # from, to
    for sender in range(count):
        for chosen in scores(sender).topk(K).indices // (E // count):
            for there in chosen.unique() if once else chosen:
                rows[sender, there] += 1
    rows.fill_diagonal_(0)
    out, back = int(rows[rank].sum()), int(rows[:, rank].sum())
    k = K if once else 1
    token, weight = RECIPE.dim * width, k * weight_width
    counts = 2 * 8 * (count - 1)
    return counts + out * (token + 2 * weight) + back * token, out * token + back * (token + weight)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_bytes_are_those_of_the_closed_form(count: int, once: bool) -> None:
    for dtypes in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        found = run_on_ranks(count, bytes_of_a_call, once, *dtypes)
        assert found == [closed_form(rank, count, once, *(d.itemsize for d in dtypes)) for rank in range(count)]


# ---------------------------------------------------------------- memory


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
        experts = optimizer.param_groups[0][GROUPED]
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
    "dp2": (2, [DataParallel(2), EP2], [1 / 2, 1 / 2, 2 / 2]),
    "dp4, ep4": (4, [DataParallel(4), ExpertParallel(4)], [1 / 4, 1 / 4, 2 / 4]),
    "zero2": (4, [Zero(4, stage=2), EP2], [1 / 2, 1 / 4, 2 / 4]),
    "zero3": (4, [Zero(4), EP2], [1 / 4, 1 / 4, 2 / 4]),
}


@sampled(1, "layout", HELD)
def test_a_rank_holds_its_part_of_the_experts(layout: str) -> None:
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
    watch = Watched()
    strategy = ExpertParallelStrategy(2, capacity_factor=1.0)
    data = loaders("banked_experts", 2, samples=16, length=tokens // 2)
    run = {"max_steps": 2, "limit_val_batches": 0, "callbacks": [watch]}
    trainer(strategy, **run).fit(build("banked_experts", n=E), *data)
    return watch.mode.most


def test_nothing_is_of_the_size_of_tokens_times_experts_times_capacity() -> None:
    tokens, k, features = 128, 2, 64  # the most features are those of the vocabulary
    capacity = 2 * tokens * k // E
    for found in run_on_ranks(2, largest, tokens):
        assert tokens * E < found <= 2 * tokens * k * features < tokens * E * capacity


# ---------------------------------------------------------------- capacity


def kept_slowly(index: Tensor, factor: float) -> Tensor:
    """Which pairs of a whole batch have room: the first of each expert."""
    limit = math.ceil(len(index) * index.shape[1] * factor / E)
    taken = [0] * E
    kept = torch.zeros_like(index, dtype=torch.bool)
    for token, chosen in enumerate(index.tolist()):
        for slot, expert in enumerate(chosen):
            kept[token, slot] = taken[expert] < limit
            taken[expert] += 1
    return kept


class Telling(Bank):
    """Stacked experts that show what was dropped."""

    drop_rate: float | Tensor = 0.0


def crowded(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a batch, which like some experts more than others."""
    tokens = torch.randn(2 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    liked = torch.cat([scores(0), scores(1)]) + torch.arange(E) / E
    weights, index = liked.topk(K)
    return tokens, index, weights


def limited(factor: float, once: bool) -> tuple[Tensor, Tensor, float]:
    """What comes out for this rank's tokens, what their gradients are, and what was dropped."""
    torch.manual_seed(0)
    experts = divided(Telling(E).double(), ExpertParallel(capacity_factor=factor, send_once=once))
    count, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    tokens, index, weights = (each.chunk(count)[rank] for each in crowded(count))
    tokens.requires_grad_()
    made = experts(tokens[None], index[None], weights[None])[0]
    made.square().sum().backward()
    return made.detach(), tokens.grad, float(experts.drop_rate)


@sampled(2, "factor", [1.0, 1.3, 3.0])
def test_the_first_of_the_batch_have_room(factor: float) -> None:
    tokens, index, weights = crowded(1)
    kept = kept_slowly(index, factor)
    torch.manual_seed(0)
    bank = Bank(E).double()
    tokens.requires_grad_()
    expected = bank(tokens[None], index[None], (weights * kept)[None])[0]
    expected.square().sum().backward()
    assert kept.all() == (factor == 3.0)
    for count, once in ((1, True), (2, True), (2, False), (4, True)):
        found = run_on_ranks(count, limited, factor, once)
        torch.testing.assert_close(torch.cat([each[0] for each in found]), expected)
        torch.testing.assert_close(torch.cat([each[1] for each in found]), tokens.grad)
        assert [each[2] for each in found] == pytest.approx([1 - kept.double().mean().item()] * count)


CAPPED = {
    "ep2": (2, partial(ExpertParallelStrategy, 2, capacity_factor=1.0), 2),
    "dp2 x tp2": (
        4,
        hybrid(DataParallel(2), TensorParallel(2, sequence_parallel=False), ExpertParallel(2, capacity_factor=1.0)),
        2,
    ),
    "zero3, two copies": (4, hybrid(Zero(4), ExpertParallel(2, capacity_factor=1.0)), 4),
}


CAPPED_CELLS = [
    ("ep2", "banked_experts"),
    ("dp2 x tp2", "looped_experts"),
    ("zero3, two copies", "flat_experts"),
    ("ep2", "looped_experts"),
    ("dp2 x tp2", "banked_experts"),
]


@sampled(1, ("layout", "column"), CAPPED_CELLS)
def test_with_a_capacity_ranks_train_as_one_does(layout: str, column: str) -> None:
    count, strategy, readers = CAPPED[layout]
    run = {"max_epochs": 1, "precision": "64-true", "data": SHORT}
    capped = begun_on_one(train, column, partial(ExpertParallelStrategy, capacity_factor=1.0), **run)
    dropless = begun_on_one(train, column, partial(ExpertParallelStrategy), **run)
    for got in run_on_ranks(count, train, column, strategy, data_ranks=readers, **run):
        compare(capped.result(), got, 1e-9)
    with pytest.raises(AssertionError):
        compare(dropless.result(), capped.result(), 1e-3)


@ranks(2)
@pytest.mark.parametrize("column", ["dense_experts", "mixing_experts"])
def test_no_capacity_where_no_tokens_travel(column: str) -> None:
    strategy = ExpertParallelStrategy(capacity_factor=1.0)
    with pytest.raises(ValueError, match=r"capacity_factor=1.0 drops tokens .* give its forward this form"):
        trainer(strategy, max_steps=1).fit(build(column), *loaders(column, 2))


@ranks(2)
def test_what_is_dropped_is_logged() -> None:
    module = MoEModule(
        MoEConfig(vocab_size=64, context=16, dim=16, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=16,
                  n_experts=E, top_k=2, expert_dim=16),
        learning_rate=1e-3, warmup_steps=1,
    )  # fmt: skip
    run = trainer(ExpertParallelStrategy(capacity_factor=1.0), max_steps=2, limit_val_batches=0)
    run.fit(module, *loaders("banked_experts", 2))
    assert 0 < run.callback_metrics["drop_rate"] < 1
    assert "__get__" not in own_experts._TOLD, "who logs asks weights whether they are leaves"
    assert all(part.drop_rate == 0 for part in module.modules() if isinstance(part, Experts))
