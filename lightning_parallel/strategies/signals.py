"""Signals and deaths that cannot leave other ranks waiting.

Lightning answers SIGTERM with a collective inside the signal handler, which deadlocks when only one rank gets it.
Here the handler only notes it, and in place of Lightning's own exchange before every batch all ranks tell each other
whether they were asked to stop: they stop after the same step, or not at all.
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

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

EXIT_CODE = 128 + signal.SIGTERM
GRACE_SECONDS = 4.0


class Termination:
    """Takes SIGTERM over from Lightning for the time of one run.

    Args:
        trainer: its loop asks `agree` before every batch.
        group: all ranks, for messages of the host.
    """

    def __init__(self, trainer: Trainer, group: dist.ProcessGroup) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._group = group
        self._asked = False
        self._previous: Any = None
        self._loop.__dict__["_broadcast_sigterm_tensor"] = self.agree
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._previous = signal.signal(signal.SIGTERM, self._note)

    def agree(self) -> None:
        """Raises SIGTERMException on all ranks if any was asked to stop. Every rank must call."""
        asked = torch.tensor(float(self._asked))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        if asked.item():
            raise SIGTERMException(EXIT_CODE)

    def close(self) -> None:
        """Gives the signal back."""
        self._loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _note(self, _: int, __: FrameType | None) -> None:
        self._asked = True
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
