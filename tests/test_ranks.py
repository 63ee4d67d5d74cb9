"""Proves the bench: results, failures, deaths and hangs on ranks, and that nothing leaks from test to test."""

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
from lightning.pytorch import seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.ranks import MAX_RANKS, POOL, RanksFailed, ranks, run_on_ranks
from tests.trainers import trainer


def describe_world(offset: int = 0) -> tuple[int, int, int, str]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), os.environ["LOCAL_RANK"]


@pytest.mark.parametrize("n", [1, 2, 4, 8, 3])
def test_results_come_in_the_order_of_the_ranks(n: int) -> None:
    total = n * (n - 1) // 2 + n * 10
    assert run_on_ranks(n, describe_world, offset=10) == [(rank, n, total, str(rank)) for rank in range(n)]


def test_pool_has_a_size() -> None:
    with pytest.raises(ValueError, match=f"n=9, but the pool has 1 to {MAX_RANKS} ranks"):
        run_on_ranks(9, describe_world)


@pytest.mark.parametrize("factor", [2, 3])
@ranks(2)
def test_fixtures_and_parameters_reach_the_ranks(tmp_path: Path, factor: int) -> None:
    (tmp_path / str(dist.get_rank())).write_text(str(factor))
    dist.barrier()
    assert (tmp_path / str(1 - dist.get_rank())).read_text() == str(factor)


class TestMethods:
    factor = 3

    @ranks(2)
    def test_methods_run_on_ranks(self) -> None:
        assert self.factor == 3
        assert dist.get_world_size() == 2


def test_local_functions_run_on_ranks() -> None:
    weight = torch.arange(3.0)

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    got = run_on_ranks(2, lambda shift: double(weight) + shift, 1)
    torch.testing.assert_close(got, [2 * weight + 1] * 2)


def test_skips_reach_pytest() -> None:
    with pytest.raises(pytest.skip.Exception, match="said so on a rank"):
        run_on_ranks(2, pytest.skip, "said so on a rank")


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
    before = [member.process.pid for member in POOL.members]
    text = failure_of(4, 2, raise_assertion)
    assert text.startswith("==== rank 2 failed in phase 'body' ====\nTraceback")
    assert "assert found.sum() == 3" in text
    assert "found = tensor([1., 1.])" in text
    assert "rank 2 was here" in text
    assert text.count("Traceback") == 1, "the others fail because rank 2 left, which takes one line"
    assert sorted(re.findall(r"\d", "".join(re.findall("==== ranks? (.*) failed", text)))) == ["0", "1", "2", "3"]
    assert [member.process.pid for member in POOL.members] == before


def test_equal_failures_are_told_once() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(4, raise_assertion)
    assert "ranks 0, 1, 2, 3 failed in phase 'body'" in str(caught.value)
    assert str(caught.value).count("Traceback") == 1


def test_dying_rank_is_named() -> None:
    assert "rank 1 lost in phase 'body' ====\nthe process died (exit code 3)" in failure_of(2, 1, lambda: os._exit(3))


def test_crash_shows_the_stack() -> None:
    text = failure_of(2, 1, lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert "the process died (signal SIGSEGV)" in text
    assert "in fail_on" in text


def test_mismatched_collective_ends_by_its_timeout() -> None:
    text = failure_of(2, 1, dist.barrier, timeout=2)
    assert "rank 1 failed in phase 'body'" in text
    assert "rank 0: no failure" in text
    assert "Timed out waiting 2000ms" in text


def test_groups_made_later_have_the_same_timeout() -> None:
    text = failure_of(2, 1, lambda: dist.barrier(dist.new_group([1, 0])), timeout=1)
    assert "1000ms" in text


def test_stuck_rank_shows_its_stack() -> None:
    text = failure_of(2, 0, lambda: time.sleep(100), limit=1)
    assert "rank 0 lost in phase 'body'" in text
    assert "still running after 1." in text
    assert "in <lambda>" in text


class CannotArrive:
    """Rank 1 cannot read it: the other one waits for a group with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, ()


def arrive() -> None:
    assert multiprocessing.current_process().name == "rank0"


def test_ranks_whose_group_came_to_nothing_are_replaced() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 failed in phase 'import'"):
        run_on_ranks(2, print, CannotArrive(), timeout=1)
    assert run_on_ranks(2, dist.get_world_size) == [2, 2]


def test_result_that_cannot_travel_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="failed in phase 'result'"):
        run_on_ranks(1, lambda: dist.group.WORLD)


@ranks(1)
def test_warnings_are_errors_on_ranks() -> None:
    with pytest.raises(UserWarning, match="beware"):
        warnings.warn("beware", UserWarning, stacklevel=1)


@pytest.mark.filterwarnings("ignore:beware")
@ranks(1)
def test_filters_of_a_test_hold_on_ranks() -> None:
    warnings.warn("beware", UserWarning, stacklevel=1)


class Careless:
    def __del__(self) -> None:
        raise RuntimeError("lost in a finalizer")


def test_errors_in_finalizers_fail() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)phase 'teardown'.*lost in a finalizer"):
        run_on_ranks(1, lambda: Careless() and None)


def fit_boring(strategy: str) -> dict[str, torch.Tensor]:
    seed_everything(7)
    model = BoringModel()
    run = trainer(strategy, max_steps=3)
    run.fit(model)
    assert run.global_step == 3
    assert (run.world_size, run.global_rank) == (dist.get_world_size(), dist.get_rank())
    return model.state_dict()


@pytest.mark.parametrize(("n", "strategy"), [(1, "auto"), (2, "ddp"), (4, "ddp")])
def test_trainers_run_in_the_pool(n: int, strategy: str) -> None:
    first, *others = run_on_ranks(n, fit_boring, strategy)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def leave_traces() -> None:
    fit_boring("ddp")
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
