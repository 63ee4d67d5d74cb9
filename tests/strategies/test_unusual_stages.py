"""Stages that are frozen, have no parameters or recompute train as on one device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel import (
    ActivationCheckpoint,
    HybridStrategy,
    ParallelPlan,
    PipelineParallel,
    PipelineParallelStrategy,
    Zero,
)
from tests.models import Plain, PlainBlock, loaders, points
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer


class Frozen(Plain):
    """The blocks of the first stage, and the stem, do not learn."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.stem, *self.blocks[:2]):
            part.requires_grad_(False)
        self.shift.requires_grad_(False)


class FrozenEnd(Plain):
    """The blocks of the last stage do not learn, nor do the heads."""

    def __init__(self) -> None:
        super().__init__()
        for part in (*self.blocks[2:], *self.heads):
            part.requires_grad_(False)
        self.temperature.requires_grad_(False)


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


class Sharing(PlainBlock):
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
    def __init__(self) -> None:
        super().__init__()
        kept: dict[str, Tensor] = {}
        self.blocks = nn.ModuleList(Sharing(number, kept) for number in range(4))


class Without(nn.Module):
    """A block without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x) * 0.1


class Parameterless(Plain):
    """The second of three stages has nothing to learn, and neither has what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2], self.blocks[3] = Without(), Without()

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("blocks.*",))


class NothingAtTheEnd(Parameterless):
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
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asking(7, 13) for _ in range(4))


class Unused(Plain):
    """A layer that no step uses; AdamW would draw it to zero if it had a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(7, 7)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


class Skipping(Plain):
    """Skips a batch before its blocks."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


MODELS: dict[str, Callable[[], Plain]] = {
    "frozen": Frozen,
    "frozen end": FrozenEnd,
    "adapted": Adapted,
    "shares": Shares,
    "parameterless": Parameterless,
    "nothing at the end": NothingAtTheEnd,
    "recomputed": Plain,
    "unused": Unused,
    "asks": Asks,
}
PIPELINES: dict[str, Callable[[], Any]] = {
    "1f1b": partial(PipelineParallelStrategy, 2, microbatches=2),
    "zbv": partial(PipelineParallelStrategy, 2, schedule="zbv", microbatches=4),
    "recomputed": lambda: HybridStrategy(PipelineParallel(2, microbatches=2), ActivationCheckpoint()),
    "zero 1": lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2, stage=1)),
    "zero 2": lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2, stage=2)),
    "zero 3": lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2)),
}


def trained(strategy: MakeStrategy | None, model: str, batch_size: int, **run: Any) -> Any:
    torch.manual_seed(0)
    losses: list[float] = []
    module = MODELS[model]()

    def note(*_: Any) -> None:
        losses.append(float(module.trainer.callback_metrics["train_loss"]))

    module.on_train_batch_end = note  # type: ignore[method-assign]
    fitting = trainer(made(strategy), max_epochs=1, gradient_clip_val=0.5, **run)
    fitting.fit(module, DataLoader(points(32, seed=1), batch_size), DataLoader(points(16, seed=2), batch_size))
    metrics = {name: float(value) for name, value in fitting.callback_metrics.items()}
    return losses, metrics, {name: value.detach().clone() for name, value in module.state_dict().items()}


def compared(model: str, layout: str, n: int = 2, data_ranks: int = 1, **run: Any) -> None:
    assert_like_one_device(trained, n, (None, model, 8), (PIPELINES[layout], model, 8 // data_ranks), **run)


@sampled(1, "model", MODELS)
def test_a_pipeline_trains_them_as_one_device_does(model: str) -> None:
    compared(model, "recomputed" if model == "recomputed" else "1f1b")


def test_layers_with_gradient_hooks() -> None:
    compared("asks", "1f1b")


def test_blocks_that_learn_in_part_and_recompute_themselves() -> None:
    compared("adapted", "1f1b")


def test_blocks_that_share_values_are_put_on_one_stage() -> None:
    compared("shares", "1f1b")


def shares(strategy: MakeStrategy) -> str:
    try:
        trained(strategy, "shares", 8)
    except ValueError as error:
        return str(error)
    return ""


def test_split_that_parts_them_is_refused() -> None:
    for said in run_on_ranks(2, shares, partial(PipelineParallelStrategy, 2, split=(2, 2))):
        assert "a tensor that was made in block" in said
        assert "choose a split that leaves both on one stage" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [name for name in MODELS if name != "shares"])  # whose second stage is the third
@pytest.mark.parametrize("layout", ["zbv", "recomputed"])
def test_so_do_other_pipelines(model: str, layout: str) -> None:
    compared(model, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_so_does_one_whose_parameters_are_sharded(model: str) -> None:
    compared(model, "zero 3", n=4, data_ranks=2)


@sampled(1, "layout", ["zero 1", "zero 2"])
def test_what_no_step_uses_does_not_move(layout: str) -> None:
    compared("unused", layout, n=4, data_ranks=2)


@pytest.mark.exhaustive
def test_so_does_one_whose_shards_compute_in_half_precision() -> None:
    expected = run_on_ranks(1, trained, None, "recomputed", 8, precision="bf16-mixed")[0]
    found = run_on_ranks(4, trained, PIPELINES["zero 3"], "recomputed", 4, precision="bf16-mixed")
    for losses, metrics, weights in found:
        assert (losses, metrics) == (found[0][0], found[0][1])
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-2, atol=1e-2)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[2][name], rtol=2e-2, atol=3e-2)


def skipped() -> None:
    trainer(PIPELINES["1f1b"](), max_epochs=1).fit(Skipping(), *loaders("plain", 8, samples=16, val_samples=8))


def test_step_without_its_blocks_says_how_to_skip_a_batch() -> None:
    with pytest.raises(AssertionError, match="to skip a batch, run them and return the loss times zero"):
        run_on_ranks(2, skipped, timeout=8.0)
