"""Steps that use gradients in unusual ways train as on one device, or are refused: every kind in every layout.

Steps find, change and drop gradients of batches before; modules override `backward`; optimizers raise; steps run
several backward passes, also for tensors of their own. One rank alone does what several do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from tests.layouts import layouts
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.strategies.test_unusual_models import Scripted
from tests.tiers import rows_covering
from tests.trainers import trainer

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Plain(LightningModule):
    """A stem and two blocks; those that inherit say what is unusual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks, self.seen = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in "ab"), list[float]()

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


# ---------------------------------------------------------------- gradients of batches before


class Dropping(Plain):
    """Leaves out the first of some batches that accumulate."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx in (1, 5):
            self.zero_grad()
        return self.loss(batch)


class Scaling(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for parameter in self.blocks.parameters():
            if parameter.grad is not None and batch_idx % 2:
                parameter.grad.mul_(0.5)
        return self.loss(batch)


class Weighing(Plain):
    """Weighs a loss by the gradient of the batch before."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        before = self.stem.weight.grad
        self.seen.append(0.0 if before is None else float(before.norm()))
        return self.loss(batch) * (1 + self.seen[-1])


# ---------------------------------------------------------------- a `backward` of the module's own


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


# ---------------------------------------------------------------- manual optimization


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.go_back(batch)
        optimizer.step()

    def go_back(self, batch: Tensor) -> None:
        self.manual_backward(self.loss(batch))


class TwoPasses(Manual):
    """Two passes through one graph; clips their sum."""

    def go_back(self, batch: Tensor) -> None:
        found = self(batch)
        self.manual_backward(found.square().mean(), retain_graph=True)
        self.manual_backward(found.abs().mean() / 2)
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.3)))


class Adversaries(Manual):
    """Two optimizers, each toggled for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, sign in zip(optimizers, (-1, 1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = F.softplus(sign * self.judge(self(batch))).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        made = [*self.stem.parameters(), *self.blocks.parameters()]
        return [optim.Adam(made, lr=0.01), optim.Adam(self.judge.parameters(), lr=0.01)]


class Attacked(Manual):
    """A pass for a tensor of the step alone, before that for the parameters."""

    def go_back(self, batch: Tensor) -> None:
        noise = torch.zeros(WIDTH, dtype=batch.dtype, requires_grad=True)
        self(torch.ones(1, WIDTH, dtype=batch.dtype) + noise).square().mean().backward(inputs=[noise])
        assert noise.grad is not None
        self.end(self.loss(batch) * (1 + noise.grad.square().sum()))

    def end(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class PlainBackward(Attacked):
    def end(self, loss: Tensor) -> None:
        loss.backward()


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


class Climbing(Raising):
    """Reads parameters again after the step of the class that it extends."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.01 * parameter.sign())
        return loss


class Handling(Manual):
    """Goes on where its optimizer raises."""

    kind: type[optim.SGD] = Raising

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        try:
            super().training_step(batch, batch_idx)
        except ArithmeticError:
            self.seen.append(float(batch_idx))

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1, momentum=0.9)


class HandlingMore(Handling):
    kind = Climbing


# ---------------------------------------------------------------- layouts

LAYOUTS = layouts(
    *("data parallel", "zero 1", "zero 2", "zero 2, offloaded", "zero 3", "tensor parallel", "pipeline"),
    *("tensor x data parallel", "tensor x zero 1", "tensor x zero 3"),
    *("one rank, zero 1", "one rank, zero 2", "one rank, zero 3", "one rank, offloaded"),
)
ONE_RANK = [name for name in LAYOUTS if name.startswith("one rank")]
BEFORE = ["data parallel", "zero 1", "zero 2", "zero 3", "tensor x zero 3", *ONE_RANK]
RAISES = ["zero 1", "zero 2, offloaded", "zero 3", "tensor parallel", "tensor x zero 3"]
SOME: dict[type[Plain], list[str]] = {
    **dict.fromkeys((Dropping, Scaling, Weighing), BEFORE),
    Halving: [name for name in LAYOUTS if name not in ONE_RANK],
    Twice: [name for name in LAYOUTS if name not in (*ONE_RANK, "pipeline")],
    Asking: ["data parallel", "zero 1", "zero 2"],
    TwoPasses: ONE_RANK,
    Adversaries: ONE_RANK,
    Attacked: ["data parallel", "zero 3", "tensor parallel"],
    **dict.fromkeys((Handling, HandlingMore), RAISES),
}
ONCE = (Asking, TwoPasses, Adversaries, Attacked, Handling, HandlingMore)
"""These cannot accumulate, nor can a pipeline, of which a step gives gradients at once."""

CASES = [
    (kind, layout, accumulate)
    for kind, layouts in SOME.items()
    for layout in layouts
    for accumulate in ((1,) if kind in ONCE or layout == "pipeline" else (2, 1))
]


def trained(kind: type[Plain], accumulate: int, strategy: Any, readers: int) -> Any:
    module, data = kind(), torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() % 2:
        optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)  # torch has hooks run by this class, too, from here on
    run = trainer(made(strategy), max_epochs=1, precision="64-true", accumulate_grad_batches=accumulate)
    run.fit(module, DataLoader(data, 4 // readers))
    assert not isinstance(module, Handling) or module.seen == [1.0, 2.0]
    return module.seen, {name: value.clone() for name, value in module.state_dict().items()}


@rows_covering(("kind", "layout", "accumulate"), CASES)
def test_training(kind: type[Plain], layout: str, accumulate: int) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    given = kind, accumulate
    assert_like_one_device(trained, ranks, (*given, None, 1), (*given, strategy, readers), rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------- refused


class Scaled(nn.Parameter):
    pass


class OwnKind(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.stem.weight = Scaled(self.stem.weight.detach())


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.stem.weight.register_hook(lambda gradient: gradient / 2)


class Averages(Plain):
    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


ROWS, IDS = torch.randn(8, WIDTH), torch.zeros(4, 5, dtype=torch.int64)
REFUSED: list[tuple[Callable[[], LightningModule], str, Tensor, str]] = [
    *(
        (PlainBackward, layout, ROWS, r"call self\.manual_backward\(loss\)")
        for layout in ("data parallel", "zero 3", "tensor parallel")
    ),
    (OwnKind, "one rank, zero 3", ROWS, r"stem.weight is of the class Scaled, and Zero.*\(parameter.scaled = True\)"),
    (Hooked, "one rank, zero 3", ROWS, "the hook of torch on stem.weight would see a part of its gradient"),
    (Averages, "one rank, zero 3", ROWS, "the step hook of SGD would see the shards that each rank steps"),
    (Scripted, "one rank, zero 3", IDS, "net.5 is a module of TorchScript"),
]


def refused(rows: list[tuple[Callable[[], LightningModule], Tensor, str]], strategy: Any) -> None:
    for make, data, said in rows:
        with pytest.raises((RuntimeError, ValueError), match=said):
            trainer(strategy(), max_epochs=1).fit(make(), DataLoader(data, 2))


@pytest.mark.parametrize("layout", dict.fromkeys(layout for _, layout, _, _ in REFUSED))
def test_refusals(layout: str) -> None:
    ranks, _, strategy = LAYOUTS[layout]
    run_on_ranks(ranks, refused, [(make, data, said) for make, at, data, said in REFUSED if at == layout], strategy)
