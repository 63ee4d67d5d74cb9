"""Global batch i holds exactly the samples that one device would see with the same global batch size and seed."""

import multiprocessing
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
from tests.tiers import covering, sampled

dp = DataParallelStrategy
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}  # ranks would start them by a slow server
pytestmark = pytest.mark.filterwarnings("ignore:(You requested to overfit|Your `IterableDataset` has `__len__`)")


class Reversed(Sampler):
    """Every epoch begins somewhere else; learns the epoch from Lightning."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter([(3 * self.epoch - i) % self.size for i in range(self.size)])


def weighted(batch_size: int, size: int) -> DataLoader:
    return loader(size, batch_size, sampler=WeightedRandomSampler([1.0 + i for i in range(size)], size))


def own_sampler(batch_size: int, size: int) -> DataLoader:
    return loader(size, batch_size, sampler=Reversed(size))


def own_generator(batch_size: int, size: int) -> DataLoader:
    return loader(size, batch_size, shuffle=True, generator=torch.Generator().manual_seed(42))


def shuffled(batch_size: int, size: int, **options: Any) -> DataLoader:
    return loader(size, batch_size, shuffle=True, **options)


def with_validation(batch_size: int, size: int, val_size: int, **options: Any) -> tuple[DataLoader, DataLoader]:
    return shuffled(batch_size, size, **options), loader(val_size, batch_size, **options)


@sampled(1, ("make", "n"), [(shuffled, 4), (weighted, 2), (shuffled, 2), (own_sampler, 2), (own_generator, 2)])
def test_the_order_of_one_device_is_kept_over_epochs(make, n):
    check_fit(n, dp, partial(make, size=19), max_epochs=3)


def test_workers_read_what_one_device_reads():
    check_fit(2, dp, partial(with_validation, size=9, val_size=5, **WORKERS))


def workers_left(strategy: Any) -> int:
    made: list[Any] = []  # a user's script still holds the loaders

    def make(batch_size: int) -> Any:
        made.extend(with_validation(batch_size, 9, 5, **WORKERS))
        return tuple(made)

    fit(strategy, make, 2)
    return len(multiprocessing.active_children())


def test_workers_end_with_their_pass():
    assert on_ranks(2, workers_left, dp) == [0, 0]


def test_validation_between_epochs_leaves_the_order_alone():
    check_fit(2, dp, partial(with_validation, size=19, val_size=5), max_epochs=3)


@sampled(2, ("size", "accumulate"), [(1, 1), (3, 2), (9, 1), (9, 2), (10, 2), (11, 1), (12, 2)])
def test_last_batch_that_does_not_divide(size, accumulate):
    check_fit(4, dp, partial(shuffled, size=size), accumulate_grad_batches=accumulate)


def test_drop_last_drops_what_one_device_drops():
    check_fit(2, dp, partial(shuffled, size=19, drop_last=True))


# ---------------------------------------------------------------- loaders of other kinds


class Pairs(Sampler):
    """A batch sampler of the user's own: batches of one and two samples in turn."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return -(-2 * self.size // 3)

    def __iter__(self) -> Any:
        start = 0
        while start < self.size:
            length = 1 + (start % 3 > 0)
            yield list(range(start, min(self.size, start + length)))
            start += length


