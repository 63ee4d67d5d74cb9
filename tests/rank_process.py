"""One process of the pool: it waits for a body, runs it in a fresh process group, reports, and forgets it."""

import contextlib
import faulthandler
import gc
import importlib
import logging
import marshal
import multiprocessing
import os
import pickle
import random
import reprlib
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

STACKS = signal.SIGUSR2
Status = Literal["ok", "failed", "skipped", "lost"]

on_a_rank = False


@dataclass(frozen=True)
class Task:
    """What the pool asks of a rank."""

    number: int
    world_size: int
    timeout: float
    filters: list[Any]
    environment: Mapping[str, str]
    search_path: list[str]
    call: bytes


@dataclass(frozen=True)
class Outcome:
    """How the body ended on one rank; `text` is a failure's traceback, a skip's reason or a lost rank's stacks."""

    status: Status
    phase: str
    value: Any = None
    text: str = ""
    summary: str = ""
    ended: float = field(default_factory=time.monotonic)

    @property
    def consequence(self) -> bool:
        """Whether the rank only failed because another one had left."""
        return " by peer" in self.summary or " failed first: " in self.summary

    @property
    def usable(self) -> bool:
        """Whether the rank can go on: torch counts a group that came to nothing, and its ranks then look for others."""
        return self.status != "lost" and not (self.status == "failed" and self.phase == "init")


@dataclass(frozen=True)
class Seat:
    """What stays the same from test to test for one rank."""

    rank: int
    log: Path
    store_port: int


class ByReference(pickle.Pickler):
    """Pickles functions by name, and those without one (lambdas, local functions) by their code and closure."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, types.FunctionType) or value in (look_up, rebuild):
            return NotImplemented
        if "<" not in value.__qualname__:
            return look_up, (value.__module__, value.__qualname__)
        closure = tuple(cell.cell_contents for cell in value.__closure__ or ())
        names = (value.__module__, value.__name__, value.__qualname__)
        return rebuild, (marshal.dumps(value.__code__), names, value.__defaults__, value.__kwdefaults__, closure)


def dumps(value: Any) -> bytes:
    buffer = BytesIO()
    ByReference(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def look_up(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def rebuild(code: bytes, names: tuple[str, str, str], defaults: Any, keyword_defaults: Any, closure: Any) -> Callable:
    module, name, qualname = names
    cells = tuple(types.CellType(content) for content in closure)
    namespace = vars(importlib.import_module(module))
    function = types.FunctionType(marshal.loads(code), namespace, name, defaults, cells)
    function.__qualname__ = qualname
    function.__kwdefaults__ = keyword_defaults
    return function


def serve(connection: Connection, seat: Seat) -> None:
    """Runs tasks until the pool closes the connection."""
    settle(seat)
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", seat.store_port, wait_for_workers=False, timeout=timedelta(seconds=20))
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        run(task, seat, store, connection)


def settle(seat: Seat) -> None:
    global on_a_rank
    import torch

    on_a_rank = True
    # A user's script starts loader workers by fork. The fork server that started this rank is inherited as the way to
    # start more; one of its own would outlive the rank.
    multiprocessing.set_start_method("fork", force=True)
    threading.Thread(target=leave_with_the_pool, name="lifeline", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=True)
    faulthandler.enable(file=2)
    faulthandler.register(STACKS, file=2, all_threads=True)
    torch.set_num_threads(1)
    share_a_device()
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    gc.freeze()  # the imported libraries never become garbage: a collection between tests then takes a millisecond


def share_a_device() -> None:
    """All groups over gloo use one device, whose thread comes last: it spins while who holds a lock waits for a core.

    A group's own device would have a thread more, which wakes up a hundred times a second.
    """
    from torch.distributed import ProcessGroupGloo

    before, make = threads(), ProcessGroupGloo.__init__
    device = ProcessGroupGloo.create_default_device()
    for thread in threads() - before:
        os.setpriority(os.PRIO_PROCESS, thread, 19)

    def make_with_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = [device], timeout, 2
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_with_device


def threads() -> set[int]:
    """Of this process, as far as the system tells."""
    folder = Path("/proc/self/task")
    return {int(each.name) for each in folder.iterdir()} if folder.exists() else set()


def leave_with_the_pool() -> None:
    os.read(multiprocessing.parent_process().sentinel, 1)
    os._exit(1)


def run(task: Task, seat: Seat, store: Any, connection: Connection) -> None:
    """A rank that failed leaves its group at once, which frees its peers; the others wait until all are done."""
    os.ftruncate(1, 0)
    ignored: list[str] = []
    with unchanged_process(), collected_exceptions(ignored):
        outcome = attempt(task, seat, store, connection)
        if outcome.status != "ok":
            leave_group()
        report(outcome, connection)
        connection.recv_bytes()
        connection.send_bytes(pickle.dumps("teardown"))
        leave_group()
    summary = ignored[0].splitlines()[-1] if ignored else ""
    end = Outcome("failed" if ignored else "ok", "teardown", text="\n".join(ignored), summary=summary)
    report(end, connection)


def attempt(task: Task, seat: Seat, store: Any, connection: Connection) -> Outcome:
    import pytest

    phase = "import"

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        connection.send_bytes(pickle.dumps(name))

    try:
        enter("import")
        sys.path[:] = task.search_path
        function, args, kwargs = pickle.loads(task.call)
        enter("init")
        prepare(task, seat)
        join_group(task, seat, store)
        enter("body")
        value = function(*args, **kwargs)
    except pytest.skip.Exception as reason:
        return Outcome("skipped", phase, text=str(reason))
    except BaseException as error:
        return failure(error, phase)
    return Outcome("ok", phase, value)


def prepare(task: Task, seat: Seat) -> None:
    import torch
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    os.environ.update(task.environment)
    os.environ.update({"RANK": str(seat.rank), "LOCAL_RANK": str(seat.rank)})
    rank_zero_only.rank = seat.rank
    faulthandler.disable()  # enabling what is enabled would leave the signals with what earlier tests imported
    faulthandler.enable(file=2)
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(task.filters):
        patterns = [getattr(each, "pattern", each) or "" for each in (message, module)]
        warnings.filterwarnings(action, patterns[0], category, patterns[1], line)
    forget_warnings()
    random.seed(0)
    torch.manual_seed(0)


def join_group(task: Task, seat: Seat, store: Any) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    timeout = timedelta(seconds=task.timeout)
    fresh = dist.PrefixStore(f"task{task.number}", store)
    fresh.set_timeout(timeout)
    # new_group() and device meshes do not inherit the timeout of the default group.
    distributed_c10d.default_pg_timeout = timeout
    dist.init_process_group("gloo", store=fresh, rank=seat.rank, world_size=task.world_size, timeout=timeout)
    # One whose body fails at once, and which leaves the group, would fail those that are still connecting.
    if fresh.add("joined", 1) == task.world_size:
        fresh.set("all", "joined")
    fresh.wait(["all"])


def leave_group() -> None:
    """Closes every connection, which takes that no object refers to a group any more."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor caches results that hold the mesh they were made on, and finds them by a mesh that looks the same.
    _clear_sharding_prop_cache()
    gc.collect()


