"""Data that cannot be divided rightly is an error on every rank, which says what differs."""

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from lightning_parallel import DataParallel, DataParallelStrategy, HybridStrategy
from lightning_parallel.strategies.data import batches
from lightning_parallel.strategies.data.loaders import is_compared
from tests.further.points import Handwritten
from tests.layouts import PP2, layouts
from tests.models import build, points
from tests.ranks import ranks, run_on_ranks
from tests.strategies.data.test_order import Stream, distributed, together
from tests.strategies.runs import Samples, fit, loader
from tests.trainers import trainer


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
        ragged = dist.get_rank() == 1 and index >= self.first
        return super().__getitem__(index)[: 2 if ragged else None]


REFUSED = [
    ("your DistributedSampler reads part 0 of 1", partial(distributed, inside=False, wrong=True)),
    ("DistributedSampler reads part 0 of 1", partial(distributed, inside=True, wrong=True)),
    ("the stream of DividesItself must be the same", lambda size: DataLoader(DividesItself(8), size)),
    ("the order of the samples that Own yields must be the same", lambda size: loader(12, size, sampler=Own())),
    ("the number of batches of DataLoader must be the same", lambda size: loader(8 + 8 * dist.get_rank(), size)),
    ("the end of the data must be the same", lambda size: DataLoader(Stream(8 + 8 * dist.get_rank()), size)),
    ("the end of the data must be the same", lambda size: DataLoader(Stream(8 * dist.get_rank()), size)),
    ("the structure of a batch must be the same", lambda size: DataLoader(Ragged(12, 0), size)),
    ("the structure of a batch must be the same", lambda size: DataLoader(Ragged(12, 8), size)),
]
REFUSED_IN_TRAINING = [
    ("one of 2 loaders read together ends with 3 samples", partial(together, mode="dict", sizes=(12, 7)))
]


