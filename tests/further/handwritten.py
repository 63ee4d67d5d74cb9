"""Small models of points, each in one way that a pipeline must bear without being told."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

from tests.models import Optimized, PlainBlock, adamw

WIDTH = 7


class Handwritten(Optimized):
    """Classifies points; how the blocks are made and run, those that inherit say."""

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
        return nn.ModuleList(PlainBlock(WIDTH, 13) for _ in range(self.count))

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


# ---------------------------------------------------------------- how the model is built


class Sequence(Handwritten):
    def make_blocks(self) -> nn.Module:
        return nn.Sequential(*super().make_blocks())

    def body(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Direct(Handwritten):
    """Parameters of the module's own, before, between and after the blocks; norms that learn between them."""

    def make(self) -> None:
        super().make()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(()))
        self.mix = nn.Parameter(torch.linspace(0.5, 1, self.count))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(self.count))

    def body(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for number, block in enumerate(self.blocks):
            x = self.norms[number](block(x)) * self.mix[number] + F.linear(x, self.head.weight.t() @ self.head.weight)
        return x * self.scale


class Parts(Handwritten):
    """A list of layers, each a list of two parts that the model calls."""

    def make_blocks(self) -> nn.Module:
        layers = (nn.ModuleList([PlainBlock(WIDTH, 13), nn.Linear(WIDTH, WIDTH)]) for _ in range(self.count // 2))
        return nn.ModuleList(layers)

    def body(self, x: Tensor) -> Tensor:
        for block, mix in self.blocks:
            x = x + mix(block(x)).tanh()
        return x


class TakingTurns(Handwritten):
    """Layers of two classes in one list, beside a smaller list of one class."""

    def make_blocks(self) -> nn.Module:
        self.scores = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        return nn.ModuleList([PlainBlock(WIDTH, 13) if k % 2 else nn.Linear(WIDTH, WIDTH) for k in range(self.count)])

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.body(self.stem(batch[0])))
        return sum((F.cross_entropy(score(logits), batch[1]) for score in self.scores), torch.zeros(()))


class FrozenFront(Handwritten):
    def make(self) -> None:
        super().make()
        self.stem.requires_grad_(False)
        for block in list(self.blocks)[: self.count // 2]:
            block.requires_grad_(False)


class OnlyTheFrontLearns(Handwritten):
    def make(self) -> None:
        super().make()
        self.requires_grad_(False)
        self.stem.requires_grad_(True)


class SharingBlock(PlainBlock):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__(WIDTH, 13)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(super().forward(x))


class Shared(Handwritten):
    """One layer in all blocks."""

    def make_blocks(self) -> nn.Module:
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.ModuleList(SharingBlock(shared) for _ in range(self.count))


class Regularised(Handwritten):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())


class UnusedHead(Handwritten):
    def make(self) -> None:
        super().make()
        self.later = nn.Linear(WIDTH, 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.later(self.body(self.stem(batch[0]))).square().mean())


class Nested(Handwritten):
    """Blocks deep inside, called by a module of their own; what the step calls first belongs to no list."""

    def make(self) -> None:
        super().make()
        blocks = self.blocks
        del self.blocks
        self.encoder = Encoder(blocks)

    def body(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Encoder(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.before, self.layers, self.after = nn.LayerNorm(WIDTH), layers, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x) if len(x) else x


class Normalised(Handwritten):
    """Decides by values of its batch, in a mask that blocks get; a buffer counts steps."""

    def make(self) -> None:
        super().make()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        inputs, classes, _ = batch
        keep = inputs[:, 0] > -3
        if not bool(keep.any()):
            keep = torch.ones_like(keep)
        x = self.body(self.stem(inputs) * self.table)
        return F.cross_entropy(self.head(x[keep]), classes[keep])


# ---------------------------------------------------------------- batches, losses, metrics


@dataclass
class Points:
    inputs: Tensor
    targets: dict[str, Tensor]
    names: list[str]
    scale: float = 1.0


def as_points(samples: list[Any]) -> Points:
    inputs, classes, values = map(torch.stack, zip(*samples, strict=True))
    return Points(inputs, {"class": classes, "value": values}, [f"sample {k}" for k in range(len(samples))], 0.5)


class Rich(Handwritten):
    """Batches of dataclasses, two losses by hand, metrics of every kind."""

    def make(self) -> None:
        super().make()
        self.value = nn.Linear(WIDTH, 1)
        self.errors = MeanSquaredError()
        self.scores = MetricCollection({"top1": MulticlassAccuracy(5), "top2": MulticlassAccuracy(5, top_k=2)})
        self.val_scores = self.scores.clone(prefix="val_")

    def score(self, batch: Points) -> tuple[Tensor, Tensor]:
        x = self.body(self.stem(batch.inputs))
        assert len(batch.names) == len(x)
        return self.head(x), self.value(x).squeeze(-1) * batch.scale

    def training_step(self, batch: Points, batch_idx: int) -> dict[str, Any]:
        logits, values = self.score(batch)
        loss = F.cross_entropy(logits, batch.targets["class"]) + (values - batch.targets["value"]).abs().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(values))
        self.log(
            "error", self.errors(values, batch.targets["value"]), on_step=True, on_epoch=False, batch_size=len(values)
        )
        self.log_dict(self.scores(logits, batch.targets["class"]), on_step=True, on_epoch=False, batch_size=len(values))
        self.log_dict(
            {"a/max": logits.max(), "a/abs": logits.abs().max()}, reduce_fx="max", on_epoch=True, batch_size=len(values)
        )
        return {"loss": loss, "logits": logits.detach(), "names": batch.names}

    def validation_step(self, batch: Points, batch_idx: int) -> None:
        logits, values = self.score(batch)
        self.val_scores.update(logits, batch.targets["class"])
        self.log_dict(self.val_scores, batch_size=len(values))
        self.log("val_loss", (values - batch.targets["value"]).abs().mean(), batch_size=len(values))

    def predict_step(self, batch: Points, batch_idx: int) -> dict[str, Any]:
        logits, values = self.score(batch)
        return {"class": logits.argmax(-1), "value": values, "names": batch.names}


MODELS: dict[str, Callable[..., Handwritten]] = {
    kind.__name__: kind
    for kind in (
        Handwritten,
        Tuples,
        Dicts,
        Dataclasses,
        InPlace,
        Views,
        Skip,
        Unet,
        Losses,
        Gated,
        Sequence,
        Direct,
        Parts,
        TakingTurns,
        FrozenFront,
        OnlyTheFrontLearns,
        Shared,
        Regularised,
        UnusedHead,
        Nested,
        Normalised,
        Rich,
    )
}

COLLATE = {"Rich": as_points}
