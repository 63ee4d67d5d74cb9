"""Launchers start the processes of a run; what is known to be wrong before is said once, and nothing is started."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_parallel.strategies.lightning_package import (
    _IS_INTERACTIVE,
    ClusterEnvironment,
    ParallelStrategy,
    Trainer,
    _ChildProcessObserver,
    _MultiProcessingLauncher,
    _set_num_threads_if_needed,
    _SubprocessScriptLauncher,
)
from lightning_parallel.strategies.ranks.tracebacks import note

KEYWORDS = ("last", "best", "hpc", "registry")  # which Lightning finds a file for
PATIENCE_SECONDS = 10.0
"""For which a process that launched others may still run when one of these has failed: unless it hangs it fails itself
soon, and says why."""


LastWords = Callable[[], str]


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script again, once for every further rank of the node.

    Args:
        environment: see `_SubprocessScriptLauncher`; so are the next two.
        processes: of this node.
        nodes: how many there are.
        last_words: of a hang that goes on, to be said should this process be killed for another that has failed.
    """

    def __init__(self, environment: ClusterEnvironment, processes: int, nodes: int, last_words: LastWords) -> None:
        super().__init__(environment, processes, nodes)
        self._last_words = last_words

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """See `_SubprocessScriptLauncher.launch`, which has an observer that says nothing of a hang."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            require_checkpoint(function, args, kwargs)
            self._call_children_scripts()
            _Observer(self.procs, self._last_words).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class _Observer(_ChildProcessObserver):
    """Ends this process and those that it launched when one of these has failed, unless it ends by itself."""

    def __init__(self, launched: list[subprocess.Popen[bytes]], last_words: LastWords) -> None:
        super().__init__(os.getpid(), launched)
        self._last_words = last_words

    def _run(self) -> bool:
        if any(process.poll() for process in self._child_processes):
            time.sleep(PATIENCE_SECONDS)  # this thread ends with the process, should that come sooner
        return super()._run()

    def _terminate_all(self) -> None:
        if words := self._last_words():
            print(words, file=sys.stderr, flush=True)
        super()._terminate_all()


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts a process for every rank of the node from this one.

    Args:
        strategy: see `_MultiProcessingLauncher`; so is the next.
        start_method: "spawn" or "fork".
        last_words: of a rank in a hang that goes on; they end the exception that this process raises.
    """

    def __init__(self, strategy: ParallelStrategy, start_method: Any, last_words: LastWords) -> None:
        super().__init__(strategy, start_method=start_method)
        self._last_words = last_words

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """See `_MultiProcessingLauncher.launch`."""
        require_checkpoint(function, args, kwargs)
        return super().launch(partial(self._noting, function), *args, trainer=trainer, **kwargs)

    def _noting(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as exception:
            note(exception, self._last_words())
            raise


Launcher = ScriptLauncher | ProcessLauncher


def make_launcher(
    strategy: ParallelStrategy,
    environment: ClusterEnvironment,
    start_method: Any,
    processes: int,
    nodes: int,
    last_words: LastWords,
) -> Launcher:
    """The launcher for a start method. It says a rank's last words, which name who is behind in a hang.

    Raises:
        ValueError: a notebook, which is no script that could be run again, and whose functions cannot be imported.
    """
    if start_method == "fork":
        return ProcessLauncher(strategy, "fork", last_words)
    if _IS_INTERACTIVE and not environment.creates_processes_externally:
        how = "runs the script again" if start_method == "popen" else "imports the script anew"
        raise ValueError(
            f"start_method={start_method!r} {how} on every rank, but a notebook or a Python prompt is no script; pass "
            "start_method='fork' to the strategy (on GPUs, before anything in the notebook has used CUDA), or train on "
            "one device"
        )
    if start_method == "popen":
        return ScriptLauncher(environment, processes, nodes, last_words)
    return ProcessLauncher(strategy, start_method, last_words)


def require_checkpoint(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raises before any process is started if the run would begin with a file that is not there.

    Args:
        function: what the processes will run; perhaps one of the trainer's with an argument `ckpt_path`.
        args: what it is called with.
        kwargs: likewise.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("ckpt_path")
    if path is None or str(path).partition(":")[0] in KEYWORDS or "://" in str(path) or Path(path).exists():
        return
    raise FileNotFoundError(f"ckpt_path={str(path)!r}: there is no checkpoint; nothing was started")
