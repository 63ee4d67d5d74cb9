"""What a block writes to its own modules is written once, though it is recomputed, and read as the forward read it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, Compile, DataParallel, HybridStrategy, TensorParallel, Zero
from lightning_parallel.techniques.activation_checkpoint.effects import Effects
from tests.models import Optimized, adamw
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like
from tests.trainers import trainer


class Block(nn.Module):
    """Normalises by statistics of the batch and by an average that it keeps, counts its calls, and keeps a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("average", torch.ones(6))
        self.calls, self.seen, self.count = 0, list[int](), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        self.loss = x.square().mean()
        hidden = self.up(self.norm(x) / self.average).relu() * min(1.0, self.calls / 4)
        return x + self.down(hidden) + 0.01 * len(self.seen) + 0.01 * self.count


class Model(Optimized):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.make_optimizer = nn.ModuleList(Block() for _ in range(3)), adamw

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + 0.1 * sum(layer.loss for layer in self.layers)


def trained(strategy: MakeStrategy | None) -> Any:
    module, data = Model(), torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer(made(strategy), max_epochs=2, precision="64-true").fit(module, DataLoader(data, 8))
    counts = [[layer.calls, len(layer.seen), int(layer.count)] for layer in module.layers]
    return counts, {name: value.detach().clone() for name, value in module.state_dict().items()}


FULL, SELECTIVE = ActivationCheckpoint(), ActivationCheckpoint("selective")
LAYOUTS: dict[str, tuple[int, list[Any]]] = {
    "full": (1, [DataParallel(1), FULL]),
    "selective": (1, [DataParallel(1), SELECTIVE]),
    "beside compiled parts": (1, [DataParallel(1), FULL, Compile(backend="aot_eager")]),
    "zero 3": (1, [Zero(1, stage=3), FULL]),
    "tensor parallel": (2, [TensorParallel(2), FULL]),
    "tensor parallel, selective": (2, [TensorParallel(2), SELECTIVE]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_write_train_as_without_recomputation(layout: str) -> None:
    ranks, techniques = LAYOUTS[layout]
    expected = begun_on_one(trained, None)
    for found in run_on_ranks(ranks, trained, partial(HybridStrategy, *techniques)):
        require_like(expected.result(), found)


def test_only_tensors_of_modules_that_write_are_copied() -> None:
    block = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    block.register_buffer("table", torch.ones(4))
    effects = Effects(block)
    for copies in (True, False):
        before, versions = effects.before(), effects.versions()
        block(torch.randn(3, 4))
        effects.learn(versions)
        kept = {key: value for (_, key, _), value in before}
        assert (kept["table"] is not block.table) is copies
        assert kept["running_mean"] is not block[0].running_mean


def test_what_a_recomputation_adds_is_gone_afterwards() -> None:
    block = nn.Linear(2, 2)
    effects = Effects(block)
    before = effects.before()
    block.own = 1
    with effects.again(before):
        block.own, block.new, block.part = 2, torch.ones(()), (part := nn.Identity())
    assert (block.own, hasattr(block, "new"), block.part) == (1, False, part)
