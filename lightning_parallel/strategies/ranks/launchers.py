"""Launchers start the processes of a run; what is known to be wrong before is said once, and nothing is started."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

KEYWORDS = ("last", "best", "hpc", "registry")  # which Lightning finds a file for


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script again, once for every further rank of the node."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """See `_SubprocessScriptLauncher.launch`."""
        if not self.cluster_environment.creates_processes_externally:
            require_checkpoint(function, args, kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts a process for every rank of the node from this one."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """See `_MultiProcessingLauncher.launch`."""
        require_checkpoint(function, args, kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)


Launcher = ScriptLauncher | ProcessLauncher


def make_launcher(
    strategy: ParallelStrategy, environment: ClusterEnvironment, start_method: Any, processes: int, nodes: int
) -> Launcher:
    """The launcher for a start method.

    Raises:
        ValueError: a notebook, which is no script that could be run again, and whose functions cannot be imported.
    """
    if start_method == "fork":
        return ProcessLauncher(strategy, start_method="fork")
    if _IS_INTERACTIVE and not environment.creates_processes_externally:
        how = "runs the script again" if start_method == "popen" else "imports the script anew"
        raise ValueError(
            f"start_method={start_method!r} {how} on every rank, but a notebook or a Python prompt is no script; pass "
            "start_method='fork' to the strategy (on GPUs, before anything in the notebook has used CUDA), or train on "
            "one device"
        )
    if start_method == "popen":
        return ScriptLauncher(environment, processes, nodes)
    return ProcessLauncher(strategy, start_method=start_method)


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
