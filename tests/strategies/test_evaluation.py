"""Evaluation and prediction see every sample exactly once; the stages of a Trainer follow each other at will."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn

from lightning_parallel import DataParallelStrategy
from tests.curves import compare_weights
from tests.heard import heard
from tests.layouts import LAYOUTS
from tests.strategies.runs import Watched, flat, loader, on_device, on_ranks, require_same_samples
from tests.tiers import sampled
from tests.trainers import trainer


class Writer(BasePredictionWriter):
    """Keeps what it is told to write."""

    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Trainer, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches.append((prediction.tolist(), list(indices)))

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, indices: Any) -> None:
        self.epochs.append(([p.tolist() for p in predictions], [list(i) for i in indices[0]]))


def evaluate(strategy: Any, batch_size: int, sizes: list[int], interval: str) -> Any:
    seed_everything(5, verbose=False)
    writer, module, results, predicted = Writer(interval), Watched(), [], []
    used = trainer(strategy, callbacks=[writer])
    for size in sizes:
        results += used.validate(module, loader(size, batch_size), verbose=False)
        results += used.test(module, [loader(size, batch_size), loader(size + 1, batch_size)], verbose=False)
        predicted.append([part.tolist() for part in used.predict(module, loader(size, batch_size))])
    return module.saw, results, predicted, writer.batches, writer.epochs


@sampled(
    1,
    ("layout", "sizes", "interval"),
    [
        ("zero 3", [1, 2, 3, 5, 8, 9], "batch_and_epoch"),
        ("data parallel", [1, 4, 6, 7], "batch"),
        ("data parallel of 4", [1, 5, 9], "epoch"),
    ],
)
def test_evaluation_and_prediction_count_every_sample_once(layout: str, sizes: list[int], interval: str) -> None:
    ranks, _, strategy = LAYOUTS[layout]
    saw, results, *_ = on_device(evaluate, 2 * ranks, sizes, interval)
    ours = on_ranks(ranks, evaluate, strategy, 2, sizes, interval)
    require_same_samples(saw, [run[0] for run in ours])
    for number, size in enumerate(sizes):
        assert sorted(flat(flat(run[2][number] for run in ours))) == list(range(size))
    for _, found, _, batches, epochs in ours:
        assert found == [pytest.approx(wanted, rel=1e-5) for wanted in results]
        assert all(prediction == indices for prediction, indices in batches)
        assert all(predictions == indices for predictions, indices in epochs)
    everything = sorted(flat(range(size) for size in sizes))
    if "batch" in interval:
        assert sorted(flat(flat(i for _, i in run[3]) for run in ours)) == everything
    if "epoch" in interval:
        assert sorted(flat(flat(flat(i for _, i in run[4])) for run in ours)) == everything


class Keeps(Watched):
    """Gathers what it kept of all batches when the evaluation is over."""

    def on_validation_epoch_end(self) -> None:
        kept = [torch.tensor(numbers) for numbers in self.saw["val0"]]
        self.gathered = self.all_gather(torch.cat(kept))


def gathered(strategy: Any) -> list[list[int]]:
    found = []
    for size, used in ((20, strategy), (21, type(strategy)())):
        module = Keeps()
        trainer(used).validate(module, loader(size, 4), verbose=False)
        assert module.gathered.shape[0] == (2 if size == 20 else 1)
        found.append(sorted(module.gathered.flatten().tolist()))
    return found


def test_kept_outputs_of_uneven_samples_are_gathered() -> None:
    assert on_ranks(2, gathered, DataParallelStrategy) == [[list(range(20)), list(range(21))]] * 2


def many_stages(strategy: Any, batch_size: int) -> Any:
    seed_everything(5, verbose=False)
    module, used = Watched(), trainer(strategy, max_epochs=1)
    data = loader(9, batch_size, shuffle=True), loader(5, batch_size)
    used.fit(module, *data)
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    pickle.dumps(module)  # nothing of the run is left on it
    results = used.validate(module, data[1], verbose=False) + used.test(module, data[1], verbose=False)
    used.predict(module, data[1])
    used.fit_loop.max_epochs = 2
    used.fit(module, *data)
    results += used.validate(module, data[1], verbose=False)
    return results, module.saw, {name: value.clone() for name, value in module.state_dict().items()}


@sampled(1, "layout", ["zero 3", "data parallel"])
def test_stages_follow_each_other_on_one_trainer(layout: str) -> None:
    results, saw, weights = on_device(many_stages, 4)
    ours = on_ranks(2, many_stages, LAYOUTS[layout].strategy, 2)
    require_same_samples(saw, [seen for _, seen, _ in ours])
    for found, _, found_weights in ours:
        assert found == [pytest.approx(wanted, rel=1e-5) for wanted in results]
        compare_weights(weights, found_weights, 1e-5)


class Normalised(Watched):
    """Its running statistics are those of each rank's own samples, as are two buffers that its step changes.

    Others are constant, or change alike on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.register_buffer("samples", torch.zeros(2))
        self.register_buffer("queue", torch.zeros(8, 2))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("slow", torch.zeros(1, 2))
        self.register_buffer("constant", torch.full((2,), 1 / 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.samples += batch[1].sum(0)
            self.queue[self.place : self.place + len(batch[1])] = batch[1]
            self.place = (self.place + len(batch[1])) % 8
            self.slow = 0.9 * self.slow + 0.1 * self.layer[1].weight
        return super().training_step(batch, batch_idx)


def normalise(strategy: Any, folder: str) -> Any:
    module, seen = Normalised(), []
    used = trainer(strategy, max_epochs=2)
    module.on_validation_batch_start = lambda *_: seen.append([b.clone() for b in module.buffers()])
    module.on_train_end = lambda: used.save_checkpoint(f"{folder}/run.ckpt")
    with heard() as lines:
        used.fit(module, loader(16, 2), loader(4, 2))
    saved = torch.load(f"{folder}/run.ckpt", weights_only=True)["state_dict"]
    return seen[-1], list(module.buffers()), saved, "\n".join(lines)


@sampled(1, "layout", ["zero 3", "data parallel"])
def test_buffers_of_all_ranks_are_brought_together(layout: str, tmp_path: Path) -> None:
    """And those that are no means are told, once, on one rank."""
    found = on_ranks(2, normalise, LAYOUTS[layout].strategy, str(tmp_path))
    (first, after, saved, said), (second, after_second, _, others) = found
    for ours, theirs in zip([*first, *after], [*second, *after_second], strict=True):
        assert torch.equal(ours, theirs)
    everything = torch.stack([features for _, features, _ in loader(16, 1).dataset])
    assert torch.allclose(saved["samples"], everything.sum(0))  # in each epoch the mean of what two ranks counted
    assert saved["layer.0.num_batches_tracked"] == 8
    assert torch.equal(saved["constant"], torch.full((2,), 1 / 3))
    assert said.count("changed these buffers by its own samples: queue, samples. ") == 1
    assert "changed these buffers" not in others
