"""Balance pipeline stages: partition the blocks so that the slowest stage is as fast as possible."""

import math
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

SAME = 1 + 1e-9  # relative tolerance: costs that differ only by rounding are ties


def balance_stages(
    costs: Sequence[float],
    stages: int,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    uncut: Collection[int] = (),
) -> list[range]:
    """Partition the blocks into contiguous stages of at least one block and minimize the largest stage cost.

    Among equally good partitions, choose the one with the fewest blocks on the last stage; then partition the blocks
    before that stage by the same rule. E.g. costs (1, 1, 1) on 2 stages: `[range(0, 2), range(2, 3)]`.

    Args:
        costs: cost of each block, in any unit.
        stages: number of stages.
        first_extra: cost of the first stage besides its blocks, e.g. of embeddings.
        last_extra: cost of the last stage besides its blocks, e.g. of the head and the loss.
        uncut: indices of blocks that stay on the stage of the preceding block; ignored if too few stages would remain.

    Raises:
        ValueError: there are fewer blocks than stages, or a cost is negative, infinite or NaN.
    """
    if stages < 1 or stages > len(costs):
        raise ValueError(
            f"{len(costs)} blocks cannot make {stages} stages, each of at least one block; "
            f"take 1 to {len(costs)} stages: fewer ranks, or fewer stages per rank"
        )
    invalid = [value for value in (*costs, first_extra, last_extra) if not 0 <= value < math.inf]
    if invalid:
        raise ValueError(f"{invalid[0]} is no cost of a block or stage; give finite numbers that are not negative")
    prefix = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        extra = first_extra * (stage == 0) + last_extra * (stage == stages - 1)
        return prefix[stop] - prefix[start] + extra

    def starts(stage: int, n: int) -> list[int]:
        """Return the blocks at which this stage can start if it ends before block n."""
        return [k for k in range(stage, n) if k not in uncut]

    # Dynamic programming: best[s][n] is the smallest possible largest cost of stages 0..s that hold the first n blocks.
    best = [[cost(0, 0, n) if n else math.inf for n in range(len(costs) + 1)]]
    for stage in range(1, stages):
        choices = ([max(best[-1][k], cost(stage, k, n)) for k in starts(stage, n)] for n in range(len(costs) + 1))
        best.append([min(candidates, default=math.inf) for candidates in choices])
    if math.isinf(best[-1][-1]):
        return balance_stages(costs, stages, first_extra, last_extra)
    bounds = [len(costs)]
    for stage in range(stages - 1, 0, -1):
        n = bounds[-1]
        limit = best[stage][n] * SAME
        bounds += [k for k in starts(stage, n) if max(best[stage - 1][k], cost(stage, k, n)) <= limit][-1:]
    return [range(start, stop) for start, stop in pairwise([0, *reversed(bounds)])]
