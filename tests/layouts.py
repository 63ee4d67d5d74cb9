"""Named layouts: how many ranks, how many of them read samples of their own, and the strategy.

`layouts("zero 3", "pipeline")` are those of a test's table; a table adds its own where it needs an option.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lightning_parallel import (
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    DataParallelStrategy,
    ExpertParallel,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)


class Layout(NamedTuple):
    """Layouts of one device read `readers` times as large batches, e.g. 8 where each of two readers takes 4."""

    ranks: int
    readers: int
    strategy: Callable[..., Any]


def hybrid(*techniques: Any, **options: Any) -> Callable[..., HybridStrategy]:
    return partial(HybridStrategy, *techniques, **options)


PP2, TP2 = PipelineParallel(2, microbatches=2), TensorParallel(2)
PIPELINE = partial(PipelineParallelStrategy, 2)
LAYOUTS: dict[str, Layout] = {
    "data parallel": Layout(2, 2, DataParallelStrategy),
    "data parallel of 4": Layout(4, 4, DataParallelStrategy),
    "zero 1": Layout(2, 2, partial(ZeroStrategy, stage=1)),
    "zero 1, offloaded": Layout(2, 2, partial(ZeroStrategy, stage=1, offload=True)),
    "zero 2": Layout(2, 2, partial(ZeroStrategy, stage=2)),
    "zero 2, offloaded": Layout(2, 2, partial(ZeroStrategy, stage=2, offload=True)),
    "zero 3": Layout(2, 2, partial(ZeroStrategy, stage=3)),
    "tensor parallel": Layout(2, 1, partial(TensorParallelStrategy, 2)),
    "tensor parallel, sequence whole": Layout(2, 1, partial(TensorParallelStrategy, 2, sequence_parallel=False)),
    "tensor x data parallel": Layout(4, 2, hybrid(TP2, DataParallel(2))),
    "tensor x zero 1": Layout(4, 2, hybrid(TP2, Zero(2, stage=1))),
    "tensor x zero 2": Layout(4, 2, hybrid(TP2, Zero(2, stage=2))),
    "tensor x zero 3": Layout(4, 2, hybrid(TP2, Zero(2))),
    "pipeline": Layout(2, 1, partial(PIPELINE, microbatches=2)),
    "pipeline of 4 microbatches": Layout(2, 1, partial(PIPELINE, microbatches=4)),
    "pipeline over the batch": Layout(2, 1, partial(PIPELINE, microbatches=2, loss_over="batch")),
    "zbv": Layout(2, 1, partial(PIPELINE, schedule="zbv", microbatches=4)),
    "pipeline x data parallel": Layout(4, 2, hybrid(PP2, DataParallel(2))),
    "pipeline x zero 1": Layout(4, 2, hybrid(PP2, Zero(2, stage=1))),
    "pipeline x zero 2": Layout(4, 2, hybrid(PP2, Zero(2, stage=2))),
    "pipeline x zero 3": Layout(4, 2, hybrid(PP2, Zero(2))),
    "pipeline x tensor": Layout(4, 1, hybrid(PP2, TP2)),
    "context": Layout(2, 1, partial(ContextParallelStrategy, 2)),
    "context x data parallel": Layout(4, 2, hybrid(ContextParallel(2), DataParallel(2))),
    "context x zero 3": Layout(4, 2, hybrid(ContextParallel(2), Zero(2))),
    "expert x data parallel": Layout(2, 2, hybrid(ExpertParallel(2), DataParallel(2))),
    "expert x zero 2": Layout(4, 4, hybrid(ExpertParallel(2), Zero(4, stage=2))),
    "expert x zero 3": Layout(4, 4, hybrid(ExpertParallel(2), Zero(4))),
    "expert x tensor": Layout(4, 2, hybrid(ExpertParallel(2), TP2, DataParallel(2))),
    "one rank, zero 1": Layout(1, 1, hybrid(Zero(1, stage=1))),
    "one rank, zero 2": Layout(1, 1, hybrid(Zero(1, stage=2))),
    "one rank, zero 3": Layout(1, 1, hybrid(Zero(1))),
    "one rank, offloaded": Layout(1, 1, hybrid(Zero(1, offload=True))),
}


def layouts(*names: str, **options: Any) -> dict[str, Layout]:
    """These layouts, their strategies with these options beside their own."""
    found = {name: LAYOUTS[name] for name in names}
    if options:
        found = {name: each._replace(strategy=partial(each.strategy, **options)) for name, each in found.items()}
    return found
