"""What a step gives to a logger itself is written as on one device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import (
    ContextParallelStrategy,
    ParallelPlan,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.test_orders_of_steps import LENGTH, WIDTH, Chain
from tests.trainers import trainer


class Experiment:
    """Reads tensors as TensorBoard's writer does."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.note = None

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        self.values.append((tag, step, values.detach().cpu().numpy().copy()))

    def log(self, values: dict[str, Any]) -> None:
        self.values += [(tag, each.detach().cpu().numpy().copy()) for tag, (each,) in values.items()]

    def __getitem__(self, key: str) -> Callable[[Tensor], None]:
        return lambda value: self.values.append((key, value.detach().cpu().numpy().copy()))

    __setitem__ = log_item = lambda self, key, value: self[key](value)


class Writer(Logger):
    name, version = "writer", 0

    def __init__(self) -> None:
        super().__init__()
        self._experiment = Experiment()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._experiment

    @rank_zero_only
    def log_image(self, key: str, images: list[Tensor]) -> None:
        self.experiment.log({key: images})

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...


class Writes(Chain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        logger: Any = self.logger
        y = self(batch)
        logger.experiment.add_histogram("weight", self.layers[1].up.weight, batch_idx)  # type: ignore[union-attr]
        logger.experiment.add_histogram("y", y, step=batch_idx)
        logger.experiment.log({"inner": [self.layers[1].up(batch)]})  # type: ignore[operator]
        logger.experiment["item"] = self.layers[0].up.weight  # type: ignore[union-attr]
        logger.log_image("image", [y[0]])
        return (y - 1).square().mean()

    def on_train_batch_end(self, *_: Any) -> None: ...


def written(strategy: Any, batch_size: int) -> Any:
    logger, module = Writer(), Writes()
    data = torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    run = trainer("auto" if strategy is None else strategy(), logger=logger, max_epochs=1, precision="64-true")
    run.fit(module, DataLoader(data.double(), batch_size))
    assert type(logger) is Writer
    return logger._experiment.values


PLAN = ParallelPlan(blocks="layers.*")
WHOLE = {
    "tensor parallel": (2, partial(TensorParallelStrategy, 2)),
    "context parallel": (2, partial(ContextParallelStrategy, 2, plan=PLAN)),
}


@pytest.mark.parametrize("layout", WHOLE)
def test_loggers_called_in_a_step_get_full_tensors(layout: str) -> None:
    ranks, strategy = WHOLE[layout]
    expected = begun_on_one(written, None, 4).result()
    first, *others = run_on_ranks(ranks, written, strategy, 4)
    assert len(expected) == 10
    for wanted, found in zip(expected, first, strict=True):
        assert wanted[:-1] == found[:-1]
        torch.testing.assert_close(torch.from_numpy(found[-1]), torch.from_numpy(wanted[-1]))
    assert not any(others)


def refused() -> None:
    strategy = PipelineParallelStrategy(microbatches=2, plan=PLAN)
    with pytest.raises((ValueError, RuntimeError), match=r"experiment\.add_histogram is called in a step.*on_train"):
        written(lambda: strategy, 4)


def test_loggers_called_in_a_step_of_a_pipeline_are_refused() -> None:
    run_on_ranks(2, refused)
