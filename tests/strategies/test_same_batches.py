"""Ranks that hold parts of one model for the same samples really read the same ones."""

from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel import DataParallel, HybridStrategy, PipelineParallel
from lightning_parallel.strategies.data import batches
from lightning_parallel.strategies.data.loaders import is_compared
from tests.models import build, points
from tests.ranks import ranks
from tests.tiers import sampled
from tests.trainers import trainer


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


class Stream(IterableDataset):
    """The same as a stream."""

    def __init__(self, changed_on: int) -> None:
        self.samples = Augmented(changed_on)

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


def fit(loader, size, **options):
    techniques = [PipelineParallel(2, microbatches=2), DataParallel(size)]
    run = trainer(HybridStrategy(*techniques), max_epochs=1, **options)
    run.fit(build("plain"), loader, DataLoader(points(8, seed=2)))


def test_the_first_batches_of_a_pass_and_every_64th_are_compared():
    assert [number for number in range(130) if is_compared(number)] == [*range(8), 64, 128]


@ranks(2)
@sampled(1, "kind", [Augmented, Stream])
def test_other_values_on_one_rank_are_named_before_the_step(kind):
    with pytest.raises(ValueError, match=r"batch \d of loader 0 differs between ranks 0, 1, which must read the same"):
        fit(DataLoader(kind(1), batch_size=8), 1)


def unseeded():
    torch.seed()
    return DataLoader(TensorDataset(torch.randn(8, 13), torch.zeros(8, dtype=torch.long), torch.randn(8)), 4)


@ranks(2)
def test_data_made_without_a_seed_is_refused_with_the_seed_as_the_first_remedy():
    with pytest.raises(ValueError, match=r"of the model for them\. .* made at random, call seed_everything\(N\)"):
        fit(unseeded(), 1)


class Batches:
    """Batches without a loader."""

    def __iter__(self):
        return iter(DataLoader(Stream(1), batch_size=8))


def sampled_by_itself():
    return DataLoader(Augmented(1), 8, sampler=DistributedSampler(range(48), num_replicas=1, rank=0, shuffle=False))


UNDIVIDED = [sampled_by_itself, Batches, lambda: DataLoader(Augmented(1), 8), lambda: DataLoader(Stream(1), 8)]


@ranks(2)
@sampled(2, "kind", UNDIVIDED, ids=["sampler", "batches", "dataset", "stream"])
def test_other_values_in_loaders_that_nobody_divides_are_named_too(kind):
    with pytest.raises(
        ValueError, match=r"batch \d of loader 0 differs(.|\n)*takes the part in trainer.distributed_samp"
    ):
        fit(kind(), 1, use_distributed_sampler=kind is sampled_by_itself)


@ranks(4)
def test_the_pipeline_concerned_is_named():
    with pytest.raises(ValueError, match=r"batch \d of loader 0 differs between ranks 1, 3, which must read the same"):
        fit(DataLoader(Augmented(3), batch_size=4), 2)


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
def test_ranks_that_agree_say_nothing_in_words():
    said, loader = Said(), DataLoader(points(48, seed=1), batch_size=4)
    techniques = [PipelineParallel(2, microbatches=2), DataParallel(2)]
    trainer(HybridStrategy(*techniques), max_epochs=1, callbacks=[said]).fit(build("plain"), loader, loader)
    assert not said.words
