"""What a rank holds between batches, counted as unique storages, against the table of ZeRO.

All counts are in units of the model's parameters: a single device holds one of them, one of gradients, and two of
AdamW's states. "all" is everything that Python can reach, so also a message or a buffer that somebody keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel import DataParallel, HybridStrategy, Zero
from lightning_parallel.techniques.technique import Technique
from tests.live import reachable, stepped
from tests.models import build, loaders
from tests.ranks import POOL, run_on_ranks
from tests.trainers import trainer

Counts = dict[str, float]
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> None:
    """What earlier tests left reachable on a rank must not count: these tests start ranks of their own."""
    POOL.kill()


def bytes_of(tensors: Iterable[Any]) -> int:
    """The bytes of all distinct storages that this rank holds."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if not t.is_meta}
    return sum(storages.values())


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
            "gradients": bytes_of(parameter.grad for parameter in parameters),
            "states": bytes_of(states),
            "all": in_all(),
        }
        self.counts.append(counted)


def held(technique: Technique | None) -> list[Counts]:
    """What this rank holds after each batch, two of which make a step, in units of all parameters."""
    module, watch = build("llama", **SMALL), Held()
    parameters = bytes_of(module.parameters())
    strategy, devices = ("auto", 1) if technique is None else (HybridStrategy(technique), None)
    run = trainer(strategy, devices, max_steps=2, limit_val_batches=0, accumulate_grad_batches=2, callbacks=[watch])
    run.fit(module, *loaders("llama", 1))
    return [{what: count / parameters for what, count in counts.items()} for counts in watch.counts]


# ---------------------------------------------------------------- the table


def expect(parameters: float, gradients: float, states: float, apart: float = 0.0) -> Any:
    """`apart` are gradients that torch's own FSDP keeps until replicas reduce them; who reads `.grad` gets them."""
    counts = {"parameters": parameters, "gradients": gradients, "states": states}
    return pytest.approx(counts | {"all": sum(counts.values()) + apart}, rel=0.02, abs=0.005)


# What one of d ranks holds after an optimizer step, and between two batches of one step, once there are states.
TABLE: dict[str, tuple[Callable[[int], Technique | None], Callable[[int], Any], Callable[[int], Any]]] = {
    "one device": (lambda d: None, lambda d: expect(1, 1, 2), lambda d: expect(1, 1, 2)),
    "data parallel": (lambda d: DataParallel(), lambda d: expect(1, 1, 2), lambda d: expect(1, 1, 2)),
    "zero 1": (lambda d: Zero(stage=1), lambda d: expect(1, 1 / d, 2 / d), lambda d: expect(1, 1, 2 / d)),
    "zero 2": (lambda d: Zero(stage=2), lambda d: expect(1, 1 / d, 2 / d), lambda d: expect(1, 1 / d, 2 / d)),
    "zero 3": (lambda d: Zero(stage=3), lambda d: expect(1 / d, 1 / d, 2 / d), lambda d: expect(1 / d, 1 / d, 2 / d)),
    "hybrid zero 1": (
        lambda d: Zero(d // 2, stage=1, replicate=2), lambda d: expect(1, 2 / d, 4 / d), lambda d: expect(1, 1, 4 / d),
    ),
    "hybrid zero 3": (
        lambda d: Zero(d // 2, stage=3, replicate=2),
        lambda d: expect(2 / d, 2 / d, 4 / d), lambda d: expect(2 / d, 0, 4 / d, apart=2 / d),
    ),
}  # fmt: skip


CELLS = [("one device", 1), ("data parallel", 2), ("zero 1", 2), ("zero 2", 4), ("zero 3", 4), ("hybrid zero 1", 4)]
CELLS += [("hybrid zero 3", 4)]


@pytest.mark.parametrize(
    ("row", "d"), [("zero 3", 2), *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in CELLS)]
)
def test_rank_holds_what_the_table_says(row: str, d: int) -> None:
    technique, after, between = TABLE[row]
    for counts in run_on_ranks(d, held, technique(d)):
        assert [counts[1], counts[3]] == [after(d), after(d)]
        assert counts[2] == between(d)
