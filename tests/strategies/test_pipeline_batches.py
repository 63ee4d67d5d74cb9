"""Batches of every size in a pipeline, and what of them a metric counts."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, SumMetric

from lightning_parallel import PipelineParallelStrategy
from tests.models import Plain, build, loaders
from tests.strategies.one_and_two import MakeStrategy, made, on_one_and_two, require_like
from tests.tiers import sampled
from tests.trainers import trainer


class Ragged(Dataset):
    """Sequences; those of every batch of four have their own length."""

    def __init__(self, samples: int) -> None:
        self.tokens = torch.randint(64, (samples, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 5 + 3 * (index // 4 % 3)
        return {"input_ids": self.tokens[index, :length], "labels": self.tokens[index, 1 : length + 1]}


def ragged(strategy: MakeStrategy | None) -> Any:
    class Losses(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))

    losses = Losses()
    model = build("llama")
    run = trainer(made(strategy), max_epochs=2, accumulate_grad_batches=3, gradient_clip_val=0.5, callbacks=[losses])
    run.fit(model, DataLoader(Ragged(26), 4), DataLoader(Ragged(6), 4))  # the last batches have 2 samples
    return losses.losses, float(run.callback_metrics["val_loss"]), {n: v.clone() for n, v in model.state_dict().items()}


@sampled(1, "microbatches", [4, 2, 8])
def test_other_lengths_and_fewer_samples_than_microbatches(microbatches: int) -> None:
    expected, found = on_one_and_two(ragged, partial(PipelineParallelStrategy, 2, microbatches=microbatches))
    for losses, val_loss, weights in found:
        require_like(expected[:2], (losses, val_loss))
        for name, wanted in expected[2].items():
            torch.testing.assert_close(weights[name], wanted, rtol=1e-4, atol=1e-5)


class Averaging(Plain):
    """Gives metrics its loss, one number for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.updated, self.total = MeanMetric(), MeanMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.updated.update(output["loss"])
        self.total.update(output["loss"])
        self.log("called", self.called(output["loss"]), on_step=True, on_epoch=True)
        self.log_dict({"updated": self.updated, "total": self.total}, on_step=False, on_epoch=True)
        return output


def averaged(strategy: MakeStrategy | None) -> dict[str, float]:
    torch.manual_seed(0)
    run = trainer(made(strategy), max_epochs=2)
    run.fit(Averaging(), *loaders("plain", 8, samples=21))
    return {name: float(value) for name, value in run.callback_metrics.items()}


def test_a_loss_given_to_a_metric_counts_once_for_a_batch() -> None:
    expected, found = on_one_and_two(averaged)
    require_like([expected] * 2, found)
