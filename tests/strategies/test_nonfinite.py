"""A loss or a gradient that is not finite stops all ranks before an optimizer steps by it, or as the user says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import (
    DataParallelStrategy,
    ExpertParallelStrategy,
    ZeroStrategy,
)
from tests.ranks import run_on_ranks
from tests.strategies.test_failures import LAYOUTS, Regression
from tests.tiers import covering, sampled
from tests.trainers import trainer

FAULTS = ["loss", "loss alone", "gradient"]
MARK, BAD_STEP, STEPS = 100.0, 2, 4


class Faulty(Regression):
    """One sample makes a loss of nan, an infinite loss with finite gradients, or gradients of nan alone."""

    def __init__(self, fault: str, manual: bool = False) -> None:
        super().__init__()
        self.fault, self.automatic_optimization = fault, not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden, bad = batch.clamp(-4, 4), (batch[:, 0] == MARK).float().max()
        for layer in self.layers:
            hidden = layer(hidden)
        loss = hidden.square().mean()
        if self.fault == "loss":
            loss = loss * torch.where(bad > 0, torch.nan, 1.0)
        elif self.fault == "loss alone":
            loss = loss + torch.where(bad > 0, torch.inf, 0.0)
        else:
            loss = loss + (1 - bad + 0 * hidden.sum()).sqrt() - (1 - bad)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss


def samples(bad: bool = True) -> DataLoader[Any]:
    """Two batches of two, one for each of two readers, make a step; the bad sample is in the second half of one."""
    drawn = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(1))
    if bad:
        drawn[4 * BAD_STEP + 3, 0] = MARK
    return DataLoader(drawn, 2)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def stopped(make: Callable[..., Any], fault: str, data: DataLoader[Any], manual: bool) -> tuple[str, int, Any]:
    module = Faulty(fault, manual)
    fitting = trainer(make(), max_epochs=1)
    with pytest.raises(FloatingPointError) as error:
        fitting.fit(module, data)
    return str(error.value), fitting.global_step, weights(module)


def trained(make: Callable[..., Any], fault: str, data: DataLoader[Any], **run: Any) -> tuple[int, dict[str, Tensor]]:
    module = Faulty(fault)
    fitting = trainer(make(), **run)
    fitting.fit(module, data)
    return fitting.global_step, weights(module)


def readers(layout: str) -> int:
    return 1 if layout in ("pipeline", "tensor") else 2


def data_of(layout: str, bad: bool = True) -> DataLoader[Any]:
    data = samples(bad)
    return data if readers(layout) == 2 else DataLoader(data.dataset, 4)


@covering(keep=2, layout=LAYOUTS, fault=FAULTS)
def test_all_ranks_stop_before_the_step(layout: str, fault: str) -> None:
    data, manual = data_of(layout), layout == "zero_2"
    ends = run_on_ranks(2, stopped, LAYOUTS[layout], fault, data, manual)
    good = run_on_ranks(2, trained, LAYOUTS[layout], fault, data_of(layout, bad=False), max_steps=BAD_STEP)
    for (said, step, kept), (_, before) in zip(ends, good, strict=True):
        assert step == BAD_STEP
        torch.testing.assert_close(kept, before)
        assert said.startswith(f"in step {BAD_STEP}, ")
        assert said == ends[0][0]
        if fault == "gradient":
            assert "the gradient of layers.0.up.weight" in said
        else:
            where = "rank 1: " if readers(layout) == 2 else ""
            assert f"{where}the loss is {'nan' if fault == 'loss' else 'inf'}" in said


class FaultyStage(Regression):
    """The step of one stage makes nan, in what it passes on or in the loss, in one batch."""

    def __init__(self, rank: int, number: int) -> None:
        super().__init__()
        self.rank, self.number = rank, number

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        fault = torch.nan if batch_idx == self.number and self.global_rank == self.rank else 1.0
        hidden = batch * fault if self.rank == 0 else batch
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean() * fault


def stopped_by_stage(rank: int, number: int) -> tuple[str, int]:
    fitting = trainer(LAYOUTS["pipeline"](), max_epochs=1)
    with pytest.raises(FloatingPointError) as error:
        fitting.fit(FaultyStage(rank, number), data_of("pipeline", bad=False))
    return str(error.value), fitting.global_step


@covering(keep=2, rank=[0, 1], number=[0, BAD_STEP])
def test_all_stages_of_a_pipeline_stop_by_what_one_of_them_makes(rank: int, number: int) -> None:
    for said, step in run_on_ranks(2, stopped_by_stage, rank, number):
        assert step == number
        assert said.startswith(f"in step {number}, rank 0: the loss is nan; rank 1: the loss is nan")


@covering(keep=1, layout=LAYOUTS, fault=FAULTS)
def test_a_step_is_left_out(layout: str, fault: str) -> None:
    """As if the batch had not been there."""
    data, make = data_of(layout), partial(LAYOUTS[layout], nonfinite="skip")
    without = [sample for number, sample in enumerate(data.dataset) if number // 4 != BAD_STEP]
    ends = run_on_ranks(2, trained, make, fault, data, max_epochs=1)
    expected = run_on_ranks(2, trained, make, fault, DataLoader(without, data.batch_size), max_epochs=1)
    for (step, kept), (_, wanted) in zip(ends, expected, strict=True):
        assert step == STEPS  # Lightning counts it
        torch.testing.assert_close(kept, wanted)


def test_one_may_train_on() -> None:
    make = partial(DataParallelStrategy, nonfinite="continue")
    for _, kept in run_on_ranks(2, trained, make, "loss", samples(), max_epochs=1):
        assert any(value.isnan().any() for value in kept.values())


def large_but_finite() -> Any:
    """Gradients whose norm does not fit in a float, while they do."""
    module = Faulty("loss")
    module.training_step = lambda batch, batch_idx: module.layers[0](batch * 1e-3).sum() * 1e25  # type: ignore[method-assign]
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-26)  # type: ignore[method-assign]
    trainer(ZeroStrategy(), max_steps=2).fit(module, samples(bad=False))
    return weights(module)


def test_what_is_large_is_finite() -> None:
    for kept in run_on_ranks(2, large_but_finite):
        assert all(value.isfinite().all() for value in kept.values())


def scaled(make: Callable[..., Any], scale: float) -> tuple[str, float]:
    """Every loss is nan; a scaler leaves out steps, and halves its scale each time."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
    module = Faulty("loss")
    module.training_step = lambda batch, batch_idx: module.layers[0](batch).sum() * torch.nan  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError) as error:
        trainer(make(), max_steps=12, plugins=[plugin]).fit(module, samples(bad=False))
    return str(error.value), plugin.scaler.get_scale()


@sampled(2, "layout", ["data_parallel", "zero_3", "zero_2", "tensor"])
def test_scaler_at_its_minimum_stops_the_run(layout: str) -> None:
    for said, scale in run_on_ranks(2, scaled, LAYOUTS[layout], 8.0):
        assert said.startswith("in step 3, rank 0: the loss is nan; ")
        assert scale == 1.0


def test_wrong_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nonfinite='halt'\): nonfinite is one of 'stop', 'skip', 'continue'"):
        ExpertParallelStrategy(nonfinite="halt")  # type: ignore[arg-type]
