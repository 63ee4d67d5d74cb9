"""What steps and hooks do in an order of their own: critics before generators, reads between forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ActivationCheckpoint,
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    ParallelPlan,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH, LENGTH = 8, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Chain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: list[float] = []
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adversaries(Chain):
    """The critic is stepped before the generator goes backward, through what it made for both."""

    toggles, every = False, 1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        generator, critic = optimizers
        made = self(batch[0].roll(1, 1))
        self.hold(critic)
        of_critic = F.softplus(-self.critic(batch[0])).mean() + F.softplus(self.critic(made.detach())).mean()
        critic.zero_grad()
        self.manual_backward(of_critic)
        if batch_idx % self.every == 0:
            critic.step()
        self.let_go(critic)
        self.hold(generator)
        loss = F.softplus(-self.critic(made)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.let_go(generator)
        self.log("loss", loss)

    def hold(self, optimizer: Any) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)

    def let_go(self, optimizer: Any) -> None:
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layers, self.critic)]


class Toggled(Adversaries):
    toggles = True


class Seldom(Toggled):
    every = 2


class Looks(Chain):
    """Averages weights between a forward and its backward, where Lightning has a hook."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            mean = getattr(self, "mean", None)
            now = [parameter.clone() for parameter in self.layers.parameters()]
            self.mean = now if mean is None else [0.9 * old + 0.1 * new for old, new in zip(mean, now, strict=True)]
        self.seen.append(sum(float(each.sum()) for each in self.mean))


class Gathers(Chain):
    """Each layer gets the list of what layers before it returned, which grows afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(found))
        return found[-1]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfAll() for _ in range(4))


class OfAll(Layer):
    def forward(self, x: Any) -> Tensor:
        return super().forward(sum(x))  # type: ignore[arg-type]


class Recomputes(torch.autograd.Function):
    """Saves inputs only, and computes gradients of parameters within its own backward."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.layer(x)
        return None, *torch.autograd.grad(y, [x, *ctx.layer.parameters()], incoming[0])


class Recomputing(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 + Recomputes.apply(self.inner, x / 2, *self.inner.parameters())  # type: ignore[no-untyped-call, no-any-return]


class Reversible(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recomputing() for _ in range(4))


class Counted(Chain):
    """Losses are sums, divided by a product of the batch's dimensions, or by parts that were counted."""

    by = "product"

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        losses, n, total = (self(batch[0]) - 1).square().mean(-1), 0, torch.zeros(())
        if self.by == "product":
            rows, length = losses.shape
            loss = losses.sum() / (rows * length)
        else:
            for part in losses.flatten().chunk(2):
                total, n = total + part.sum(), n + part.numel()
            loss = total / n
        self.log("loss", loss)
        return loss


class CountedParts(Counted):
    by = "parts"


class ScheduleFree(torch.optim.Optimizer):
    """After Defazio et al., The Road Less Scheduled, 2024: parameters are swapped between training and evaluation."""

    def __init__(self, parameters: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "mode": True, "k": 0})

    @torch.no_grad()
    def eval(self) -> None:
        self._turn(False, lambda group: 1 - 1 / group["beta"])

    @torch.no_grad()
    def train(self) -> None:
        self._turn(True, lambda group: 1 - group["beta"])

    def _turn(self, mode: bool, weight: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["mode"] is not mode else ():
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(end=self.state[parameter]["z"], weight=weight(group))
            group["mode"] = mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            assert group["mode"]
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(end=z, weight=1 / group["k"])
                    parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                    z.sub_(parameter.grad, alpha=group["lr"])
        return loss


class Turns(Chain):
    """Turns its optimizer to training and evaluation, in hooks of which one looks at the model."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.trainer.optimizers[0].train()

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        optimizer: Any = self.optimizers()
        optimizer.eval()

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.layers[0].up.weight.detach().norm()))
        self.trainer.optimizers[0].train()  # type: ignore[no-untyped-call]
        self.seen.append(float(self.layers[3].up.weight.detach().norm()))
        self.trainer.optimizers[0].eval()
        self.seen.append(float(self.layers[3].up.weight.detach().norm()))

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), lr=0.1)


class StepsInHooks(Chain):
    """An optimizer steps once more, by the gradients that are left, in hooks that look at the model."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        optimizer: Any = self.trainer.optimizers[0]
        self.look()
        optimizer.step()
        self.look()

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.layers[1].down.weight.mul_(1.1)
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.look()

    def look(self) -> None:
        self.seen += [float(layer.up.weight.detach().norm()) for layer in self.layers]  # type: ignore[operator, union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trained(kind: type[Chain], strategy: Any, batch_size: int, samples: int) -> Any:
    module = kind()
    data = torch.randn(samples, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    run = trainer(made(strategy), precision="64-true", max_epochs=2)
    run.fit(module, DataLoader(TensorDataset(data), batch_size))
    return module.seen, {name: value.clone() for name, value in module.state_dict().items()}


PLAN = ParallelPlan(blocks="layers.*")
LAYOUTS: dict[str, tuple[int, int, Any]] = {
    "data parallel": (2, 2, DataParallelStrategy),
    "zero 1": (2, 2, partial(ZeroStrategy, stage=1)),
    "zero 2": (2, 2, partial(ZeroStrategy, stage=2)),
    "zero 3": (2, 2, partial(ZeroStrategy, stage=3)),
    "zero 3, recomputed": (2, 2, lambda: HybridStrategy(Zero(2), ActivationCheckpoint(), plan=PLAN)),
    "tensor parallel": (2, 1, partial(TensorParallelStrategy, 2)),
    "pipeline": (2, 1, partial(PipelineParallelStrategy, microbatches=2, plan=PLAN)),
    "pipeline of replicas": (
        4,
        2,
        lambda: HybridStrategy(PipelineParallel(2, microbatches=2), DataParallel(2), plan=PLAN),
    ),
}


CASES: list[tuple[type[Chain], str]] = [
    *((kind, layout) for kind in (Adversaries, Toggled, Seldom) for layout in LAYOUTS if not layout.startswith("pipe")),
    *((Looks, layout) for layout in ("data parallel", "zero 3", "tensor parallel")),
    *((StepsInHooks, layout) for layout in ("zero 2", "zero 3", "tensor parallel", "pipeline")),
    *((Turns, layout) for layout in LAYOUTS if layout not in ("data parallel", "zero 3, recomputed")),
    *((Gathers, layout) for layout in ("zero 3, recomputed", "pipeline")),
    *((Reversible, layout) for layout in ("data parallel", "pipeline", "pipeline of replicas")),
    *((kind, layout) for kind in (Counted, CountedParts) for layout in ("data parallel", "zero 3", "pipeline")),
]


def check(kind: type[Chain], layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, ranks, (kind, None, 8, 24), (kind, strategy, 8 // readers, 24))


@sampled(1, ("kind", "layout"), CASES)
def test_what_is_done_in_an_own_order_is_as_on_one_device(kind: type[Chain], layout: str) -> None:
    check(kind, layout)


@sampled(1, "layout", ["data parallel", "zero 3"])
def test_values_of_an_uneven_last_batch_of_adversaries(layout: str) -> None:
    """Ranks have three and two samples of it, and the critic's loss is a sum of two."""
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, ranks, (Adversaries, None, 8, 13), (Adversaries, strategy, 8 // readers, 13))
