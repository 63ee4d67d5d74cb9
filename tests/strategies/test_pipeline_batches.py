"""Batches of every size in a pipeline, and what of them a metric counts."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_parallel import DataParallel, HybridStrategy, PipelineParallel, PipelineParallelStrategy
from tests.further.points import Handwritten
from tests.models import Plain, build, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import (
    PIPELINE,
    MakeStrategy,
    assert_like_one_device,
    made,
    on_one_and_two,
    require_like,
)
from tests.tiers import covering, sampled
from tests.trainers import trainer


class Ragged(Dataset):
    """Sequences; those of every batch of four have their own length."""

    def __init__(self, samples: int) -> None:
        self.tokens = torch.randint(64, (samples, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 5 + 3 * (index // 4 % 3)
        return {"input_ids": self.tokens[index, :length], "labels": self.tokens[index, 1 : length + 1]}


def ragged(strategy: MakeStrategy | None) -> Any:
    class Losses(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))

    losses = Losses()
    model = build("llama")
    run = trainer(made(strategy), max_epochs=2, accumulate_grad_batches=3, gradient_clip_val=0.5, callbacks=[losses])
    run.fit(model, DataLoader(Ragged(26), 4), DataLoader(Ragged(6), 4))  # the last batches have 2 samples
    return losses.losses, float(run.callback_metrics["val_loss"]), {n: v.clone() for n, v in model.state_dict().items()}


@sampled(1, "microbatches", [4, 2, 8])
def test_other_lengths_and_fewer_samples_than_microbatches(microbatches: int) -> None:
    expected, found = on_one_and_two(ragged, partial(PipelineParallelStrategy, 2, microbatches=microbatches))
    for losses, val_loss, weights in found:
        require_like(expected[:2], (losses, val_loss))
        for name, wanted in expected[2].items():
            torch.testing.assert_close(weights[name], wanted, rtol=1e-4, atol=1e-5)


class Averaging(Plain):
    """Gives metrics its loss, one number for a microbatch, and the samples that it is a mean over."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.updated, self.total = MeanMetric(), MeanMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.updated.update(output["loss"], weight=len(batch[0]))
        self.total.update(output["loss"] * len(batch[0]))
        self.log("called", self.called(output["loss"], weight=len(batch[0])), on_step=True, on_epoch=True)
        self.log_dict({"updated": self.updated, "total": self.total}, on_step=False, on_epoch=True)
        return output


def averaged(strategy: MakeStrategy | None) -> dict[str, float]:
    torch.manual_seed(0)
    run = trainer(made(strategy), max_epochs=2)
    run.fit(Averaging(), *loaders("plain", 8, samples=21))
    return {name: float(value) for name, value in run.callback_metrics.items()}


def test_loss_given_to_a_metric_counts_by_its_weight() -> None:
    assert_like_one_device(averaged, 2, (None,), (PIPELINE,))


# ---------------------------------------------------------------- data that comes once


class Lines(IterableDataset):
    """The lines of a file that stays open; each pass begins with the first one if it starts `anew`."""

    def __init__(self, file: IO[str], anew: bool) -> None:
        self.file, self.anew = file, anew

    def __iter__(self) -> Any:
        if self.anew:
            self.file.seek(0)
        for line in iter(self.file.readline, ""):
            yield torch.full((13,), float(line)), 0, 0.0


