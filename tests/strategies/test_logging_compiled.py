"""What is logged by steps whose blocks or functions are compiled is that of the whole batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel import Compile, DataParallel, HybridStrategy, PipelineParallel
from tests.models import Plain, loaders
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

COMPILED = Compile(backend="aot_eager", fullgraph=True)


def scored(logits: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, classes), (logits.argmax(-1) == classes).sum()


class Logs(Plain):
    """Logs a mean, a count and an extreme, under reductions that tell them apart."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__(blocks=2)
        self.scored: Callable[..., Any] = (
            torch.compile(scored, backend="aot_eager", fullgraph=True) if compiled else scored
        )

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        logits, errors = self.score(batch)
        loss, hits = self.scored(logits, batch[1])
        self.log("train_loss", loss, on_epoch=True)
        self.log("error_sum", errors.abs().sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("hits", hits.float(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("highest", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss


def logged(strategy: MakeStrategy | None, batch_size: int, compiled: bool) -> dict[str, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = trainer(made(strategy), max_epochs=1)
    run.fit(Logs(compiled), *loaders("plain", batch_size, samples=32, val_samples=8))
    return {name: float(value) for name, value in run.callback_metrics.items()}


LAYOUTS: dict[str, Any] = {
    "data parallel, blocks": (2, lambda: HybridStrategy(DataParallel(2), COMPILED), False),
    "data parallel, a function": (2, lambda: HybridStrategy(DataParallel(2)), True),
    "pipeline, blocks": (1, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), COMPILED), False),
    "pipeline, a function": (1, partial(lambda: HybridStrategy(PipelineParallel(2, microbatches=2))), True),
}


@sampled(1, "layout", LAYOUTS)
def test_values_of_compiled_steps_are_those_of_one_device(layout: str) -> None:
    data_ranks, strategy, compiled = LAYOUTS[layout]
    assert_like_one_device(logged, 2, (None, 8, compiled), (strategy, 8 // data_ranks, compiled))