def refused(number: int, validated: bool) -> None:
    message, make = (REFUSED + REFUSED_IN_TRAINING)[number]
    data = (lambda size: (loader(8, size), make(size))) if validated else make
    with pytest.raises(ValueError, match=message):
        fit(DataParallelStrategy(), data, 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("validated", [False, True])
def test_data_is_refused_on_every_rank(validated):
    for number in range(len(REFUSED) + (not validated)):
        run_on_ranks(2, refused, number, validated)


class Hooked(Handwritten):
    """Makes its loaders itself."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def val_dataloader(self) -> list[DataLoader]:
        return fewer_on_rank_one()


def ones() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(8, 13), torch.zeros(8, dtype=torch.long), torch.zeros(8)), 4)


def fewer_on_rank_one() -> list[DataLoader]:
    return [ones(), ones()][dist.get_rank() :]


GIVEN = [
    (Handwritten, lambda: (dict(enumerate(fewer_on_rank_one())), ones()), "loaders of train_dataloader: 2; "),
    (Handwritten, lambda: (ones(), fewer_on_rank_one()), "loaders of val_dataloader: 2; "),
    (Hooked, lambda: (ones(),), "loaders of val_dataloader: 2; "),
    (Handwritten, lambda: (ones(), fewer_on_rank_one()[1:] or None), "loaders of val_dataloader: some; "),
]


def other_numbers(strategy: Any, number: int, checks: int) -> None:
    make, data, theirs = GIVEN[number]
    message = rf"^which loaders are read next must be .* \(rank 0: {theirs}rank 1: .*\); give every rank equally many"
    with pytest.raises(ValueError, match=message):
        trainer(strategy(), max_epochs=1, num_sanity_val_steps=checks).fit(make(), *data())
    assert not [name for kind in (DataLoader, BatchSampler) for name in vars(kind) if name.startswith("__old")]


@pytest.mark.parametrize("layout", ["data parallel", pytest.param("pipeline", marks=pytest.mark.exhaustive)])
def test_other_numbers_of_loaders_are_refused_on_every_rank(layout):
    # in a hook each rank of a pipeline is the one reader, so that both make as many loaders
    numbers = [number for number, (kind, *_) in enumerate(GIVEN) if layout != "pipeline" or kind is not Hooked]
    for number, checks in itertools.product(numbers, (2, 0)):
        run_on_ranks(2, other_numbers, layouts(layout)[layout].strategy, number, checks)


class Augmented(Dataset):
    """Samples of which one rank sees a changed version after its first sixteen."""

    def __init__(self, changed_on: int) -> None:
        self.points, self.changed_on, self.reads = points(48, seed=1), changed_on, 0

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        inputs, *targets = self.points[index]
        self.reads += 1
        late = self.reads > 16 and torch.distributed.get_rank() == self.changed_on
        return (inputs + 0.5 * late, *targets)


class AugmentedStream(IterableDataset):
    """The same as a stream."""

    def __iter__(self):
        return map(Augmented(1).__getitem__, range(48))


class Batches:
    """Batches without a loader."""

    def __iter__(self):
        return iter(DataLoader(AugmentedStream(), batch_size=8))


def fit_pipeline(loader, size, **options):
    run = trainer(HybridStrategy(PP2, DataParallel(size)), max_epochs=1, **options)
    run.fit(build("plain", blocks=2), loader, DataLoader(points(8, seed=2)))


def unseeded():
    torch.seed()
    return DataLoader(TensorDataset(torch.randn(8, 13), torch.zeros(8, dtype=torch.long), torch.randn(8)), 4)


def test_first_batches_of_a_pass_and_every_64th_are_compared():
    assert [number for number in range(130) if is_compared(number)] == [*range(8), 64, 128]


def sampled_by_itself():
    return DataLoader(Augmented(1), 8, sampler=DistributedSampler(range(48), num_replicas=1, rank=0, shuffle=False))


DIFFERS = r"batch \d of loader 0 differs between ranks 0, 1, which must read the same"
UNDIVIDED = r"batch \d of loader 0 differs(.|\n)*must do so by trainer.distributed_samp"
OTHER_VALUES = [
    (True, lambda: DataLoader(Augmented(1), 8), DIFFERS),
    (True, lambda: DataLoader(AugmentedStream(), 8), DIFFERS),
    (True, unseeded, r"of the model\. .* made at random, call seed_everything\(N\)"),
    (True, sampled_by_itself, UNDIVIDED),
    (False, Batches, UNDIVIDED),
    (False, lambda: DataLoader(Augmented(1), 8), UNDIVIDED),
    (False, lambda: DataLoader(AugmentedStream(), 8), UNDIVIDED),
]


def other_values(number):
    divided, make, message = OTHER_VALUES[number]
    with pytest.raises(ValueError, match=message):
        fit_pipeline(make(), 1, use_distributed_sampler=divided)


def test_other_values_on_one_rank_are_named_before_the_step():
    """In loaders that are divided, in those that nobody divides, and where a seed is missing."""
    for number in range(len(OTHER_VALUES)):
        run_on_ranks(2, other_values, number)


class Said(Callback):
    """What ranks told each other in objects, from the second batch to the last."""

    def __init__(self):
        self.words = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.patch = mock.patch.object(batches, "gather_objects", side_effect=self.count)
            self.patch.start()
        elif batch_idx == 4:
            self.patch.stop()

    def count(self, value, group):
        self.words += 1
        return [value] * group.size()


@ranks(4)
def test_pipeline_concerned_is_named_and_others_say_nothing():
    said = Said()
    fit_pipeline(DataLoader(points(48, seed=1), batch_size=4), 2, callbacks=[said])
    assert not said.words
    with pytest.raises(ValueError, match=r"batch \d of loader 0 differs between ranks 1, 3, which must read the same"):
        fit_pipeline(DataLoader(Augmented(3), batch_size=4), 2)
