"""Batches with an item of a list for each sample, as detectors and captions have, and of what nothing tells apart."""

import gc
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
from torch.utils.data import DataLoader, Dataset

import lightning_parallel as lp
from lightning_parallel import LayerParallelStrategy, PipelineParallelStrategy
from tests.layouts import layouts
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
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
    boxes = [target["boxes"] for target in targets]
    whose = torch.cat([torch.full((len(each),), number) for number, each in enumerate(boxes)])
    return {"vectors": torch.stack(vectors), "boxes": torch.cat(boxes), "whose": whose}


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
    model, load = Detector(), partial(DataLoader, batch_size=batch_size, collate_fn=in_lists)
    run = trainer(made(strategy), max_epochs=2)
    run.fit(model, load(Boxes(samples)), load(Boxes(samples - 3)))
    return {name: float(value) for name, value in run.callback_metrics.items()}, dict(model.state_dict())


LAYOUTS = layouts("pipeline of 4 microbatches", "zbv", "data parallel")


@sampled(1, "layout", LAYOUTS)
def test_targets_of_its_samples_are_what_a_step_gets(layout: str) -> None:
    """The last batch has three samples: two ranks have two and one of them, with lists of other lengths."""
    _, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, 2, (None, 4, 19), (strategy, 4 // readers, 19))


def of_graphs(strategy: MakeStrategy | None) -> Any:
    model = Graphs()
    trainer(made(strategy), max_epochs=1).fit(model, DataLoader(Boxes(16), 4, collate_fn=in_a_row))
    return dict(model.state_dict())


def refused() -> None:
    said = r"batch\['(vectors|boxes|whose)'\] is a tensor of shape .* so it is unknown how to split it"
    with pytest.raises(ValueError, match=said):
        of_graphs(partial(PipelineParallelStrategy, 2, microbatches=2))


def test_samples_that_nothing_tells_apart_are_not_divided() -> None:
    run_on_ranks(2, refused)
    assert_like_one_device(of_graphs, 2, (None,), (partial(LayerParallelStrategy, 2),))


class Counted(Boxes):
    """Draws by a generator of its own, and counts what is read of all such, where a look puts nothing back."""

    reads = Counter[int]()

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.draws = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        Counted.reads[self.samples] += 1
        vector, targets = super().__getitem__(index)
        return vector + torch.tensor(self.draws.normal(), dtype=torch.float32), targets


def counted(strategy: MakeStrategy | None) -> Any:
    torch.manual_seed(5)
    Counted.reads.clear()
    model, load = Detector(), partial(DataLoader, batch_size=4, collate_fn=in_lists)
    trainer(made(strategy), max_epochs=2).fit(model, load(Counted(8), shuffle=True), load(Counted(12)))
    return dict(Counted.reads), dict(model.state_dict())


def test_first_batch_is_read_once_and_leaves_no_trace() -> None:
    """Counters and generators, the global one too, are as one device has them."""
    assert_like_one_device(counted, 2, (None,), (partial(PipelineParallelStrategy, 2, microbatches=4),))


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
