"""What a rank holds between batches, counted as unique storages, against the table of ZeRO.

All counts are in units of the model's parameters: a single device holds one of them, one of gradients, and two of
AdamW's states. "all" is everything that Python can reach, so also a message or a buffer that somebody keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel import DataParallel, HybridStrategy, Zero
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.zero.sharded.parameters import UNIT_BYTES
from tests.live import LEFT, reachable, stepped
from tests.models import build, loaders
from tests.ranks import POOL, run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

Counts = dict[str, float]
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
FOUR_UNITS = {"hidden_size": 512, "intermediate_size": 2304, "num_hidden_layers": 4}  # every block is one


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> None:
    """What earlier tests left reachable on a rank must not count: these tests start ranks of their own."""
    POOL.kill()


# ---------------------------------------------------------------- counting


def bytes_of(tensors: Iterable[Any]) -> int:
    """The bytes of all distinct storages that this rank holds."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if not t.is_meta}
    return sum(storages.values())


def left_by_backward(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [left for left in map(LEFT, parameters) if left is not None]


def in_all() -> int:
    """What is reachable; gloo's threads let go of a message a moment after it has arrived."""
    counts = []
    for _ in range(3):
        time.sleep(0.03)
        counts.append(bytes_of(reachable()))
    return min(counts)


class Held(Callback):
    """Counts after every batch, by what the optimizer was given: a hook that asks the module is shown all of it."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        parameters = stepped(trainer.optimizers[0])
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        counted = {
            "parameters": bytes_of(parameters),
            "gradients": bytes_of(left_by_backward(parameters)),
            "states": bytes_of(states),
            "all": in_all(),
        }
        self.counts.append(counted)


class Whole(Callback):
    """The most bytes of whole parameters that are there at once, seen within every block, forward and backward."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for block in module.network.model.layers:
            block.mlp.register_forward_pre_hook(lambda *_: self.look(module))
            block.mlp.register_full_backward_pre_hook(lambda *_: self.look(module))

    def look(self, module: nn.Module) -> None:
        self.most = max(self.most, bytes_of(p for p in module.parameters() if not isinstance(p, DTensor)))


def fit(technique: Technique | None, callback: Callback, accumulate: int, sizes: dict[str, int]) -> int:
    """Two steps; returns the bytes of the parameters."""
    module = build("llama", **sizes)
    parameters = bytes_of(module.parameters())
    strategy, devices = ("auto", 1) if technique is None else (HybridStrategy(technique), None)
    run = {"max_steps": 2, "limit_val_batches": 0, "accumulate_grad_batches": accumulate, "callbacks": [callback]}
    trainer(strategy, devices, **run).fit(module, *loaders("llama", 1))
    return parameters


def held(technique: Technique | None, accumulate: int) -> list[Counts]:
    """What this rank holds after each batch, in units of all parameters."""
    watch = Held()
    parameters = fit(technique, watch, accumulate, SMALL)
    return [{what: count / parameters for what, count in counts.items()} for counts in watch.counts]


# ---------------------------------------------------------------- the table


def expect(parameters: float, gradients: float, states: float) -> Any:
    counts = {"parameters": parameters, "gradients": gradients, "states": states}
    return pytest.approx(counts | {"all": sum(counts.values())}, rel=0.02, abs=0.005)


# d ranks -> what one of them holds after an optimizer step.
AFTER_STEP: dict[str, tuple[Callable[[int], Technique | None], Callable[[int], Any]]] = {
    "one device": (lambda d: None, lambda d: expect(1, 1, 2)),
    "data parallel": (lambda d: DataParallel(), lambda d: expect(1, 1, 2)),
    "zero 1": (lambda d: Zero(stage=1), lambda d: expect(1, 1 / d, 2 / d)),
    "zero 2": (lambda d: Zero(stage=2), lambda d: expect(1, 1 / d, 2 / d)),
    "zero 3": (lambda d: Zero(stage=3), lambda d: expect(1 / d, 1 / d, 2 / d)),
    "hybrid zero 1": (lambda d: Zero(d // 2, stage=1, replicate=2), lambda d: expect(1, 2 / d, 4 / d)),
    "hybrid zero 2": (lambda d: Zero(d // 2, stage=2, replicate=2), lambda d: expect(1, 2 / d, 4 / d)),
    "hybrid zero 3": (lambda d: Zero(d // 2, stage=3, replicate=2), lambda d: expect(2 / d, 2 / d, 4 / d)),
}


ONE = [("one device", 1, 1), ("one device", 1, 2)]
CELLS = [*ONE, *((row, d, accumulate) for row in AFTER_STEP for d, accumulate in ((2, 2), (4, 1)) if row != ONE[0][0])]


@sampled(1, ("row", "d", "accumulate"), CELLS)
def test_after_a_step(row: str, d: int, accumulate: int) -> None:
    technique, table = AFTER_STEP[row]
    for counts in run_on_ranks(d, held, technique(d), accumulate):
        assert counts[accumulate - 1 :: accumulate] == [table(d), table(d)]


# d ranks -> what one of them holds between two batches of one step, once there are states.
BETWEEN: dict[str, tuple[Technique, Callable[[int], Any]]] = {
    "data parallel": (DataParallel(), lambda d: expect(1, 1, 2)),
    "zero 1": (Zero(stage=1), lambda d: expect(1, 1, 2 / d)),
    "zero 2": (Zero(stage=2), lambda d: expect(1, 1 / d, 2 / d)),
    "zero 3": (Zero(stage=3), lambda d: expect(1 / d, 1 / d, 2 / d)),
}


@covering(keep=1, d=(2, 4), row=BETWEEN)
def test_while_gradients_accumulate(row: str, d: int) -> None:
    technique, table = BETWEEN[row]
    for counts in run_on_ranks(d, held, technique, 3):
        assert counts[3:5] == [table(d), table(d)]


def most_whole() -> tuple[int, int, int]:
    """The most whole bytes at once during steps of ZeRO-3; those of a block; those in no block."""
    watch = Whole()
    parameters = fit(Zero(stage=3), watch, 1, FOUR_UNITS)
    blocks = build("llama", **FOUR_UNITS).network.model.layers
    return watch.most, bytes_of(blocks[0].parameters()), parameters - bytes_of(blocks.parameters())


def test_zero_3_holds_two_units_whole_at_most() -> None:
    for most, block, outside in run_on_ranks(2, most_whole):
        assert block > UNIT_BYTES
        assert block + outside <= most <= 2 * block + outside
