"""What no pipeline can run is refused on every rank before the first step, with the rule and the remedy."""

import random
import re
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import ActivationCheckpoint, Compile, HybridStrategy, PipelineParallel, PipelineParallelStrategy
from tests.further.points import Handwritten
from tests.models import PlainBlock, points
from tests.ranks import RanksFailed, on_one, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer


class Manual(Handwritten):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OneDirection(Handwritten):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class CountingBlock(PlainBlock):
    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(7, 13)
        self.state = state


class Tables(CountingBlock):
    """Keeps a table that it makes when it is first called: this is no state that anything depends on."""

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in vars(self):
            self.table = torch.linspace(0, 1, x.shape[-1])
        return super().forward(x * self.table)


class Drawing(CountingBlock):
    """Leaves itself out now and then."""

    def forward(self, x: Tensor) -> Tensor:
        kept = random.random() < 0.5, bool(torch.rand(()) < 0.5), numpy.random.rand() < 0.5
        return x + sum(kept) * super().forward(x)


def shares(kind: type[CountingBlock]) -> Handwritten:
    class Sharing(Handwritten):
        def make_blocks(self) -> nn.Module:
            state: dict[str, Any] = {"count": 0, "seen": None, "flip": False}
            return nn.ModuleList(kind(state) for _ in range(4))

    return Sharing()


