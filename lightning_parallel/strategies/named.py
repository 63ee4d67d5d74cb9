"""Named strategies of one technique each, and `HybridStrategy`, which combines any techniques."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, final

from lightning_parallel.mesh import Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.context_parallel import ContextParallel
from lightning_parallel.techniques.context_parallel.technique import Method
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.expert_parallel import ExpertParallel
from lightning_parallel.techniques.gradients.buckets import Compression
from lightning_parallel.techniques.pipeline_parallel.technique import LossOver, PipelineParallel
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tensor_parallel import TensorParallel
from lightning_parallel.techniques.zero import Zero


@final
class DataParallelStrategy(MeshStrategy):
    """Every rank holds the full model and reads different samples; see `DataParallel` for the arguments."""

    def __init__(
        self, size: Size = "auto", *, compression: Compression | None = None, bucket_mb: float = 25, **lightning: Any
    ) -> None:
        super().__init__([DataParallel(size, compression=compression, bucket_mb=bucket_mb)], **lightning)


@final
class ZeroStrategy(MeshStrategy):
    """Shard optimizer states (stage 1), also gradients (2), also parameters (3); see `Zero` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        stage: Literal[1, 2, 3] = 3,
        replicate: Size = 1,
        offload: bool = False,
        **lightning: Any,
    ) -> None:
        super().__init__([Zero(size, stage=stage, replicate=replicate, offload=offload)], **lightning)


@final
class TensorParallelStrategy(MeshStrategy):
    """Shard the features of each layer; ranks read the same samples; see `TensorParallel` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        sequence_parallel: bool = True,
        overlap: bool = False,
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        technique = TensorParallel(size, sequence_parallel=sequence_parallel, overlap=overlap)
        super().__init__([technique], plan, **lightning)


@final
class ContextParallelStrategy(MeshStrategy):
    """Shard each sequence by positions; ranks read the same samples; see `ContextParallel` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        method: Method = "auto",
        ulysses_size: int | None = None,
        load_balance: bool = True,
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        technique = ContextParallel(size, method=method, ulysses_size=ulysses_size, load_balance=load_balance)
        super().__init__([technique], plan, **lightning)


@final
class ExpertParallelStrategy(MeshStrategy):
    """Data parallelism on all ranks, with the experts divided over them; see `ExpertParallel` for the arguments."""

    def __init__(self, size: Size = "auto", *, plan: ParallelPlan | None = None, **lightning: Any) -> None:
        # experts are divided over ranks that read different samples, which data parallelism provides
        super().__init__([DataParallel(), ExpertParallel(size)], plan, **lightning)


@final
class PipelineParallelStrategy(MeshStrategy):
    """Hold layers on different ranks, through which microbatches pass; see `PipelineParallel` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        schedule: str = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages_per_rank: int | None = None,
        split: tuple[int, ...] | None = None,
        loss_over: LossOver = "auto",
        **lightning: Any,
    ) -> None:
        pipeline = PipelineParallel(
            size,
            schedule=schedule,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            split=split,
            loss_over=loss_over,
        )
        super().__init__([pipeline], **lightning)


@final
class LayerParallelStrategy(MeshStrategy):
    """Hold layers on different ranks, which run in turn (naive model parallelism): a pipeline with one microbatch."""

    def __init__(self, size: Size = "auto", *, split: tuple[int, ...] | None = None, **lightning: Any) -> None:
        # with one microbatch no two stages ever run at the same time
        super().__init__([PipelineParallel(size, schedule="gpipe", microbatches=1, split=split)], **lightning)


@final
class HybridStrategy(MeshStrategy):
    """Train with a set of techniques, in any order: `HybridStrategy(Zero(4), ActivationCheckpoint())`.

    Args:
        given: how training is parallelized; `HybridStrategy()` trains on a single device.
        techniques: the same as a list, for configuration files and command lines, where every argument has a name.
        plan: the blocks, styles and experts of the model; found from the model if it is None.
        lightning: arguments of `RankStrategy`.

    Raises:
        TypeError: an argument is not a technique.
        ValueError: techniques are passed in both forms, two techniques claim one axis, or sizes do not fit.
    """

    def __init__(
        self,
        *given: Technique,
        techniques: Sequence[Technique] | None = None,
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        if given and techniques is not None:
            raise ValueError(
                f"{', '.join(map(repr, given))} and techniques={techniques!r} are both given; "
                "pass all of them in the list, or all as positional arguments"
            )
        if isinstance(techniques, Technique):
            raise TypeError(f"techniques={techniques!r} is not a list; write techniques=[{techniques!r}]")
        chosen = given if techniques is None else techniques
        for technique in chosen:
            if not isinstance(technique, Technique):
                raise TypeError(f"{technique!r} is not a technique; pass objects such as Zero(4) or DataParallel()")
        super().__init__(chosen, plan, **lightning)
