"""A ring's messages travel while a rank attends to what has come: told by a clock that messages and kernels set.

Nothing is timed. Kernels only move the clock by what they would compute, and messages by a latency and their bytes, on
a wire for each direction; so the figures are those of the order in which a rank begins, waits and computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives import circle, functional
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.context_parallel.attention import ContextAttention, merged
from lightning_parallel.techniques.context_parallel.attention.kernels import Given, Gradients, How, Plain
from lightning_parallel.techniques.divided.tensor import Divided

CHUNK = 4
BACKWARD = 2.5
"""Products of a fused backward over those of its forward."""


@dataclass(eq=False)
class Wire:
    free: float = 0.0
    busy: float = 0.0
    longest: float = 0.0


@dataclass(eq=False)
class Clock:
    """The time of one rank; a score takes one unit."""

    pace: float
    latency: float
    now: float = 0.0
    computed: float = 0.0
    wires: tuple[Wire, Wire] = field(default_factory=lambda: (Wire(), Wire()))

    def compute(self, time: float) -> None:
        self.now, self.computed = self.now + time, self.computed + time

    def begin(self, wire: Wire, elements: int) -> UnderWay:
        took = self.latency + elements * self.pace
        wire.free = max(wire.free, self.now) + took
        wire.busy, wire.longest = wire.busy + took, max(wire.longest, took)
        return UnderWay(self, wire.free)

    @property
    def messages(self) -> float:
        return max(wire.busy for wire in self.wires)

    @property
    def hop(self) -> float:
        return max(wire.longest for wire in self.wires)


@dataclass(eq=False)
class UnderWay:
    clock: Clock
    arrives: float

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.arrives)


@dataclass(eq=False)
class Group:
    """One rank of many, of which nothing comes but the time that it takes."""

    clock: Clock
    place: int
    count: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.count

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> UnderWay:
        return self.clock.begin(self.clock.wires[0], tensors[0].numel())

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> UnderWay:
        tensors[0].zero_()
        return self.clock.begin(self.clock.wires[1], tensors[0].numel())


def scores_of(given: Given) -> float:
    rows, keys = given.query.shape[-2], given.key.shape[-2]
    return rows * (rows + 1) / 2 if given.is_causal else rows * keys


def pass_through(monkeypatch: pytest.MonkeyPatch, clock: Clock, group: Group, is_causal: bool) -> tuple[Clock, Clock]:
    """The clocks of a forward and a backward of attention."""
    clocks = clock, Clock(clock.pace, clock.latency)

    def attend(given: Given, mask: Any) -> tuple[Tensor, Tensor, How]:
        clocks[0].compute(scores_of(given))
        return torch.zeros_like(given.query), given.query.new_zeros(given.query.shape[:-1]), How(Plain(), ())

    def attend_backward(gradient: Tensor, given: Given, *rest: Any) -> Gradients:
        clocks[1].compute(BACKWARD * scores_of(given))
        return torch.zeros_like(given.query), torch.zeros_like(given.key), torch.zeros_like(given.value)

    monkeypatch.setattr(functional, "uses_exchange", lambda _: True)
    monkeypatch.setattr(merged, "attend", attend)
    monkeypatch.setattr(merged, "attend_backward", attend_backward)
    ranks = Ranks(group, "sequence")  # type: ignore[arg-type]
    ranks.attention = ContextAttention("ring")
    elements = ranks.zigzag(2 * CHUNK * group.count)
    given = [Divided(torch.zeros(1, 1, elements.length, 1, requires_grad=True), {2: elements}) for _ in range(3)]
    out = F.scaled_dot_product_attention(*given, is_causal=is_causal)
    group.clock = clocks[1]
    out.own.sum().backward()
    return clocks


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_messages_hide_behind_attention(
    monkeypatch: pytest.MonkeyPatch, count: int, is_causal: bool, pace: float
) -> None:
    """A step takes what computing takes, or messages, and one hop: the gradients of what came last.

    Where messages take about as long as computing or longer, that hop cannot begin before the attention to what came
    last is done.
    """
    for rank in range(count):
        clock = Clock(pace, latency=1.0)
        for each in pass_through(monkeypatch, clock, Group(clock, rank, count), is_causal):
            assert each.messages > 0
            bound = 1.05 * max(each.computed, each.messages) + each.hop
            after_the_last = each.computed / count if each.messages > 0.8 * each.computed else 0.0
            assert each.now <= bound + after_the_last


def test_a_ring_that_waited_for_each_message_would_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = functional.exchange

    def at_once(*args: Any) -> Any:
        pending = exchange(*args)
        pending.wait()
        return pending

    monkeypatch.setattr(circle, "exchange", at_once)
    clock = Clock(2.0, latency=1.0)
    for each in pass_through(monkeypatch, clock, Group(clock, 0, 4), is_causal=True):
        assert each.now > 1.05 * max(each.computed, each.messages) + each.hop
