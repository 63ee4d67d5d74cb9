"""A technique that only this file knows: all maps of a division, on an axis that no other technique has.

It is context parallel in its crudest form, for a model that treats every position alike: ranks of `cp` read the same
samples and each computes its own positions. Nothing of the lifecycle knows it, and it trains as one process does.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    DataParallel,
    HybridStrategy,
    ParallelMesh,
    PipelineParallel,
    TensorParallel,
    Zero,
)
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.step import BatchContext, Step, StepFn, WrappedStep
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.zero.sharded import parameters
from tests.curves import SMALL, compare, curve
from tests.models import Loaders
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

T = TypeVar("T")
LENGTH, WIDTH, CLASSES = 8, 6, 5


@dataclass(frozen=True)
class OwnPositions(Technique):
    """Every rank of `cp` computes its own positions of the samples that all of them read."""

    size: Size = "auto"
    meets: bool = False

    phase: ClassVar[Phase] = Phase.PARTITION

    @property
    def axes(self) -> Mapping[Axis, Size]:
        return {"cp": self.size}

    @property
    def traits(self) -> Traits:
        return Traits(communicates_in_forward=self.meets)

    def analyze(self, model: nn.Module, context: PartitionContext) -> int:
        return sum(1 for _ in model.parameters())

    def divide(self, model: nn.Module, context: PartitionContext, analysis: int) -> Division:
        assert analysis
        return Positions(model, context.mesh)


@dataclass(eq=False)
class Positions(Division):
    mesh: ParallelMesh
    happened: list[str] = field(default_factory=list)

    def batch(self, batch: Any) -> Any:
        self.happened.append("batch")
        own = self.mesh["cp"].get_local_rank()
        return [part.chunk(self.mesh.sizes["cp"], 1)[own] if part.dim() > 1 else part for part in batch]

    def outputs(self, outputs: Any) -> Any:
        self.happened.append("outputs")
        if not isinstance(outputs, Tensor) or outputs.dim() < 2:
            return outputs
        parts = [torch.empty_like(outputs) for _ in range(self.mesh.sizes["cp"])]
        dist.all_gather(parts, outputs.contiguous(), group=self.mesh["cp"].get_group())
        return torch.cat(parts, 1)

    def run(self, run: StepFn[T]) -> StepFn[T]:
        return lambda *args, **kwargs: (self.happened.append("run"), run(*args, **kwargs))[1]

    def expose_gathered(self) -> None:
        self.happened.append("expose_gathered")

    def encode_activation(self, value: Any) -> Any:
        return {"encoded": value}

    def decode_activation(self, value: Any) -> Any:
        self.happened.append("decode")
        return value["encoded"]

    def step(self, step: Step) -> Step:
        return ToldStep("step", self, step)

    def outermost_step(self, step: Step) -> Step:
        return ToldStep("outermost_step", self, step)


class ToldStep(WrappedStep):
    latest: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, division: Positions, inner: Step) -> None:
        super().__init__(inner)
        self.name, self.division = name, division
        self.latest[name] = self

    def begin_batch(self, batch: BatchContext) -> None:
        self.latest["info"] = batch
        super().begin_batch(batch)

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        self.division.happened.append(self.name)
        return super().forward(run, *args, **kwargs)


def sentences(size: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES, (size, LENGTH), generator=draw)
    return TensorDataset(torch.randn(size, LENGTH, WIDTH, generator=draw), labels)


class Tagger(LightningModule):
    """Treats every position alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, CLASSES)

    def logits(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.logits(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.logits(batch[0]).flatten(0, 1), batch[1].flatten()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(techniques: tuple[Technique, ...] | None, data_ranks: int = 1) -> tuple[Any, list[Tensor]]:
    if techniques is None:  # Lightning warns wherever a process group exists, even of one rank
        warnings.filterwarnings("ignore", ".*sync_dist=True")

    def make(**options: Any) -> Trainer:
        strategy = "auto" if techniques is None else HybridStrategy(*techniques)
        return trainer(strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, **options)

    data = [DataLoader(sentences(size), batch_size=8 // data_ranks) for size in (32, 8)]
    model = Tagger()
    found = curve(make, model, Loaders(*data))
    predictions = make().predict(model, DataLoader(sentences(8), batch_size=8)) if data_ranks == 1 else []
    return found, predictions


def fit_once(strategy: HybridStrategy, samples: int, batch_size: int = 8) -> None:
    """One epoch without evaluation."""
    data = DataLoader(sentences(samples), batch_size=batch_size)
    trainer(strategy, max_epochs=1, limit_val_batches=0).fit(Tagger(), data, data)


@sampled(
    1,
    ("techniques", "ranks_", "data_ranks"),
    [
        ((OwnPositions(2), PipelineParallel(2, microbatches=2)), 4, 1),
        ((Zero(1, stage=3), OwnPositions(2)), 2, 1),
        ((DataParallel(2), OwnPositions(2)), 4, 2),
    ],
    ids=["pp x cp", "zero3 over cp", "dp x cp"],
)
def test_technique_that_nothing_knows_trains_as_one_process(
    techniques: tuple[Technique, ...], ranks_: int, data_ranks: int
) -> None:
    begun = begun_on_one(fitted, None)
    for rank, (got, predictions) in enumerate(run_on_ranks(ranks_, fitted, techniques, data_ranks)):
        wanted, expected = begun.result()
        compare(wanted, got, where=f"rank {rank}: ")
        for mine, whole in zip(predictions, expected, strict=False):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=SMALL * 1e-4)


@ranks(4)
def test_maps_happen_where_they_belong() -> None:
    techniques = OwnPositions(2), PipelineParallel(2, microbatches=2, loss_over="microbatches")
    fit_once(HybridStrategy(*techniques), samples=8)
    division = ToldStep.latest["step"].division
    calls = division.happened.count("run")
    assert calls == 2  # one for each microbatch of this rank's stage
    decoded = 2 * division.mesh["pp"].get_local_rank()  # activations that the stage before sent
    assert division.happened.count("decode") == decoded
    happened = [each for each in division.happened if each != "decode"]
    assert happened == ["batch", "outermost_step", "step", *["run"] * calls, "outputs"]


class Penalised(Tagger):
    """Reads a weight outside of its block, which ZeRO 3 gathers then."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.layers[1][0].weight.square().sum()


def test_technique_with_all_maps_takes_sixty_lines() -> None:
    lines = [line for each in (OwnPositions, Positions, ToldStep) for line in inspect.getsource(each).splitlines()]
    assert len([line for line in lines if line.strip()]) <= 60
    maps = {name for name, value in vars(Division).items() if callable(value) and not name.startswith("_")}
    assert maps <= vars(Positions).keys()


class Disagreeing(OwnPositions):
    def analyze(self, model: nn.Module, context: PartitionContext) -> int:
        return dist.get_rank()


class FailingOnOne(OwnPositions):
    def analyze(self, model: nn.Module, context: PartitionContext) -> int:
        if dist.get_rank() == 1:
            raise ValueError("this rank cannot see it")
        return 1


@ranks(2)
def test_technique_is_told_and_asked_by_the_lifecycle() -> None:
    with mock.patch.object(parameters, "UNIT_BYTES", 64):  # what is gathered within a step is shown
        data = DataLoader(sentences(8), batch_size=8)
        strategy = HybridStrategy(Zero(1, stage=3), OwnPositions(2))
        trainer(strategy, max_epochs=1, limit_val_batches=0).fit(Penalised(), data, data)
        assert ToldStep.latest["step"].division.happened.count("expose_gathered")
    for meets in (True, False):  # of the last batch one reader has 4 samples, the other one 3
        fit_once(HybridStrategy(DataParallel(2), OwnPositions(1, meets=meets)), samples=7, batch_size=4)
        assert ToldStep.latest["info"].samples == ([3, 3] if meets else [None, None])[dist.get_rank()]
    technique = PipelineParallel(2)
    before, strategy = repr(vars(technique)), HybridStrategy(technique)
    fit_once(strategy, samples=8)
    assert strategy.techniques == (technique,)
    assert repr(vars(strategy.techniques[0])) == before, "techniques are never written to"
    with pytest.raises((ValueError, RuntimeError), match="must be the same on all ranks"):
        fit_once(HybridStrategy(Disagreeing(2)), samples=8)
    said = "^this rank cannot see it" if dist.get_rank() else "(?s)(?=.*rank 1).*this rank cannot see it"
    with pytest.raises((ValueError, RuntimeError), match=said):
        fit_once(HybridStrategy(FailingOnOne(2)), samples=8)


SET = (
    PipelineParallel(2, schedule="1f1b", microbatches=2),
    TensorParallel(2),
    OwnPositions(2),
    ActivationCheckpoint(),
    Compile(backend="eager"),
    Zero(2, stage=2),
)


def test_order_of_listed_techniques_has_no_meaning() -> None:
    orders = {HybridStrategy(*given).techniques for given in itertools.permutations(SET)}
    assert len(orders) == 1
    names = [type(technique).__name__ for technique in orders.pop()]
    split, checkpoint, compiled, shard = "PipelineParallel", "ActivationCheckpoint", "Compile", "Zero"
    assert names == [split, "TensorParallel", "OwnPositions", checkpoint, compiled, shard]
