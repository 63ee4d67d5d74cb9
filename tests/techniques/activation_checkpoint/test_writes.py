"""What a recomputed block writes: buffers once, and read as the forward did; weights and inputs are refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, Compile, DataParallel, HybridStrategy, TensorParallel, Zero
from lightning_parallel.techniques.activation_checkpoint import WriteDetector
from tests.models import Optimized, adamw
from tests.ranks import ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer


class Block(nn.Module):
    """Normalises by statistics of the batch and by an average that it keeps, counts calls in a buffer, keeps a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("average", torch.ones(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1  # another tensor each time
        self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        self.loss = x.square().mean()
        hidden = self.up(self.norm(x) / self.average).relu() * (self.count / 4).clamp(max=1.0)
        return x + self.down(hidden) + 0.01 * self.count


class Model(Optimized):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.make_optimizer = nn.ModuleList(block() for _ in range(3)), adamw

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + 0.1 * sum(layer.loss for layer in self.layers)


class Plain(nn.Module):
    loss = torch.zeros(())

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.steps = nn.Linear(6, 12), nn.Linear(12, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class WritesWeights(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class WritesData(Plain):
    """Writes in a way that counts as no version."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.bias.data.mul_(0.8)
        return super().forward(x)


class Averages(Plain):
    """Computes with a buffer that it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        return super().forward(x / self.average)


class WritesInputs(Plain):
    """Writes into what it is given, a tensor that the step has made."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down.bias
        return super().forward(x)


class WritesLate(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps > 2:
            with torch.no_grad():
                self.up.bias.mul_(0.9)
        return super().forward(x)


class Gives(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch * 2.0, batch_idx)


class Thaws(Plain):
    """Has a norm that is frozen in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1  # not in recomputations
        self.norm.train(self.steps > 3)
        return super().forward(self.norm(x))


class Lends(Model):
    """Computes a block with another weight for a while."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        up = self.layers[1].up
        own, up.weight = up.weight, nn.Parameter(torch.full((12, 6), 0.1, dtype=batch.dtype))
        found = self.layers[1](batch)
        up.weight = own
        return super().training_step(batch, batch_idx) + found.square().mean()


KINDS: dict[str, tuple[type[Model], type[nn.Module]]] = {
    "buffers": (Model, Block),
    "averages": (Model, Averages),
    "lent": (Lends, Plain),
    "a norm that thaws": (Model, Thaws),
}


def trained(strategy: MakeStrategy | None, model: type[Model], block: type[nn.Module]) -> Any:
    module, data = model(block), torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer(made(strategy), max_epochs=2, precision="64-true").fit(module, DataLoader(data, 8))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


FULL, SELECTIVE = ActivationCheckpoint(), ActivationCheckpoint("selective")
LAYOUTS: dict[str, list[Any]] = {
    "full": [DataParallel(1), FULL],
    "selective": [DataParallel(1), SELECTIVE],
    "beside compiled parts": [DataParallel(1), FULL, Compile(backend="aot_eager")],
    "zero 3": [Zero(1, stage=3), FULL],
    "tensor parallel": [TensorParallel(2), FULL],
    "tensor parallel, selective": [TensorParallel(2), SELECTIVE],
}
ROWS = [
    *(("tensor parallel", "buffers"), ("full", "lent"), ("zero 3", "averages"), ("tensor parallel, selective", "lent")),
    *(("beside compiled parts", "buffers"), ("zero 3", "buffers"), ("selective", "a norm that thaws")),
]


@sampled(1, ("layout", "kind"), ROWS)
def test_blocks_that_write_train_as_without_recomputation(layout: str, kind: str) -> None:
    make, count = partial(HybridStrategy, *LAYOUTS[layout]), 2 if "tensor" in layout else 1
    assert_like_one_device(trained, count, (None, *KINDS[kind]), (make, *KINDS[kind]))


WRITES = ((WritesWeights, "down.weight"), (WritesData, "up.bias"), (WritesInputs, "its inputs"))
REFUSED = [
    *((block, f"{block.__name__} writes to {what} in its forward, so ActivationCheckpoint would recompute from", ())
      for block, what in (*WRITES, (WritesLate, "up.bias"))),
    (Averages, "a recomputed forward writes to a tensor from outside it", (Compile("aot_eager", fullgraph=True),)),
]  # fmt: skip


@ranks(1)
def test_blocks_that_write_weights_or_inputs_are_refused() -> None:
    """A graph also leaves out a block that writes buffers."""
    for block, said, more in REFUSED:
        torch._dynamo.reset()  # what broke once is not read again
        with pytest.raises((ValueError, Unsupported), match=re.escape(said)):
            trained(partial(HybridStrategy, DataParallel(1), FULL, *more), Gives, block)


def test_only_buffers_of_modules_that_write_are_copied() -> None:
    block = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    block.register_buffer("table", torch.ones(4))
    written, of_norm = WriteDetector(block), {"running_mean", "running_var", "num_batches_tracked"}
    for names in (of_norm | {"table"}, of_norm):
        found = written.before(())
        block(torch.randn(3, 4))
        written.after(found)
        assert {name for _, name, _ in found.buffers} == names
