"""Batches with an item of a list for each sample, as detectors and captions have, and of what nothing tells apart."""

import gc
import operator
import weakref
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import lightning_parallel as lp
from lightning_parallel import LayerParallelStrategy, PipelineParallelStrategy
from tests.layouts import layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made, require_like
from tests.tiers import covering
from tests.trainers import trainer

WIDTH = 6


class Boxes(Dataset):
    """A vector, and targets of which each sample has another number; some have a note."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.vectors = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        boxes = self.vectors[index : index + 1].repeat(1 + index % 3, 1)[:, :4]
        return self.vectors[index], {"boxes": boxes, "name": f"{index}.png", "note": None if index % 2 else index}


def in_lists(samples: list[Any]) -> Any:
    vectors, targets = zip(*samples, strict=True)
    return torch.stack(vectors), list(targets), [target["note"] for target in targets]


def in_a_row(samples: list[Any]) -> Any:
    vectors, targets = zip(*samples, strict=True)
    whose = [torch.full((len(target["boxes"]),), number) for number, target in enumerate(targets)]
    return {
        "vectors": torch.stack(vectors),
        "boxes": torch.cat([target["boxes"] for target in targets]),
        "whose": torch.cat(whose),
    }


class Detector(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)
        self.names: list[str] = []

    def found(self, vectors: Tensor) -> Tensor:
        for layer in self.layers:
            vectors = vectors + layer(vectors)
        return self.head(vectors)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        vectors, targets, notes = batch
        assert len(targets) == len(notes) == len(vectors)
        found = zip(self.found(vectors), targets, strict=True)
        losses = [F.mse_loss(one.expand_as(target["boxes"]), target["boxes"]) for one, target in found]
        return lp.mean(torch.stack(losses).sum(), len(losses))  # and not over all boxes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Graphs(Detector):
    validation_step = LightningModule.validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.found(batch["vectors"])[batch["whose"]], batch["boxes"])


def trained(strategy: MakeStrategy | None, batch_size: int, samples: int) -> Any:
    model = Detector()
    run = trainer(made(strategy), max_epochs=2)
    load = partial(DataLoader, batch_size=batch_size, collate_fn=in_lists)
    run.fit(model, load(Boxes(samples)), load(Boxes(samples - 3)))
    return {name: float(value) for name, value in run.callback_metrics.items()}, dict(model.state_dict())


LAYOUTS = layouts("pipeline of 4 microbatches", "zbv", "data parallel", "zero 3")


@covering(keep=1, layout=LAYOUTS, samples=[16, 19])
def test_a_step_gets_the_targets_of_its_samples(layout: str, samples: int) -> None:
    """The last batch has three samples: two ranks have two and one of them, with lists of other lengths."""
    _, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, 2, (None, 4, samples), (strategy, 4 // readers, samples))


def of_graphs(strategy: MakeStrategy | None) -> Any:
    model = Graphs()
    trainer(made(strategy), max_epochs=1).fit(model, DataLoader(Boxes(16), 4, collate_fn=in_a_row))
    return dict(model.state_dict())


def refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"batch\['(vectors|boxes|whose)'\] is a tensor of shape .* so nothing tells which of it belongs to which",
    ):
        of_graphs(partial(PipelineParallelStrategy, 2, microbatches=2))


def test_samples_that_nothing_tells_apart_are_not_divided() -> None:
    run_on_ranks(2, refused)
    assert_like_one_device(of_graphs, 2, (None,), (partial(LayerParallelStrategy, 2),))


class Counted(Boxes):
    """Draws by a generator of its own."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.draws = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        vector, targets = super().__getitem__(index)
        return vector + torch.tensor(self.draws.normal(), dtype=torch.float32), targets