class NoList(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(13, 7), nn.Linear(7, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.second(self.first(batch[0])).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters())


class Sometimes(Handwritten):
    """Runs its blocks in the other order in its second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in reversed(self.blocks) if batch_idx else self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Contrasts(Handwritten):
    """Every sample is to be found among all samples of the batch."""

    def loss(self, batch: Any) -> Tensor:
        x = self.body(self.stem(batch[0]))
        return F.cross_entropy(x @ self.stem(batch[0]).t(), torch.arange(len(x)))


class Decorrelates(Handwritten):
    """Looks at the covariance of features over the batch."""

    def loss(self, batch: Any) -> Tensor:
        x = self.body(self.stem(batch[0]))
        return (x.t() @ x / len(x) - torch.eye(x.shape[1])).square().sum()


class ValidatesTwice(Handwritten):
    """Runs the model twice where it is evaluated."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.loss(batch) + self.loss(batch)) / 2)


class Reduces(Handwritten):
    """Logs what Lightning does not reduce."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("largest", loss, reduce_fx=lambda values: max(values))
        return loss


class SkipsOne(Handwritten):
    """Has no loss for some samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch[0][0, 0] > 0 else loss


class SometimesBySamples(Handwritten):
    """Has a mean over targets for some samples, and one over samples for others."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.body(self.stem(batch[0])))
        return logits.square().mean() if batch[0][0, 0] > 0 else F.cross_entropy(logits, batch[1])


class ReturnsUnsendable(Handwritten):
    """Returns what no other rank can get."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "more": lambda: batch}


class CallsInSecret(Handwritten):
    """Calls the model between steps, in a way that its code does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [lambda: self.body(torch.ones(1, 7))]

    def on_train_batch_end(self, *_: Any) -> None:
        self.calls[0]()


def run(make: Any, strategy: Any, **options: Any) -> None:
    data = DataLoader(points(32, seed=1), 8)
    trainer(strategy(), **({"max_epochs": 1} | options)).fit(make(), data, data)


def refused(make: Any, strategy: Any, **options: Any) -> list[str]:
    """What the ranks say; one whose neighbour has left already may only miss it."""
    return run_on_ranks(2, error_of, make, strategy, **options)


def error_of(make: Any, strategy: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        run(make, strategy, **options)
    return str(caught.value)


PP2 = partial(PipelineParallelStrategy, 2, microbatches=4)


def zbv_with(technique: Any) -> Any:
    return partial(HybridStrategy, PipelineParallel(2, schedule="zbv"), technique)


@pytest.mark.parametrize(
    ("make", "strategy", "said"),
    [
        (Manual, PP2, "Manual optimizes manually"),
        (OneDirection, PP2, "LBFGS is not known to step each parameter by itself"),
        (Contrasts, PP2, r"the loss of 4 samples is .* 2 and 2 of them together make .*: samples interact"),
        (Decorrelates, PP2, r"together make .*: samples interact, .*microbatches=1"),
        (Reduces, PP2, r"Only `self.log\(..., reduce_fx=\{min,max,mean,sum\}\)` are supported"),
        (NoList, PP2, r"NoList .*blocks="),
        (partial(Handwritten, blocks=3), partial(PipelineParallelStrategy, 2, schedule="zbv"), r"4 stages .* has 3"),
        (Handwritten, partial(PipelineParallelStrategy, 2, split=(3, 2)), r"split=\(3, 2\) .* 4 blocks"),
        (Handwritten, zbv_with(ActivationCheckpoint()), r"zbv.* twice; choose a schedule such as '1f1b'"),
        (Handwritten, zbv_with(Compile()), r"zbv.* twice; choose a schedule such as '1f1b'"),
    ],
)  # fmt: skip
def test_before_the_first_step_or_in_it(make: Any, strategy: Any, said: str) -> None:
    for message in refused(make, strategy):
        assert re.search(said, message), message


def test_an_evaluation_that_runs_the_model_twice() -> None:
    said = r"block blocks\.0 was called where .* a pipeline needs blocks that run in one order"
    with pytest.raises(RanksFailed, match=said):
        run_on_ranks(2, run, ValidatesTwice, PP2)


class Encoder(LightningModule):
    """Torch's own, which lets its layers compute with nested tensors where it evaluates samples of other lengths."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.stem, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=nested)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids = batch[0]
        logits = self.head(self.body(self.stem(ids), src_key_padding_mask=ids == 0))
        return F.cross_entropy(logits.transpose(1, 2), ids, ignore_index=0)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def encode(nested: bool, strategy: Any) -> float:
    torch.manual_seed(0)
    ids = torch.randint(1, 11, (16, 6))
    ids[::2, 4:] = 0
    data, fitting = DataLoader(TensorDataset(ids), 8), trainer(strategy(), max_epochs=1)
    fitting.fit(Encoder(nested), data, data)
    return float(fitting.callback_metrics["val_loss"])


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_an_evaluation_with_nested_tensors() -> None:
    with pytest.raises(RanksFailed, match=r"a nested tensor, which has no one shape .* enable_nested_tensor=False"):
        run_on_ranks(2, encode, True, PP2)
    expected = on_one(encode, False, HybridStrategy)
    assert run_on_ranks(2, encode, False, PP2) == pytest.approx([expected] * 2)


@sampled(1, "kind", [Tables, Drawing])
def test_tables_of_a_blocks_own_and_random_numbers_are_no_state(kind: type[CountingBlock]) -> None:
    run_on_ranks(2, run, partial(shares, kind), PP2)


def test_callbacks_that_replace_parameters() -> None:
    for message in refused(Handwritten, PP2, callbacks=[ModelPruning("l1_unstructured", amount=0.5)]):
        assert "ModelPruning puts whole parameters and masks in the place of parameters" in message


def test_calls_between_steps_are_not_refused() -> None:
    run_on_ranks(2, run, CallsInSecret, PP2)


def test_during_a_step() -> None:
    with pytest.raises(RanksFailed, match=r"block blocks\.3 was called where the analyzed step called blocks\.0"):
        run_on_ranks(2, run, Sometimes, PP2)


@sampled(
    1,
    ("make", "said"),
    [
        (SkipsOne, r"returned no loss for microbatches \[\d.*a batch is skipped as a whole"),
        (SometimesBySamples, r"computed a mean over targets for microbatches \[\d.*decide it by batch_idx"),
        (ReturnsUnsendable, r"what a step returned, .* cannot go to other ranks \(.*lambda"),
    ],
)
def test_an_error_in_what_the_last_stage_says_is_one_on_all_ranks(make: Any, said: str) -> None:
    first, second = refused(make, PP2)
    assert first == second
    assert re.search(said, first), first
