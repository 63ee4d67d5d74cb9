"""Data that cannot be divided rightly is an error on every rank, within seconds, which says what differs."""

import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from lightning_parallel import DataParallelStrategy
from tests.ranks import TIMEOUT, RanksFailed
from tests.strategies.runs import Samples, fit, loader, on_ranks
from tests.strategies.test_data import Stream, distributed, stream, together
from tests.tiers import sampled

dp = DataParallelStrategy


class DividesItself(Stream):
    def __init__(self, size: int) -> None:
        super().__init__(size, skip=dist.get_rank())


class Own(Sampler):
    """Ranks draw another order each."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter([(i + dist.get_rank()) % 12 for i in range(12)])


class Ragged(Samples):
    """Ranks get batches of another structure each, from some sample on."""

    def __init__(self, size: int, first: int) -> None:
        super().__init__(size)
        self.first = first

    def __getitem__(self, index: int) -> Any:
        return (
            super().__getitem__(index)[:2]
            if dist.get_rank() == 1 and index >= self.first
            else super().__getitem__(index)
        )


def self_divided(batch_size: int) -> DataLoader:
    return stream(batch_size, 8, DividesItself)


def unequal_orders(batch_size: int) -> DataLoader:
    return loader(12, batch_size, sampler=Own())


def unequal_lengths(batch_size: int) -> DataLoader:
    return loader(8 + 8 * dist.get_rank(), batch_size)


def unequal_streams(batch_size: int, first: int = 0) -> DataLoader:
    return stream(batch_size, first + 8 * dist.get_rank())


def unequal_structures(batch_size: int, first: int) -> DataLoader:
    return DataLoader(Ragged(12, first), batch_size)


def tails(batch_size: int) -> Any:
    return together(batch_size, "dict", (12, 7))


REFUSED = {
    "your DistributedSampler reads part 0 of 1": partial(distributed, inside=False, wrong=True),
    "DistributedSampler reads part 0 of 1": partial(distributed, inside=True, wrong=True),
    "the stream of DividesItself must be the same": self_divided,
    "the order of the samples that Own yields must be the same": unequal_orders,
    "the number of batches of DataLoader must be the same": unequal_lengths,
    "the end of the data must be the same": partial(unequal_streams, first=8),
    "end of the data must be the same": unequal_streams,
    "the structure of a batch must be the same": partial(unequal_structures, first=0),
    "structure of a batch must be the same": partial(unequal_structures, first=8),
    "one of 2 loaders read together ends with 3 samples": tails,
}


@sampled(5, "message", REFUSED)
def test_training_data_that_cannot_be_divided_is_refused_on_every_rank(message):
    check_refused(message, REFUSED[message])


@sampled(5, "message", [message for message, make in REFUSED.items() if make is not tails])
def test_validation_data_that_cannot_be_divided_is_refused_on_every_rank(message):
    check_refused(message, partial(after_training, REFUSED[message]))


def check_refused(message: str, make: Any) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as raised:
        on_ranks(2, fit, dp, make, 2)
    assert time.monotonic() - start < TIMEOUT / 2  # nobody waited for anybody
    text = str(raised.value)
    assert message in text
    assert "ranks 0, 1 failed" in text or text.count(f"Error: {message}") == 2 or text.count(message) == 2, text


def after_training(make: Any, batch_size: int) -> Any:
    return loader(8, batch_size), make(batch_size)
