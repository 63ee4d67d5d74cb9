"""Launchers check what they can beforehand, start the processes of a run, and end them together."""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.collectives.functional import call_with_timeout, connect_store
from lightning_parallel.strategies.lightning_package import (
    ClusterEnvironment,
    ParallelStrategy,
    SIGTERMException,
    SLURMEnvironment,
    Trainer,
    _ChildProcessObserver,
    _get_default_process_group_backend_for_device,
    _interrupt,
    _MultiProcessingLauncher,
    _set_num_threads_if_needed,
    _SubprocessScriptLauncher,
)
from lightning_parallel.strategies.ranks.failures import EXIT_CODE
from lightning_parallel.values import add_note

REPORT_SECONDS = 20.0
"""Seconds until a waiting rank reports which ranks are missing; doubled after each report."""
CONNECT_SECONDS, POLL_SECONDS, ANSWER_SECONDS = 10.0, 0.2, 30.0
LAUNCHER = "LIGHTNING_PARALLEL_LAUNCHER"
"""Environment variable in which a launched script finds the process id of its launcher."""
KEYWORDS = ("last", "best", "hpc", "registry")  # values of `ckpt_path` for which Lightning finds a file
OBSERVER_SECONDS = 10.0
"""Seconds in which the launching process may fail by itself, with a reason, after a rank has failed; else it hangs."""
GRACE_SECONDS = 5.0
HangSummary = Callable[[], str]
"""Returns which rank is behind, in one line, while the run hangs; else ""."""


def wait_for_all(environment: ClusterEnvironment, timeout: timedelta) -> Any:
    """Wait until all ranks have started, and report on stderr which have not. Collective over all ranks.

    Without this, torch waits for its timeout when it forms the process group, and does not say which rank is missing.

    Returns:
        The store in which the ranks joined. Keep it until the process group is formed: rank 0's process serves it.

    Raises:
        RuntimeError: a rank has not joined within the timeout, or the process that serves the store has ended.
    """
    rank, ranks, limit = environment.global_rank(), environment.world_size(), timeout.total_seconds()
    address = f"{environment.main_address}:{environment.main_port}"
    began, report, hint = time.monotonic(), REPORT_SECONDS, ""
    if isinstance(environment, SLURMEnvironment):
        hint = "; under SLURM, srun starts all ranks: srun python SCRIPT"
        report = report if "SLURM_STEP_ID" in os.environ else 0.0  # not started by srun: report at once
    store, round_ = None, 0
    while True:
        if store is None:
            store, round_ = _join(environment)
        if store is not None and _all_have_joined(store, round_, address):
            return store
        waited = time.monotonic() - began
        if waited > min(report, limit):
            missing = [0] if store is None else [n for n in range(ranks) if store.add(f"joins_of_{n}", 0) < round_]
            listed = ", ".join(map(str, missing[:8])) + " and more" * (len(missing) > 8)
            late = f"rank {listed} of {ranks} has not joined at {address} after {waited:.0f} s{hint}"
            if waited > limit:
                raise RuntimeError(f"{late}; that is the strategy's timeout: look at what rank {listed} printed last")
            print(f"[rank{rank}] {late}; still waiting", file=sys.stderr, flush=True)
            report = max(2 * report, REPORT_SECONDS)
        time.sleep(POLL_SECONDS)


def _join(environment: ClusterEnvironment) -> tuple[Any, int]:
    """Join in the store; return it, and how often this rank has joined there. (None, 0) if nobody serves it yet."""
    rank, ranks = environment.global_rank(), environment.world_size()
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    name = f"lightning_parallel_joins_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = connect_store(name, environment.main_address, environment.main_port, serves, CONNECT_SECONDS)
    except dist.DistNetworkError:
        if serves:
            raise
        return None, 0
    round_ = store.add(f"joins_of_{rank}", 1)  # above 1 if the store has outlived an earlier process group
    if store.add("joins", 1) >= round_ * ranks:
        store.set(f"all_{round_}", "")
    return store, round_


def _all_have_joined(store: Any, round_: int, address: str) -> bool:
    try:
        return bool(call_with_timeout(ANSWER_SECONDS, store.check, [f"all_{round_}"]))
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"the process at {address} ended, or is stopped, while ranks joined: that is rank 0, or torchrun on the "
            "first node; look at what it printed last"
        ) from error


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script again for every further rank of the node; this process is local rank 0."""

    def __init__(self, environment: ClusterEnvironment, processes: int, nodes: int, summary: HangSummary) -> None:
        super().__init__(environment, processes, nodes)
        self._hang_summary = summary

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """See `_SubprocessScriptLauncher.launch`; unlike Lightning's, the observer also reports a hang."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            require_checkpoint(function, args, kwargs)
            os.environ[LAUNCHER] = str(os.getpid())
            self._call_children_scripts()
            _Observer(self.procs, self._hang_summary).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """End launched ranks. Lightning calls this after Ctrl-C, on which they end by themselves: wait a little."""
        if signum == signal.SIGKILL:
            end_children(self.procs)
        super().kill(signum)


