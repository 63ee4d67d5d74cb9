"""Models built in `configure_model`, or on meta: the weights of one process, and on every rank only its shards."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, HybridStrategy, ZeroStrategy
from tests.curves import check_parity, compare_weights, whole
from tests.live import stepped
from tests.ranks import on_one, run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

STRATEGIES = {
    "dp": DataParallelStrategy,
    "zero1": partial(ZeroStrategy, stage=1),
    "zero2": partial(ZeroStrategy, stage=2),
    "zero3": partial(ZeroStrategy, stage=3),
    "zero3 offloaded": partial(ZeroStrategy, stage=3, offload=True),
}


def network() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    made = nn.Sequential(nn.Linear(7, 16), *layers, nn.Linear(16, 3))
    nn.init.trunc_normal_(made[0].weight, std=0.1)
    return made


class Scaling(nn.Module):
    """Names its dtype, as rotary embeddings do, and draws when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16, dtype=torch.float32))
        self.register_buffer("rates", torch.arange(16, dtype=torch.float32) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.rates


def of_two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 16), Scaling(), nn.Linear(16, 3))


class Late(LightningModule):
    """Builds where Lightning says that large models are built."""

    def __init__(self, on_meta: bool = False, build: Callable[[], nn.Module] = network) -> None:
        super().__init__()
        self.build = build
        self.network: nn.Module | None = None
        if on_meta:
            with torch.device("meta"):
                self.network = nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.Linear(16, 3))

    def configure_model(self) -> None:
        if self.network is None:
            self.network = self.build()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


class Peek(Callback):
    """Looks at what the optimizer was given of the divided model: a hook that asks the module is shown all of it."""

    def on_fit_start(self, trainer: Trainer, _: LightningModule) -> None:
        parameters = stepped(trainer.optimizers[0])
        self.held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
        self.whole = sum(parameter.numel() for parameter in parameters)
        self.on_meta = any(parameter.is_meta for parameter in parameters)


def fit(strategy, batch_size: int, seed: int | None = 3, max_steps: int = 2, precision: str = "32-true", **options):
    if seed is None:
        torch.seed()  # nobody seeded: every rank would draw something else
    else:
        torch.manual_seed(seed)
    module, peek = Late(**options), Peek()
    data = torch.linspace(-1, 1, 8 * 4 * 7).view(8, 4, 7)
    run = trainer(strategy(), max_steps=max_steps, callbacks=[peek], precision=precision)
    run.fit(module, DataLoader(data, batch_size=batch_size))
    weights = {name: whole(name, value) for name, value in module.state_dict().items()}
    return weights, peek.held / peek.whole, peek.on_meta, torch.rand(1).item()


@sampled(2, "layout", STRATEGIES)
def test_the_weights_are_those_of_one_process(layout):
    expected, _, _, drawn_next = on_one(fit, HybridStrategy, 4)
    for weights, held, on_meta, drawn in run_on_ranks(2, fit, STRATEGIES[layout], 2):
        compare_weights(expected, weights, 1e-4)
        assert not on_meta
        assert held == pytest.approx(0.5, abs=0.02) if layout.startswith("zero3") else held == 1
        assert drawn == drawn_next


@sampled(2, "layout", ["zero2", "zero3", "zero3 offloaded"])
def test_a_run_without_a_step_gives_back_the_weights(layout):
    expected, *_ = on_one(fit, HybridStrategy, 4, max_steps=0)
    for weights, *_ in run_on_ranks(2, fit, STRATEGIES[layout], 2, max_steps=0):
        compare_weights(expected, weights, 0)


def test_one_process_builds_as_plain_lightning_does():
    [(expected, *_, drawn_next)] = run_on_ranks(1, fit, lambda: "auto", 4)
    weights, *_, drawn = on_one(fit, HybridStrategy, 4)
    compare_weights(expected, weights, 1e-4)
    assert drawn == drawn_next


@covering(layout=("dp", "zero3"), precision=("bf16-true", "64-true"))
def test_dtypes_are_converted_as_by_plain_lightning(layout, precision):
    options = {"max_steps": 0, "build": of_two_dtypes, "precision": precision}
    [(expected, *_)] = run_on_ranks(1, fit, lambda: "auto", 4, **options)
    for weights, *_ in run_on_ranks(2, fit, STRATEGIES[layout], 2, **options):
        compare_weights(expected, weights, 0)


class Failing(Late):
    def configure_model(self) -> None:
        self.norm = nn.BatchNorm1d(3, affine=False)  # has buffers and no parameters
        raise LookupError("a mistake of the user's")


def failing() -> None:
    with pytest.raises(LookupError, match="a mistake"):
        trainer(ZeroStrategy(), max_steps=1).fit(Failing(), DataLoader(torch.ones(8, 7)))


def test_error_of_the_users_code_is_raised_unchanged():
    on_one(failing)


@covering(layout=("dp", "zero3"), on_meta=(False, True))
def test_without_a_seed_ranks_still_hold_one_model(layout, on_meta):
    (first, *_), (second, *_) = run_on_ranks(2, fit, STRATEGIES[layout], 2, seed=None, on_meta=on_meta)
    compare_weights(first, second, 0)


def test_model_on_meta_has_the_same_weights_in_every_layout():
    [(expected, *_)] = run_on_ranks(1, fit, HybridStrategy, 4, on_meta=True)
    for weights, *_ in run_on_ranks(4, fit, STRATEGIES["zero3"], 1, on_meta=True):
        compare_weights(expected, weights, 1e-4)


def test_metrics_made_there_count():
    check_parity("Rich", 2, ZeroStrategy, data_ranks=2, model={"late": True}, max_epochs=1)
