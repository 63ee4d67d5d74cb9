"""What blocks return and are given, and values that go past them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.further.points import WIDTH, Handwritten
from tests.models import PlainBlock

# ---------------------------------------------------------------- what blocks return, and what they are given


@dataclass
class State:
    x: Tensor
    passed: list[Tensor]
    step: int = 0


class DataclassBlock(PlainBlock):
    def forward(self, state: State) -> State:
        x = super().forward(state.x)
        return dataclasses.replace(state, x=x, passed=[*state.passed, x.mean(-1)], step=state.step + 1)


class Dataclasses(Handwritten):
    """A list in what goes on that grows from block to block."""

    block = DataclassBlock

    def body(self, x: Tensor) -> Tensor:
        state = State(x, [])
        for block in self.blocks:
            state = block(state)
        assert state.step == self.count
        return state.x + torch.stack(state.passed).sum(0)[:, None]


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


class InPlaceBlock(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        x += self.down(F.gelu(self.up(self.norm(x.clone()))))
        return x.mul_(0.9)


class InPlace(Handwritten):
    block = InPlaceBlock


class TransposedBlock(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t().contiguous().t()).t().contiguous().t()


class Views(Handwritten):
    """Blocks return views that are not contiguous."""

    block = TransposedBlock


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


# ---------------------------------------------------------------- values that go past the blocks


class Unet(Handwritten):
    """What the first half returns, the second half gets in the other order."""

    def body(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.blocks):
            if number >= len(self.blocks) / 2:
                x = x + kept.pop()
            x = block(x)
            if number < len(self.blocks) / 2:
                kept.append(x)
        return x


class LossBlock(PlainBlock):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, x.square().mean()


class Losses(Handwritten):
    """Every block adds a term to the loss."""

    block = LossBlock

    def loss(self, batch: Any) -> Tensor:
        x, extra = self.stem(batch[0]), []
        for block in self.blocks:
            x, more = block(x)
            extra.append(more)
        self.log("extra", torch.stack(extra).sum().detach(), on_epoch=True, on_step=False)
        return F.cross_entropy(self.head(x), batch[1]) + 0.1 * sum(extra)


# ---------------------------------------------------------------- what modules return and no parameter goes into


class Front(nn.Module):
    """Beside what it computes, a bias from a table of its own, and the mask that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(13, WIDTH)
        self.register_buffer("slopes", torch.linspace(0.1, 0.9, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.stem(x), self.slopes * x.mean(-1, keepdim=True), mask


class MaskedBlock(PlainBlock):
    """The first one says which points count, all others hand on what they were given."""

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        return super().forward(x) + bias * mask, mask * 0.5 + 1 if first else mask


class Masked(Handwritten):
    """Masks that no stage has from another one, two of them in the form of a tensor that the first stage has."""

    block = MaskedBlock

    def make(self) -> None:
        super().make()
        self.stem = Front()

    def loss(self, batch: Any) -> Tensor:
        inputs, classes, _ = batch
        x, bias, given = self.stem(inputs, (inputs[:, :1] > 0).float())
        valid = (inputs[:, 1:2] > -1).type_as(x).expand_as(x) + (inputs[:, 2:3] > 0).to(x)
        bias, mask = bias[:, None].tanh().squeeze(1), given
        masks = []
        for number, block in enumerate(self.blocks):
            x, returned = block(x, bias * valid, mask, first=number == 0)
            mask = returned if number == 0 else mask
            masks.append(returned)
        assert torch.equal(masks[0], given * 0.5 + 1)
        assert (masks[0] >= 1).all()
        return F.cross_entropy(self.head(x * (torch.stack(masks).sum(0) + given)), classes)


# ---------------------------------------------------------------- objects with tensors


class Memory:
    """Tensors in an object that says nothing of them, as a cache of keys and values."""

    def __init__(self, *states: Tensor) -> None:
        self.states = states


class Reference(nn.Module):
    """Returns a memory beside what counts, as models that can generate do unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.line(x)
        return {"y": y, "memory": Memory(x.sum(), y), "make": lambda: y}


class Referred(Handwritten):
    """What a frozen reference returned before the blocks counts after them."""

    reads_memory = False

    def make(self) -> None:
        super().make()
        self.reference = Reference().requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        old = self.reference(batch[0])
        x = self.body(self.stem(batch[0]))
        if self.reads_memory:
            x = x + old["memory"].states[1]
        return F.cross_entropy(self.head(x), batch[1]) + (x - old["y"]).square().mean()


class ReadsMemory(Referred):
    reads_memory = True