class _Observer(_ChildProcessObserver):
    """Ends this process and the processes that it launched when one of these has failed."""

    def __init__(self, launched: list[subprocess.Popen[bytes]], summary: HangSummary) -> None:
        super().__init__(os.getpid(), launched)
        self._hang_summary = summary

    def _run(self) -> bool:
        if any(process.poll() for process in self._child_processes):
            time.sleep(OBSERVER_SECONDS)  # this is a daemon thread: the process may end sooner by itself
        return super()._run()

    def _terminate_all(self) -> None:
        if summary := self._hang_summary():
            print(summary, file=sys.stderr, flush=True)
        super()._terminate_all()
        os._exit(1)  # a container's process 1 cannot kill itself by a signal, as Lightning's observer does


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts a process for every rank of the node by "spawn" or "fork"; this process is none of the ranks."""

    def __init__(self, strategy: ParallelStrategy, start_method: Any, summary: HangSummary) -> None:
        super().__init__(strategy, start_method=start_method)
        self._hang_summary = summary

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """See `_MultiProcessingLauncher.launch`. On SIGINT, ask all ranks to stop together, and wait for them."""
        require_checkpoint(function, args, kwargs)
        try:
            return super().launch(self._run_rank, function, trainer, *args, trainer=trainer, **kwargs)
        except KeyboardInterrupt:
            for process in self.procs:
                process.terminate()  # a terminal has sent SIGINT to the ranks as well, and a second one would kill them
            for process in self.procs:
                process.join()
            raise

    def _run_rank(self, function: Callable[..., Any], trainer: Trainer | None, *args: Any, **kwargs: Any) -> Any:
        """Run the function; after a stop that ranks agreed on, run its hooks here: the launcher has no model."""
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, SIGTERMException) as exception:
            if trainer is not None:
                _interrupt(trainer, exception)
            sys.exit(EXIT_CODE)  # on KeyboardInterrupt, torch would end the process with exit code 0
        except BaseException as exception:
            add_note(exception, self._hang_summary())
            raise


def require_checkpoint(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise FileNotFoundError, before any process is started, if the argument `ckpt_path` names no existing file."""
    path = inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("ckpt_path")
    if path is None or str(path).partition(":")[0] in KEYWORDS or "://" in str(path) or Path(path).exists():
        return
    raise FileNotFoundError(f"ckpt_path={str(path)!r}: there is no checkpoint; nothing was started")


def end_children(processes: Sequence[subprocess.Popen[bytes] | BaseProcess]) -> None:
    """Give launched processes `GRACE_SECONDS` to end by themselves, so that they print their errors, then kill them."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        seconds = max(0.0, deadline - time.monotonic())
        with suppress(subprocess.TimeoutExpired):
            process.join(seconds) if isinstance(process, BaseProcess) else process.wait(seconds)
        process.kill()  # does nothing if the process has ended


def die_with(launcher: int | None) -> None:
    """Let the kernel kill this process when its launcher dies, even by SIGKILL; None undoes that. Linux only.

    Args:
        launcher: the launcher's process id, which is 1 for a container's command.
    """
    if not sys.platform.startswith("linux"):
        return
    death_signal = 0 if launcher is None else signal.SIGKILL
    ctypes.CDLL(None, use_errno=True).prctl(1, death_signal)  # PR_SET_PDEATHSIG
    if launcher not in (None, os.getppid()):  # the launcher died before the call
        print(f"process {launcher}, which launched this rank, has ended; this rank ends too", file=sys.stderr)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def backend_for(devices: Sequence[torch.device], chosen: str | None) -> str:
    """Return the backend for the devices of a node: the user's choice, else "gloo" for shared GPUs or the default.

    Raises:
        ValueError: NCCL was chosen for ranks that share a GPU.
    """
    shared = len(set(devices)) < len(devices) and devices[0].type != "cpu"
    if shared and "nccl" in (chosen or ""):
        raise ValueError(
            f"process_group_backend={chosen!r} does not work between ranks that share a device, but {len(devices)} "
            f"ranks share {len(set(devices))}; leave it out, or pass 'gloo', which goes through the host"
        )
    return chosen or ("gloo" if shared else _get_default_process_group_backend_for_device(devices[0]))
