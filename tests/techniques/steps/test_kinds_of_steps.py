"""Steps that use gradients in unusual ways train as on one device: every kind in every layout.

Steps find, change and drop gradients of batches before; modules override `backward`; optimizers raise; steps run
several backward passes, also for tensors of their own. One rank alone does what several do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from tests.layouts import layouts
from tests.models import PlainBlock
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH = 6


class Plain(LightningModule):
    """A stem and two blocks; those that inherit say what is unusual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.seen = nn.Linear(WIDTH, WIDTH), list[float]()
        self.blocks = nn.ModuleList(PlainBlock(WIDTH, 12) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class OfBefore(Plain):
    """Drops, changes and reads gradients of the batches before."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx in (1, 5):
            self.zero_grad()
        for parameter in self.blocks.parameters():
            if parameter.grad is not None and batch_idx % 2:
                parameter.grad.mul_(0.5)
        before = self.stem.weight.grad
        self.seen.append(0.0 if before is None else float(before.norm()))
        return self.loss(batch) * (1 + self.seen[-1])


class Halving(Plain):
    """Halves gradients in every other step."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        if self.global_step % 2:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


class Twice(Halving):
    """Runs two passes, and changes what the first one left."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward(retain_graph=True)
        for parameter in self.stem.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3)
        super().backward(loss * 2)


class Asking(Plain):
    """Gives gradients that it asks for."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.go_back(batch)
        optimizer.step()

    def go_back(self, batch: Tensor) -> None:
        self.manual_backward(self.loss(batch))


class Attacked(Manual):
    """A pass for a tensor of the step alone, before that for the parameters."""

    def go_back(self, batch: Tensor) -> None:
        noise = torch.zeros(WIDTH, dtype=batch.dtype, requires_grad=True)
        self(torch.ones(1, WIDTH, dtype=batch.dtype) + noise).square().mean().backward(inputs=[noise])
        assert noise.grad is not None
        self.manual_backward(self.loss(batch) * (1 + noise.grad.square().sum()))


class Raising(optim.SGD):
    """Raises in its second step, before it does anything, and in its third, after it did."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.count = vars(self).get("count", 0) + 1
        if self.count == 2:
            if closure is not None:
                closure()
            raise ArithmeticError("no step")
        loss = super().step(closure)
        if self.count == 3:
            raise ArithmeticError("a step")
        return loss


class Handling(Manual):
    """Goes on where its optimizer raises."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        try:
            super().training_step(batch, batch_idx)
        except ArithmeticError:
            self.seen.append(float(batch_idx))

    def configure_optimizers(self) -> Any:
        return Raising(self.parameters(), lr=0.1, momentum=0.9)


LAYOUTS = layouts(
    *("data parallel", "zero 1", "zero 2", "zero 2, offloaded", "zero 3", "tensor parallel", "pipeline"),
    *("tensor x data parallel", "tensor x zero 1", "tensor x zero 3", "one rank, zero 2", "one rank, zero 3"),
)
CASES: list[tuple[type[Plain], str, int]] = [
    *((OfBefore, "zero 3", 2), (Handling, "tensor parallel", 1), (OfBefore, "one rank, zero 3", 2)),
    *((Asking, "zero 2", 1), (Handling, "zero 3", 1), (Attacked, "tensor parallel", 1)),
    *((Twice, "zero 2, offloaded", 2), (OfBefore, "data parallel", 1)),
    *((OfBefore, "tensor x zero 3", 2), (Halving, "pipeline", 1), (Halving, "tensor x zero 1", 2)),
    *((Twice, "zero 3", 1), (Twice, "tensor x data parallel", 2), (Twice, "tensor parallel", 1)),
    *((Asking, "data parallel", 1), (Attacked, "zero 3", 1), (Handling, "zero 2, offloaded", 1)),
    *((Handling, "tensor x zero 3", 1), (Handling, "zero 1", 1), (Attacked, "data parallel", 1)),
]
"""With the batches that a step of the optimizer takes: some steps cannot accumulate, nor can a pipeline here."""


def trained(kind: type[Plain], accumulate: int, strategy: Any, readers: int) -> Any:
    module, data = kind(), torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = trainer(made(strategy), max_epochs=1, precision="64-true", accumulate_grad_batches=accumulate)
    run.fit(module, DataLoader(data, 4 // readers))
    assert not isinstance(module, Handling) or module.seen == [1.0, 2.0]
    return module.seen, {name: value.clone() for name, value in module.state_dict().items()}


@sampled(3, ("kind", "layout", "accumulate"), CASES)
def test_unusual_steps_train_as_on_one_device(kind: type[Plain], layout: str, accumulate: int) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    given = kind, accumulate
    assert_like_one_device(trained, ranks, (*given, None, 1), (*given, strategy, readers), rtol=1e-9, atol=1e-11)
