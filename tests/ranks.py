"""A warm pool of gloo processes: `@ranks(4)` runs a test's body on four of them.

The processes start once per session, forked from one that has already imported the libraries, and live between tests.
Each test gets a fresh process group with a short timeout; a failure on any rank fails the test and names the rank.
"""

import atexit
import contextlib
import functools
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests import rank_process
from tests.rank_process import Outcome, Seat, Task

MAX_RANKS = 8
TIMEOUT = 40.0  # of one collective: a rank may compile while its neighbour waits
LIMIT = 240.0  # of a whole body, on a slow machine too
GRACE = 2.0  # for the others, once a rank has failed
MOST_THREADS = 64  # of a rank between tests: torch 2.11 keeps meshes for ever, whose groups wake up 100 times a second
End = tuple[int, Outcome]
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "lightning.pytorch",
    "torchmetrics.classification",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "lightning_parallel",
    "tests.curves",
]


class RanksFailed(AssertionError):  # noqa: N818
    """Says which ranks failed, where, and what they printed."""


def ranks(n: int, *, timeout: float = TIMEOUT, limit: float = LIMIT) -> Callable[[Callable], Callable]:
    """Makes a test run on `n` ranks; its arguments (fixtures, parameters) must be picklable."""

    def decorate(body: Callable) -> Callable:
        if rank_process.on_a_rank:
            return body
        POOL.warm_up()

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            failure = None
            try:
                run_on_ranks(n, body, *args, timeout=timeout, limit=limit, **kwargs)
            except RanksFailed as error:
                failure = str(error)
            if failure:
                pytest.fail(failure, pytrace=False)

        return test

    return decorate


def run_on_ranks(
    n: int, function: Callable, *args: Any, timeout: float = TIMEOUT, limit: float = LIMIT, **kwargs: Any
) -> list[Any]:
    """Calls the function on `n` ranks at once and returns their results in the order of the ranks."""
    if not 1 <= n <= MAX_RANKS:
        raise ValueError(f"n={n}, but the pool has 1 to {MAX_RANKS} ranks")
    return POOL.run(n, rank_process.dumps((function, args, kwargs)), timeout, limit)


def on_one(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The function's result in one process; it is computed once per session."""
    return begun_on_one(function, *args, **kwargs).result()


def begun_on_one(function: Callable, *args: Any, **kwargs: Any) -> Future[Any]:
    """What `on_one` returns, while others run: ranks wait for each other, and leave a part of the cores idle."""
    return ALONE.begun(rank_process.dumps((function, args, kwargs)))


@dataclass(frozen=True)
class Member:
    """One process of the pool, seen from outside."""

    rank: int
    process: BaseProcess
    connection: Connection
    log: Path
    phases: list[str] = field(default_factory=list)

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it died, as receive() will tell
            self.connection.send_bytes(message)

    def receive(self) -> Outcome | None:
        """Takes one message: how the rank ended, or only the phase that it enters."""
        try:
            message = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE)
            code = self.process.exitcode
            reason = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
            return self.lost(f"the process died ({reason})")
        if isinstance(message, Outcome):
            return message
        self.phases.append(message)
        return None

    def threads(self) -> int:
        folder = Path(f"/proc/{self.process.pid}/task")
        return len(list(folder.iterdir())) if folder.exists() else 0

    def lost(self, summary: str) -> Outcome:
        return Outcome("lost", self.phases[-1] if self.phases else "start", text=summary, summary=summary)

    def stuck(self, seconds: float) -> Outcome:
        """Makes the rank write its stacks into its log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, rank_process.STACKS)
            time.sleep(0.2)
        return self.lost(f"still running after {seconds:.1f} s; the output ends with its stacks")

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


@dataclass
class Pool:
    """The processes, the store through which they meet, and a folder for what they write."""

    members: list[Member] = field(default_factory=list)
    folder: Path | None = None
    store: Any = None
    tasks: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Starts the process that the ranks are forked from; it imports while this one goes on."""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        get_context("forkserver").set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()

    def run(self, n: int, call: bytes, timeout: float, limit: float, filters: Sequence[Any] = ()) -> list[Any]:
        members = self._first(n)
        self.tasks += 1
        sizes = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        filters = list(filters or warnings.filters)
        task = Task(self.tasks, n, timeout, filters, self.environment | sizes, list(sys.path), call)
        usable = False
        try:
            ends = exchange(members, pickle.dumps(task), limit)
            failure = describe(members, ends)
            usable = all(outcome.usable for _, outcome in ends) and max(map(Member.threads, members)) < MOST_THREADS
        finally:
            if not usable:
                self.kill()
        shutil.rmtree(self.environment["RANKS_SCRATCH"], ignore_errors=True)
        if failure:
            raise RanksFailed(failure)
        for _, outcome in ends:
            if outcome.status == "skipped":
                pytest.skip(outcome.text)
        return [outcome.value for _, outcome in sorted(ends[:n], key=lambda end: end[0])]

    def _first(self, n: int) -> list[Member]:
        if self.store is None:
            self._open()
        for rank in range(len(self.members), n):
            self.members.append(self._start(rank))
        return self.members[:n]

    def _open(self) -> None:
        import torch.distributed as dist

        self.warm_up()
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "RANKS_SCRATCH": str(self.folder / "scratch"),
        }
        atexit.register(self.close)

    def _start(self, rank: int) -> Member:
        context = get_context("forkserver")
        ours, theirs = context.Pipe()
        seat = Seat(rank, self.folder / f"rank{rank}.log", self.store.port)
        process = context.Process(target=rank_process.serve, args=(theirs, seat), name=f"rank{rank}")
        process.start()
        theirs.close()
        return Member(rank, process, ours, seat.log)

    def kill(self) -> None:
        for member in self.members:
            member.kill()
        self.members.clear()

    def close(self) -> None:
        """Leaves nothing behind; a later run would start anew."""
        self.kill()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.store = self.folder = None
        atexit.unregister(self.close)


