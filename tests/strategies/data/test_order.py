"""Global batch i holds exactly the samples that one device would see with the same global batch size and seed."""

import multiprocessing
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_parallel import DataParallelStrategy
from tests.strategies.runs import Samples, check_fit, fit, flat, loader, on_ranks
from tests.tiers import sampled

dp = DataParallelStrategy
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}  # ranks would start them by a slow server
pytestmark = pytest.mark.filterwarnings("ignore:(You requested to overfit|Your `IterableDataset` has `__len__`)")


class ByEpoch(Sampler):
    """Every epoch begins somewhere else, if somebody says it; tells it to the sampler that it takes its samples from.

    With a `batch`, a batch sampler.
    """

    def __init__(self, inner: Any, size: int, step: int, batch: int = 0) -> None:
        self.sampler, self.size, self.step, self.batch, self.epoch = inner, size, step, batch, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = self.step * epoch

    def __len__(self) -> int:
        return -(-self.size // self.batch) if self.batch else self.size

    def __iter__(self) -> Iterator[Any]:
        order = [(self.epoch - i) % self.size for i in self.sampler]
        return iter([order[at : at + self.batch] for at in range(0, self.size, self.batch)] if self.batch else order)


class Pairs(Sampler):
    """A batch sampler of the user's own: batches of one and two samples in turn; `n` of them at once."""

    def __init__(self, size: int, n: int) -> None:
        starts = [start for start in range(size) if start % 3 < 2]
        parts = [list(range(start, min(size, start + 1 + (start % 3 > 0)))) for start in starts]
        self.batches = [flat(parts[at : at + n]) for at in range(0, len(parts), n)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Batched(Samples):
    """Automatic batching is off: the dataset makes batches of the lists of indices that it gets."""

    def __getitem__(self, indices: Any) -> Any:
        return torch.tensor(indices), self.features[indices], self.features[indices].sum(-1).tanh()


class Stream(IterableDataset):
    """Samples in their order, divided among loader workers as PyTorch's documents show."""

    def __init__(self, size: int, skip: int = 0) -> None:
        self.samples, self.skip = Samples(size), skip

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return (self.samples[i] for i in range(self.skip + worker, len(self.samples), workers))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class NoLoader:
    """Any iterable will do for Lightning, but a list, which it takes for a list of loaders."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def shuffled(size: int, n: int, **options: Any) -> DataLoader:
    return loader(size, n, shuffle=True, **options)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KINDS: dict[str, Any] = {  # of so many samples, in batches of n
    "shuffled": shuffled,
    "shuffled, drop_last": partial(shuffled, drop_last=True),
    "own generator": lambda size, n: shuffled(size, n, generator=seeded(42)),
    "other generators": lambda size, n: shuffled(size, n, generator=seeded(dist.get_rank())),
    "weighted": lambda size, n: loader(size, n, sampler=WeightedRandomSampler([1.0 + i for i in range(size)], size)),
    "by epoch": lambda size, n: loader(size, n, sampler=ByEpoch(range(size), size, 3)),
    "batches by epoch": lambda size, n: DataLoader(
        Samples(size), batch_sampler=ByEpoch(ByEpoch(range(size), size, 3), size, 5, n)
    ),
    "whole batches": lambda size, n: DataLoader(
        Batched(size), batch_size=None, sampler=ByEpoch(range(size), size, 5, n)
    ),
    "own batches": lambda size, n: DataLoader(Samples(size), batch_sampler=Pairs(size, n // 2)),
    "no loader": lambda size, n: NoLoader(loader(size, n)),
    "stream": lambda size, n: DataLoader(Stream(size), n),
    "stream, drop_last": lambda size, n: DataLoader(Stream(size), n, drop_last=True),
    "sized stream": lambda size, n: DataLoader(SizedStream(size), n),
}


def of_kinds(train: str, size: int, kinds: Sequence[str], n: int) -> Any:
    val = [KINDS[kind](7 + k, n) for k, kind in enumerate(kinds)]
    return (KINDS[train](size, n), val) if val else KINDS[train](size, n)


@sampled(1, "train", ["batches by epoch", "shuffled", "own generator", "weighted"])
def test_loaders_of_all_kinds_keep_the_order_of_one_device(train):
    validated = [kind for kind in KINDS if kind != "other generators"]
    check_fit(2, dp, partial(of_kinds, train, 12, validated), max_epochs=3)


@sampled(
    2,
    ("n", "kind", "size", "options"),
    [
        (4, "shuffled", 9, {"accumulate_grad_batches": 2}),
        (4, "shuffled", 1, {}),
        (4, "shuffled", 3, {"accumulate_grad_batches": 2}),
        (2, "shuffled, drop_last", 19, {}),
        (2, "whole batches", 9, {}),
        (2, "no loader", 9, {}),
        (2, "own batches", 10, {}),
        (2, "sized stream", 7, {}),
        (2, "stream", 5, {}),
    ],
)
def test_last_batch_that_does_not_divide(n, kind, size, options):
    check_fit(n, dp, partial(of_kinds, kind, size, ()), **options)


def in_workers(n: int) -> Any:
    return shuffled(9, n, **WORKERS), [loader(5, n, **WORKERS), DataLoader(Stream(11), n, **WORKERS)]


def workers_left(strategy: Any) -> int:
    made: list[Any] = []  # a user's script still holds the loaders

    def make(n: int) -> Any:
        made.extend(in_workers(n))
        return tuple(made)

    fit(strategy, make, 2, max_epochs=1)
    return len(multiprocessing.active_children())


def test_workers_read_what_one_device_reads_and_end():
    check_fit(2, dp, in_workers, max_epochs=1)
    assert on_ranks(2, workers_left, dp) == [0, 0]


def together(n: int, mode: str, sizes: tuple[int, ...]) -> Any:
    loaders = {name: shuffled(size, n) for name, size in zip("ab", sizes, strict=True)}
    return loaders if mode == "dict" else CombinedLoader(loaders, mode)


@sampled(1, "mode", ["dict", "min_size", "max_size", "max_size_cycle"])
def test_loaders_read_together_are_divided_each(mode):
    check_fit(2, dp, partial(together, mode=mode, sizes=(12, 8)))


@sampled(
    2,
    "options",
    [
        {"limit_train_batches": 0.5, "limit_val_batches": 1, "reload_dataloaders_every_n_epochs": 1},
        {"overfit_batches": 2},
        {"val_check_interval": 0.4, "num_sanity_val_steps": 2, "accumulate_grad_batches": 2, "max_steps": 3},
        {"check_val_every_n_epoch": 2, "limit_train_batches": 2},
    ],
    ids=str,
)
def test_trainer_options_mean_the_same_as_on_one_device(options):
    check_fit(2, dp, partial(of_kinds, "shuffled", 19, ["shuffled"]), **options)


class Peeks(Callback):
    """Looks at a batch of its own on rank 0 only, in the middle of epochs."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            next(iter(trainer.train_dataloader))
            next(iter(trainer.val_dataloaders[0]))

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_start(trainer)


@sampled(1, "kind", ["other generators", "shuffled", "own generator"])
def test_draws_of_rank_zero_alone_lead_nobody_astray(kind):
    check_fit(2, dp, partial(of_kinds, kind, 19, [kind]), callbacks=[Peeks()], num_sanity_val_steps=0)


def distributed(batch_size: int, *, inside: bool, wrong: bool = False, size: int = 12) -> DataLoader:
    n, rank = (1, 0) if wrong else (dist.get_world_size(), dist.get_rank())
    sampler = DistributedSampler(range(size), n, rank, shuffle=False)
    if inside:
        return DataLoader(Samples(size), batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))
    return loader(size, batch_size, sampler=sampler)


def both(batch_size: int) -> Any:
    return distributed(batch_size, inside=False), distributed(batch_size, inside=True)


def test_loaders_that_users_divide_are_left_alone():
    for rank, run in enumerate(on_ranks(2, fit, dp, both, 2, num_sanity_val_steps=0)):
        assert flat(run.saw["train"]) == flat(run.saw["val0"]) == 2 * list(range(rank, 12, 2))
    for run in on_ranks(2, fit, dp, partial(loader, 6), 2, use_distributed_sampler=False, max_epochs=1):
        assert flat(run.saw["train"]) == list(range(6))
