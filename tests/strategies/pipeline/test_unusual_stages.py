"""Stages that are frozen, have no parameters or recompute train as on one device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, ParallelPlan
from tests.layouts import PP2, Layout, hybrid, layouts
from tests.models import Plain, PlainBlock, points
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer


class Frozen(Plain):
    """The first stage, or the last with the heads, does not learn."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        names = ("stem", "blocks.0", "blocks.1", "shift") if first else ("blocks.2", "blocks.3", "heads", "temperature")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(names))


class Recomputed(PlainBlock):
    """A block that recomputes itself in backward, of which a part learns, as where adapters are trained."""

    def __init__(self) -> None:
        super().__init__(7, 13)
        self.up.requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Adapted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recomputed() for _ in range(4))


class Without(nn.Module):
    """A block without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x) * 0.1


class NothingAtTheEnd(Plain):
    """The last stage has nothing to learn, and neither has what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2], self.blocks[3] = Without(), Without()

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("blocks.*",))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = (x.mean(-1) - batch[2]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
        self.log("val_loss", x.abs().mean())


class Asking(PlainBlock):
    """Hooks on what it computes, and a quantile of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            y.register_hook(lambda gradient: 0.5 * gradient)
            y.retain_grad()
        return y * torch.quantile(y, 0.9, dim=-1, keepdim=True).sigmoid()


class Asks(Plain):
    """Its last layer no step uses; AdamW would draw it to zero if it had a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asking(7, 13) for _ in range(4))
        self.unused = nn.Linear(7, 7)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5, eps=1e-5)


class PassesOn(PlainBlock):
    """A block that keeps a value for the next one, or takes what the one before kept, as layers that share keys do."""

    def __init__(self, number: int, kept: dict[str, Tensor]) -> None:
        super().__init__(7, 13)
        self.number, self.kept = number, kept

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.number == 1:
            self.kept["keys"] = x.tanh()
        return x * self.kept.pop("keys") if self.number == 2 else x


class Shares(Plain):
    """Its second and third block have to be on one stage."""

    def __init__(self) -> None:
        super().__init__()
        kept: dict[str, Tensor] = {}
        self.blocks = nn.ModuleList(PassesOn(number, kept) for number in range(4))


MODELS: dict[str, Callable[[], Plain]] = {
    "plain": Plain,
    "frozen": partial(Frozen, first=True),
    "frozen end": partial(Frozen, first=False),
    "adapted": Adapted,
    "shares": Shares,
    "nothing at the end": NothingAtTheEnd,
    "asks": Asks,
}
LAYOUTS = layouts("pipeline", "zbv", "pipeline x zero 1", "pipeline x zero 2", "pipeline x zero 3") | {
    "recomputed": Layout(2, 1, hybrid(PP2, ActivationCheckpoint()))
}


def trained(strategy: MakeStrategy | None, model: str, batch_size: int) -> Any:
    torch.manual_seed(0)
    losses, module = list[float](), MODELS[model]()
    fitting = trainer(made(strategy), max_epochs=1, gradient_clip_val=0.5)
    module.on_train_batch_end = lambda *_: losses.append(float(fitting.callback_metrics["train_loss"]))
    fitting.fit(module, *(DataLoader(points(size, seed=1), batch_size) for size in (32, 16)))
    metrics = {name: float(value) for name, value in fitting.callback_metrics.items()}
    return losses, metrics, {name: value.detach().clone() for name, value in module.state_dict().items()}


@sampled(
    2,
    ("model", "layout"),
    [
        ("shares", "pipeline"),
        ("frozen", "pipeline"),
        ("frozen", "zbv"),
        ("frozen", "pipeline x zero 3"),
        ("frozen end", "pipeline"),
        ("frozen end", "recomputed"),
        ("frozen end", "pipeline x zero 3"),
        ("adapted", "pipeline"),
        ("adapted", "zbv"),
        ("adapted", "pipeline x zero 3"),
        ("nothing at the end", "pipeline"),
        ("nothing at the end", "pipeline x zero 3"),
        ("plain", "recomputed"),
        ("asks", "zbv"),
        ("asks", "pipeline x zero 3"),
        ("asks", "pipeline x zero 2"),
        ("asks", "pipeline x zero 1"),
        ("asks", "pipeline"),
    ],
)
def test_unusual_stages_train_as_on_one_device(model: str, layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, ranks, (None, model, 8), (strategy, model, 8 // readers))
