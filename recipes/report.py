"""Reports of a run: its speed, and at the end metrics, a sample of text and the curves of the loss."""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import matplotlib
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tokenizers import Tokenizer
from torch import Tensor, nn

from recipes.gpt import GPTModule

matplotlib.use("Agg")  # draws into files, on machines without a display
from matplotlib import pyplot as plt


class TokensPerSecond(Callback):
    """Logs the number of tokens per second of all ranks together, over the last batches.

    Args:
        window: Number of batches to average over.
    """

    def __init__(self, window: int = 20) -> None:
        self.ends: deque[float] = deque(maxlen=window + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Log the rate since the end of the oldest batch in the window."""
        self.ends.append(perf_counter())
        if len(self.ends) > 1:
            # Ranks with the same samples, for example the stages of a pipeline, count once.
            readers = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
            tokens = batch["input_ids"].numel() * readers * (len(self.ends) - 1)
            pl_module.log("tokens/s", tokens / (self.ends[-1] - self.ends[0]), prog_bar=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new window, so that the time of validation does not count."""
        self.ends.clear()


@torch.no_grad()
def generate(network: nn.Module, ids: Tensor, count: int, *, context: int, temperature: float) -> Tensor:
    """Append ``count`` ids to ``ids`` (T), each drawn from the prediction of the network.

    Temperature 0 takes the likeliest id. The draws are the same every time.
    """
    generator = torch.Generator(ids.device).manual_seed(0)
    for _ in range(count):
        logits = network(ids[None, -context:])[0, -1]  # (V)
        probabilities = torch.softmax(logits.float() / max(temperature, 1e-4), dim=-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, 1, generator=generator)))
    return ids


def read_curve(log: Path, name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which ``name`` was logged to a CSV file, and its values."""
    with log.open(newline="") as lines:
        points = [(int(row["step"]), float(row[name])) for row in csv.DictReader(lines) if row.get(name)]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(log: Path, picture: Path) -> None:
    """Draw training and validation loss over the steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*read_curve(log, "train_loss"), label="training", linewidth=1)
    steps, losses = read_curve(log, "val_loss")
    if losses[-2:] == 2 * losses[-1:]:  # validated at the last step of the fit, and with the same weights after it
        steps, losses = steps[:-1], losses[:-1]
    axes.plot(steps, losses, "o-", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def report(
    folder: Path,
    model: GPTModule,
    tokenizer: Tokenizer | None,
    metrics: Mapping[str, float],
    *,
    prompt: str,
    **sample: Any,
) -> None:
    """Print the validation loss, a sample of text and the paths of the files, and draw the curves."""
    if (log := folder / "log" / "metrics.csv").exists():
        draw_curves(log, folder / "curves.png")
    print(f"\nvalidation loss  {metrics['val_loss']:.4f}")
    print(f"perplexity       {math.exp(metrics['val_loss']):.2f}")
    if tokenizer is not None:
        # An empty prompt is the end of a document, which is id 0 of our own tokenizers.
        ids = torch.tensor(tokenizer.encode(prompt).ids or [0], device=model.device)
        drawn = generate(model.eval(), ids, context=model.config.context, **sample)
        print("sample           " + tokenizer.decode(drawn.tolist()).replace("\n", "\n" + " " * 17))
    for name, file in {"checkpoint": "checkpoints/last.ckpt", "loss curves": "curves.png"}.items():
        if (folder / file).exists():
            print(f"{name:<16} {folder / file}", flush=True)
