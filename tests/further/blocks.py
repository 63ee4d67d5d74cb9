"""Blocks of one list that do not do alike, and code between them that depends on what they return."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.further.points import WIDTH, Handwritten
from tests.models import PlainBlock


class Growing(Handwritten):
    """Wider from block to block, by layers between them; the last blocks are narrow again."""

    widths = (WIDTH, 2 * WIDTH, 3 * WIDTH, WIDTH)

    def make(self) -> None:
        super().make()
        self.between = nn.ModuleList(nn.Linear(a, b) for a, b in zip(self.widths, self.widths[1:], strict=False))

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(PlainBlock(width, 13) for width in self.widths)

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            assert x.shape[-1] == self.widths[number]
            x = block(x)
            if number < len(self.between):
                x = F.gelu(self.between[number](x))
        return x


class PairBlock(PlainBlock):
    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        return super().forward(x), None, torch.arange(x.shape[-1], dtype=x.dtype)


class NamedBlock(PlainBlock):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": super().forward(x), "of": "names", "sizes": [1.5, (2, None)], "mask": x.detach() > 0}


class Differing(Handwritten):
    """Every block returns something else: a tensor, a tuple with None and a constant, a dict with plain values."""

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(kind(WIDTH, 13) for kind in (PlainBlock, PairBlock, NamedBlock, PairBlock))

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x, nothing, row = self.blocks[1](x)
        assert nothing is None
        named = self.blocks[2](x * (1 + row / 10))
        assert named["of"] == "names"
        x, _, row = self.blocks[3](named["x"] * named["mask"] * named["sizes"][0])
        return x + row


class Between(Handwritten):
    """Code between the blocks changes in place what they returned."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x *= 1.5
            x[:, 0] += 1
        return x