class Merged(Sampler):
    """What one device must be given to see what `n` ranks see together: `n` batches of another sampler at once."""

    def __init__(self, batches: Any, n: int) -> None:
        self.batches, self.n = list(batches), n

    def __len__(self) -> int:
        return -(-len(self.batches) // self.n)

    def __iter__(self) -> Any:
        for start in range(0, len(self.batches), self.n):
            yield [index for batch in self.batches[start : start + self.n] for index in batch]


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


def own_batch_sampler(batch_size: int, size: int) -> DataLoader:
    batches: Any = Pairs(size)
    return DataLoader(Samples(size), batch_sampler=batches if batch_size == 1 else Merged(batches, batch_size))


def whole_batches(batch_size: int, size: int) -> DataLoader:
    """Automatic batching is off: the dataset makes batches of the lists of indices that it gets."""
    together = BatchSampler(range(size), batch_size, drop_last=False)
    return DataLoader(Batched(size), batch_size=None, sampler=Merged(together, 1) if batch_size > 2 else together)


class Batched(Samples):
    def __getitem__(self, indices: Any) -> Any:
        return torch.tensor(indices), self.features[indices], self.features[indices].sum(-1).tanh()


class NoLoader:
    """Any iterable will do for Lightning, but a list, which it takes for a list of loaders."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def no_loader(batch_size: int, size: int) -> NoLoader:
    return NoLoader(loader(size, batch_size))


def stream(batch_size: int, size: int, kind: type[Stream] = Stream, **options: Any) -> DataLoader:
    return DataLoader(kind(size), batch_size, **options)


def test_batches_of_the_users_own_sampler_are_dealt_in_turn():
    check_fit(2, dp, partial(own_batch_sampler, size=10), batch_size=1)


@covering(make=(whole_batches, no_loader), size=(8, 9, 12))
def test_whole_batches_are_dealt_in_turn(make, size):
    check_fit(2, dp, partial(make, size=size))


@covering(keep=5, kind=(Stream, SizedStream), options=({}, {"drop_last": True}), size=(5, 7))
def test_streams_are_divided_batch_by_batch(kind, options, size):
    check_fit(2, dp, partial(stream, size=size, kind=kind, **options))


def test_stream_in_workers_is_divided_batch_by_batch():
    check_fit(2, dp, partial(stream, size=11, **WORKERS), max_epochs=1)


def together(batch_size: int, mode: str, sizes: tuple[int, ...]) -> Any:
    loaders = {name: loader(size, batch_size, shuffle=True) for name, size in zip("ab", sizes, strict=True)}
    return loaders if mode == "dict" else CombinedLoader(loaders, mode)


@pytest.mark.parametrize("mode", ["dict", "min_size", "max_size", "max_size_cycle"])
def test_loaders_read_together_are_divided_each(mode):
    check_fit(2, dp, partial(together, mode=mode, sizes=(12, 8)))


@sampled(
    3,
    "options",
    [
        {"overfit_batches": 2},
        {"limit_train_batches": 2, "limit_val_batches": 1},
        {"limit_train_batches": 0.5},
        {"reload_dataloaders_every_n_epochs": 1},
        {"val_check_interval": 0.4},
        {"check_val_every_n_epoch": 2},
        {"num_sanity_val_steps": 2},
        {"accumulate_grad_batches": 2},
        {"max_steps": 3},
    ],
    ids=str,
)
def test_trainer_options_mean_the_same_as_on_one_device(options):
    check_fit(2, dp, partial(with_validation, size=19, val_size=5), **options)


class Peeks(Callback):
    """Looks at a batch of its own on rank 0 only, in the middle of epochs."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            next(iter(trainer.train_dataloader))
            next(iter(trainer.val_dataloaders))

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_start(trainer)


def unequal_generators(batch_size: int, size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return loader(size, batch_size, shuffle=True, generator=generator)


def shuffled_validation(batch_size: int, make: Any) -> Any:
    return make(batch_size, size=19), make(batch_size, size=7)


@pytest.mark.parametrize("make", [shuffled, own_generator, unequal_generators])
def test_what_only_rank_zero_draws_leads_nobody_astray(make):
    check_fit(2, dp, partial(shuffled_validation, make=make), callbacks=[Peeks()], num_sanity_val_steps=0)


# ---------------------------------------------------------------- what users divide themselves


def distributed(batch_size: int, *, inside: bool, wrong: bool, size: int = 12) -> DataLoader:
    n, rank = (1, 0) if wrong else (dist.get_world_size(), dist.get_rank())
    sampler = DistributedSampler(range(size), n, rank, shuffle=False)
    if inside:
        return DataLoader(Samples(size), batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))
    return loader(size, batch_size, sampler=sampler)


@pytest.mark.parametrize("inside", [False, True])
def test_users_own_distributed_sampler_is_left_alone(inside):
    for rank, run in enumerate(on_ranks(2, fit, dp, partial(distributed, inside=inside, wrong=False), 2)):
        assert flat(run.saw["train"]) == 2 * list(range(rank, 12, 2))


def test_use_distributed_sampler_false_leaves_loaders_alone():
    for run in on_ranks(2, fit, dp, partial(loader_of, size=6), 2, use_distributed_sampler=False, max_epochs=1):
        assert flat(run.saw["train"]) == list(range(6))


def loader_of(batch_size: int, size: int) -> DataLoader:
    return loader(size, batch_size)
