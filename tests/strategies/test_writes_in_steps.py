"""Steps that write what the first stage has into tensors that all stages make train like one process in a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.curves import compare_weights
from tests.strategies.one_and_two import MakeStrategy, made, on_one_and_two
from tests.trainers import trainer

WIDTH, WORDS, LENGTH = 8, 12, 6


class Tied(LightningModule):
    """The first and the last stage have the word embedding, and only the first has that of positions."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def embedded(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens)
        if self.form == "in place":
            x += self.positions.weight
            return x
        padded = torch.zeros(len(tokens), LENGTH + 1, WIDTH)
        padded[:, :-1] = x + self.positions.weight
        padded[:, -1] = self.positions.weight[0]
        return padded[:, 1:]

    def training_step(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trained(strategy: MakeStrategy | None, form: str) -> dict[str, Tensor]:
    random, model = torch.Generator().manual_seed(1), Tied(form)
    tokens = [*torch.randint(WORDS, (16, LENGTH), generator=random)]
    trainer(made(strategy), max_epochs=1).fit(model, DataLoader(tokens, batch_size=8))  # type: ignore[arg-type]
    return {**model.state_dict()}


@pytest.mark.parametrize("form", ["in place", "by index"])
def test_steps_write_into_tensors_that_all_stages_make(form: str) -> None:
    expected, found = on_one_and_two(trained, form=form)
    for weights in found:
        compare_weights(expected, weights, rtol=1e-5)
