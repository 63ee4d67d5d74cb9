"""Loaders that keep a state of their own, and samplers without a length: where a run goes on."""

import os
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_parallel import DataParallelStrategy
from tests.ranks import run_on_ranks
from tests.strategies.checkpoint.saves import SaveAt, SaveAtEnd
from tests.strategies.checkpoint.test_resume import stop_and_go_on
from tests.strategies.one_and_two import require_like
from tests.tiers import sampled
from tests.trainers import trainer

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it


class Numbered(Dataset):
    """Samples that draw no random numbers: Lightning reads those of loaders without a length one batch ahead."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.linspace(-1, 1, 6) * index / 22


class Stream(IterableDataset):
    """The same in their order, which says where it stands."""

    def __init__(self) -> None:
        self.samples, self.at = Numbered(), 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        while workers * self.at + worker < len(self.samples):
            self.at += 1
            yield self.samples[workers * (self.at - 1) + worker]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Forgetful(IterableDataset):
    """The same without a state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Stream())


class Buckets:
    """A batch sampler as torch asks for it: without a length, and without a `batch_size`."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(22).split(self.batch))


def stateful(dataset: Any, batch_size: int, **options: Any) -> DataLoader:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(dataset, batch_size, **options)


def bucketed(_: Dataset, batch_size: int, *, shuffle: bool, **options: Any) -> DataLoader:
    return DataLoader(Numbered(), batch_sampler=Buckets(batch_size), **options)


def own_generator(samples: Dataset, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(samples, batch_size, generator=torch.Generator().manual_seed(42), **options)


LOADERS = [(stateful, 2), (stateful, 0), (own_generator, 2), (own_generator, 0), (bucketed, 0)]


@sampled(2, ("make", "workers"), LOADERS)
def test_runs_go_on_where_they_were_stopped(make: Any, workers: int) -> None:
    strategy = partial(DataParallelStrategy, 2)
    run_on_ranks(2, stop_and_go_on, strategy, [2, 9], workers=workers, make_loader=make)


class Reads(LightningModule):
    """Notes the samples of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.saw: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.saw.append((self.current_epoch, batch_idx, batch[0].tolist()))
        return self.layer(batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SOURCES = {
    "samples": partial(stateful, Numbered(), shuffle=True),
    "stream": partial(stateful, Stream()),
    "stream without a state": partial(stateful, Forgetful()),
}
Seen = tuple[list[tuple[int, int, list[int]]], Tensor]


def read(strategy: Any, source: str, workers: int, folder: Path, stops: list[int], resume: str = "") -> Seen:
    """Two epochs in global batches of four samples; what a rank saw, and a weight."""
    seed_everything(4 if resume else 3, verbose=False)
    warnings.filterwarnings("ignore", ".*os.fork.*")
    module, loader = Reads(), SOURCES[source](4 // int(os.environ["WORLD_SIZE"]), num_workers=workers)
    callbacks = [SaveAt(folder / source, stops), SaveAtEnd(folder / source)] if stops else []
    path = folder / source / resume if resume else None
    trainer(strategy, max_epochs=2, callbacks=callbacks).fit(module, loader, ckpt_path=path, weights_only=True)
    return module.saw, module.layer.weight.detach().clone()


def read_all(workers: int, folder: Path, stops: list[int], resume: str = "") -> list[Seen]:
    return [read(DataParallelStrategy(), source, workers, folder, stops, resume) for source in SOURCES]


def together(ranks: tuple[Seen, ...]) -> list[tuple[int, int, list[int]]]:
    """The global batches of what ranks saw; the last one has less than a sample for each, and repeats its first."""
    batches = ([*zip(*parts, strict=True)] for parts in zip(*(saw for saw, _ in ranks), strict=True))
    return [(epoch, index, sorted({*chain(*numbers)})) for (epoch, *_), (index, *_), numbers in batches]


@sampled(1, ("before", "after", "workers"), [(2, 4, 0), (1, 2, 2), (4, 1, 2)])
def test_stateful_loaders_go_on_on_other_numbers(before: int, after: int, workers: int, tmp_path: Path) -> None:
    wholes = [*zip(*run_on_ranks(before, read_all, workers, tmp_path, [2, 8]), strict=True)]
    for file, done in [("2.ckpt", 2), ("8.ckpt", 8), ("end_of_epoch.ckpt", 6)]:
        rests = zip(*run_on_ranks(after, read_all, workers, tmp_path, [], file), strict=True)
        for source, whole, rest in zip(SOURCES, wholes, rests, strict=True):
            assert together(rest) == together(whole)[done:], f"{source} from {file}"
            for _, weight in rest:  # samples that do not count in the last batch do not train either
                require_like(whole[0][1], weight, where=source)


def refused(folder: Path) -> None:
    given = SOURCES["samples"](2)
    next(iter(given))
    given.load_state_dict(given.state_dict())
    with pytest.raises(ValueError, match=r"was given a state by load_state_dict, but .* pass ckpt_path to fit"):
        trainer(DataParallelStrategy(), max_epochs=1).fit(Reads(), given)
    read(DataParallelStrategy(), "stream", 0, folder, [2])
    larger, path = stateful(Stream(), 3), folder / "stream" / "2.ckpt"
    with pytest.raises(ValueError, match="read in global batches of 4, but now one has 6"):
        trainer(DataParallelStrategy(), max_epochs=1).fit(Reads(), larger, ckpt_path=path, weights_only=True)


def other_strategy(folder: Path) -> None:
    """A checkpoint of Lightning's own strategy holds what torchdata's loaders say of themselves."""
    for source in SOURCES:
        read("auto", source, 0, folder, [2])
        with pytest.raises(ValueError, match="a loader's state from another strategy"):
            read(DataParallelStrategy(), source, 0, folder, [], "2.ckpt")


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run_on_ranks(2, refused, tmp_path / "two")
    run_on_ranks(1, other_strategy, tmp_path / "one")
