"""What a run shows: tokens per second on the way; at the end losses, a sample of text, the checkpoint and a picture."""

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

matplotlib.use("Agg")  # draws into files, on machines without a display
from matplotlib import pyplot as plt


class TokensPerSecond(Callback):
    """Logs how many tokens all ranks together train on per second, over the last steps.

    Args:
        window: Number of batches to average over.
    """

    def __init__(self, window: int = 20) -> None:
        self.ends: deque[float] = deque(maxlen=window + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Log the rate since the oldest remembered batch."""
        self.ends.append(perf_counter())
        if len(self.ends) > 1:
            tokens = batch["input_ids"].numel() * trainer.world_size * (len(self.ends) - 1)
            pl_module.log("tokens/s", tokens / (self.ends[-1] - self.ends[0]), prog_bar=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget, so that the pause for validation does not count."""
        self.ends.clear()


@torch.no_grad()
def generate(network: nn.Module, ids: Tensor, count: int, *, context: int, temperature: float) -> Tensor:
    """Append ``count`` ids to ``ids`` (T), each drawn from the network's prediction; the draws are reproducible."""
    generator = torch.Generator(ids.device).manual_seed(0)
    for _ in range(count):
        logits = network(ids[None, -context:])[0, -1]  # (V)
        probabilities = torch.softmax(logits.float() / temperature, dim=-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, 1, generator=generator)))
    return ids


def write_sample(network: nn.Module, tokenizer: Tokenizer, *, prompt: str, count: int, **options: Any) -> str:
    """Return ``prompt`` and what the network makes of it."""
    device = next(network.parameters()).device
    ids = torch.tensor(tokenizer.encode(prompt).ids, device=device)
    text: str = tokenizer.decode(generate(network.eval(), ids, count, **options).tolist())
    return text


def read_curve(log: Path, name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which ``name`` was logged to a CSV file, and its values."""
    with log.open(newline="") as lines:
        points = [(int(row["step"]), float(row[name])) for row in csv.DictReader(lines) if row.get(name)]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(log: Path, picture: Path) -> None:
    """Draw training and validation loss over the steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*read_curve(log, "train_loss"), label="training", linewidth=1)
    axes.plot(*read_curve(log, "val_loss"), "o-", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def print_report(metrics: Mapping[str, float], sample: str | None, checkpoint: str, picture: Path) -> None:
    """Print the end of the story."""
    loss = metrics["val_loss"]
    print(f"\nvalidation loss  {loss:.4f}")
    print(f"perplexity       {metrics.get('val_perplexity', math.exp(loss)):.2f}")
    if sample is not None:
        print("sample           " + sample.replace("\n", "\n                 "))
    print(f"checkpoint       {checkpoint}")
    print(f"loss curves      {picture}")
