"""Ctrl-C: the first SIGINT, to any rank, stops all ranks before the same batch; the second ends the process at once."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_parallel.strategies.ranks.failures import Signals
from tests.ranks import run_on_ranks
from tests.strategies.test_failures import LAYOUTS, Regression, fail, loader
from tests.tiers import sampled
from tests.trainers import trainer

VERBS = ["validate", "test", "predict"]


class Ended(NamedTuple):
    """How a run ended on one rank."""

    code: Any
    status: str
    place: int
    said: list[str]
    handler: Any


class Evaluated(Regression):
    """Counts the batches that it evaluates."""

    evaluated = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.evaluated += 1
        self.at("evaluation", batch_idx)
        return batch

    test_step = predict_step = validation_step


def interrupt(ranks: list[int], module: LightningModule) -> None:
    """Sends this process the first SIGINT, once: a pipeline may call a step more often."""
    if module.global_rank in ranks and signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        signal.raise_signal(signal.SIGINT)


def fail_on(rank: int, module: LightningModule) -> None:
    if module.global_rank == rank:
        fail(module)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What Lightning and this package log inside."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_parallel")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield said
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def ended(make: Callable[[], Any], verb: str, module: Regression, folder: Path) -> Ended:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a script; ranks of the pool ignore it
    saves = ModelCheckpoint(folder, filename="interrupted", save_on_exception=True)
    running = trainer(make(), max_steps=4, callbacks=[saves], enable_checkpointing=True)
    code = None
    with heard() as said:
        try:
            getattr(running, verb)(module, loader())
        except (SystemExit, ValueError, RuntimeError) as stopped:
            code = getattr(stopped, "code", type(stopped).__name__)
    assert saves.save_on_exception
    place = module.evaluated if isinstance(module, Evaluated) else running.global_step
    said = [line for line in said if "checkpoint" in line.lower()]
    return Ended(code, running.state.status.value, place, said, signal.getsignal(signal.SIGINT))


@sampled(2, "layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_first_sigint_stops_all_ranks_before_the_same_batch(layout: str, ranks: list[int], tmp_path: Path) -> None:
    def event(module: LightningModule) -> None:
        interrupt(ranks, module)

    first, second = run_on_ranks(2, ended, LAYOUTS[layout], "fit", Regression("training_step", event), tmp_path)
    stopped = 1, "interrupted", 2
    assert first[:3] == second[:3] == stopped
    assert first.handler == second.handler == signal.default_int_handler
    assert any("KeyboardInterrupt was raised" in line and "saved checkpoint to" in line for line in first.said)
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert len(saved["optimizer_states"][0]["state"]) == 8


@sampled(1, "verb", VERBS)
def test_so_it_does_in_an_evaluation(verb: str, tmp_path: Path) -> None:
    def event(module: LightningModule) -> None:
        interrupt([1], module)

    for rank in run_on_ranks(2, ended, LAYOUTS["zero_3"], verb, Evaluated("evaluation", event), tmp_path):
        assert rank[:3] == (1, "interrupted", 2)


def test_checkpoint_that_was_not_saved_is_not_logged(tmp_path: Path) -> None:
    def event(module: LightningModule) -> None:
        fail_on(1, module)

    for rank in run_on_ranks(2, ended, LAYOUTS["zero_3"], "fit", Regression("training_step", event), tmp_path):
        assert rank.code in ("ValueError", "RuntimeError")
        assert rank.said == [
            "No checkpoint of this exception: the parts of other ranks are missing, for not all came to it"
        ]
    assert list(tmp_path.iterdir()) == []


class Reads(torch.utils.data.Dataset[Tensor]):
    """Its first worker is interrupted, as all processes of a terminal are."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        if get_worker_info() is not None and index == 0:
            signal.raise_signal(signal.SIGINT)
        return torch.full((8,), float(index))


def trains_with_workers() -> tuple[int, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    running = trainer(LAYOUTS["data_parallel"](), max_steps=4)
    running.fit(Regression(), DataLoader(Reads(), batch_size=2, num_workers=1))
    return running.global_step, signal.getsignal(signal.SIGINT)


def test_workers_of_loaders_go_on_until_their_ranks_stop() -> None:
    assert run_on_ranks(2, trains_with_workers) == [(4, signal.default_int_handler)] * 2


def within_a_run(handler: Any, asked: int) -> tuple[Any, int]:
    """What handles SIGINT after so many, during a run that began with a handler."""
    signal.signal(signal.SIGINT, handler)
    signals = Signals(trainer(LAYOUTS["data_parallel"]()))
    signals.install()
    for _ in range(asked):
        signal.raise_signal(signal.SIGINT)
    handles = signal.getsignal(signal.SIGINT)
    signals.close()
    return handles, signals.stop


def own(*_: Any) -> None:
    pass


def test_second_one_ends_the_process_at_once() -> None:
    assert run_on_ranks(1, within_a_run, signal.default_int_handler, 1) == [(signal.SIG_DFL, signal.SIGINT)]


@pytest.mark.parametrize("handler", [own, signal.SIG_IGN])
def test_handler_of_the_users_own_stays(handler: Any) -> None:
    assert run_on_ranks(1, within_a_run, handler, 1) == [(handler, 0)]