class SizedLines(Lines):
    """Goes back to the first line as soon as a pass begins, not with its first sample."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        self.file.seek(0)
        return ((torch.full((13,), float(line)), 0, 0.0) for line in iter(self.file.readline, ""))


class Seeing(Handwritten):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.validated = list[list[float]](), list[list[float]]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trained.append(batch[0][:, 0].tolist())

    def on_validation_batch_start(self, batch: Any, *_: int) -> None:
        self.validated.append(batch[0][:, 0].tolist())


def lines(
    strategy: MakeStrategy, path: Path, anew: bool, workers: int, divides: bool, kind: type[Lines] = Lines
) -> Any:
    model, epochs = Seeing(), 2 if anew else 1
    run = trainer(strategy(), max_epochs=epochs, num_sanity_val_steps=0, use_distributed_sampler=divides)
    with path.open() as one, path.open() as other, warnings.catch_warnings():
        load = [DataLoader(kind(file, anew), 2, num_workers=workers) for file in (one, other)]
        warnings.simplefilter("ignore", PossibleUserWarning)  # there are few workers
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        run.fit(model, *load)
    return model.trained, model.validated


@covering(keep=1, anew=[True, False], workers=[0, 1], divides=[True, False])
def test_a_look_at_a_stream_takes_no_samples_from_it(tmp_path: Path, anew: bool, workers: int, divides: bool) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(8)))
    pairs = [[float(number), number + 1.0] for number in range(0, 8, 2)]
    strategy = partial(PipelineParallelStrategy, 2, microbatches=2)
    for trained, validated in run_on_ranks(2, lines, strategy, path, anew, workers, divides):
        assert trained == validated == pairs * (2 if anew else 1)


@sampled(1, "divides", [True, False])
def test_a_stream_that_knows_its_length_begins_after_the_look(tmp_path: Path, divides: bool) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(8)))
    strategy = partial(PipelineParallelStrategy, 2, microbatches=2)
    for trained, _ in run_on_ranks(2, lines, strategy, path, True, 0, divides, SizedLines):
        assert trained == [[float(number), number + 1.0] for number in range(0, 8, 2)] * 2


def read_once(path: Path) -> list[list[float]]:
    model, run = Seeing(), trainer(PipelineParallelStrategy(2, microbatches=2), max_epochs=1)
    with path.open() as file, path.open() as other:
        run.fit(model, DataLoader(Lines(file, True), 2), DataLoader(Lines(other, True), 2))
        with pytest.raises(ValueError, match="a Lines yields nothing, but a pipeline analyzes a step before") as caught:
            run.fit(Seeing(), DataLoader(Lines(file, False), 2), DataLoader(Lines(other, True), 2))
        file.seek(0)
        model = Seeing()
        trainer(PipelineParallelStrategy(2, microbatches=2), max_epochs=1).fit(
            model, DataLoader(Lines(file, False), 2), DataLoader(Lines(other, True), 2)
        )
    assert "num_sanity_val_steps=0" in caught.value.__notes__[0]  # type: ignore[attr-defined]
    return model.trained


def test_stream_that_is_read_once_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(8)))
    assert run_on_ranks(2, read_once, path) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


class Unequal(IterableDataset):
    """Ranks have other numbers of samples, which no length tells."""

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        yield from ((torch.ones(13), 0, 0.0) for _ in range(self.samples[dist.get_rank()]))


class InTurn(Handwritten):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def ends_differ(*samples: Sequence[int]) -> None:
    pipeline = PipelineParallelStrategy(2, microbatches=2)
    run = trainer(pipeline, max_epochs=1, num_sanity_val_steps=0, use_distributed_sampler=False)
    load = [DataLoader(Unequal(each), 2) for each in ((4, 4), *samples)]
    with pytest.raises(ValueError, match="the end of the data must be the same on every rank"):
        run.fit(InTurn() if len(samples) > 1 else Handwritten(), load[0], load[1:])


@pytest.mark.parametrize("samples", [[(4, 6), (4, 4)], [(0, 4)]])
def test_unequal_ends_of_data_are_refused_at_once(samples: Sequence[Sequence[int]]) -> None:
    run_on_ranks(2, ends_differ, *samples)


class Ready(Dataset):
    """Batches, each a list."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[Tensor]:
        draws = torch.Generator().manual_seed(index)
        return [torch.randn(4, 13, generator=draws), torch.randint(5, (4,), generator=draws)]


class OfPairs(Handwritten):
    validation_step = LightningModule.validation_step

    def loss(self, batch: Any) -> Tensor:
        inputs, classes = batch
        return super().loss((inputs, classes, None))


def ready(strategy: MakeStrategy | None) -> Any:
    model = OfPairs()
    trainer(made(strategy), max_epochs=1).fit(model, DataLoader(Ready(), batch_size=None))
    return dict(model.state_dict())


def test_list_that_is_a_batch_is_not_taken_for_its_samples() -> None:
    assert_like_one_device(ready, 2, (None,), (PIPELINE,))


# ---------------------------------------------------------------- streams of which readers get batches of other shapes


class RaggedLines(IterableDataset):
    """Sequences, each of its own length; nobody knows how many there are."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        tokens = torch.randint(1, 64, (self.samples, 17), generator=torch.Generator().manual_seed(1))
        yield from (row[: 5 + 5 * number % 12] for number, row in enumerate(tokens))


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens, targets = pad_sequence(rows, batch_first=True), pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": tokens[:, :-1], "labels": targets[:, 1:]}


def streamed(strategy: MakeStrategy | None, samples: int) -> Any:
    model, readers = build("llama"), 1 if strategy is None else 2
    load = [DataLoader(RaggedLines(number), 8 // readers, collate_fn=padded) for number in (samples, 8)]
    run = trainer(made(strategy), max_epochs=2, precision="64-true")
    run.fit(model, *load)
    return float(run.callback_metrics["val_loss"]), {n: v.clone() for n, v in model.state_dict().items()}


@sampled(1, "samples", [16, 3])
def test_first_batches_of_other_shapes(samples: int) -> None:
    expected = begun_on_one(streamed, None, samples)
    strategy = partial(HybridStrategy, DataParallel(2), PipelineParallel(2, microbatches=2))
    found = run_on_ranks(4, streamed, strategy, samples)
    require_like([expected.result()] * 4, found)