class ByEpoch(Sampler):
    """Another order in each pass, which it counts."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Scaled:
    """Collates with numbers of a generator of its own."""

    def __init__(self) -> None:
        self.draws, self.calls = torch.Generator().manual_seed(0), 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        vectors, *others = in_lists(samples)
        return vectors * torch.rand((), generator=self.draws) + 0.01 * self.calls, *others


def counted(strategy: MakeStrategy | None) -> Any:
    model = Detector()
    load = [DataLoader(Counted(16), 4, sampler=ByEpoch(16), collate_fn=Scaled()) for _ in range(2)]
    trainer(made(strategy), max_epochs=2).fit(model, *load)
    return dict(model.state_dict())


def test_counters_and_generators_are_as_before_the_first_batch() -> None:
    assert_like_one_device(counted, 2, (None,), (partial(PipelineParallelStrategy, 2, microbatches=4),))


# ---------------------------------------------------------------- looks at first batches


class Counting(Boxes):
    """Counts what is read of it, where a look puts nothing back."""

    read = Counter[int]()

    def __getitem__(self, index: int) -> Any:
        Counting.read[self.samples] += 1
        return super().__getitem__(index)


def read_by(strategy: MakeStrategy) -> dict[int, int]:
    Counting.read.clear()
    load = partial(DataLoader, batch_size=4, collate_fn=in_lists)
    trainer(strategy(), max_epochs=1, num_sanity_val_steps=0).fit(Detector(), load(Counting(8)), load(Counting(12)))
    return dict(Counting.read)


@covering(strategy=[partial(PipelineParallelStrategy, 2, microbatches=2), partial(LayerParallelStrategy, 2)])
def test_no_batch_is_read_twice(strategy: MakeStrategy) -> None:
    assert run_on_ranks(2, read_by, strategy) == [{8: 8, 12: 12}] * 2


class Together(Detector):
    """Trains on several loaders at once; its hook is told which one a batch is of."""

    def __init__(self, asked: list[tuple[int, int]]) -> None:
        super().__init__()
        self.ask = lambda dataloader_idx, size: asked.append((dataloader_idx, size))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not isinstance(batch, dict):
            self.ask(dataloader_idx, len(batch[0]))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (vectors, *lists), (others, *more) = batch["one"], batch["other"]
        return self.loss((torch.cat([vectors, others]), *map(operator.add, lists, more)))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)


def together(strategy: MakeStrategy | None) -> Any:
    asked: list[tuple[int, int]] = []
    model, load = Together(asked), partial(DataLoader, collate_fn=in_lists)
    one, other, larger = load(Boxes(8), 4), load(Boxes(8), 4), load(Boxes(12), 6)
    run = trainer(made(strategy), max_epochs=1, use_distributed_sampler=False)
    run.fit(model, {"one": one, "other": other}, [one, larger])
    return set(asked), dict(model.state_dict())


def test_hooks_get_the_number_of_the_loader() -> None:
    _, expected = begun_on_one(together, None).result()
    for asked, found in run_on_ranks(2, together, partial(PipelineParallelStrategy, 2, microbatches=2)):
        require_like(expected, found)
        assert asked == {(0, 4), (1, 6)}


class Reloading(Detector):
    """Makes loaders for each epoch."""

    validation_step = LightningModule.validation_step

    def __init__(self) -> None:
        super().__init__()
        self.made, self.alive = list[weakref.ref[Any]](), list[int]()

    def train_dataloader(self) -> Any:
        loader = DataLoader(Boxes(4), 4, collate_fn=in_lists)
        self.made.append(weakref.ref(loader))
        return loader

    def on_train_epoch_end(self) -> None:
        gc.collect()
        self.alive.append(sum(ref() is not None for ref in self.made))


def reloaded() -> list[int]:
    model, strategy = Reloading(), PipelineParallelStrategy(2, microbatches=2)
    trainer(strategy, max_epochs=4, reload_dataloaders_every_n_epochs=1, limit_val_batches=0).fit(model)
    return model.alive


def test_loaders_that_are_made_anew_are_let_go_of() -> None:
    assert run_on_ranks(2, reloaded) == [[1] * 4] * 2
