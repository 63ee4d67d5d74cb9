"""Models built in `configure_model`, or on meta: the weights of one process, and on every rank only its shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, ZeroStrategy
from tests.curves import check_parity, compare_weights, whole
from tests.layouts import layouts
from tests.live import stepped
from tests.ranks import begun_on_one, on_one, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS = layouts("data parallel", "zero 1", "zero 2", "zero 3")
LAYOUTS["zero 3, offloaded"] = layouts("zero 3", offload=True)["zero 3"]


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

    def __init__(self, on_meta: bool, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.build = build
        self.network: Any = None
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
        parameters: list[Any] = stepped(trainer.optimizers[0])
        held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
        self.held = held / sum(parameter.numel() for parameter in parameters)
        assert not any(parameter.is_meta for parameter in parameters)


def fit(
    strategy: Callable[[], Any],
    batch_size: int,
    max_steps: int = 2,
    precision: Any = "32-true",
    seed: int | None = 3,
    on_meta: bool = False,
    build: Callable[[], nn.Module] = network,
) -> tuple[dict[str, Tensor], float, float]:
    if seed is None:
        torch.seed()  # nobody seeded: every rank would draw something else
    else:
        torch.manual_seed(seed)
    module, peek = Late(on_meta, build), Peek()
    run = trainer(strategy(), max_steps=max_steps, callbacks=[peek], precision=precision)
    run.fit(module, DataLoader(torch.linspace(-1, 1, 8 * 4 * 7).view(8, 4, 7), batch_size=batch_size))
    return {name: whole(name, value) for name, value in module.state_dict().items()}, peek.held, torch.rand(1).item()


EXACT = [
    {"max_steps": 0},
    {"max_steps": 0, "build": of_two_dtypes, "precision": "bf16-true"},
    {"max_steps": 0, "build": of_two_dtypes, "precision": "64-true"},
]


def fits(strategy: Callable[[], Any], readers: int) -> Any:
    trained, exact = fit(strategy, 4 // readers), [fit(strategy, 4 // readers, **options)[0] for options in EXACT]
    unseeded = [fit(strategy, 4 // readers, seed=None, on_meta=on_meta)[0] for on_meta in (False, True)]
    return trained, exact, unseeded, fit(strategy, 4 // readers, on_meta=True)[0]


def plain() -> str:
    return "auto"


@sampled(1, "layout", LAYOUTS)
def test_weights_are_those_of_plain_lightning(layout: str) -> None:
    """After steps and without one, by dtype, and on all ranks the same where nobody has seeded or built on meta."""
    ranks, readers, strategy = LAYOUTS[layout]
    begun = [begun_on_one(fit, plain, 4), *(begun_on_one(fit, plain, 4, **options) for options in EXACT)]
    results = run_on_ranks(ranks, fits, strategy, readers)
    expected, _, drawn_next = begun[0].result()
    compare_weights(expected, on_one(fit, HybridStrategy, 4)[0], 1e-4)
    on_meta = on_one(fit, HybridStrategy, 4, on_meta=True)[0]
    for (weights, held, drawn), exact, unseeded, from_meta in results:
        compare_weights(expected, weights, 1e-4)
        assert held == pytest.approx(0.5, abs=0.02) if layout.startswith("zero 3") else held == 1
        assert drawn == drawn_next
        for each, found in zip(begun[1:], exact, strict=True):
            compare_weights(each.result()[0], found, 0)
        for first, found in zip(results[0][2], unseeded, strict=True):
            compare_weights(first, found, 0)
        compare_weights(on_meta, from_meta, 1e-4)


class Failing(LightningModule):
    configure_optimizers = Late.configure_optimizers

    def configure_model(self) -> None:
        self.norm = nn.BatchNorm1d(3, affine=False)  # has buffers and no parameters
        raise LookupError("a mistake of the user's")

    def training_step(self, batch: Tensor) -> None: ...


def failing() -> None:
    with pytest.raises(LookupError, match="a mistake"):
        trainer(ZeroStrategy(), max_steps=1).fit(Failing(), DataLoader(torch.ones(8, 7)))


def test_errors_of_users_code_are_raised_unchanged() -> None:
    on_one(failing)


def test_metrics_made_in_configure_model_count() -> None:
    check_parity("Rich", 2, ZeroStrategy, data_ranks=2, model={"late": True}, max_epochs=1)
