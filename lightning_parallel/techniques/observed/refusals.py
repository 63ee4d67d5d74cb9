"""Says why an observed step cannot be divided, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_parallel.plan.plan import starred

UNDIVIDED = "use ZeroStrategy, which divides any model"


class BlocksMissingError(ValueError):
    """A step ran without some of the blocks.

    Args:
        blocks: by their FQN.
        ran: those that ran, in their order.
        called: the FQN of all modules that the step called.
    """

    def __init__(self, blocks: Collection[str], ran: Sequence[str], called: Collection[str]) -> None:
        super().__init__(without(blocks, ran))
        self.called = called


def without(blocks: Collection[str], ran: Sequence[str]) -> str:
    """Why a step that ran these blocks only is refused."""
    missing = [name for name in blocks if name not in ran]
    listed = f"{', '.join(missing[:3])}{', …' * (len(missing) > 3)}"
    patterns = tuple(dict.fromkeys(map(starred, ran)))
    if not ran:
        remedy = "call them as modules, layer(x) and not layer.forward(x), name others in plan=ParallelPlan(blocks=...)"
    elif set(patterns) & set(map(starred, missing)):
        remedy = (
            f"where layers are left out at random, as LayerDrop does, set its probability to 0; where {missing[0]} "
            f"never runs, name the others in plan=ParallelPlan(blocks={tuple(ran)!r})"
        )
    else:
        remedy = f"name those in plan=ParallelPlan(blocks={patterns!r})"
    rule = f"the step ran without the blocks {listed}; a pipeline needs blocks that run in every step"
    return f"{rule}: {remedy}, or {UNDIVIDED}"
