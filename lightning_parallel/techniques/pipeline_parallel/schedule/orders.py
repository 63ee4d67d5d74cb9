"""Orders in which the ranks of a pipeline compute: one function per schedule.

Every function takes the rank, the numbers of ranks `p`, of microbatches `m` and of stages per rank `v`, and returns the
rank's actions in their order. Idle time is not part of an order: it follows from the inputs that actions wait for.
"""

from collections import Counter, deque

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741


def gpipe(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Run all forwards, then all backwards (Y. Huang et al., GPipe, 2019, arXiv:1811.06965)."""
    return [Action(rank, kind, i) for kind in (F, B) for i in range(m)]


def one_forward_one_backward(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Run one forward for each later stage, then alternate forwards and backwards, then run the remaining backwards.

    PipeDream-Flush: D. Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, arXiv:2006.09503.
    """
    forwards, backwards = ([Action(rank, kind, i) for i in range(m)] for kind in (F, B))
    return _in_turn(forwards, backwards, warmup=p - 1 - rank)


def looped_bfs(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Run all microbatches on one stage before the rank's next stage (J. Lamy-Poirier, 2022, arXiv:2211.05953)."""
    local_stages = range(rank, p * v, p)
    forwards = [Action(stage, F, i) for stage in local_stages for i in range(m)]
    return forwards + [Action(stage, B, i) for stage in reversed(local_stages) for i in reversed(range(m))]


def interleaved_1f1b(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Run 1F1B in rounds of microbatches: one round passes all stages of the rank before the next round starts.

    D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, arXiv:2104.04473.
    """
    forwards, backwards = _rounds(F, rank, p, m, v), _rounds(B, rank, p, m, v)
    return _in_turn(forwards, backwards, warmup=(v - 1) * round_length(p, m) + 2 * (p - 1 - rank))


def interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Run interleaved 1F1B, and delay weight gradients by `rank` backwards so that they fill the bubble at the end.

    With one stage per rank this is ZB-H1 of P. Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv:2401.10241.
    """
    forwards, inputs = _rounds(F, rank, p, m, v), _rounds(I, rank, p, m, v)
    order = _in_turn(forwards, inputs, warmup=(v - 1) * round_length(p, m) + p - 1 - rank)
    weights, delay, result = deque(Action(a.stage, W, a.microbatch) for a in inputs), rank, list[Action]()
    for action in order:
        result.append(action)
        delay -= action.kind is I
        if action.kind is I and delay < 0:
            result.append(weights.popleft())
    return [*result, *weights]


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Run `warmup` forwards, then alternate forwards and backwards, then run the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def round_length(p: int, m: int) -> int:
    """Return the number of microbatches that an interleaved schedule runs on a stage before the rank's next stage.

    It is `p` if `m` is a multiple of `p`; otherwise the `m // p` rounds are longer, e.g. 5 for `p=4`, `m=10`.
    """
    return m // max(1, m // p)


def _rounds(kind: ActionKind, rank: int, p: int, m: int, v: int) -> list[Action]:
    """Return the rank's actions of one kind round by round: forwards from its first stage, backwards from its last."""
    length = round_length(p, m)
    stages = range(rank, p * v, p)[:: 1 if kind is F else -1]
    return [Action(s, kind, i) for first in range(0, m, length) for s in stages for i in range(first, first + length)]


def zbv(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Run two stages per rank, placed like a V: rank 0 holds the first and the last; all ranks store equally much.

    P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6 (arXiv:2401.10241).
    """
    down, up = rank, 2 * p - 1 - rank
    # The pattern needs at least 2p - 1 microbatches to fill the pipeline; those from m on are removed at the end.
    total = max(2 * p - 1, m)
    order: list[Action] = []
    count: Counter[tuple[int, ActionKind]] = Counter()

    def add(*work: tuple[int, ActionKind]) -> None:
        """Append each (stage, kind) for the next microbatch that this stage has not run it on."""
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
