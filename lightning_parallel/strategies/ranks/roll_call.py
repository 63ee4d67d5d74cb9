"""The roll call before ranks form a group: torch waits for its timeout and does not say which rank is missing."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_parallel.collectives.functional import answer_of, notes_at
from lightning_parallel.strategies.lightning_package import ClusterEnvironment, SLURMEnvironment

REPORT_SECONDS = 20.0
"""After this time a waiting rank prints which ranks are missing; then after twice as long, and so on."""
CONNECT_SECONDS, POLL_SECONDS, ANSWER_SECONDS = 10.0, 0.2, 30.0


def wait_for_all(environment: ClusterEnvironment, timeout: timedelta) -> Any:
    """Wait until all ranks have started, and report on stderr which have not. Collective over all ranks.

    Returns:
        The store in which the ranks joined. Keep it until the group is formed: rank 0's process serves it.

    Raises:
        RuntimeError: a rank has not joined within the timeout, or the process that serves the store has ended.
    """
    rank, ranks, limit = environment.global_rank(), environment.world_size(), timeout.total_seconds()
    address = f"{environment.main_address}:{environment.main_port}"
    began, report, hint = time.monotonic(), REPORT_SECONDS, ""
    if isinstance(environment, SLURMEnvironment):
        hint = "; under SLURM, srun starts all ranks: srun python SCRIPT"
        report = report if "SLURM_STEP_ID" in os.environ else 0.0  # srun sets it in all processes that it starts
    store, round_ = None, 0
    while True:
        if store is None:
            store, round_ = _join(environment)
        if store is not None and _all_have_joined(store, round_, address):
            return store
        waited = time.monotonic() - began
        if waited > min(report, limit):
            missing = [0] if store is None else [n for n in range(ranks) if store.add(f"joins_of_{n}", 0) < round_]
            named = ", ".join(map(str, missing[:8])) + " and more" * (len(missing) > 8)
            late = f"rank {named} of {ranks} has not joined at {address} after {waited:.0f} s{hint}"
            if waited > limit:
                raise RuntimeError(f"{late}; that is the strategy's timeout: look at what rank {named} printed last")
            print(f"[rank{rank}] {late}; still waiting", file=sys.stderr, flush=True)
            report = max(2 * report, REPORT_SECONDS)
        time.sleep(POLL_SECONDS)


def _join(environment: ClusterEnvironment) -> tuple[Any, int]:
    """The store, and how often this rank has joined in it; None where rank 0 does not serve it yet."""
    rank, ranks = environment.global_rank(), environment.world_size()
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    name = f"lightning_parallel_joins_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = notes_at(name, environment.main_address, environment.main_port, serves, CONNECT_SECONDS)
    except dist.DistNetworkError:
        if serves:
            raise
        return None, 0
    round_ = store.add(f"joins_of_{rank}", 1)  # above 1 where the store outlives a process group
    if store.add("joins", 1) >= round_ * ranks:
        store.set(f"all_{round_}", "")
    return store, round_


def _all_have_joined(store: Any, round_: int, address: str) -> bool:
    try:
        return answer_of(lambda: bool(store.check([f"all_{round_}"])), ANSWER_SECONDS)
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"the process at {address} ended, or is stopped, while ranks joined: that is rank 0, or torchrun on the "
            "first node; look at what it printed last"
        ) from error
