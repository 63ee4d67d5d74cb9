"""A run on one device and on ranks, and whether every rank saw what the one device saw."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_parallel import PipelineParallelStrategy
from tests.ranks import begun_on_one, run_on_ranks

MakeStrategy = Callable[[], Any]
PIPELINE = partial(PipelineParallelStrategy, 2, microbatches=4)
ZBV = partial(PipelineParallelStrategy, 2, schedule="zbv", microbatches=4)


class Sees(Callback):
    """What a callback sees at every hook: values by their names, steps, learning rates, and what a step returned."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Trainer, *more: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append([values, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], *more])

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.note(trainer, float(outputs["loss"]), outputs["logits"].clone())

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer)


def scratch() -> Path:
    return Path(os.environ["RANKS_SCRATCH"])


def made(strategy: MakeStrategy | None) -> Any:
    if strategy is None:  # Lightning's own: it warns wherever a process group exists, even of one rank
        warnings.filterwarnings("ignore", ".*sync_dist=True")
        return "auto"
    return strategy()


def on_one_and_two(run: Callable[..., Any], strategy: MakeStrategy = PIPELINE, **options: Any) -> tuple[Any, list[Any]]:
    expected = begun_on_one(run, None, **options)
    found = run_on_ranks(2, run, strategy, **options)
    return expected.result(), found


def assert_like_one_device(
    run: Callable[..., Any],
    ranks: int,
    one: tuple[Any, ...],
    many: tuple[Any, ...],
    *,
    rtol: float = 1e-5,
    atol: float | None = None,
    **options: Any,
) -> None:
    """Holds what `run(*many)` returns on every rank to what `run(*one)` returns in one process.

    Args:
        run: what is compared, a function of this or another module.
        ranks: how many ranks run it.
        one: its arguments in one process, e.g. `(None, 8)`: no strategy, and batches of 8.
        many: those of a rank, e.g. `(ZeroStrategy, 4)`.
        rtol: how far numbers may differ, by their size.
        atol: and beside that; by default as much for tensors, and a tenth for plain numbers.
        options: arguments by name of both.
    """
    expected = begun_on_one(run, *one, **options)
    for rank, found in enumerate(run_on_ranks(ranks, run, *many, **options)):
        require_like(expected.result(), found, rtol, atol, f"rank {rank}")


def require_like(
    expected: Any, found: Any, rtol: float = 1e-5, atol: float | None = None, where: str = "result"
) -> None:
    """Nested lists and dicts of numbers, the same but for rounding; an error names the place."""
    if isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key in expected:
            require_like(expected[key], found[key], rtol, atol, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found), where
        for number, (wanted, got) in enumerate(zip(expected, found, strict=True)):
            require_like(wanted, got, rtol, atol, f"{where}[{number}]")
    elif isinstance(expected, Tensor):
        close = {"rtol": rtol, "atol": rtol if atol is None else atol}
        torch.testing.assert_close(found, expected, **close, msg=lambda said: f"{where}: {said}")
    elif isinstance(expected, Number):
        assert found == pytest.approx(expected, rel=rtol, abs=rtol / 10 if atol is None else atol), where
    else:
        assert found == expected, where
