"""Context parallel: every rank holds and computes some positions of each sequence.

Source: H. Liu et al., Ring Attention with Blockwise Transformers, ICLR 2024; S. A. Jacobs et al., DeepSpeed Ulysses,
2023; J. Fang, S. Zhao, USP: A Unified Sequence Parallelism Approach, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.arguments import one_of, true_or_false
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.context_parallel.attention.choice import METHODS
from lightning_parallel.techniques.context_parallel.sequence import Sequences
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.parcels import packed, unpacked
from lightning_parallel.techniques.divided.step import DividedStep
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.step import Step, StepFn
from lightning_parallel.techniques.technique import Phase, Technique, Traits

T = TypeVar("T")

Method = Literal["auto", "ring", "ulysses", "all_gather", "hybrid"]


@dataclass(frozen=True)
class ContextParallel(Technique):
    """Divides sequences over ranks: activations of each are 1/size, in attention too.

    Args:
        size: number of ranks that share one copy of a sequence and read the same samples; "auto" takes the ranks that
            no other technique claims.
        method: how attention sees all positions. "ring": keys and values travel around; "ulysses": heads are divided
            in place of positions, while attention runs; "all_gather": every rank gets all keys and values; "hybrid":
            ulysses within a ring; "auto": what sends the fewest bytes, for each shape of attention.
        load_balance: whether a rank has positions from the front and from the back, so that causal attention is equal
            work; False for consecutive ones.

    Raises:
        ValueError: an unknown method, or (in the first step) a batch without sequences, or heads that do not fit.
    """

    size: Size = "auto"
    _: KW_ONLY
    method: Method = "auto"
    load_balance: bool = True

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        one_of("ContextParallel", "method", self.method, METHODS)
        true_or_false("ContextParallel", load_balance=self.load_balance)

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"cp": self.size}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(steps_see_wholes=True, replaces_tensors=True)

    def divide(self, model: nn.Module, ground: PartitionContext, seen: None) -> Division:
        """Leaves the model as it is; what is divided is the batch that it sees."""
        if ground.mesh.sizes["cp"] == 1:
            return Division(model)
        ranks = Ranks(ground.mesh["cp"].get_group(), "cp")
        ranks.attention = ContextAttention(self.method)
        return DividedSequences(model, Sequences(ranks, ground.plan.sequence_dim, self.load_balance, repr(self)))


@dataclass(eq=False)
class DividedSequences(Division):
    """A model that sees batches of which each rank has some positions."""

    sequences: Sequences

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Shows the user's step sequences that look whole; what it returns is whole."""

        def on_sequences(batch: Any, *rest: Any, **kwargs: Any) -> T:
            self.sequences.ranks.made_of.forget()
            output = run(self.sequences.divided(batch), *rest, **kwargs)
            made: T = tree_map_only(Divided, lambda each: each.whole("what a step returns"), output)
            return made

        return on_sequences

    def encode_activation(self, value: Any) -> Any:
        """See `Division.encode_activation`."""
        return packed(value)

    def decode_activation(self, value: Any) -> Any:
        """See `Division.decode_activation`."""
        return unpacked(value, self.sequences.ranks)

    def settle(self, step: Step) -> Step:
        """Gives whole tensors to what goes around rules, and to what runs between steps."""
        self.sequences.ranks.averages = Registered(self.model)
        return DividedStep(step, self.model, self.sequences.ranks)


class Registered:
    """Tells which tensors are parameters that the model has before it trains, whole or gathered from shards.

    Others, as a perturbation that a step learns, are nobody's to average.

    Args:
        model: with its parameters as they are kept between steps.
    """

    def __init__(self, model: nn.Module) -> None:
        tables = [module._parameters for module in model.modules()]
        slots = [(table, name, kept) for table in tables for name, kept in table.items() if kept is not None]
        self._whole = {id(kept): kept for _, _, kept in slots}
        self._sharded = [(table, name) for table, name, kept in slots if isinstance(kept, DTensor)]
        self._gathered: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def __call__(self, tensor: Tensor) -> bool:
        """Whether it is one of them."""
        if id(tensor) in self._whole or self._gathered.get(id(tensor)) is tensor:
            return True
        if not any(table[name] is tensor for table, name in self._sharded):
            return False
        self._gathered[id(tensor)] = tensor
        return True
