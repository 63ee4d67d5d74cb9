"""A chain of small layers that models of tests derive from, and a comparison of their runs with those of one device.

`check([Looks, Turns], "zero 3")` fits each of these models in one process and, one after the other, on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    ParallelPlan,
    TensorParallel,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.techniques.zero.sharded import parameters
from tests.layouts import Layout, hybrid, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like
from tests.trainers import trainer

WIDTH, INNER, LENGTH, BATCH = 10, 18, 3, 12
PLAN = ParallelPlan(blocks="layers.*")
IN_UNITS = Layout(2, 2, ZeroStrategy)
LAYOUTS = {
    **layouts("data parallel", "zero 1", "zero 2", "zero 3", "tensor parallel", "tensor x zero 2", "tensor x zero 3"),
    **layouts("pipeline", "pipeline x data parallel", plan=PLAN),
    "zero 3, recomputed": Layout(2, 2, hybrid(Zero(2), ActivationCheckpoint(), plan=PLAN)),
    "zero 3, offloaded": layouts("zero 3", offload=True)["zero 3"],
    "tensor parallel, compiled": Layout(2, 1, hybrid(TensorParallel(2), Compile(backend="aot_eager"))),
    "zero 3 in units": IN_UNITS,
    "zero 3 in units, on 3": IN_UNITS._replace(ranks=3, readers=3),
    "replicated zero 3 in units": Layout(4, 4, hybrid(Zero(2, replicate=2))),
    "tensor x zero 3 in units": layouts("tensor x zero 3")["tensor x zero 3"],
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(LightningModule):
    """A stem, layers and a head; what `seen` holds after the run is compared, too."""

    layer: type[nn.Module] = Layer
    depth, samples = 4, 24
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: Any = []
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = (self(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


Kind = Callable[[], Chain]


def fit(kind: Kind, strategy: MakeStrategy | None, batch_size: int) -> Any:
    torch.set_default_dtype(torch.float64)  # of what is logged, too
    module, random = kind(), torch.Generator().manual_seed(1)
    data = torch.randn(module.samples, LENGTH, WIDTH, generator=random)
    run = trainer(made(strategy), precision="64-true", **({"max_epochs": 2} | module.options))
    validates = type(module).validation_step is not LightningModule.validation_step
    run.fit(module, *[DataLoader(TensorDataset(data), batch_size)] * (1 + validates))
    return module.seen, {name: value.clone() for name, value in module.state_dict().items()}


def fit_each(kinds: Sequence[Kind], strategy: MakeStrategy, batch_size: int, unit_bytes: int) -> list[Any]:
    with mock.patch.object(parameters, "UNIT_BYTES", unit_bytes):
        return [fit(kind, strategy, batch_size) for kind in kinds]


def check(kinds: Sequence[Kind], layout: str | Layout) -> None:
    """Holds runs of these models on all ranks to those of one device, to nine digits."""
    ranks, readers, strategy = LAYOUTS[layout] if isinstance(layout, str) else layout
    begun = [begun_on_one(fit, kind, None, BATCH) for kind in kinds]
    unit_bytes = 64 if "in units" in layout else parameters.UNIT_BYTES
    for rank, found in enumerate(run_on_ranks(ranks, fit_each, kinds, strategy, BATCH // readers, unit_bytes)):
        for kind, expected, got in zip(kinds, begun, found, strict=True):
            named = kind.args if isinstance(kind, partial) else kind
            require_like(expected.result(), got, 1e-9, where=f"rank {rank}, {named}")
