"""The parity table: every layout trains every model as one process does, in every precision.

Each cell is a whole curve of more than twenty steps, with accumulation and clipping: losses, metrics on every rank,
final weights. In double precision only rounding differs.
"""

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

from lightning_parallel import ActivationCheckpoint, DataParallelStrategy, HybridStrategy, Zero, ZeroStrategy
from tests.curves import check_parity, compare, train
from tests.layouts import LAYOUTS as SHARED
from tests.layouts import Layout, hybrid, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS = layouts("data parallel", "data parallel of 4", "zero 1", "zero 2", "zero 3") | {
    "none": Layout(1, 1, HybridStrategy),
    "zero 3 of 4": Layout(4, 4, partial(ZeroStrategy, stage=3)),
    "hsdp": Layout(4, 4, partial(ZeroStrategy, 2, replicate=2)),
    "hsdp, zero 1": Layout(4, 4, partial(ZeroStrategy, 2, replicate=2, stage=1)),
    "hsdp, zero 2": Layout(4, 4, partial(ZeroStrategy, 2, replicate=2, stage=2)),
    "recomputed zero 3": Layout(2, 2, hybrid(ActivationCheckpoint(), Zero())),  # in any order
}
TWO_BLOCKS = {"gpt": {"n_layers": 2}, "llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 2}, "plain": {"blocks": 2}}
STEPS = {
    "max_epochs": 2,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "data": {"samples": 96, "val_samples": 16},
}


@sampled(
    2,
    ("layout", "column", "precision"),
    [
        ("data parallel", "plain", "64-true"),
        ("data parallel of 4", "llama", "32-true"),
        ("none", "gpt2", "32-true"),
        ("zero 1", "gpt", "64-true"),
        ("zero 1", "plain", "32-true"),
        ("zero 2", "llama", "64-true"),
        ("hsdp", "plain", "64-true"),
        ("hsdp, zero 1", "llama", "32-true"),
        ("hsdp, zero 2", "gpt", "64-true"),
        ("zero 3 of 4", "plain", "32-true"),
        ("recomputed zero 3", "llama", "32-true"),
        ("zero 3", "gpt2", "64-true"),
        ("zero 3", "gpt", "32-true"),
    ],
)
def test_layouts_train_as_one_process_does(layout: str, column: str, precision: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    # Hugging Face's own loss turns logits into single precision, whatever the model computes in.
    rtol = 1e-5 if precision == "32-true" else 1e-6 if column == "gpt2" else 1e-10
    run = {"precision": precision, "model": TWO_BLOCKS[column], **STEPS}
    check_parity(column, ranks, strategy, data_ranks=readers, rtol=rtol, **run)


# Half a batch's gradient in bfloat16 (8 bits) rounds otherwise than the whole batch's: 2**-8 a step.
TOLERANCES = {"bf16-mixed": 2e-2, "bf16-true": 5e-2}


def trained(precision: str, make_strategy: Callable[[], Any] | str = "auto", data_ranks: int = 1) -> Any:
    sgd = partial(optim.SGD, lr=0.05, momentum=0.9)  # keeps rounding as small as it is, where Adam would scale it up
    run = {"precision": precision, "limit_val_batches": 0, "max_epochs": 1, "data": {"samples": 32}}
    return train("plain", make_strategy, data_ranks=data_ranks, model={"blocks": 1, "optimizer": sgd}, **run)


@sampled(
    1,
    ("precision", "layout"),
    [("bf16-mixed", "zero 3"), ("bf16-true", "data parallel"), ("bf16-true", "zero 2"), ("bf16-true", "zero 3")],
)
def test_half_precision_trains_as_on_one_device(precision: str, layout: str) -> None:
    expected, tolerance = begun_on_one(trained, precision), TOLERANCES[precision]
    for got in run_on_ranks(2, trained, precision, SHARED[layout].strategy, data_ranks=2):
        assert got.losses == pytest.approx(expected.result().losses, rel=tolerance)
        for name, wanted in expected.result().weights.items():
            assert got.weights[name].dtype == wanted.dtype, name
            error = (got.weights[name].double() - wanted.double()).norm()
            assert error <= tolerance * max(1.0, wanted.double().norm()), name


class Poisoned(LightningModule):
    """Multiplies its loss by the largest factor in the batch."""

    def __init__(self, optimizer: Callable[..., optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        self.make = optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, factors = batch
        return self.layers(inputs).float().square().mean() * factors.max()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=0.1)


def poisoned(factors: list[float], batch_size: int = 2) -> DataLoader:
    inputs = torch.randn(len(factors), 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, torch.tensor(factors)), batch_size)


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


def overflow(make_strategy: Callable[[], Any], fused: bool, clip: float | None) -> list[float]:
    watch = Watch()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    run = trainer(make_strategy(), plugins=[plugin], callbacks=[watch], max_epochs=1, gradient_clip_val=clip)
    # Of the second global batch, only what rank 1 reads overflows.
    data = poisoned([1, 1, 1, 1, 1, 1, math.inf, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    run.fit(Poisoned(partial(optim.AdamW, fused=fused)), data)
    first, skipped, third, fourth = watch.weights
    assert torch.equal(first, skipped)
    assert not torch.equal(skipped, third)
    assert not torch.equal(third, fourth)
    assert torch.isfinite(fourth).all()
    assert watch.scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    return fourth.flatten().tolist()


@sampled(
    1,
    ("layout", "fused", "clip"),
    [("zero 3", False, 0.5), ("zero 1", False, 0.5), ("data parallel", True, None), ("zero 2", False, None)],
)
def test_overflow_on_one_rank_skips_the_step_on_all(layout: str, fused: bool, clip: float | None) -> None:
    one, other = run_on_ranks(2, overflow, SHARED[layout].strategy, fused, clip)
    assert one == other


def clipped(strategy: Any, algorithm: str, factors: list[float], batch_size: int) -> dict[str, Tensor]:
    model, run = Poisoned(optim.SGD), trainer(strategy, max_epochs=1)
    run.gradient_clip_val, run.gradient_clip_algorithm = 0.01, algorithm
    run.fit(model, poisoned(factors, batch_size))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def clipped_by_all(*options: Any) -> list[dict[str, Tensor]]:
    strategies = (SHARED[layout].strategy for layout in ("data parallel", "zero 1", "zero 2", "zero 3"))
    return [clipped(make(nonfinite="continue"), *options, 2) for make in strategies]


@sampled(1, ("algorithm", "factor"), [("norm", 10.0), ("norm", math.inf), ("value", 10.0), ("value", math.nan)])
def test_clipping(algorithm: str, factor: float) -> None:
    """What is not finite stays so, as on one device, and on every rank."""
    factors = [1.0, 1.0, 1.0, 1.0, factor, factor, factor, factor]
    expected = begun_on_one(clipped, "auto", algorithm, factors, 4)
    for rank in run_on_ranks(2, clipped_by_all, algorithm, factors):
        for layout, got in enumerate(rank):
            torch.testing.assert_close(got, expected.result(), equal_nan=True, msg=str(layout))


def cast() -> tuple[Any, list[str]]:
    said = []
    for stage in (1, 2, 3):
        with pytest.raises(TypeError) as error:
            train("CastsItself", partial(ZeroStrategy, 2, stage=stage), data_ranks=2, max_epochs=1)
        said.append(str(error.value))
    return train("CastsItself", partial(DataParallelStrategy, 2), data_ranks=2, max_epochs=1), said


def test_cast_is_followed_by_data_parallel_and_refused_by_zero() -> None:
    """Followed too where a message began with gradients of another dtype, in a pass that only accumulates."""
    expected = begun_on_one(train, "CastsItself", max_epochs=1)
    for got, messages in run_on_ranks(2, cast):
        compare(expected.result(), got)
        for said in messages:
            what = "a module cast blocks.0.router.line.weight from torch.float32 to torch.float64 in its forward"
            assert said.startswith(what)
            assert said.endswith(
                "use DataParallelStrategy, which keeps full parameters, or a precision that needs no cast: "
                "precision='64-true'"
            )
