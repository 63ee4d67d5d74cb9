"""Models that few write: in one nn.Sequential, without shapes, with two names, transforms or reentrant checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ContextParallelStrategy,
    DataParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from tests.curves import compare_weights
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

WORDS, WIDTH, RATE = 16, 8, 0.01


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class InSequence(LightningModule):
    """Embedding, layers and head are members of one list."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [self.layer() for _ in range(4)]
        self.net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].roll(-1, 1).flatten())
        self.log_dict({"loss": loss, "rate": RATE, "step": float(self.global_step)})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Transformed(InSequence):
    """Transforms of torch.func in a layer, on its parameters, and on what it makes."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.func.vmap(self.net[:3])(ids)
        y = self.net[3:](x)
        sharpness = torch.func.grad(lambda logits: logits.square().mean())(y)
        return y + 0.1 * sharpness + 0.1 * torch.func.vjp(torch.sin, y)[1](torch.ones_like(y))[0]


class Shrinking(Layer):
    """Changes its weights through views; the last change follows their last use."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.weight.narrow(1, 3, 9).mul_(0.9)
            self.up.weight.diagonal().mul_(1.1)
        x = super().forward(x)
        with torch.no_grad():
            self.down.bias.narrow(0, 2, 4).mul_(0.9)
            self.up.bias.narrow(0, 2, 11).mul_(0.9)
        return x


class Shrunk(InSequence):
    layer = Shrinking


class WithoutShape(InSequence):
    def __init__(self) -> None:
        super().__init__()
        self.net[-1] = nn.LazyLinear(WORDS)


class Scripted(InSequence):
    """Its norm is one of TorchScript, which has tables of its own."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is, of newer torch
            self.net[-2] = torch.jit.script(self.net[-2])


class Marked(nn.Parameter):
    pass


class OwnKind(InSequence):
    """Its parameters have a class of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.net[-1].weight = Marked(self.net[-1].weight.detach())


class TwoNames(InSequence):
    """A list of layers that stand in another one before."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.net[1:5]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.net[0](ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return self.net[6](self.net[5](x))  # type: ignore[no-any-return]


class ParametrizedVocabulary(TwoNames):
    """The weights of its embedding and its head are computed from others."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])
        parametrizations.weight_norm(self.net[-1])


class ShortRows(TwoNames):
    """The embedding shortens the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].max_norm = 0.5


class ShortBags(ShortRows):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.EmbeddingBag(WORDS, WIDTH, max_norm=0.5)


class Reading(TwoNames):
    """Takes its batches from the loader."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Recomputed(TwoNames):
    reentrant = True


def fit(
    make: Callable[[], LightningModule], make_strategy: Callable[[], Strategy] | None, readers: int = 1
) -> tuple[dict[str, float], dict[str, Tensor]]:
    module, ids = make(), torch.randint(WORDS, (8, 6), generator=torch.Generator().manual_seed(1))
    run = trainer(make_strategy() if make_strategy else "auto", precision="64-true", max_epochs=1, limit_val_batches=0)
    run.fit(module, DataLoader(TensorDataset(ids), 4 // readers))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return logged, {name: value.clone() for name, value in module.state_dict().items()}


PIPELINE = partial(PipelineParallelStrategy, microbatches=2)


@sampled(
    2,
    ("make", "make_strategy", "readers"),
    [
        (Shrunk, TensorParallelStrategy, 1),
        (InSequence, ContextParallelStrategy, 1),
        (Scripted, partial(ZeroStrategy, stage=2), 2),
        (Transformed, ContextParallelStrategy, 1),
        (ParametrizedVocabulary, TensorParallelStrategy, 1),
        (ShortRows, TensorParallelStrategy, 1),
        (ShortRows, PIPELINE, 1),
    ],
)
def test_unusual_models_train_as_on_one_device(make: Any, make_strategy: Callable[[], Strategy], readers: int) -> None:
    expected = begun_on_one(fit, make, None)
    for logged, weights in run_on_ranks(2, fit, make, make_strategy, readers):
        assert logged["rate"] == expected.result()[0]["rate"] == RATE
        assert logged == pytest.approx(expected.result()[0], rel=1e-10)
        compare_weights(expected.result()[1], weights, 1e-10)


REFUSED = [
    (WithoutShape, DataParallelStrategy, "net.6.weight has no shape until"),
    (WithoutShape, ZeroStrategy, "run the module once on a batch, as in __init__ or configure_model"),
    (
        ShortRows,
        DataParallelStrategy,
        "net.0 has max_norm=0.5, which shortens the rows that a forward reads, but the 2 data-parallel ranks",
    ),
    (ShortBags, ZeroStrategy, "shorten all rows in on_train_batch_start (torch.renorm) and omit max_norm"),
    (Reading, DataParallelStrategy, "Reading.training_step(dataloader_iter) reads batches itself, but 2 ranks"),
    (Reading, PIPELINE, "write training_step(self, batch, batch_idx), and let the Trainer read"),
    (Scripted, TensorParallelStrategy, "net.5 is a TorchScript module, whose tensors cannot be replaced, but"),
    (Scripted, PIPELINE, "pass the module from before torch.jit.script"),
    (Scripted, ZeroStrategy, "use DataParallel() or Zero(stage=2), which leave modules as they are"),
    (OwnKind, ZeroStrategy, "net.6.weight is a Marked, but Zero"),
    (Recomputed, PIPELINE, "pass use_reentrant=False if that is a checkpoint"),
]


def refused() -> list[str]:
    said = []
    for make, make_strategy, _ in REFUSED:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # in the step that is looked at
            warnings.filterwarnings("ignore", ".*dataloader_iter")  # Lightning's own
            with pytest.raises(ValueError, match=r".") as error:
                fit(make, make_strategy)
        said.append(str(error.value))
    return said


def test_refusals() -> None:
    for messages in run_on_ranks(2, refused):
        for message, (_, _, said) in zip(messages, REFUSED, strict=True):
            assert said in message
