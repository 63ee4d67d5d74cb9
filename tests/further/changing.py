"""Models that change their own tensors in a step, or use them in another way than by calling their modules."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.further.points import WIDTH, Handwritten


class Double(nn.Module):
    """Casts its own weight when it is first called, and for good, as the routers of some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.line = self.line.to(torch.float64)
        return self.line(x.double()).to(x.dtype)


class CastsItself(Handwritten):
    """A part beside the blocks, and one in each block."""

    def make(self) -> None:
        super().make()
        self.router = Double()
        for block in self.blocks:
            block.router = Double()
            block.register_forward_hook(lambda block, _, output: output + block.router(output))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.router(self.stem(batch[0])))), batch[1])


class Measured(nn.Module):
    """Puts another buffer in the place of its own, of another shape the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.zeros(1))
        self.register_buffer("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        self.weight = self.line.weight.detach().abs().amax(0)
        self.largest = self.weight + 0 * self.largest
        return x + self.line(x) / self.largest.sum()


class ReplacesBuffers(Handwritten):
    """In its blocks."""

    def make(self) -> None:
        super().make()
        self.blocks = nn.ModuleList(Measured() for _ in self.blocks)


class LendsWeights(Handwritten):
    """A part is called, and its weight is read by code between modules too; of another one nothing is used."""

    def make(self) -> None:
        super().make()
        self.lent, self.idle = nn.Linear(WIDTH, WIDTH), Idle()

    def loss(self, batch: Any) -> Tensor:
        x = self.lent(self.stem(batch[0]))
        y = self.lent.forward(x) + self.lent.weight[0]
        return F.cross_entropy(self.head(self.body(self.idle(x * y))), batch[1])


class Idle(nn.Module):
    """Would embed an image, were there one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        return x if image is None else x + self.line(image)
