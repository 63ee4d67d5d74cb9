"""Steps under tensor parallelism that draw random numbers, decide by them, or run a model several times."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import DataParallel, HybridStrategy, TensorParallel, TensorParallelStrategy
from tests.models import Optimized, adamw
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like
from tests.techniques.test_tensor_parallel import Masks
from tests.trainers import trainer

TP2 = partial(TensorParallelStrategy, 2)


def masks_beside_readers() -> list[Tensor]:
    module = Masks(0.5, 0.5)
    run = trainer(HybridStrategy(DataParallel(2), TensorParallel(2)), max_steps=2)
    run.fit(module, DataLoader(torch.zeros(4, 1)))
    return [kept for block in module.blocks for kept in block.kept["inner"]]


def test_dropout_within_regions_differs_between_all_ranks() -> None:
    ranks = run_on_ranks(4, masks_beside_readers)
    for of_all in zip(*ranks, strict=True):
        assert len({mask.numpy().tobytes() for mask in of_all}) == 4


class Block(nn.Module):
    """Leaves itself out at random, and draws within its region."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        if self.skips and torch.rand(()) < 0.5:
            return x
        hidden = F.gelu(self.up(self.norm(x)))
        if self.skips:  # changes nothing, but draws for a rank's own features
            hidden = hidden + 0 * F.dropout(hidden, 0.5, training=True)
        return x + self.down(hidden) * (1 + (torch.rand(()).item() if self.skips else 0))


class Repeated(Optimized):
    """Runs its blocks once for each of some lengths, of which ranks divide some only."""

    def __init__(self, lengths: tuple[int, ...], skips: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.make_optimizer, self.lengths = adamw, lengths
        self.stem, self.head = nn.Linear(5, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(skips) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = []
        for length in self.lengths:
            x = self.stem(batch[:, :length])
            for block in self.blocks:
                x = block(x)
            found.append(self.head(x).square().mean())
        return torch.stack(found).sum()


def fitted(strategy: MakeStrategy | None, *of: Any) -> Any:
    module, losses = Repeated(*of), list[float]()
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
    data = torch.randn(24, 8, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(data, 4))  # type: ignore[arg-type]
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("lengths", [(8, 7), (7, 8), (4, 8, 7, 8)])
def test_a_step_that_runs_blocks_on_several_lengths(lengths: tuple[int, ...]) -> None:
    expected = begun_on_one(fitted, None, lengths, False)
    for found in run_on_ranks(2, fitted, TP2, lengths, False):
        require_like(expected.result(), found)


def test_ranks_leave_the_same_layers_out() -> None:
    """They decide by numbers that all draw alike, whatever each draws for its own features."""
    first, second = run_on_ranks(2, fitted, TP2, (8,), True)
    require_like(first, second)
