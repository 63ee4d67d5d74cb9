"""Signals and deaths that cannot leave other ranks waiting.

Lightning answers SIGTERM with a collective inside the signal handler, which deadlocks when only one rank gets it.
Here the handler only notes it. Before every batch ranks tell each other whether they were asked to stop, in the message
in which they agree on the batch: they stop after the same step, or not at all.
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
from collections.abc import Sequence
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer

EXIT_CODE = 128 + signal.SIGTERM
GRACE_SECONDS = 1.0


class Termination:
    """Takes SIGTERM over from Lightning for the time of one run; `asked` says whether it came.

    Args:
        trainer: its loop no longer tells other ranks; `Batches` does, in the message that it sends anyway.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.asked = False
        self._loop = trainer.fit_loop.epoch_loop
        self._previous: Any = None
        self._loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._previous = signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        """Gives the signal back."""
        self._loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _note(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # asked twice, the process ends at once


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that launched it dies, even by SIGKILL (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() == 1:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def is_launched_child(local_rank: int, start_method: str) -> bool:
    """Whether this process was made by the strategy's own launcher."""
    return local_rank > 0 if start_method == "popen" else multiprocessing.parent_process() is not None


def end_children(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits a little for launched processes to end by themselves, so that one can print the cause, then kills them."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
