"""The warm pool: failures, deaths and hangs of ranks are named and end, and nothing leaks from test to test."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.ranks import POOL, RanksFailed, ranks, run_on_ranks
from tests.trainers import trainer


def describe_world(offset: int = 0) -> tuple[int, int, int, str]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), os.environ["LOCAL_RANK"]


def test_results_come_in_the_order_of_the_ranks() -> None:
    for n in (4, 3):
        total = n * (n - 1) // 2 + n * 10
        assert run_on_ranks(n, describe_world, offset=10) == [(rank, n, total, str(rank)) for rank in range(n)]


def fail_on(rank: int, how: Callable[[], object]) -> None:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def raise_assertion() -> None:
    found = torch.ones(2)
    assert found.sum() == 3


def failure_of(n: int, rank: int, how: Callable[[], object], **limits: float) -> str:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(n, fail_on, rank, how, **limits)
    assert run_on_ranks(n, describe_world)[0][:2] == (0, n), "the pool does not work after a failure"
    return str(caught.value)


def test_failing_rank_is_named_first_and_frees_the_others() -> None:
    run_on_ranks(4, describe_world)
    before = [member.process.pid for member in POOL.members]
    text = failure_of(4, 2, raise_assertion)
    assert text.startswith("==== rank 2 failed in phase 'body' ====\nTraceback")
    assert "assert found.sum() == 3" in text
    assert "found = tensor([1., 1.])" in text
    assert "rank 2 was here" in text
    assert text.count("Traceback") == 1, "the others fail because rank 2 left, which takes one line"
    assert sorted(re.findall(r"\d", "".join(re.findall("==== ranks? (.*) failed", text)))) == ["0", "1", "2", "3"]
    assert [member.process.pid for member in POOL.members] == before


ENDS: dict[str, tuple[Callable[[], object], dict[str, float], list[str]]] = {
    "crashes": (
        lambda: signal.raise_signal(signal.SIGSEGV),  # to the thread that runs this
        {},
        ["rank 1 lost in phase 'body' ====\nthe process died (signal SIGSEGV)", "in fail_on"],
    ),
    "calls one collective more": (
        dist.barrier,
        {"timeout": 2},
        ["rank 1 failed in phase 'body'", "rank 0: no failure", "Timed out waiting 2000ms"],
    ),
    "in a group made later": (lambda: dist.barrier(dist.new_group([1, 0])), {"timeout": 1}, ["1000ms"]),
    "is stuck": (
        lambda: time.sleep(100),
        {"limit": 1},
        ["rank 1 lost in phase 'body'", "still running after 1.", "in <lambda>"],
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_rank_that_is_lost_or_waits_is_told(how: str) -> None:
    act, limits, said = ENDS[how]
    text = failure_of(2, 1, act, **limits)
    assert [part for part in said if part not in text] == [], text


class CannotArrive:
    """Rank 1 cannot read it: the other one waits for a group with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, ()


def arrive() -> None:
    assert multiprocessing.current_process().name == "rank0"


class Careless:
    def __del__(self) -> None:
        raise RuntimeError("lost in a finalizer")


def test_failures_outside_of_the_body_are_told() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 failed in phase 'import'"):
        run_on_ranks(2, print, CannotArrive(), timeout=1)
    assert run_on_ranks(2, dist.get_world_size) == [2, 2]
    with pytest.raises(RanksFailed, match="failed in phase 'result'"):
        run_on_ranks(1, lambda: dist.group.WORLD)
    with pytest.raises(RanksFailed, match=r"(?s)phase 'teardown'.*lost in a finalizer"):
        run_on_ranks(1, lambda: Careless() and None)


@pytest.mark.filterwarnings("ignore:known")
@ranks(1)
def test_warnings_are_errors_on_ranks_but_for_filtered_ones() -> None:
    warnings.warn("known", UserWarning, stacklevel=1)
    with pytest.raises(UserWarning, match="beware"):
        warnings.warn("beware", UserWarning, stacklevel=1)


def leave_traces() -> None:
    trainer("ddp", max_steps=3).fit(BoringModel())
    os.environ["LEFT"] = "behind"
    os.environ.pop("MASTER_PORT")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.chdir("/")


def traces() -> tuple[object, ...]:
    names = [name for name in os.environ if name.startswith(("PL_", "LEFT", "MASTER"))]
    state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed(), float(torch.rand(()))
    return sorted(names), signal.getsignal(signal.SIGTERM), *state, Path.cwd()


def test_nothing_is_left_for_the_next_test() -> None:
    before = run_on_ranks(2, traces)
    run_on_ranks(2, leave_traces)
    assert run_on_ranks(2, traces) == before


SESSION = """
import multiprocessing, threading, time
from tests.rank_process import leave_with_the_pool

def be_busy():
    threading.Thread(target=leave_with_the_pool, daemon=True).start()
    print("busy", flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    multiprocessing.get_context("forkserver").Process(target=be_busy).start()
"""


def test_ranks_die_with_their_session(tmp_path: Path) -> None:
    """Also when the session gets no chance to clean up, and a rank is busy."""
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True) as session:
        assert session.stdout.readline() == "busy\n"
        session.kill()
        session.communicate(timeout=300)  # until the last process that could write to it is gone
