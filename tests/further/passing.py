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


class TupleBlock(PlainBlock):
    def forward(self, x: Tensor, others: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = super().forward(x)
        return out, (out if others is None else others * 0.5) + out.tanh()


class Tuples(Handwritten):
    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(TupleBlock(WIDTH, 13) for _ in range(self.count))

    def body(self, x: Tensor) -> Tensor:
        others = None
        for block in self.blocks:
            x, others = block(x, others=others)
        return x + others


class DictBlock(PlainBlock):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = super().forward(state["x"])
        return {"x": x, "seen": state["seen"] + 1, "sizes": (*state["sizes"], x.shape[-1]), "mask": state["mask"]}


class Dicts(Handwritten):
    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(DictBlock(WIDTH, 13) for _ in range(self.count))

    def body(self, x: Tensor) -> Tensor:
        state = {"x": x, "seen": 0, "sizes": (), "mask": torch.arange(WIDTH) > 2}
        for block in self.blocks:
            state = block(state)
        assert state["seen"] == len(state["sizes"]) == self.count
        return state["x"] * state["mask"]


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

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(DataclassBlock(WIDTH, 13) for _ in range(self.count))

    def body(self, x: Tensor) -> Tensor:
        state = State(x, [])
        for block in self.blocks:
            state = block(state)
        return state.x + torch.stack(state.passed).sum(0)[:, None]


class InPlaceBlock(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        x += self.down(F.gelu(self.up(self.norm(x.clone()))))
        return x.mul_(0.9)


class InPlace(Handwritten):
    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(InPlaceBlock(WIDTH, 13) for _ in range(self.count))


class TransposedBlock(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t().contiguous().t()).t().contiguous().t()


class Views(Handwritten):
    """Blocks return views that are not contiguous."""

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(TransposedBlock(WIDTH, 13) for _ in range(self.count))


# ---------------------------------------------------------------- values that go past the blocks


class SkipBlock(PlainBlock):
    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        return super().forward(0.8 * x + 0.2 * x0)


class Skip(Handwritten):
    """The embedding goes into every block."""

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(SkipBlock(WIDTH, 13) for _ in range(self.count))

    def body(self, x: Tensor) -> Tensor:
        x = x0 = F.layer_norm(x, (WIDTH,))
        for block in self.blocks:
            x = block(x, x0)
        return x


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

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(LossBlock(WIDTH, 13) for _ in range(self.count))

    def loss(self, batch: Any) -> Tensor:
        inputs, classes, _ = batch
        x, extra = self.stem(inputs), []
        for block in self.blocks:
            x, more = block(x)
            extra.append(more)
        loss = F.cross_entropy(self.head(x), classes) + 0.1 * sum(extra)
        self.log("extra", torch.stack(extra).sum().detach(), on_epoch=True, on_step=False)
        return loss


class Gated(Skip):
    """What goes past the blocks was made with a parameter of the module's own."""

    def make(self) -> None:
        super().make()
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * self.gate)


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

    def make(self) -> None:
        super().make()
        self.stem = Front()

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(MaskedBlock(WIDTH, 13) for _ in range(self.count))

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
        weights = torch.stack(masks).sum(0) + given
        return F.cross_entropy(self.head(x * weights), classes)


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
