"""Tensor parallel: every rank holds some features of each layer and computes with them.

Source: M. Shoeybi et al., Megatron-LM, 2019; V. Korthikanti et al., MLSys 2023 (sequence parallel).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.arguments import true_or_false
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.overlap import overlap_compiled_products
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.plan.plan import ParallelPlan
from lightning_parallel.plan.styles import find_styles
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.parcels import packed, unpacked
from lightning_parallel.techniques.divided.parts import Parameters, Part, computing
from lightning_parallel.techniques.divided.step import DividedStep
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tensor_parallel.layout import (
    DividedModule,
    divide_parameters,
    find_divided,
    found_again,
)
from lightning_parallel.techniques.tensor_parallel.step import TensorParallelStep
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.values import map_kind

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Divides the features of linear maps, the heads of attention and the vocabulary over ranks.

    Args:
        size: number of ranks that share one copy of the model and read the same samples; "auto" takes the ranks that
            no other technique claims.
        sequence_parallel: whether each rank keeps only its part of the sequence between divided layers, norms and
            dropout included: the same bytes on the wire, activations divided by `size`.
        overlap: with a split sequence, lets torch's compiler overlap products of compiled blocks with the collective
            before or after them, on GPUs that reach each other's memory. Without `Compile` it changes nothing.

    Raises:
        ValueError: switches that contradict each other, or (when training starts) a model without a known way to divide
            it, or sizes that do not divide.
    """

    size: Size = "auto"
    _: KW_ONLY
    sequence_parallel: bool = True
    overlap: bool = False

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        true_or_false("TensorParallel", sequence_parallel=self.sequence_parallel, overlap=self.overlap)
        if self.overlap and not self.sequence_parallel:
            raise ValueError(
                "TensorParallel(sequence_parallel=False, overlap=True): only a split sequence can do that; leave "
                "sequence_parallel at True, or overlap at False"
            )

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"tp": self.size}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(replaces_tensors=True, replaces_parameters=True)

    def analyze(self, model: nn.Module, ground: PartitionContext) -> list[DividedModule]:
        """Finds out on the whole model what is divided and how, and whether its sizes allow it."""
        ranks = ground.mesh.sizes["tp"]
        if ranks == 1:
            return []
        styles = ground.plan.styles or find_styles(model, ground.plan)
        divided = find_divided(model, styles, bool(ground.plan.styles))
        if not divided:
            raise ValueError(_nothing_to_divide(self, model, ground.plan))
        for each in divided:
            each.check()
        divided = [each for each in divided if not each.stays_whole(ranks)]
        if dist.get_rank() == 0:
            log.info("Tensor parallel divides %s", dict(styles))
        return divided

    def divide(self, model: nn.Module, ground: PartitionContext, seen: list[DividedModule]) -> Division:
        """Keeps this rank's part of every weight that the styles name."""
        if not seen:
            return Division(model)
        mesh, divided = ground.mesh, found_again(model, seen)
        divide_parameters(model, divided, mesh["tp"])
        sequence_dim = ground.plan.sequence_dim if self.sequence_parallel else None
        ranks = Ranks(mesh["tp"].get_group(), "tp", sequence_dim)
        if self.overlap:
            overlap_compiled_products(ranks.group)
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and not elsewhere.is_shared(parameter):
                vars(parameter)["_replicated_path"] = name  # one that another stage has too is summed where it is used
        return DividedFeatures(model, TensorParameters(model, ranks))


class TensorParameters(Parameters):
    """The parameters of a model; while a step runs, divided ones compute as the whole."""

    def made(self, own: Tensor, cuts: Cuts) -> Divided:
        """See `Parameters.made`."""
        return Divided(own, cuts)


@dataclass(eq=False)
class DividedFeatures(Division):
    """A model of whose features, heads and vocabulary each rank has a part."""

    parameters: Parameters

    def outputs(self, outputs: Any) -> Any:
        """Makes whole what ranks have parts of."""
        return tree_map_only((Divided, Part), lambda each: computing(each).whole("what a step returns"), outputs)

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Shows the user's own code whole parameters."""

        def whole_looking(*args: Any, **kwargs: Any) -> T:
            self.parameters.ranks.made_of.forget()
            with self.parameters.computing():
                return run(*args, **kwargs)

        return whole_looking

    def show(self) -> None:
        """See `Division.show`."""
        self.parameters.find()

    def encode_activation(self, value: Any) -> Any:
        """See `Division.encode_activation`."""
        return packed(map_kind(Part, computing, value))

    def decode_activation(self, value: Any) -> Any:
        """See `Division.decode_activation`."""
        return unpacked(value, self.parameters.ranks)

    def settle(self, step: Step) -> Step:
        """Averages gradients that ranks have summands of; the module keeps whole tensors."""
        return DividedStep(TensorParallelStep(step, self.model, self.parameters), self.model, self.parameters.ranks)


def _nothing_to_divide(technique: TensorParallel, model: nn.Module, plan: ParallelPlan) -> str:
    return (
        f"{technique!r} finds nothing to divide in {type(model).__name__}: {plan.source} names no tensor styles, and "
        "there is no linear map or embedding. Give it a plan, such as ParallelPlan("
        f"blocks={plan.blocks!r}, styles={{'net.layers.*.up': 'colwise', 'net.layers.*.down': 'rowwise'}}), with the "
        "names of the maps into and out of the features to be divided; for models without such pairs, as conv nets, "
        "use ZeroStrategy or DataParallelStrategy"
    )
