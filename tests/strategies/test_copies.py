"""A copy of a part of the model is a model of its own, whenever it is made: teachers, averages, target networks."""

from __future__ import annotations

import copy
import io
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    Compile,
    HybridStrategy,
    TensorParallel,
)
from lightning_parallel.techniques.tools.redirect import Surrounded, redirect_forward
from tests.layouts import Layout, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.strategies.test_unusual_models import WIDTH, Layer
from tests.tiers import sampled
from tests.trainers import trainer

SAMPLES = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(4, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Student(LightningModule):
    """Learns to be far from its teacher, which is a copy that follows it."""

    copied_in = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.teacher: nn.Module | None = None
        self.losses: list[float] = []

    def look(self, here: str) -> None:
        if here == self.copied_in and self.teacher is None:
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_start(self) -> None:
        self.look("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look("on_train_batch_start")

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.look("training_step")
        taught = torch.zeros(()) if self.teacher is None else self.teacher(1.5 * batch[0])
        return (self.net(batch[0]) - taught - 1).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        with torch.no_grad():
            if self.teacher is not None:
                for mine, own in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                    own.lerp_(mine, 0.2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_redirected_module_is_copied_and_saved_plain() -> None:
    module = nn.Linear(2, 2)
    redirect_forward(module, lambda forward: lambda x: -forward(x))
    redirect_forward(module, lambda forward: lambda x: 2 * forward(x), Surrounded)
    kept, x = io.BytesIO(), torch.ones(1, 2)
    torch.save(module, kept)
    kept.seek(0)
    expected = F.linear(x, module.weight, module.bias)
    assert torch.equal(module(x), -2 * expected)
    for twin in copy.deepcopy(module), torch.load(kept, weights_only=False):
        assert torch.equal(twin(x), expected)
        twin.weight.data.zero_()
        assert torch.equal(twin(x)[0], twin.bias)


def taught(copied_in: str, strategy: Any, batch_size: int) -> Any:
    module = Student()
    module.copied_in = copied_in
    samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    run = trainer(made(strategy), max_epochs=2)
    run.fit(module, DataLoader(TensorDataset(samples), batch_size))
    assert module.teacher is not None
    with torch.no_grad():
        return module.losses, module.teacher(torch.ones(1, 4))


COMPILED = partial(HybridStrategy, TensorParallel(2), Compile(backend="aot_eager"))
LAYOUTS = layouts("zero 1", "zero 2", "zero 3", "tensor parallel", "pipeline") | {
    "tensor parallel, compiled": Layout(2, 1, COMPILED)
}
PLACES = "on_train_start", "on_train_batch_start", "on_train_epoch_end", "training_step"


@sampled(1, ("layout", "copied_in"), product(LAYOUTS, PLACES))
def test_a_copy_computes_with_its_own_weights(layout: str, copied_in: str) -> None:
    _, data_ranks, strategy = LAYOUTS[layout]
    expected = begun_on_one(taught, copied_in, None, 4)
    found = run_on_ranks(2, taught, copied_in, strategy, 4 // data_ranks)
    losses = [sum(each) / len(found) for each in zip(*(losses for losses, _ in found), strict=True)]
    require_like(expected.result()[0], losses)
    for _, answer in found:
        require_like(expected.result()[1], answer)
