"""Says why an observed step cannot be divided, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from traceback import extract_tb

import torch

from lightning_parallel.plan.plan import starred
from lightning_parallel.techniques.divided.python_functions import running_function

UNDIVIDED = "use ZeroStrategy, which divides any model"


REENTRANT = ("CheckpointFunction", "CheckpointFunctionBackward")
"""What `torch.utils.checkpoint` is with use_reentrant=True."""


TRANSFORM_LESS = "transform what lies inside one block or follows the last one"

TRANSFORMS = "_functorch"
"""The folder of torch in which transforms of `torch.func` run what they are given."""


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


def runs_twice(block: str) -> str:
    """Why a step that calls a block twice is refused."""
    return (
        f"the block {block} runs twice in one step, so it cannot belong to one stage; name layers that run once, as in "
        f"plan=ParallelPlan(blocks='net.layers.*'); where there are none, {UNDIVIDED}"
    )


def runs_within(block: str) -> str | None:
    """Why a step is refused that calls a block where gradients do not come the usual way; None where they do."""
    if torch._C._are_functorch_transforms_active():
        return (
            f"the block {block} runs inside a transform of torch.func, which would have to go through all stages; "
            f"{TRANSFORM_LESS}, or {UNDIVIDED}"
        )
    function = running_function()
    if function is None:
        return None
    remedy = "checkpoint it with use_reentrant=False" if function.__name__ in REENTRANT else "call it outside"
    return (
        f"the block {block} runs inside {function.__name__}, a torch.autograd.Function, whose backward would have to "
        f"go through all stages; {remedy}, or {UNDIVIDED}"
    )


def unlike_before(block: str) -> str:
    """Why a block is refused that does something else when it is called again."""
    return (
        f"the block {block}, called again with the same input, does something else: it depends on Python state that "
        "blocks or calls share, such as a counter, and a pipeline runs them on several ranks, once for each "
        "microbatch; hand such values from block to block as arguments, fix them in __init__, or " + UNDIVIDED
    )


def failed(place: str, error: Exception) -> str:
    """Why a step is refused that could not be followed up to its last block.

    Args:
        place: where it failed.
        error: in which the step ended.
    """
    remedy = "if this place needs values, compute them from the batch alone"
    if any(TRANSFORMS in frame.filename for frame in extract_tb(error.__traceback__)):
        remedy = f"it is inside a transform of torch.func, and if blocks run in that, {TRANSFORM_LESS}; else, {remedy}"
    return (
        "the order of the model's parts is found by one step in which parameters have shapes but no values, and that "
        f"failed {place}: {type(error).__name__}: {error}; {remedy}, or {UNDIVIDED} without a look at its step"
    )