def failure(error: BaseException, phase: str) -> Outcome:
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError) and not str(error):
        text += "where\n" + local_values(trace)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    clear_frames(error)  # they hold process groups, whose connections must close for the peers to notice
    return Outcome("failed", phase, text=text, summary=summary)


def local_values(trace: types.TracebackType | None) -> str:
    """Stands in for pytest's rewritten asserts, which a rank does not have."""
    if trace is None:
        return ""
    while trace.tb_next:
        trace = trace.tb_next
    short = reprlib.Repr()
    short.maxstring = short.maxother = 400
    return "".join(f"    {name} = {short.repr(value)}\n" for name, value in trace.tb_frame.f_locals.items())


def clear_frames(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def report(outcome: Outcome, connection: Connection) -> None:
    try:
        message = dumps(outcome)
    except Exception as error:
        message = dumps(failure(error, "result"))
    sys.stdout.flush()
    connection.send_bytes(message)


@contextlib.contextmanager
def collected_exceptions(into: list[str]) -> Iterator[None]:
    """Gathers what Python would only print: errors in finalizers and in threads."""

    def collect(event: Any) -> None:
        origin = getattr(event, "object", None) or getattr(event, "thread", None)
        lines = traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback)
        into.append(f"Exception ignored in {reprlib.repr(origin)}:\n{''.join(lines).rstrip()}")

    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = threading.excepthook = collect
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = before


@contextlib.contextmanager
def unchanged_process() -> Iterator[None]:
    """Undoes what Trainers and tests leave behind in a process."""
    import torch

    environment, folder, search_path = dict(os.environ), os.getcwd(), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings(), torch.enable_grad():
        yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.chdir(folder)
    sys.path[:] = search_path
    os.environ.clear()
    os.environ.update(environment)


def forget_warnings() -> None:
    """Lightning gives some warnings once per process, which would be once per session here."""
    for module in list(sys.modules.values()):
        cache = vars(module).get("warning_cache")
        if isinstance(cache, set):
            cache.clear()
