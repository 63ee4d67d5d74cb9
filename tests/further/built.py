"""Ways to build a model and to use its parts, and what its batches, losses and metrics may be."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

from tests.further.points import WIDTH, Handwritten
from tests.models import PlainBlock

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
    """Layers of two classes in one list, beside a smaller list of one class, and a larger one that is never called."""

    def make_blocks(self) -> nn.Module:
        self.scores = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.tower = nn.ModuleList(nn.Linear(99, 99) for _ in range(3))
        return nn.ModuleList([PlainBlock(WIDTH, 13) if k % 2 else nn.Linear(WIDTH, WIDTH) for k in range(self.count)])

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.body(self.stem(batch[0])))
        return sum((F.cross_entropy(score(logits), batch[1]) for score in self.scores), torch.zeros(()))


class SharingBlock(PlainBlock):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__(WIDTH, 13)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(super().forward(x))


class Shared(Handwritten):
    """One layer in all blocks, and a penalty on all weights."""

    def make_blocks(self) -> nn.Module:
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.ModuleList(SharingBlock(shared) for _ in range(self.count))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())


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


# ---------------------------------------------------------------- steps that look at parts, or change them


class UnusedHead(Handwritten):
    def make(self) -> None:
        super().make()
        self.later = nn.Linear(WIDTH, 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.later(self.body(self.stem(batch[0]))).square().mean())


class Normalised(Handwritten):
    """Decides by values of its batch, in a mask that goes to the end."""

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
        scores = {"top1": MulticlassAccuracy(5), "top2": MulticlassAccuracy(5, top_k=2)}
        self.scores = MetricCollection(scores, compute_groups=False)  # a pipeline makes no groups by itself
        self.val_scores = self.scores.clone(prefix="val_")

    def score(self, batch: Points) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        x = self.body(self.stem(batch.inputs))
        assert len(batch.names) == len(x)
        classes, wanted = batch.targets["class"], batch.targets["value"]
        return self.head(x), self.value(x).squeeze(-1) * batch.scale, classes, wanted, len(x)

    def training_step(self, batch: Points, batch_idx: int) -> dict[str, Any]:
        logits, values, classes, wanted, size = self.score(batch)
        loss = F.cross_entropy(logits, classes) + (values - wanted).abs().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=size)
        self.log("error", self.errors(values, wanted), on_step=True, on_epoch=False, batch_size=size)
        self.scores.update(logits, classes)
        self.log_dict(self.scores, on_step=False, on_epoch=True, batch_size=size)
        largest = {"a/max": logits.max(), "a/abs": logits.abs().max()}
        self.log_dict(largest, reduce_fx="max", on_epoch=True, batch_size=size)
        return {"loss": loss, "logits": logits.detach(), "names": batch.names}

    def validation_step(self, batch: Points, batch_idx: int) -> None:
        logits, values, classes, wanted, size = self.score(batch)
        self.val_scores.update(logits, classes)
        self.log_dict(self.val_scores, batch_size=size)
        self.log("val_loss", (values - wanted).abs().mean(), batch_size=size)

    def predict_step(self, batch: Points, batch_idx: int) -> dict[str, Any]:
        logits, values, *_ = self.score(batch)
        return {"class": logits.argmax(-1), "value": values, "names": batch.names}
