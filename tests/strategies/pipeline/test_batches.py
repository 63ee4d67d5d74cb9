"""Batches of every size in a pipeline, and streams of which a pipeline reads the first batch before the first step."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel import PipelineParallelStrategy
from tests.further.points import Handwritten
from tests.layouts import LAYOUTS
from tests.models import build
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import (
    MakeStrategy,
    assert_like_one_device,
    made,
)
from tests.tiers import sampled
from tests.trainers import trainer

TWO_MICROBATCHES = partial(PipelineParallelStrategy, 2, microbatches=2)


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


def streamed(strategy: MakeStrategy | None, samples: int, readers: int) -> Any:
    losses, model = list[float](), build("llama", num_hidden_layers=2)
    load = [DataLoader(RaggedLines(number), 8 // readers, collate_fn=padded) for number in (samples, 10)]
    run = trainer(made(strategy), max_epochs=2, precision="64-true", gradient_clip_val=0.5)
    model.on_train_batch_end = lambda *_: losses.append(float(run.callback_metrics["train_loss"]))
    run.fit(model, *load)
    return losses, float(run.callback_metrics["val_loss"]), {n: v.clone() for n, v in model.state_dict().items()}


@sampled(
    2,
    ("layout", "samples"),
    [("pipeline of 4 microbatches", 26), ("pipeline x data parallel", 16), ("pipeline x data parallel", 3)],
)
def test_batches_of_other_lengths_and_of_few_samples(layout: str, samples: int) -> None:
    """Also the first batches of readers, and batches of fewer samples than microbatches."""
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(streamed, ranks, (None, samples, 1), (strategy, samples, readers))


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


def read(path: Path, kind: type[Lines], anew: bool, workers: int, divides: bool) -> tuple[Any, Any]:
    model, options = Seeing(), {"num_sanity_val_steps": 0, "use_distributed_sampler": divides}
    run = trainer(TWO_MICROBATCHES(), max_epochs=2 if anew else 1, **options)
    with path.open() as one, path.open() as other, warnings.catch_warnings():
        load = [DataLoader(kind(file, anew), 2, num_workers=workers) for file in (one, other)]
        warnings.simplefilter("ignore", PossibleUserWarning)  # there are few workers
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        run.fit(model, *load)
    return model.trained, model.validated


def after_a_sanity_check(path: Path) -> list[list[float]]:
    """Which has read a stream that comes once to its end; the remedy is in a note."""
    with path.open() as file, path.open() as other:
        run = trainer(TWO_MICROBATCHES(), max_epochs=1)
        run.fit(Seeing(), DataLoader(Lines(file, True), 2), DataLoader(Lines(other, True), 2))
        with pytest.raises(ValueError, match="a Lines yields nothing, but a pipeline analyzes a step before") as caught:
            run.fit(Seeing(), DataLoader(Lines(file, False), 2), DataLoader(Lines(other, True), 2))
        file.seek(0)
        model = Seeing()
        again = trainer(TWO_MICROBATCHES(), max_epochs=1)
        again.fit(model, DataLoader(Lines(file, False), 2), DataLoader(Lines(other, True), 2))
    assert "num_sanity_val_steps=0" in caught.value.__notes__[0]  # type: ignore[attr-defined]
    return model.trained


def streams(path: Path, workers: int) -> list[tuple[Any, Any]]:
    cases = [(Lines, True, False), (Lines, False, True), (SizedLines, True, True), (SizedLines, True, False)]
    found = [read(path, kind, anew, workers, divides) for kind, anew, divides in cases]
    return [*found, (after_a_sanity_check(path), None)] if not workers else found


@sampled(1, "workers", [0, 1])
def test_streams_lose_no_sample_to_the_analyzed_step(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(8)))
    pairs = [[float(number), number + 1.0] for number in range(0, 8, 2)]
    for again, once, sized, sized_too, *last in run_on_ranks(2, streams, path, workers):
        assert again == sized == sized_too == (pairs * 2, pairs * 2)
        assert once == (pairs, pairs)
        assert last in ([], [(pairs, None)])


class Unequal(IterableDataset):
    """Ranks have other numbers of samples, which no length tells."""

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        yield from ((torch.ones(13), 0, 0.0) for _ in range(self.samples[dist.get_rank()]))


def ends_differ() -> None:
    for samples in ([(4, 4), (4, 6)], [(4, 4), (0, 4)]):
        run = trainer(TWO_MICROBATCHES(), max_epochs=1, num_sanity_val_steps=0, use_distributed_sampler=False)
        with pytest.raises(ValueError, match="the end of the data must be the same on all ranks"):
            run.fit(Handwritten(), *(DataLoader(Unequal(each), 2) for each in samples))


def test_unequal_ends_of_data_are_refused_at_once() -> None:
    run_on_ranks(2, ends_differ)
