"""Balances stages: blocks are chosen so that the slowest stage is as fast as can be."""

import math
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

SAME = 1 + 1e-9  # sums of floats that differ by rounding are ties


def balanced(
    costs: Sequence[float],
    stages: int,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    uncut: Collection[int] = (),
) -> list[range]:
    """Divides the blocks into contiguous stages of at least one block, so that the largest stage cost is smallest.

    Of several best divisions it takes the one with the fewest blocks on the last stage, then on the stage before it
    if the stages up to there cannot be balanced better, and so on.

    Args:
        costs: of every block, in any unit.
        stages: how many.
        first_extra: cost of the first stage besides its blocks, as of embeddings.
        last_extra: of the last stage besides its blocks, as of the head and the loss.
        uncut: numbers of blocks that go on the stage of the block before, unless there were too few stages then.

    Raises:
        ValueError: there are fewer blocks than stages, or a cost is negative or no number.
    """
    if stages < 1 or stages > len(costs):
        raise ValueError(
            f"{len(costs)} blocks cannot make {stages} stages, each of at least one block; "
            f"take 1 to {len(costs)} stages: fewer ranks, or fewer stages per rank"
        )
    wrong = [value for value in (*costs, first_extra, last_extra) if not 0 <= value < math.inf]
    if wrong:
        raise ValueError(f"{wrong[0]} is no cost of a block or stage; give finite numbers that are not negative")
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        extra = first_extra * (stage == 0) + last_extra * (stage == stages - 1)
        return total[stop] - total[start] + extra

    def starts(stage: int, n: int) -> list[int]:
        """Where a stage that ends before block n can begin."""
        return [k for k in range(stage, n) if k not in uncut]

    # best[s][n]: the largest cost when the first n blocks make the stages 0 to s, divided as well as can be
    best = [[cost(0, 0, n) if n else math.inf for n in range(len(costs) + 1)]]
    for stage in range(1, stages):
        choices = ([max(best[-1][k], cost(stage, k, n)) for k in starts(stage, n)] for n in range(len(costs) + 1))
        best.append([min(some, default=math.inf) for some in choices])
    if math.isinf(best[-1][-1]):
        return balanced(costs, stages, first_extra, last_extra)
    bounds = [len(costs)]
    for stage in range(stages - 1, 0, -1):
        n = bounds[-1]
        limit = best[stage][n] * SAME
        bounds += [k for k in starts(stage, n) if max(best[stage - 1][k], cost(stage, k, n)) <= limit][-1:]
    return [range(start, stop) for start, stop in pairwise([0, *reversed(bounds)])]
