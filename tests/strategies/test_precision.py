"""Every precision trains as it does on one device, and what must be skipped or clipped is so on all ranks alike."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel.strategies.named import DataParallelStrategy, ZeroStrategy
from tests.curves import check_parity, compare, train
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer

LAYOUTS: dict[str, Callable[[], Any]] = {
    "data_parallel": partial(DataParallelStrategy, 2),
    "zero_1": partial(ZeroStrategy, 2, stage=1),
    "zero_2": partial(ZeroStrategy, 2, stage=2),
    "zero_3": partial(ZeroStrategy, 2, stage=3),
}
# Half a batch's gradient in bfloat16 (8 bits) rounds otherwise than the whole batch's: 2**-8 a step.
TOLERANCES = {"64-true": 1e-10, "bf16-mixed": 2e-2, "bf16-true": 5e-2}


def trained(precision: str, make_strategy: Callable[[], Any] | str = "auto", data_ranks: int = 1) -> Any:
    sgd = partial(optim.SGD, lr=0.05, momentum=0.9)  # keeps rounding as small as it is, where Adam would scale it up
    make = {"64-true": None}.get(precision, sgd)
    model = {"blocks": 1} | ({"optimizer": make} if make else {})
    if precision == "64-true":
        torch.set_default_dtype(torch.float64)
    run = {"precision": precision, "limit_val_batches": 0, "max_epochs": 1}
    return train("plain", make_strategy, data_ranks=data_ranks, model=model, data={"samples": 32}, **run)


@covering(keep=1, precision=TOLERANCES, layout=LAYOUTS)
def test_parity(precision: str, layout: str) -> None:
    begun = begun_on_one(trained, precision)
    for rank, got in enumerate(run_on_ranks(2, trained, precision, LAYOUTS[layout], data_ranks=2)):
        expected, where = begun.result(), f"rank {rank}: "
        if precision == "64-true":
            compare(expected, got, TOLERANCES[precision], where)
        else:
            compare_roughly(expected, got, TOLERANCES[precision], where)


def compare_roughly(expected: Any, got: Any, tolerance: float, where: str) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=tolerance), where
    for name, wanted in expected.weights.items():
        assert got.weights[name].dtype == wanted.dtype, where + name
        error = (got.weights[name].double() - wanted.double()).norm()
        assert error <= tolerance * max(1.0, wanted.double().norm()), where + name


class Poisoned(LightningModule):
    """Multiplies its loss by the largest factor in the batch."""

    def __init__(self, lr: float = 0.1, fused: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        self.make = partial(optim.AdamW, lr=lr, fused=fused)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, factors = batch
        return self.layers(inputs).float().square().mean() * factors.max()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def poisoned(factors: list[float]) -> DataLoader:
    inputs = torch.randn(len(factors), 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, torch.tensor(factors)), 2)


class Watch(Callback):
    """The weights and the scale after every step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        weight = module.layers[0].weight
        whole = weight.full_tensor() if isinstance(weight, torch.distributed.tensor.DTensor) else weight
        self.weights.append(whole.detach().clone())
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def overflow(make_strategy: Callable[[], Any], fused: bool | None = None, clip: float | None = None) -> list[float]:
    watch = Watch()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    run = trainer(make_strategy(), plugins=[plugin], callbacks=[watch], max_epochs=1, gradient_clip_val=clip)
    # Of the second global batch, only what rank 1 reads overflows.
    run.fit(Poisoned(fused=fused), poisoned([1, 1, 1, 1, 1, 1, math.inf, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    first, skipped, third, fourth = watch.weights
    assert torch.equal(first, skipped)
    assert not torch.equal(skipped, third)
    assert not torch.equal(third, fourth)
    assert torch.isfinite(fourth).all()
    assert watch.scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    return fourth.flatten().tolist()


@covering(layout=LAYOUTS, options=({}, {"clip": 0.5}, {"fused": True}))
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str, options: dict[str, Any]) -> None:
    one, other = run_on_ranks(2, overflow, LAYOUTS[layout], **options)
    assert one == other


def clipped(make_strategy: Callable[[], Any] | str, algorithm: str, factors: list[float], ranks: int) -> Any:
    model = Poisoned()
    model.make = partial(optim.SGD, lr=0.1)
    strategy = make_strategy if isinstance(make_strategy, str) else make_strategy(nonfinite="continue")
    run = trainer(strategy, max_epochs=1)
    run.gradient_clip_val, run.gradient_clip_algorithm = 0.01, algorithm
    data = poisoned(factors)
    run.fit(model, DataLoader(data.dataset, 4 // ranks))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@covering(keep=1, factor=(10.0, math.inf, math.nan), algorithm=("norm", "value"))
def test_clipping(algorithm: str, factor: float) -> None:
    """What is not finite stays so, as on one device, and on every rank."""
    factors = [1.0, 1.0, 1.0, 1.0, factor, factor, factor, factor]
    expected = run_on_ranks(1, clipped, "auto", algorithm, factors, 1)[0]
    for layout, make in LAYOUTS.items():
        for got in run_on_ranks(2, clipped, make, algorithm, factors, 2):
            for name, wanted in expected.items():
                torch.testing.assert_close(got[name], wanted, equal_nan=True, msg=f"{layout}: {name}")


# ---------------------------------------------------------------- modules that cast their own parameters


def test_data_parallel_follows_a_cast() -> None:
    """Also where a message began with gradients of another dtype, in a pass that only accumulates."""
    check_parity("CastsItself", 2, partial(DataParallelStrategy, 2), data_ranks=2, max_epochs=1)


def refused(stage: int) -> str:
    with pytest.raises(TypeError) as error:
        train("CastsItself", partial(ZeroStrategy, 2, stage=stage), data_ranks=2, max_epochs=1)
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_refuses_a_cast(stage: int) -> None:
    for said in run_on_ranks(2, refused, stage):
        assert said.startswith(
            "a module cast blocks.0.router.line.weight from torch.float32 to torch.float64 in its forward"
        )
        assert said.endswith(
            "use DataParallelStrategy, where every rank keeps it whole, or a precision in which there "
            "is nothing to cast: precision='64-true'"
        )
