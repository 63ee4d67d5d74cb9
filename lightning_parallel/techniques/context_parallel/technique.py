"""Context parallel: every rank holds and computes a shard of each sequence.

Source: H. Liu et al., Ring Attention with Blockwise Transformers, ICLR 2024; S. A. Jacobs et al., DeepSpeed Ulysses,
2023; J. Fang, S. Zhao, USP: A Unified Sequence Parallelism Approach, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.arguments import one_of, true_or_false, whole_number
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.step import DividedStep, DividedTensors
from lightning_parallel.techniques.divided.tensor import Divided, to_full_tensors
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.values import held_by_objects, map_tensors, tensors_of

T = TypeVar("T")

Method = Literal["auto", "ring", "ulysses", "all_gather", "hybrid"]


@dataclass(frozen=True)
class ContextParallel(Technique):
    """Shards sequences over ranks, so that each rank has 1/size of the activations, in attention too.

    Args:
        size: number of ranks that share one copy of a sequence and read the same samples; "auto" takes the ranks that
            no other technique claims.
        method: how queries attend to keys of other ranks. "ring": keys and values travel around; "ulysses": during
            attention, ranks hold some heads of all positions instead; "all_gather": every rank gets all keys and
            values; "hybrid": ulysses within teams of `ulysses_size` neighbouring ranks, a ring between teams; "auto":
            ulysses if `size` divides the heads of queries and divides those of keys or is a multiple of them, and no
            mask has different rows for different queries; else ring.
        ulysses_size: for "hybrid", e.g. 2 of 4 ranks: two teams of two ranks, in each of which heads are sharded.
        load_balance: whether each rank has positions from the front and from the back (zigzag), so that ranks have
            equal work in causal attention; False for consecutive positions.

    Raises:
        ValueError: an unknown method, sizes that do not divide, or (in the first step) a batch without sequences, or
            heads that do not fit.
    """

    size: Size = "auto"
    _: KW_ONLY
    method: Method = "auto"
    ulysses_size: int | None = None
    load_balance: bool = True

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        one_of("ContextParallel", "method", self.method, get_args(Method))
        true_or_false("ContextParallel", load_balance=self.load_balance)
        whole_number("ContextParallel", "ulysses_size", self.ulysses_size, None)
        if (self.method == "hybrid") != (self.ulysses_size is not None):
            raise ValueError(
                f"ContextParallel(method={self.method!r}, ulysses_size={self.ulysses_size}): method='hybrid' needs the "
                "number of ranks in a team, such as ulysses_size=2; no other method takes it"
            )
        if isinstance(self.size, int):
            self._require_teams(self.size)

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"cp": self.size}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(replicates_steps=True, replaces_tensors=True)

    def divide(self, model: nn.Module, context: PartitionContext, analysis: None) -> Division:
        """Leave the model as it is: its input, the batch, is sharded."""
        if context.mesh.sizes["cp"] == 1:
            return Division(model)
        self._require_teams(context.mesh.sizes["cp"])
        ranks = Ranks(context.mesh["cp"].get_group(), "cp")
        ranks.attention = ContextAttention(self.method, self.ulysses_size)
        return DividedSequences(model, ranks, context.plan.sequence_dim, self)

    def _require_teams(self, size: int) -> None:
        team = self.ulysses_size
        if team is not None and (not 1 < team < size or size % team):
            fit = [number for number in range(2, size) if size % number == 0]
            remedy = f"set it to one of {fit}" if fit else "use method='ulysses' or 'ring'"
            raise ValueError(
                f"ContextParallel(method='hybrid', ulysses_size={team}) needs several teams of several ranks, but "
                f"{size} ranks do not form such teams; {remedy}"
            )


@dataclass(eq=False)
class DividedSequences(DividedTensors):
    """A model that gets batches whose sequences are sharded over ranks.

    All ranks read the same samples, so each also keeps the full tensors of the batch: token ids are small, and code
    that needs all of them, such as a shift of labels, needs no communication.

    Args:
        ranks: the ranks over which positions are sharded.
        dim: the sequence dimension of the batch's tensors.
        technique: has the option `load_balance`, and is named in error messages.
    """

    dim: int
    technique: ContextParallel

    def divided(self, batch: Any) -> Any:
        """Return the batch with `Divided` tensors in place of those with a sequence dimension.

        Raises:
            ValueError: no tensor of the batch has a sequence dimension, or one that has is an attribute of an object.
        """
        dim, tensors = self.dim, tensors_of(batch)
        # Integer tensors (tokens, labels, masks) are [B, T, ...]. So are floating-point ones with the same length T,
        # or with three dimensions if the batch has no integer tensor.
        able = [tensor for tensor in tensors if tensor.dim() > max(dim, 1)]
        lengths = {tensor.shape[dim] for tensor in able if not tensor.is_floating_point()}
        sequences = [
            tensor for tensor in able
            if not tensor.is_floating_point() or (tensor.shape[dim] in lengths if lengths else tensor.dim() == 3)
        ]  # fmt: skip
        chosen = {id(tensor): tensor.shape[: dim + 1] for tensor in sequences if tensor.shape[dim] > 1}
        for holder, tensor in held_by_objects(batch):
            if not sequences or (tensor.dim() > max(dim, 1) and tensor.shape[: dim + 1] in chosen.values()):
                kind = type(holder).__name__
                raise ValueError(
                    f"{self.technique!r} divides the sequences of tensors in dicts, lists, tuples and dataclasses, but "
                    f"a tensor of shape {tuple(tensor.shape)} is an attribute of a {kind}, so every rank would compute "
                    f"all of it; make {kind} a dataclass, or let collate_fn return a dict or a tuple"
                )
        if tensors and not sequences:
            raise ValueError(
                f"{self.technique!r} divides sequences, but none of the batch's tensors has one; their shapes are "
                f"{[tuple(tensor.shape) for tensor in tensors]}. It looks for tokens (batch, sequence) or features "
                f"(batch, sequence, features), with the sequence in dimension {dim}. Name another dimension, as in "
                "plan=ParallelPlan(sequence_dim=0), or train models without sequences with DataParallelStrategy or "
                "ZeroStrategy"
            )

        def shard(whole: Tensor) -> Tensor:
            if id(whole) not in chosen:
                return whole
            length = whole.shape[dim]
            elements = self.ranks.zigzag(length) if self.technique.load_balance else self.ranks.chunks(length)
            divided = Divided(elements.take(whole, dim), {dim: elements})
            return divided if whole.requires_grad else divided.with_full(whole)  # no gather to get the full tensor

        return map_tensors(shard, batch)

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Wrap the user's step: it gets a batch with sharded sequences, and its outputs are gathered."""

        def run_sharded(batch: Any, *rest: Any, **kwargs: Any) -> T:
            full: T = to_full_tensors(run(self.divided(batch), *rest, **kwargs), "output of the step")
            return full

        return super().run(run_sharded)

    def outermost_step(self, step: Step) -> Step:
        """Wrap the step: functions without a rule get full tensors, and the module keeps no `Divided` after a batch."""
        self.ranks.averages = RegisteredParameters(self.model)
        return DividedStep(step, self.model, self.ranks)


class RegisteredParameters:
    """Predicate for the parameters that the model has before training, full or gathered from shards.

    The gradients of other leaves, such as a perturbation that a step learns, are not averaged over ranks.

    Args:
        model: with its parameters as they are stored between steps.
    """

    def __init__(self, model: nn.Module) -> None:
        tables = [module._parameters for module in model.modules()]
        slots = [(table, name, stored) for table in tables for name, stored in table.items() if stored is not None]
        self._whole = {id(stored): stored for _, _, stored in slots}
        self._sharded = [(table, name) for table, name, stored in slots if isinstance(stored, DTensor)]
        self._gathered: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # full tensors found in `_sharded`

    def __call__(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these parameters."""
        if id(tensor) in self._whole or self._gathered.get(id(tensor)) is tensor:
            return True
        if not any(table[name] is tensor for table, name in self._sharded):
            return False
        self._gathered[id(tensor)] = tensor
        return True
