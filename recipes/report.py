"""What a run leaves: validation loss and perplexity, a sample of text, a checkpoint and a picture of its curves."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from recipes.gpt import GPTModule

matplotlib.use("Agg")  # draws into files, on machines without a display
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator


@torch.no_grad()
def generate(network: nn.Module, ids: Tensor, count: int, *, context: int, temperature: float) -> Tensor:
    """Append ``count`` ids to ``ids`` (T), each drawn from the network's prediction; temperature 0 takes the likeliest.

    The draws are the same every time.
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
    axes.plot(*read_curve(log, "val_loss"), "o-", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def draw_load(load: Tensor, first_layer: int, picture: Path) -> None:
    """Draw how many tokens went to each expert of each layer from ``first_layer`` on (L, E); 1 is an equal share."""
    relative = (load / load.double().mean(1, keepdim=True)).numpy()
    layers, experts = load.shape
    figure, axes = plt.subplots(figsize=(7, min(7, 2 + layers / 3)), layout="constrained")
    edges = (-0.5, experts - 0.5, first_layer + layers - 0.5, first_layer - 0.5)
    image = axes.imshow(relative, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto", interpolation="nearest", extent=edges)
    axes.set(xlabel="expert", ylabel="layer", title="Load of experts over the whole run")
    for axis, count in ((axes.xaxis, experts), (axes.yaxis, layers)):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=min(count, 10)))
    figure.colorbar(image, extend="max", label="tokens, relative to an equal share")
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
    """Print the end of the story: metrics, a sample of text, and where the files are."""
    if (log := folder / "log" / "metrics.csv").exists():
        draw_curves(log, folder / "curves.png")
    print(f"\nvalidation loss  {metrics['val_loss']:.4f}")
    print(f"perplexity       {metrics['val_perplexity']:.2f}")
    if tokenizer is not None:
        # An empty prompt starts where a document has just ended, which is id 0 of our own tokenizers.
        ids = torch.tensor(tokenizer.encode(prompt).ids or [0], device=model.device)
        drawn = generate(model.eval(), ids, context=model.config.context, **sample)
        print("sample           " + tokenizer.decode(drawn.tolist()).replace("\n", "\n" + " " * 17))
    files = {"checkpoint": "checkpoints/last.ckpt", "loss curves": "curves.png", "load of experts": "experts.png"}
    for name, file in files.items():
        if (folder / file).exists():
            print(f"{name:<16} {folder / file}", flush=True)
