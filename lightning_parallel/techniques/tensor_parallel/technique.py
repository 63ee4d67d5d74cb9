"""Tensor parallel: every rank holds some features of each layer and computes with them.

Source: M. Shoeybi et al., Megatron-LM, 2019; V. Korthikanti et al., MLSys 2023 (sequence parallel).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from lightning_parallel.arguments import true_or_false
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.plan.plan import ParallelPlan, starred
from lightning_parallel.plan.styles import find_styles
from lightning_parallel.techniques.division import Division, Ground
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Phase, Technique
from lightning_parallel.techniques.tensor_parallel.layout import Divided, divide_parameters, find_divided
from lightning_parallel.techniques.tensor_parallel.partition import BLOCK_STYLES, Partition
from lightning_parallel.techniques.tensor_parallel.step import TensorParallelStep
from lightning_parallel.techniques.tensor_parallel.whole.divided_tensor import whole_tensors
from lightning_parallel.techniques.tools.boundaries import ends_stage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Divides the features of linear maps, the heads of attention and the vocabulary over ranks.

    Args:
        size: number of ranks that share one copy of the model and read the same samples; "auto" takes the ranks that
            no other technique claims.
        sequence_parallel: whether each rank keeps only its part of the sequence between divided layers, norms and
            dropout included: the same bytes on the wire, activations divided by `size`.
        regather: with a split sequence, keeps only this rank's part of what enters a region and gathers it again in
            backward: all activations divided by `size`, for a quarter more bytes on the wire.
        overlap: with a split sequence, lets products of plain linear maps overlap with the collective before or after
            them, on GPUs that reach each other's memory. Elsewhere it changes nothing but rounding.

    Raises:
        ValueError: switches that contradict each other, or (when training starts) a model without a known way to divide
            it, or sizes that do not divide.
    """

    size: Size = "auto"
    _: KW_ONLY
    sequence_parallel: bool = True
    regather: bool = False
    overlap: bool = False

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        switches = {name: getattr(self, name) for name in ("sequence_parallel", "regather", "overlap")}
        true_or_false("TensorParallel", **switches)
        alone = [f"{name}=True" for name in ("regather", "overlap") if switches[name]]
        if alone and not self.sequence_parallel:
            raise ValueError(
                f"TensorParallel(sequence_parallel=False, {', '.join(alone)}): only a split sequence can do that; "
                "leave sequence_parallel at True, or the other at False"
            )

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"tp": self.size}

    def look(self, model: nn.Module, ground: Ground) -> Mapping[str, str]:
        """Finds out on the whole model what is divided and how, and whether its sizes allow it."""
        ranks = ground.mesh.sizes["tp"]
        if ranks == 1:
            return {}
        styles = ground.plan.styles or find_styles(model, ground.plan)
        divided = find_divided(model, styles)
        if not divided:
            raise ValueError(_nothing_to_divide(self, model, ground.plan))
        for each in divided:
            each.check(ranks)
        if dist.get_rank() == 0:
            log.info("Tensor parallel divides %s", dict(styles))
        return dict(styles)

    def divide(self, model: nn.Module, ground: Ground, seen: Mapping[str, str]) -> Division:
        """Keeps this rank's part of every weight that the styles name."""
        if not seen:
            return Division(model)
        mesh, plan, divided = ground.mesh, ground.plan, find_divided(model, seen)
        runs = list(_runs_of_blocks(model, plan))
        runs += _other_blocks(model, divided, {name for run in runs for name in run})
        group, options = mesh["tp"].get_group(), (self.sequence_parallel, self.regather, self.overlap)
        partition = Partition(divided, runs, group, plan.sequence_dim, *options)
        divide_parameters(model, divided, mesh["tp"])
        return DividedFeatures(model, partition)


@dataclass(eq=False)
class DividedFeatures(Division):
    """A model of whose features, heads and vocabulary each rank has a part."""

    partition: Partition

    def outputs(self, outputs: Any) -> Any:
        """Makes logits whole that the step returned."""
        return whole_tensors(outputs)

    def settle(self, step: Step) -> Step:
        """Adds the sum of what ranks have summands of."""
        return TensorParallelStep(step, self.partition)


def _runs_of_blocks(model: nn.Module, plan: ParallelPlan) -> Iterator[dict[str, nn.Module]]:
    """This rank's blocks, those of a stage together; other stages of a pipeline have those without parameters."""
    run: dict[str, nn.Module] = {}
    for name, block in plan.find_blocks(model).items():
        here = any(True for _ in block.parameters())
        if here:
            run[name] = block
        if run and (not here or ends_stage(block)):
            yield run
            run = {}
    if run:
        yield run


def _other_blocks(model: nn.Module, divided: Iterable[Divided], known: set[str]) -> list[dict[str, nn.Module]]:
    """Layers with divided modules that the plan does not name, such as those of a second model; a list together."""
    runs: dict[str, dict[str, nn.Module]] = {}
    for each in divided:
        block = re.match(r"(.+?\.)?\d+(?=\.)", each.name)
        if each.style.kind in BLOCK_STYLES and block and not any(each.name.startswith(f"{name}.") for name in known):
            runs.setdefault(starred(block[0]), {}).setdefault(block[0], model.get_submodule(block[0]))
    return list(runs.values())


def _nothing_to_divide(technique: TensorParallel, model: nn.Module, plan: ParallelPlan) -> str:
    return (
        f"{technique!r} finds nothing to divide in {type(model).__name__}: {plan.source} names no tensor styles, and "
        "no pair of linear maps was recognised. Give it a plan, such as ParallelPlan("
        f"blocks={plan.blocks!r}, styles={{'net.layers.*.up': 'colwise', 'net.layers.*.down': 'rowwise'}}), with the "
        "names of the maps into and out of the features to be divided; for models without such pairs, as conv nets, "
        "use ZeroStrategy or DataParallelStrategy"
    )
