"""Steps that use, or log, what the analyzed step did not use on their stage."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import PipelineParallelStrategy
from tests.models import PlainBlock, points
from tests.ranks import RanksFailed, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

PP2 = partial(PipelineParallelStrategy, 2, microbatches=2)


class Steps(LightningModule):
    """Scales what comes in, and evaluates as told."""

    def __init__(self, evaluation: str) -> None:
        super().__init__()
        self.evaluation = evaluation
        self.stem, self.scale = nn.Linear(13, 13), nn.Parameter(torch.full((13,), 2.0))
        self.blocks = nn.ModuleList(PlainBlock(13, 7) for _ in range(2))
        self.head = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.stem(x) * self.scale
        x = first
        for block in self.blocks:
            x = block(x)
        return first, x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self(batch[0])[1]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        first, x = self(batch[0])
        if self.evaluation == "scales again":
            x = x * self.scale
        elif self.evaluation == "skips":
            x = x + first
        elif self.evaluation == "asks":
            x = x * (2.0 if float(first.sum()) > 0 else 1.0)
        elif self.evaluation == "reads a weight":
            x = x @ self.stem.weight
        self.log("val_loss", F.cross_entropy(self.head(x), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Logs(Steps):
    """Logs what only its first stage has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, x = self(batch[0])
        self.log("first", first.mean(), on_step=False, on_epoch=True)
        self.log("scale", self.scale.sum())
        return F.cross_entropy(self.head(x), batch[1])


def run(evaluation: str, strategy: MakeStrategy | None) -> dict[str, float]:
    model = (Logs if evaluation == "logs" else Steps)(evaluation)
    fit = trainer(made(strategy), max_epochs=1)
    loader = DataLoader(points(8, seed=3), 4)
    fit.fit(model, loader, loader)
    return {name: float(value) for name, value in fit.callback_metrics.items()}


@sampled(
    2,
    ("evaluation", "what"),
    [
        ("scales again", r"scale \(of stage 0\) is read"),
        ("skips", r"stem.bias \(of stage 0\) is read"),
        ("reads a weight", r"stem.weight \(of stage 0\) is read"),
        ("asks", r"stem.bias \(of stage 0\) is read"),
    ],
)
def test_an_evaluation_that_uses_what_its_stage_does_not_have(evaluation: str, what: str) -> None:
    with pytest.raises(RanksFailed, match=f"{what}, but another stage of the pipeline has it: .* or use ZeroStrategy"):
        run_on_ranks(2, run, evaluation, PP2)


class Penalizes(Steps):
    """Adds a penalty on a weight of the first stage for some samples of the second batch, in its second half."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        marked = batch[2] > 0
        return loss + marked.float().mean() * self.stem.weight.square().sum() if marked.any() else loss


def penalized() -> None:
    inputs, targets, _ = points(8, seed=3).tensors
    marked = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    loader = DataLoader(TensorDataset(inputs, targets, marked), 4)
    trainer(PP2(), max_epochs=1).fit(Penalizes(""), loader, loader)


def test_weight_of_another_stage_that_a_later_microbatch_reads() -> None:
    """It was zeros there, and the loss another one, without a word."""
    with pytest.raises(
        RanksFailed, match=r"stem\.weight \(of stage 0\) is .*, but another stage of the pipeline has it"
    ):
        run_on_ranks(2, penalized)


class Explains(Steps):
    """Evaluates how much each feature of its input matters."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.head(self(x)[1]).sum(), x)
        self.log("matters", gradient.abs().mean())


def explained() -> None:
    loader = DataLoader(points(8, seed=3), 4)
    trainer(PP2(), max_epochs=1, inference_mode=False).fit(Explains(""), loader, loader)


def test_evaluation_that_takes_gradients_through_other_stages() -> None:
    with pytest.raises(RanksFailed, match=r"takes gradients to a tensor that another stage .* use ZeroStrategy"):
        run_on_ranks(2, explained)


@pytest.mark.parametrize("evaluation", ["as in training", "logs"])
def test_as_one_device(evaluation: str) -> None:
    assert_like_one_device(partial(run, evaluation), 2, (None,), (PP2,))
