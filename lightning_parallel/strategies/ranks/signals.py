"""Signals and deaths that cannot leave other ranks waiting.

Lightning answers SIGTERM with a collective inside the signal handler, which deadlocks when only one rank gets it, and
saves a checkpoint inside the handler when SLURM asks to requeue. Python raises KeyboardInterrupt wherever a rank is.
Here handlers only note the signal. Before every batch ranks exchange what they were asked, in the message in which they
agree on the batch, and act together.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from lightning_parallel.strategies.lightning_package import SIGTERMException, SLURMEnvironment, Trainer
from lightning_parallel.strategies.ranks.failures import TOGETHER

INTERRUPTED = b"\nAll ranks stop before their next batch; SIGINT (Ctrl-C) once more ends this process at once\n"
EXIT_CODE = 128 + signal.SIGTERM


class Signals:
    """Handles SIGTERM, SIGINT unless the user does, and SLURM's signal to requeue, for the time of one run.

    Attributes:
        stop: the number of the signal that asked this process to stop, the higher one of two; 0 if none has.
        requeue: whether SLURM has asked to requeue.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.stop, self.requeue = 0, False
        self._trainer, self._process = trainer, os.getpid()
        self._replaced: dict[int, Any] = {}  # Lightning's handlers, or Python's
        self._requeue_signal: int | None = None
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._handle(signal.SIGTERM, self._note_stop)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._handle(signal.SIGINT, self._note_stop)
            environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
            if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
                self._requeue_signal = environment.requeue_signal
                self._handle(environment.requeue_signal, self._note_requeue)

    def answer(self, stop: int, requeue: bool) -> None:
        """Do between two batches, on all ranks together, what any of them was asked for.

        Raises:
            SIGTERMException: a rank got SIGTERM.
            KeyboardInterrupt: a rank got SIGINT.
        """
        if requeue and self._requeue_signal is not None:
            self.requeue = False
            self._replaced[self._requeue_signal](self._requeue_signal, None)  # saves, and asks SLURM
        if stop:
            asked = SIGTERMException(EXIT_CODE) if stop == signal.SIGTERM else KeyboardInterrupt()
            vars(asked)[TOGETHER] = True  # all ranks raise it here, so they can save a checkpoint
            raise asked

    def close(self) -> None:
        """Restore the handlers."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._replaced[number] = signal.signal(number, handler)

    def _note_stop(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # asked twice, the process ends at once
        self.stop = max(number, self.stop)
        if os.getpid() != self._process:  # forked from a rank
            if get_worker_info() is None:  # workers of loaders go on until their rank stops
                os.kill(os.getpid(), number)
        elif number == signal.SIGINT and self._trainer.local_rank == 0:
            os.write(2, INTERRUPTED)  # `print` is not reentrant

    def _note_requeue(self, _: int, __: FrameType | None) -> None:
        self.requeue = True


SET_PARENT_DEATH_SIGNAL = 1
LAUNCHER = "LIGHTNING_PARALLEL_LAUNCHER"
"""The environment variable in which a launched script finds the process id of its launcher."""


def launcher_of(local_rank: int, start_method: str) -> int | None:
    """The id of the process whose launcher started this rank; None for a rank that somebody else started."""
    if start_method != "popen":
        parent = multiprocessing.parent_process()
        return None if parent is None else parent.pid
    return int(os.environ[LAUNCHER]) if local_rank > 0 and LAUNCHER in os.environ else None


def die_with_launcher(launcher: int) -> None:
    """Let the kernel kill this process when its launcher dies, even by SIGKILL (Linux).

    Args:
        launcher: the launcher's process id, which is 1 for a container's command.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the call
        print(
            f"process {launcher}, which launched this rank, has ended; so does this rank", file=sys.stderr, flush=True
        )
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_launcher() -> None:
    """Take `die_with_launcher` back: after a run a script may take longer than that of rank 0."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, 0)
