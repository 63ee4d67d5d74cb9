"""Data that cannot be divided rightly is an error on every rank, which says what differs."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from lightning_parallel import DataParallelStrategy, PipelineParallelStrategy
from tests.further.points import Handwritten
from tests.ranks import RanksFailed, run_on_ranks
from tests.strategies.runs import Samples, fit, loader, on_ranks
from tests.strategies.test_data import Stream, distributed, stream, together
from tests.tiers import covering, sampled
from tests.trainers import trainer

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


@sampled(4, "message", REFUSED)
def test_training_data_is_refused_on_every_rank(message):
    check_refused(message, REFUSED[message])


@sampled(4, "message", [message for message, make in REFUSED.items() if make is not tails])
def test_validation_data_is_refused_on_every_rank(message):
    check_refused(message, partial(after_training, REFUSED[message]))


def check_refused(message: str, make: Any) -> None:
    with pytest.raises(RanksFailed) as raised:
        on_ranks(2, fit, dp, make, 2)
    text = str(raised.value)
    assert message in text
    assert "ranks 0, 1 failed" in text or text.count(f"Error: {message}") == 2 or text.count(message) == 2, text


def after_training(make: Any, batch_size: int) -> Any:
    return loader(8, batch_size), make(batch_size)


# ---------------------------------------------------------------- other numbers of loaders


class Hooked(Handwritten):
    """Makes its loaders itself."""

    def val_dataloader(self) -> list[DataLoader]:
        return fewer_on_rank_one()


def points() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(8, 13), torch.zeros(8, dtype=torch.long), torch.zeros(8)), 4)


def fewer_on_rank_one() -> list[DataLoader]:
    return [points(), points()][dist.get_rank() :]


GIVEN = {
    "train": (
        Handwritten,
        lambda: (dict(enumerate(fewer_on_rank_one())), points()),
        "loaders of train_dataloader: 2; ",
    ),
    "validation": (Handwritten, lambda: (points(), fewer_on_rank_one()), "loaders of val_dataloader: 2; "),
    "hook": (Hooked, lambda: (points(),), "loaders of val_dataloader: 2; "),
    "none": (Handwritten, lambda: (points(), fewer_on_rank_one()[1:] or None), "loaders of val_dataloader: some; "),
}


def other_numbers(strategy: Any, given: str, checks: int) -> None:
    make, data, theirs = GIVEN[given]
    message = rf"^which loaders are read next must be .* \(rank 0: {theirs}rank 1: .*\); give every rank equally many"
    with pytest.raises(ValueError, match=message):
        trainer(strategy(), max_epochs=1, num_sanity_val_steps=checks).fit(make(), *data())
    assert not [name for kind in (DataLoader, BatchSampler) for name in vars(kind) if name.startswith("__old")]


@covering(keep=4, strategy=[partial(dp, 2), partial(PipelineParallelStrategy, 2)], given=GIVEN, checks=[2, 0])
def test_other_numbers_of_loaders_are_an_error_on_every_rank(strategy: Any, given: str, checks: int) -> None:
    run_on_ranks(2, other_numbers, strategy, given, checks)
