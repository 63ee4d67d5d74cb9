"""Simulated steps against the closed forms of the literature, bubble and peak activations of every schedule."""

import pytest

from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES, make_schedule
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import simulate

LAYOUTS = [(2, 8), (4, 8), (8, 16), (8, 64)]  # ranks and microbatches


def closed_bubble(name: str, p: int, m: int, v: int) -> float:
    """At equal costs of F, I and W."""
    if name in ("gpipe", "1f1b"):
        return (p - 1) / (m + p - 1)
    if name in ("interleaved_1f1b", "looped_bfs"):
        return (p - 1) / (v * m + p - 1)
    return (p - 1) / (3 * v * m + p - 1)


def closed_peak(name: str, p: int, m: int, v: int, rank: int) -> float:
    return {
        "gpipe": m,
        "looped_bfs": m,
        "1f1b": min(m, p - rank),
        "interleaved_1f1b": p + (p - 1 - 2 * rank) / v,
        "interleaved_zero_bubble": p,
        "zbv": p,
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), LAYOUTS)
def test_bubble_and_peak_are_the_closed_forms(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p, m)
    timeline = simulate(schedule)
    v = schedule.stages // p
    assert timeline.bubble == pytest.approx(closed_bubble(name, p, m, v), abs=1e-12)
    assert timeline.peak_activations == tuple(closed_peak(name, p, m, v, rank) for rank in range(p))


@pytest.mark.parametrize(("name", "bubble"), [("interleaved_zero_bubble", 0.093), ("zbv", 0.080)])
def test_unequal_gradients_leave_a_bubble(name: str, bubble: float) -> None:
    timeline = simulate(make_schedule(name, 8, 16), (1, 1.2, 0.8))
    assert timeline.bubble == pytest.approx(bubble, abs=5e-4)


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 1.5, 0.5), (2, 2, 2)], ids=str)
def test_waits_shrink_with_the_stages_of_a_rank(v: int, costs: tuple[float, float, float]) -> None:
    p, m = 4, 8
    full = sum(costs)
    for name in ("interleaved_1f1b", "looped_bfs"):
        step = simulate(make_schedule(name, p, m, v), costs).step
        assert step == pytest.approx(m * full + (p - 1) * full / v)
    step = simulate(make_schedule("interleaved_zero_bubble", p, m, v), costs).step
    assert step == pytest.approx(m * full + (p - 1) * (full - 2 * costs[2]) / v)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_beats_the_bound(name: str) -> None:
    p, m = 4, 8
    schedule = make_schedule(name, p, m)
    v = schedule.stages // p
    assert simulate(schedule, (1, 1.3, 0.7)).step >= m * 3 + (p - 1) / v - 1e-9


def test_one_rank_never_waits() -> None:
    for name in SCHEDULES:
        assert simulate(make_schedule(name, 1, 4)).bubble == pytest.approx(0)


def test_latency_delays_what_other_ranks_wait_for() -> None:
    schedule = make_schedule("gpipe", 3, 1)
    assert simulate(schedule, latency=0.5).step == simulate(schedule).step + 4 * 0.5
    assert simulate(make_schedule("zbv", 1, 2), latency=9).step == simulate(make_schedule("zbv", 1, 2)).step


def test_impossible_costs_are_refused() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"the times -1, 1, 1, 0 make no timeline"):
        simulate(schedule, (-1, 1, 1))
    with pytest.raises(ValueError, match=r"the times 0, 0, 0, 0 make no timeline"):
        simulate(schedule, (0, 0, 0))
    with pytest.raises(ValueError, match=r"the times 1, 1, 1, nan make no timeline"):
        simulate(schedule, latency=float("nan"))
