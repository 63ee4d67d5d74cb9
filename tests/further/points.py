"""A small model of points, from which those inherit that are odd in one way."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Optimized, PlainBlock, adamw

WIDTH = 7


class Handwritten(Optimized):
    """Classifies points; how the blocks are made and run, those that inherit say."""

    block: Callable[[int, int], nn.Module] = PlainBlock

    def __init__(self, late: bool = False, blocks: int = 4) -> None:
        super().__init__()
        self.make_optimizer, self.count = adamw, blocks
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if "stem" not in self._modules:
            torch.manual_seed(7)
            self.make()

    def make(self) -> None:
        self.stem = nn.Linear(13, WIDTH)
        self.blocks = self.make_blocks()
        self.head = nn.Linear(WIDTH, 5)

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.block(WIDTH, 13) for _ in range(self.count))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        inputs, classes, _ = batch
        return F.cross_entropy(self.head(self.body(self.stem(inputs))), classes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