@dataclass
class Alone:
    """A process beside the ranks for what runs in one; each call once per session."""

    pool: Pool = field(default_factory=Pool)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    calls: dict[bytes, Future[Any]] = field(default_factory=dict)

    def begun(self, call: bytes) -> Future[Any]:
        if call not in self.calls:
            self.calls[call] = self.thread.submit(self._run, call, list(warnings.filters))
        return self.calls[call]

    def _run(self, call: bytes, filters: Sequence[Any]) -> Any:
        return self.pool.run(1, call, TIMEOUT, LIMIT, filters)[0]

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        self.pool.close()


POOL = Pool()
ALONE = Alone()


def exchange(members: Sequence[Member], task: bytes, limit: float) -> list[End]:
    """Task out, ends in; then all are let go together, as nobody may leave a group that is still in use."""
    ends = send_and_gather(members, task, limit)
    if all(outcome.status != "lost" for _, outcome in ends):
        ends += send_and_gather(members, b"leave", limit)
    return ends


def send_and_gather(members: Sequence[Member], message: bytes, limit: float) -> list[End]:
    """How each rank ended; once one has failed, the others get only a short grace."""
    for member in members:
        member.send(message)
    start = time.monotonic()
    deadline, pending, ends = start + limit, list(members), []
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = connections.wait([member.connection for member in pending], left)
        for member in [member for member in pending if member.connection in ready]:
            if outcome := member.receive():
                ends.append((member.rank, outcome))
                pending.remove(member)
                if outcome.status in ("failed", "lost"):
                    deadline = min(deadline, time.monotonic() + GRACE)
    return ends + [(member.rank, member.stuck(time.monotonic() - start)) for member in pending]


def describe(members: Sequence[Member], ends: Sequence[End]) -> str:
    """The failures, the first one first, equal ones once, and consequences of others last; empty if no rank failed."""
    failed = [(rank, outcome) for rank, outcome in ends if outcome.status in ("failed", "lost")]
    failed.sort(key=lambda end: (end[1].consequence, end[1].ended))
    if not failed:
        return ""
    alike: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, outcome in failed:
        text = outcome.summary if outcome.consequence else outcome.text.rstrip()
        alike[outcome.status, outcome.phase, text].append(rank)
    lines = []
    for (status, phase, text), found in alike.items():
        lines += [f"==== {named(found)} {status} in phase {phase!r} ====", text]
        said = {rank: members[rank].output().rstrip() for rank in found}
        lines += [f"---- output of rank {rank} ----\n{output}" for rank, output in said.items() if output]
    if fine := {member.rank for member in members} - {rank for rank, _ in failed}:
        lines.append(f"==== {named(sorted(fine))}: no failure ====")
    return "\n".join(lines)


def named(found: Sequence[int]) -> str:
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, sorted(found)))}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
