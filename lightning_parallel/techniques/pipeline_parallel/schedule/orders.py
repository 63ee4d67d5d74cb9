"""Orders in which the ranks of a pipeline compute, one function per schedule.

Every function takes the rank, the number of ranks `p`, of microbatches `m` and of stages per rank `v`, and returns what
the rank computes, one action after another. Waiting follows from what an action needs, so it is not part of an order.
"""

from collections import Counter, deque

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741


def gpipe(rank: int, p: int, m: int, v: int) -> list[Action]:
    """All forwards, then all backwards (Y. Huang et al., GPipe, 2019, arXiv:1811.06965)."""
    return [Action(rank, kind, i) for kind in (F, B) for i in range(m)]


def one_forward_one_backward(rank: int, p: int, m: int, v: int) -> list[Action]:
    """As many forwards as stages follow, then a forward and a backward in turn, then the remaining backwards.

    PipeDream-Flush: D. Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, arXiv:2006.09503.
    """
    forwards, backwards = ([Action(rank, kind, i) for i in range(m)] for kind in (F, B))
    return _in_turn(forwards, backwards, warmup=p - 1 - rank)


def looped_bfs(rank: int, p: int, m: int, v: int) -> list[Action]:
    """All microbatches through one stage of the rank after the other, and back (J. Lamy-Poirier, arXiv:2211.05953)."""
    mine = range(rank, p * v, p)
    forwards = [Action(stage, F, i) for stage in mine for i in range(m)]
    return forwards + [Action(stage, B, i) for stage in reversed(mine) for i in reversed(range(m))]


def interleaved_1f1b(rank: int, p: int, m: int, v: int) -> list[Action]:
    """1F1B in which a round of microbatches visits all stages of the rank before the next round begins.

    D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, arXiv:2104.04473.
    """
    forwards, backwards = _rounds(F, rank, p, m, v), _rounds(B, rank, p, m, v)
    return _in_turn(forwards, backwards, warmup=(v - 1) * round_length(p, m) + 2 * (p - 1 - rank))


def interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Interleaved 1F1B whose weight gradients follow `rank` backwards later and fill the wait at the end.

    With one stage per rank this is ZB-H1 of P. Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv:2401.10241.
    """
    forwards, inputs = _rounds(F, rank, p, m, v), _rounds(I, rank, p, m, v)
    order = _in_turn(forwards, inputs, warmup=(v - 1) * round_length(p, m) + p - 1 - rank)
    weights, delay, found = deque(Action(each.stage, W, each.microbatch) for each in inputs), rank, list[Action]()
    for action in order:
        found.append(action)
        delay -= action.kind is I
        if action.kind is I and delay < 0:
            found.append(weights.popleft())
    return [*found, *weights]


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that remain."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def round_length(p: int, m: int) -> int:
    """The number of microbatches that an interleaved schedule takes through a stage before it turns to the next one.

    That is `p` if `m` is a multiple of `p`; otherwise the `m // p` rounds are a little longer.
    """
    return m // max(1, m // p)


def _rounds(kind: ActionKind, rank: int, p: int, m: int, v: int) -> list[Action]:
    """Round after round through the rank's stages, forwards from the first one, backwards from the last one."""
    length = round_length(p, m)
    stages = range(rank, p * v, p)[:: 1 if kind is F else -1]
    return [Action(s, kind, i) for first in range(0, m, length) for s in stages for i in range(first, first + length)]


def zbv(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Two stages per rank, down and up again like a V: the last stage lies with the first, and all ranks store alike.

    P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6 (arXiv:2401.10241).
    """
    down, up = rank, 2 * p - 1 - rank
    total = max(2 * p - 1, m)  # the order is that of a filled pipeline; microbatches from m on are removed at the end
    order: list[Action] = []
    count: Counter[tuple[int, ActionKind]] = Counter()

    def add(*work: tuple[int, ActionKind]) -> None:
        """Append each computation for the next microbatch of its stage."""
        for stage, kind in work:
            order.append(Action(stage, kind, count[stage, kind]))
            count[stage, kind] += 1

    add(*[(down, F)] * (2 * (p - rank) - 1))
    add(*[(up, F), (down, F)] * rank)
    add(*[(up, F), (up, I), (up, W)] * (p - rank))
    while count[up, F] < total:
        add(*[(down, F)] * (count[down, F] < total))
        add((down, I), (down, W), (up, F), (up, I), (up, W))
    add(*[(down, I), (up, I)] * rank)
    add(*[(down, I), (down, W)] * (p - rank))
    add(*[(up, W)] * (total - count[up, W]), *[(down, W)] * (total - count[down, W]))
    return [action for action in order if action.microbatch < m]
