"""Variants of one training, measured side by side: short fits in the same warm processes, one after the other.

Every round runs every variant once, each other round in reverse order, so that a change of the machine's load meets all
of them. What is reported is the median of the ratios within rounds. CPU time is that of all threads of all ranks: on a
shared machine it says more than wall time, which also counts the waiting for a core.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader, Dataset

from tests.ranks import run_on_ranks
from tests.trainers import trainer

WARM_UP = 3
ROUNDS = int(os.environ.get("ROUNDS", "20"))


@dataclass(frozen=True)
class Variant:
    """One way to train: a model and the strategy that trains it; both are made anew for every fit."""

    make_module: Callable[[], LightningModule]
    make_strategy: Callable[[], Strategy | str]
    devices: int | None = None


@dataclass(frozen=True)
class Cost:
    """What one step took, in seconds: CPU time of all threads, that of the one with the user's code, wall time."""

    cpu: float
    host: float
    wall: float

    @classmethod
    def now(cls) -> Cost:
        return cls(time.process_time(), time.thread_time(), time.perf_counter())

    def since(self, start: Cost, steps: int) -> Cost:
        parts = ((now - then) / steps for now, then in zip(astuple(self), astuple(start), strict=True))
        return Cost(*parts)

    @classmethod
    def of_ranks(cls, costs: Sequence[Cost]) -> Cost:
        """CPU time of the mean rank, wall time of the slowest."""
        cpu, host = (statistics.mean(getattr(cost, clock) for cost in costs) for clock in ("cpu", "host"))
        return cls(cpu, host, max(cost.wall for cost in costs))


Rounds = Sequence[Mapping[str, Cost]]


class Stopwatch(Callback):
    """Measures the steps of a fit but for the first ones."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            dist.barrier()
            self.start = Cost.now()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
        if rest[-1] == WARM_UP + self.steps - 1:
            self.cost = Cost.now().since(self.start, self.steps)


class Repeated(Dataset):
    """One sample, as often as it is asked for: loading data must not be what is measured."""

    def __init__(self, shape: Sequence[int], samples: int) -> None:
        self.sample, self.samples = torch.randn(*shape), samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def fit(variant: Variant, shape: Sequence[int], batch: int, steps: int) -> Cost:
    """One short fit; the cost is this rank's."""
    torch.manual_seed(0)
    watch = Stopwatch(steps)
    data = Repeated(shape, batch * (WARM_UP + steps) * dist.get_world_size())
    run = {"barebones": True, "log_every_n_steps": None, "max_epochs": 1, "limit_train_batches": WARM_UP + steps}
    quiet = trainer(variant.make_strategy(), variant.devices, callbacks=[watch], **run)
    quiet.fit(variant.make_module(), DataLoader(data, batch))
    return watch.cost


def interleave(
    variants: Mapping[str, Variant], shape: Sequence[int], batch: int, steps: int, rounds: int
) -> list[dict[str, Cost]]:
    """On a rank: the costs of all variants in every round; the first round only warms up."""
    costs = []
    for number in range(rounds + 1):
        order = list(variants)[:: 1 if number % 2 else -1]
        measured = {name: fit(variants[name], shape, batch, steps) for name in order}
        costs.append({name: measured[name] for name in variants})
    return costs[1:]


def measure(
    variants: Mapping[str, Variant], *, ranks: int, shape: Sequence[int], batch: int, steps: int, rounds: int = ROUNDS
) -> list[dict[str, Cost]]:
    """The costs of every variant in every round."""
    arguments = (dict(variants), tuple(shape), batch, steps, rounds)
    by_rank = run_on_ranks(ranks, interleave, *arguments, timeout=300.0, limit=3600.0)
    return [
        {name: Cost.of_ranks([c[name] for c in costs]) for name in variants} for costs in zip(*by_rank, strict=True)
    ]


# ---------------------------------------------------------------- tables


def ratios(rounds: Rounds, name: str, base: str, clock: str) -> list[float]:
    return [getattr(costs[name], clock) / getattr(costs[base], clock) for costs in rounds]


def milliseconds(rounds: Rounds, name: str, clock: str) -> str:
    return f"{1000 * statistics.median(getattr(costs[name], clock) for costs in rounds):.3f}"


def spread(values: Sequence[float]) -> str:
    """The median and the quantiles 0.1 and 0.9."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return f"{statistics.median(values):.3f} [{low:.2f}, {high:.2f}]"


def table_of_ratios(rounds: Rounds, base: str, targets: Mapping[str, str]) -> str:
    """What a step costs, as ratios to one of the variants."""
    rows = [["variant", f"CPU time / {base}", "wall time", "CPU ms a step", "target"]]
    for name in rounds[0]:
        cpu, wall = (spread(ratios(rounds, name, base, clock)) for clock in ("cpu", "wall"))
        rows.append([name, cpu, wall, milliseconds(rounds, name, "cpu"), targets.get(name, "")])
    return markdown(rows)


def table_of_differences(rounds: Rounds, base: str, targets: Mapping[str, str]) -> str:
    """What a step costs the thread that runs it, in milliseconds more than one of the variants."""
    rows = [["variant", f"ms over {base}", "ms a step", "all threads, ms", "target"]]
    for name in rounds[0]:
        over = spread([1000 * (costs[name].host - costs[base].host) for costs in rounds])
        absolute = [milliseconds(rounds, name, clock) for clock in ("host", "cpu")]
        rows.append([name, over, *absolute, targets.get(name, "")])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    head, *lines = ["| " + " | ".join(row) + " |" for row in padded]
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines])


def verdict(rounds: Rounds, same: str, base: str, clock: str = "cpu") -> str:
    """Whether the run counts: two runs of one variant must cost the same."""
    ratio = statistics.median(ratios(rounds, same, base, clock))
    said = "counts" if 0.95 <= ratio <= 1.05 else "is VOID (0.95-1.05 allowed)"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{len(rounds)} rounds, torch {torch.__version__}, load {load}; A/A {ratio:.3f}: the run {said}"


def show(capsys: pytest.CaptureFixture[str], title: str, parts: list[str]) -> None:
    with capsys.disabled():
        print("\n\n" + "\n\n".join([title, *parts]) + "\n")
