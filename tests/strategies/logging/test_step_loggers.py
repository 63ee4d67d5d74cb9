"""What a step gives to a logger itself is written as on one device, or refused."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import ContextParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.between_steps.chains import LENGTH, PLAN, WIDTH, Chain
from tests.strategies.one_and_two import made
from tests.trainers import trainer


class Experiment:
    """Reads tensors as TensorBoard's writer does."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        self.values.append((tag, step, values.detach().cpu().numpy().copy()))

    def log(self, values: dict[str, Any]) -> None:
        self.values += [(tag, each.detach().cpu().numpy().copy()) for tag, (each,) in values.items()]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.values.append((key, value.detach().cpu().numpy().copy()))


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
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logger: Any = self.logger
        y, layers = self(batch[0]), self.layers
        logger.experiment.add_histogram("weight", layers[1].up.weight, batch_idx)
        logger.experiment.add_histogram("y", y, step=batch_idx)
        logger.experiment.log({"inner": [layers[1].up(batch[0])]})
        logger.experiment["item"] = layers[0].up.weight
        logger.log_image("image", [y[0]])
        return (y - 1).square().mean()

    def on_train_batch_end(self, *_: Any) -> None: ...


def written(strategy: Any) -> Any:
    logger, random = Writer(), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(8, LENGTH, WIDTH, generator=random).double())
    run = trainer(made(strategy), logger=logger, max_epochs=1, precision="64-true")
    run.fit(Writes(), DataLoader(data, 4))
    assert type(logger) is Writer
    return logger._experiment.values


def all_written() -> Any:
    strategies = [partial(kind, 2, plan=PLAN) for kind in (TensorParallelStrategy, ContextParallelStrategy)]
    found = [written(strategy) for strategy in strategies]
    pipeline = PipelineParallelStrategy(microbatches=2, plan=PLAN)
    with pytest.raises((ValueError, RuntimeError), match=r"experiment\.add_histogram is called in a step.*on_train"):
        written(lambda: pipeline)
    return found


def test_loggers_called_in_a_step_get_full_tensors() -> None:
    """In a pipeline that is refused."""
    expected = begun_on_one(written, None)
    first, others = run_on_ranks(2, all_written)
    assert len(expected.result()) == 10
    for each in first:
        for wanted, found in zip(expected.result(), each, strict=True):
            assert wanted[:-1] == found[:-1]
            torch.testing.assert_close(torch.from_numpy(found[-1]), torch.from_numpy(wanted[-1]))
    assert not any(others)
