"""A loss or a gradient that is not finite stops all ranks before an optimizer steps by it, or as the user says."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import ExpertParallelStrategy, ZeroStrategy
from tests.ranks import run_on_ranks
from tests.strategies.faults.regression import LAYOUTS, Regression, weights
from tests.tiers import sampled
from tests.trainers import trainer

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


def samples(batch_size: int, bad: bool = True, without_step: int | None = None) -> DataLoader[Any]:
    """Four samples make a step; the bad one is in the second half of its step."""
    drawn = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(1))
    if bad:
        drawn[4 * BAD_STEP + 3, 0] = MARK
    return DataLoader([row for number, row in enumerate(drawn) if number // 4 != without_step], batch_size)


class Ends(NamedTuple):
    """How runs with a bad batch ended on one rank, and the weights of those without it."""

    said: str
    stopped: tuple[int, dict[str, Tensor]]
    skipped: tuple[int, dict[str, Tensor]]
    went_on: dict[str, Tensor]
    before: dict[str, Tensor]
    without: dict[str, Tensor]


def ends(layout: str, fault: str, manual: bool) -> Ends:
    _, readers, make = LAYOUTS[layout]

    def fitted(data: DataLoader[Any], manual: bool = False, steps: int = -1, **policy: Any) -> tuple[int, Any]:
        module, run = Faulty(fault, manual), trainer(make(**policy), max_epochs=1, max_steps=steps)
        try:
            run.fit(module, data)
        except FloatingPointError as error:
            said.append(str(error))
        return run.global_step, weights(module)

    said: list[str] = []
    size = 4 // readers
    stopped = fitted(samples(size), manual)
    skipped = fitted(samples(size), nonfinite="skip")
    _, went_on = fitted(samples(size), nonfinite="continue")
    _, before = fitted(samples(size, bad=False), steps=BAD_STEP)
    _, without = fitted(samples(size, without_step=BAD_STEP))
    (message,) = said
    return Ends(message, stopped, skipped, went_on, before, without)


@sampled(
    2,
    ("layout", "fault", "manual"),
    [
        ("data parallel", "loss alone", False),
        ("zero 2", "gradient", True),
        ("pipeline", "loss", False),
        ("tensor parallel", "gradient", False),
        ("zero 3", "gradient", False),
    ],
)
def test_faults_stop_all_ranks_or_their_step_is_left_out(layout: str, fault: str, manual: bool) -> None:
    found = run_on_ranks(2, ends, layout, fault, manual)
    for said, (stopped_at, kept), (skipped_to, skipped), went_on, before, without in found:
        assert stopped_at == BAD_STEP
        torch.testing.assert_close(kept, before)
        assert said.startswith(f"in step {BAD_STEP}, ")
        assert said == found[0].said
        if fault == "gradient":
            assert "the gradient of layers.0.up.weight" in said
        else:
            where = "rank 1: " if LAYOUTS[layout].readers == 2 else ""
            assert f"{where}the loss is {'nan' if fault == 'loss' else 'inf'}" in said
        assert skipped_to == STEPS  # Lightning counts it
        torch.testing.assert_close(skipped, without)
        assert fault == "loss alone" or any(value.isnan().any() for value in went_on.values())


class Scaled(Faulty):
    """Its loss is one number times what its first layer computes."""

    def __init__(self, scale: float) -> None:
        super().__init__("loss")
        self.scale = scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers[0](batch * 1e-3).sum() * self.scale  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-26)


def at_the_limits(make: Any) -> tuple[bool, str, float]:
    """Whether weights stay finite by gradients whose norm does not fit in a float; and the end of a scaler's run."""
    large = Scaled(1e25)
    trainer(make(), max_steps=2).fit(large, samples(2, bad=False))
    finite = all(bool(value.isfinite().all()) for value in weights(large).values())
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    with pytest.raises(FloatingPointError) as error:
        trainer(make(), max_steps=12, plugins=[plugin]).fit(Scaled(torch.nan), samples(2, bad=False))
    return finite, str(error.value), plugin.scaler.get_scale()


@sampled(1, "make", [ZeroStrategy, LAYOUTS["tensor parallel"].strategy, partial(ZeroStrategy, stage=2)])
def test_large_values_are_finite_and_scalers_stop_at_minimum(make: Any) -> None:
    """Every loss of the second run is nan; the scaler leaves out steps, and halves its scale each time."""
    for finite, said, scale in run_on_ranks(2, at_the_limits, make):
        assert finite
        assert said.startswith("in step 3, rank 0: the loss is nan; ")
        assert scale == 1.0


def test_wrong_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nonfinite='halt'\): nonfinite is one of 'stop', 'skip', 'continue'"):
        ExpertParallelStrategy(nonfinite="halt")  # type: ignore[arg-type]
