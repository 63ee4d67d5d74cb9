"""Evaluation and prediction see every sample exactly once; the stages of a Trainer follow each other at will."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from tests.curves import compare_weights
from tests.strategies.runs import Watched, flat, loader, on_device, on_ranks, require_same_samples
from tests.tiers import covering, sampled
from tests.trainers import trainer

STRATEGIES = [DataParallelStrategy, partial(ZeroStrategy, stage=1), partial(ZeroStrategy, stage=3)]


def evaluate(strategy: Any, batch_size: int, sizes: list[int]) -> Any:
    seed_everything(5, verbose=False)
    used, module, results = trainer(strategy), Watched(), []
    for size in sizes:
        results += used.validate(module, loader(size, batch_size), verbose=False)
        results += used.test(module, [loader(size, batch_size), loader(size + 1, batch_size)], verbose=False)
    return module.saw, results


@covering(keep=1, strategy=STRATEGIES, n=(2, 4))
def test_evaluation_counts_every_sample_once(strategy, n):
    sizes = list(range(1, 10)) if strategy is DataParallelStrategy else [1, 5]
    saw, results = on_device(evaluate, 2 * n, sizes)
    ours = on_ranks(n, evaluate, strategy, 2, sizes)
    require_same_samples(saw, [seen for seen, _ in ours])
    for _, found in ours:
        assert found == [pytest.approx(wanted, rel=1e-5) for wanted in results]


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


def predict(strategy: Any, batch_size: int, sizes: list[int], interval: str) -> Any:
    writer = Writer(interval)
    used = trainer(strategy, callbacks=[writer])
    predicted = [used.predict(Watched(), loader(size, batch_size)) for size in sizes]
    return [[part.tolist() for part in parts] for parts in predicted], writer.batches, writer.epochs


@covering(keep=2, interval=("batch", "epoch", "batch_and_epoch"), n=(2, 4))
def test_predictions_are_made_and_written_once(interval, n):
    sizes = [1, 2, 3, 5, 8, 9]
    runs = on_ranks(n, predict, DataParallelStrategy, 2, sizes, interval)
    for number, size in enumerate(sizes):
        assert sorted(flat(flat(predicted[number] for predicted, _, _ in runs))) == list(range(size))
    for _, batches, epochs in runs:
        assert all(prediction == indices for prediction, indices in batches)
        assert all(predictions == indices for predictions, indices in epochs)
    everything = sorted(flat(range(size) for size in sizes))
    if "batch" in interval:
        assert sorted(flat(flat(i for _, i in batches) for _, batches, _ in runs)) == everything
    if "epoch" in interval:
        assert sorted(flat(flat(flat(i for _, i in epochs)) for _, _, epochs in runs)) == everything


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


@sampled(1, "strategy", STRATEGIES)
def test_stages_follow_each_other_on_one_trainer(strategy):
    results, saw, weights = on_device(many_stages, 4)
    ours = on_ranks(2, many_stages, strategy, 2)
    require_same_samples(saw, [seen for _, seen, _ in ours])
    for found, _, found_weights in ours:
        assert found == [pytest.approx(wanted, rel=1e-5) for wanted in results]
        compare_weights(weights, found_weights, 1e-5)


class Normalised(Watched):
    """Its running statistics are those of each rank's own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.register_buffer("samples", torch.zeros(2))
        self.register_buffer("constant", torch.full((2,), 1 / 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.samples += batch[1].sum(0).detach()
        return super().training_step(batch, batch_idx)


def normalise(strategy: Any, folder: str) -> Any:
    module, seen = Normalised(), []
    used = trainer(strategy, max_epochs=1)
    module.on_validation_batch_start = lambda *_: seen.append([b.clone() for b in module.buffers()])
    module.on_train_end = lambda: used.save_checkpoint(f"{folder}/run.ckpt")
    used.fit(module, loader(16, 2), loader(4, 2))
    saved = torch.load(f"{folder}/run.ckpt", weights_only=True)["state_dict"]
    return seen[-1], list(module.buffers()), saved


@sampled(2, "strategy", STRATEGIES)
def test_buffers_of_all_ranks_are_brought_together(strategy, tmp_path: Path):
    (first, after, saved), (second, after_second, _) = on_ranks(2, normalise, strategy, str(tmp_path))
    for ours, theirs in zip([*first, *after], [*second, *after_second], strict=True):
        assert torch.equal(ours, theirs)
    everything = torch.stack([features for _, features, _ in loader(16, 1).dataset])
    assert torch.allclose(saved["samples"], everything.sum(0) / 2)  # the mean of what the two ranks counted
    assert saved["layer.0.num_batches_tracked"] == 4
    assert torch.equal(saved["constant"], torch.full((2,), 1 / 3))


class Keeps(Watched):
    """Gathers what it kept of all batches when the evaluation is over."""

    def on_validation_epoch_start(self) -> None:
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.kept.append(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.gathered = self.all_gather(torch.cat(self.kept))


def gathered(strategy: Any, size: int) -> list[int]:
    module = Keeps()
    trainer(strategy).validate(module, loader(size, 4), verbose=False)
    assert module.gathered.shape[0] == (2 if size == 20 else 1)
    return module.gathered.flatten(0, 1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [20, 21])
def test_kept_outputs_of_uneven_samples_are_gathered(size: int) -> None:
    for found in on_ranks(2, gathered, DataParallelStrategy, size):
        assert sorted(found) == list(range(size))
