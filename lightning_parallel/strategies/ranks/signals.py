"""Signals and deaths that cannot leave other ranks waiting.

Lightning answers SIGTERM with a collective inside the signal handler, which deadlocks when only one rank gets it, and
saves a checkpoint inside the handler when SLURM asks to requeue. Here handlers only note it. Before every batch ranks
tell each other what they were asked, in the message in which they agree on the batch: they act together, or not at all.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NamedTuple

from lightning_parallel.strategies.lightning_package import SIGTERMException, SLURMEnvironment, Trainer

EXIT_CODE = 128 + signal.SIGTERM
GRACE_SECONDS = CAUSE_SECONDS = 5.0


class Requested(NamedTuple):
    """Requests of the outside world to this process."""

    stop: bool = False
    requeue: bool = False


class Signals:
    """Takes signals over from Lightning for the time of one run: SIGTERM, and on SLURM the one that asks to requeue.

    Args:
        trainer: its loop no longer tells other ranks; `Batches` does, in the message that it sends anyway.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.requested = Requested()
        self._loop = trainer.fit_loop.epoch_loop
        self._loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
        self._lightnings: dict[int, Any] = {}
        self._requeue_signal: int | None = None
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._take(signal.SIGTERM, self._note_stop)
            environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
            if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
                self._requeue_signal = environment.requeue_signal
                self._take(environment.requeue_signal, self._note_requeue)

    def answer(self, requested: Requested) -> None:
        """Does between two batches, on all ranks together, what any of them was asked for.

        Raises:
            SIGTERMException: any was asked to stop.
        """
        if requested.requeue and self._requeue_signal is not None:
            self.requested = self.requested._replace(requeue=False)
            self._lightnings[self._requeue_signal](self._requeue_signal, None)  # saves, and asks SLURM
        if requested.stop:
            raise SIGTERMException(EXIT_CODE)

    def close(self) -> None:
        """Gives the signals back."""
        self._loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        for number, handler in self._lightnings.items():
            signal.signal(number, handler)
        self._lightnings.clear()

    def _take(self, number: int, note: Callable[[int, FrameType | None], None]) -> None:
        self._lightnings[number] = signal.signal(number, note)

    def _note_stop(self, number: int, _: FrameType | None) -> None:
        self.requested = self.requested._replace(stop=True)
        signal.signal(number, signal.SIG_DFL)  # asked twice, the process ends at once

    def _note_requeue(self, _: int, __: FrameType | None) -> None:
        self.requested = self.requested._replace(requeue=True)


SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that launched it dies, even by SIGKILL (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Takes `die_with_parent` back: after a run a script may take longer than that of rank 0."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, 0)


def is_launched_child(local_rank: int, start_method: str) -> bool:
    """Whether this process was made by the strategy's own launcher."""
    return local_rank > 0 if start_method == "popen" else multiprocessing.parent_process() is not None


def end_children(processes: Sequence[subprocess.Popen[bytes] | BaseProcess], first: int = -1) -> None:
    """Waits for launched processes to end by themselves, so that the cause is printed, then kills them.

    Args:
        processes: those that were launched.
        first: the index of the one that failed before all others and is printing why, if it is among them.
    """
    if 0 <= first < len(processes):
        _ended(processes[first], CAUSE_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        if not _ended(process, max(0.0, deadline - time.monotonic())):
            process.kill()


def _ended(process: subprocess.Popen[bytes] | BaseProcess, seconds: float) -> bool:
    if isinstance(process, BaseProcess):
        process.join(seconds)
        return process.exitcode is not None
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
