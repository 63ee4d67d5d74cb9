"""SIGTERM, SIGINT and SLURM's request to requeue: a handler notes the signal, and all ranks act between two batches.

Lightning answers SIGTERM with a collective inside the signal handler, which deadlocks when only one rank gets it, and
saves a checkpoint inside the handler when SLURM asks to requeue. Python raises KeyboardInterrupt wherever a rank is.
Here the message about every batch (`sync.Message`) carries what the handlers noted.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from lightning_parallel.strategies.lightning_package import SIGTERMException, SLURMEnvironment, Trainer
from lightning_parallel.strategies.ranks.failures import mark_as_raised_together

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
        if threading.current_thread() is not threading.main_thread():  # no other thread may set handlers
            return
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signal = environment.requeue_signal
        for number in (signal.SIGTERM, signal.SIGINT, self._requeue_signal):
            users = number == signal.SIGINT and signal.getsignal(number) is not signal.default_int_handler
            if number and not users:
                self._replaced[number] = signal.signal(number, self._note)

    def answer(self, stop: int, requeue: bool) -> None:
        """Do between two batches, on all ranks, what any of them was asked for.

        Raises:
            SIGTERMException: a rank got SIGTERM.
            KeyboardInterrupt: a rank got SIGINT.
        """
        if requeue and self._requeue_signal is not None:
            self.requeue = False
            self._replaced[self._requeue_signal](self._requeue_signal, None)  # saves, and asks SLURM
        if stop:
            raise mark_as_raised_together(
                SIGTERMException(EXIT_CODE) if stop == signal.SIGTERM else KeyboardInterrupt()
            )

    def close(self) -> None:
        """Restore the handlers."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == self._requeue_signal:
            self.requeue = True
            return
        signal.signal(number, signal.SIG_DFL)  # asked twice, the process ends at once
        self.stop = max(number, self.stop)
        if os.getpid() != self._process:  # forked from a rank
            if get_worker_info() is None:  # workers of loaders go on until their rank stops
                os.kill(os.getpid(), number)
        elif number == signal.SIGINT and self._trainer.local_rank == 0:
            os.write(2, INTERRUPTED)  # `print` is not reentrant
