"""Global batch i holds exactly the samples that one device would see with the same global batch size and seed."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from lightning_parallel import DataParallelStrategy
from tests.strategies.runs import check_fit, loader

dp = DataParallelStrategy


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


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("make", [shuffled, weighted, own_sampler, own_generator])
def test_the_order_of_one_device_is_kept_over_epochs(make, n):
    check_fit(n, dp, partial(make, size=19), max_epochs=3)


def test_workers_read_what_one_device_reads():
    check_fit(2, dp, partial(with_validation, size=19, val_size=5, num_workers=2), max_epochs=3)


def test_validation_between_epochs_leaves_the_order_alone():
    check_fit(2, dp, partial(with_validation, size=19, val_size=5), max_epochs=3)


@pytest.mark.parametrize("size", [1, 2, 3, 9, 10, 11, 12])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_last_batch_that_does_not_divide_trains_as_on_one_device(size, accumulate):
    check_fit(4, dp, partial(shuffled, size=size), accumulate_grad_batches=accumulate)


def test_drop_last_drops_what_one_device_drops():
    check_fit(2, dp, partial(shuffled, size=19, drop_last=True))
