"""Loaders that keep a state of their own, and samplers without a length: where a run goes on, and in which order."""

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
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from lightning_parallel import DataParallelStrategy
from tests.ranks import run_on_ranks
from tests.strategies.runs import Samples, check_fit
from tests.strategies.test_checkpoints import SaveAt
from tests.strategies.test_data import Batched
from tests.strategies.test_resume import SaveAtEnd, stop_and_go_on
from tests.tiers import covering, sampled
from tests.trainers import trainer

dp = partial(DataParallelStrategy, 2)
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it


class Stream(IterableDataset):
    """Samples of another dataset in their order, which says where it stands."""

    def __init__(self, samples: Dataset) -> None:
        self.samples, self.at = samples, 0

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

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(Stream(self.samples))


class Numbered(Dataset):
    """Samples that draw no random numbers: Lightning reads those of loaders without a length one batch ahead."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.linspace(-1, 1, 6) * index / 22


class Buckets:
    """A batch sampler as torch asks for it: without a length, and without a `batch_size`."""

    def __init__(self, size: int, batch: int) -> None:
        self.size, self.batch = size, batch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(self.size).split(self.batch))


def stateful(dataset: Any, batch_size: int, **options: Any) -> DataLoader:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(dataset, batch_size, **options)


def bucketed(_: Dataset, batch_size: int, *, shuffle: bool, **options: Any) -> DataLoader:
    return DataLoader(Numbered(), batch_sampler=Buckets(22, batch_size), **options)


def own_generator(samples: Dataset, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(samples, batch_size, generator=torch.Generator().manual_seed(42), **options)


LOADERS = {"stateful": stateful, "without a length": bucketed, "own generator": own_generator}


@pytest.mark.parametrize("kind", LOADERS)
def test_runs_go_on_where_they_were_stopped(kind: str) -> None:
    run_on_ranks(2, stop_and_go_on, dp, 1, 0, [2, 6, 9], make_loader=LOADERS[kind])


@sampled(1, "kind", LOADERS)
def test_runs_go_on_where_they_were_stopped_with_workers(kind: str) -> None:
    run_on_ranks(2, stop_and_go_on, dp, 1, 2, [2, 6], make_loader=LOADERS[kind])


# ---------------------------------------------------------------- on other numbers of ranks


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


def samples_in_order(batch_size: int, workers: int) -> DataLoader:
    return stateful(Numbered(), batch_size, shuffle=True, num_workers=workers)


def streamed(batch_size: int, workers: int, kind: type[IterableDataset]) -> DataLoader:
    return stateful(kind(Numbered()), batch_size, num_workers=workers)


def read(
    strategy: Any, make_loader: Any, workers: int, folder: Path, stops: list[int], resume: str | None = None
) -> tuple[list[tuple[int, int, list[int]]], Tensor]:
    """Two epochs in global batches of four samples."""
    seed_everything(3 if resume is None else 4, verbose=False)
    warnings.filterwarnings("ignore", ".*os.fork.*")
    module, size = Reads(), int(os.environ.get("WORLD_SIZE", "1"))
    callbacks = [SaveAt(folder, stops), SaveAtEnd(folder)] if stops else []
    made = make_loader(4 // size, workers)
    ckpt_path = None if resume is None else folder / resume
    trainer(strategy(), max_epochs=2, callbacks=callbacks).fit(module, made, ckpt_path=ckpt_path, weights_only=True)
    return module.saw, module.layer.weight.detach().clone()


def together(ends: list[tuple[list[tuple[int, int, list[int]]], Tensor]]) -> list[tuple[int, int, list[int]]]:
    """The global batches of what ranks saw; the last one has less than a sample for each, and repeats its first."""
    batches = ([*zip(*parts, strict=True)] for parts in zip(*(saw for saw, _ in ends), strict=True))
    return [(epoch, index, sorted({*chain(*numbers)})) for (epoch, *_), (index, *_), numbers in batches]


SOURCES = {
    "samples": samples_in_order,
    "stream": partial(streamed, kind=Stream),
    "stream without a state": partial(streamed, kind=Forgetful),
}


@covering(keep=3, source=SOURCES, workers=[0, 2], ranks=[(1, 2), (2, 4), (4, 1)])
def test_stateful_loaders_go_on_on_other_numbers_of_ranks(
    source: str, workers: int, ranks: tuple[int, int], tmp_path: Path
) -> None:
    before, after = ranks
    make = SOURCES[source]
    ends = run_on_ranks(before, read, DataParallelStrategy, make, workers, tmp_path, [2, 6, 8])
    whole, (_, weight) = together(ends), ends[0]
    for file, done in [("2.ckpt", 2), ("6.ckpt", 6), ("8.ckpt", 8), ("end_of_epoch.ckpt", 6)]:
        rest = run_on_ranks(after, read, DataParallelStrategy, make, workers, tmp_path, [], file)
        assert together(rest) == whole[done:], file
        for _, other in rest:  # samples that do not count in the last batch do not train either
            torch.testing.assert_close(other, weight)


def refused(folder: Path) -> None:
    given = samples_in_order(2, 0)
    next(iter(given))
    given.load_state_dict(given.state_dict())
    with pytest.raises(ValueError, match=r"was given a state by load_state_dict, but .* pass ckpt_path to fit"):
        trainer(dp(), max_epochs=1).fit(Reads(), given)
    read(dp, partial(streamed, kind=Stream), 0, folder, [2])
    larger = partial(trainer(dp(), max_epochs=1).fit, Reads(), ckpt_path=folder / "2.ckpt", weights_only=True)
    with pytest.raises(ValueError, match="read in global batches of 4, and now one has 6"):
        larger(stateful(Stream(Numbered()), 3))


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run_on_ranks(2, refused, tmp_path)


def other_strategy(folder: Path) -> None:
    """A checkpoint of Lightning's own strategy holds what torchdata's loaders say of themselves."""
    for name, make in SOURCES.items():
        read(lambda: "auto", make, 0, folder / name, [2])
        with pytest.raises(ValueError, match="a loader's state that another strategy wrote"):
            read(DataParallelStrategy, make, 0, folder / name, [], "2.ckpt")


def test_states_that_another_strategy_wrote_are_refused(tmp_path: Path) -> None:
    run_on_ranks(1, other_strategy, tmp_path)


# ---------------------------------------------------------------- the order of one device


class Epochs(Sampler):
    """A batch sampler with batches of its own, which tells its sampler, or itself, the epoch if somebody says it."""

    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler, self.size, self.epoch = sampler, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = 5 * epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = [(each + self.epoch) % 12 for each in self.sampler]
        return iter([order[at : at + self.size] for at in range(0, 12, self.size)])


class Inner(Epochs):
    """What it takes its samples from."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = 3 * epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(each + self.epoch) % 12 for each in range(12)])


def batches_by_epoch(batch_size: int) -> DataLoader:
    return DataLoader(Samples(12), batch_sampler=Epochs(Inner(None, 0), batch_size))


def lists_by_epoch(batch_size: int) -> DataLoader:
    return DataLoader(Batched(12), batch_size=None, sampler=Epochs(range(12), batch_size))


@pytest.mark.parametrize("make", [batches_by_epoch, lists_by_epoch])
def test_who_is_told_the_epoch_on_one_device_is_told_on_ranks(make: Any) -> None:
    check_fit(2, dp, make, batch_size=3)
