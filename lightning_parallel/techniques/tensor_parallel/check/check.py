"""Whether a block computes the same when its features are divided: found out on meta tensors, before its first forward.

The block runs once whole and once divided, without values and without communication. Both must give hidden states of
the same shape, and every product and reduction between activations must run over the same number of elements: a model
that reshapes by the number of heads of the whole model would otherwise fail late, or mix what must not be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from lightning_parallel.techniques.tensor_parallel.activations import Entry, Mode
from lightning_parallel.techniques.tensor_parallel.check.dry import DryActivations
from lightning_parallel.techniques.tensor_parallel.check.features import wrong_read
from lightning_parallel.techniques.tensor_parallel.check.places import told, wrong_place
from lightning_parallel.techniques.tensor_parallel.check.skeleton import skeleton_of
from lightning_parallel.techniques.tensor_parallel.check.trial import Trial
from lightning_parallel.techniques.tensor_parallel.entries import enter_in_parents, hidden_of, replace_hidden
from lightning_parallel.techniques.tensor_parallel.heads import LEVELS, set_local_sizes
from lightning_parallel.techniques.tensor_parallel.layout import Divided, parent_of
from lightning_parallel.techniques.tensor_parallel.modules import divided_forward
from lightning_parallel.techniques.tensor_parallel.whole.hidden import FIRST
from lightning_parallel.techniques.tools.caches import CACHES, is_cache
from lightning_parallel.techniques.tools.shards import bounds

PLAIN = (type(None), bool, int, float, str)
ENTRIES: Mapping[bool, tuple[Entry, ...]] = {False: ("linear", "face", "parent"), True: ("linear", "parent", "face")}
"""Ways into regions in the order in which they are tried, by whether the sequence is split."""


@dataclass(frozen=True)
class Finding:
    """How a block is to be run.

    Args:
        mode: where activations enter its regions, and which regions compute whole features.
        level: which of its sizes are set to this rank's.
        partial: the parameters, by their names in the block, of whose gradient each rank has a summand.
        outputs: which leaves of its results run along the split sequence.
        reason: why regions compute whole features, None where none does.
    """

    mode: Mode
    level: int
    partial: frozenset[str]
    outputs: frozenset[int] | None = FIRST
    reason: str | None = None


class RefusedBlockError(ValueError):
    """A block that cannot be divided as the plan says."""


class BlockCheck:
    """Finds out how blocks of one structure are to be run.

    Args:
        skeleton: one of them, see `skeleton_of`.
        divided: its modules that are divided, by their names in the block.
        ranks: the size of the axis tp.
        sequence_dim: the dimension of the hidden state that may be split.
    """

    def __init__(self, name: str, skeleton: nn.Module, divided: Mapping[str, Divided], ranks: int, dim: int) -> None:
        self._name, self._skeleton, self._divided = name, skeleton, dict(divided)
        self._ranks, self._dim = ranks, dim
        self._found: dict[Any, Finding | RefusedBlockError] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], split: bool) -> Finding:
        """How to run the block on such inputs.

        Args:
            args: those of the block's forward, with the whole hidden state; so are `kwargs`.
            kwargs: by name.
            split: whether the sequence is split between regions.

        Raises:
            RefusedBlockError: it cannot be run divided; names the line where that shows.
        """
        learning = learning_of(args, kwargs)
        key = split, learning, _kinds((args, kwargs))
        if key not in self._found:
            try:
                self._found[key] = self._find(*_as_meta((args, kwargs)), learning, split)
            except RefusedBlockError as refused:
                self._found[key] = refused
        found = self._found[key]
        if isinstance(found, RefusedBlockError):
            raise found
        return found

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], learning: frozenset[int], split: bool) -> Finding:
        whole = Trial(skeleton_of(self._skeleton))
        whole.watch(self._colwise())
        error = whole.run(args, kwargs)
        if error is not None:
            return self._gathered(split, f"it cannot be tried without values ({error})")
        problems: list[tuple[int, str]] = []
        for gathered in self._choices_of_gathered(split):
            for level, entry in product(LEVELS, ENTRIES[split]):
                mode = Mode(entry, gathered)
                inputs = args, kwargs, learning
                trials = [self._divided_trial(rank, level, mode, inputs, split) for rank in self._distinct()]
                wrong = [(t.progress, p) for t in trials if (p := t.differs_from(whole) or self._misread(whole, t))]
                if not wrong:
                    reason = self._told(gathered, _furthest(problems)) if gathered else None
                    partial, outputs = self._partial(trials[0].trial, split), trials[0].split_outputs(whole)
                    return Finding(mode, level, partial, outputs, reason)
                problems += wrong[:1] if not gathered else []
        return self._gathered(split, _furthest(problems))

    def _gathered(self, split: bool, reason: str) -> Finding:
        """Every divided map gives all of its features, so that the block computes what it always does."""
        if split:
            raise RefusedBlockError(
                f"{self._name} ({type(self._skeleton).__name__}) cannot work on parts of the sequence on {self._ranks} "
                f"tensor-parallel ranks: {reason}"
            )
        regions = frozenset(self._regions())
        return Finding(Mode("linear", regions), 0, frozenset(), reason=self._told(regions, reason))

    def _told(self, gathered: frozenset[str], reason: str) -> str:
        names = ", ".join(sorted(f"{self._name}.{region}".rstrip(".") for region in gathered))
        return (
            f"{names}: all {self._ranks} tensor-parallel ranks compute all heads and features, and divide only the "
            f"products into and out of them, because {reason}. To divide these too, let "
            f"{type(self._skeleton).__name__} take their number from the tensors it gets"
        )

    def _misread(self, whole: Trial, found: _Outcome) -> str | None:
        return wrong_read(whole.reads, found.trial.reads, self._divided, self._ranks, found.rank)

    def _regions(self) -> list[str]:
        return sorted({parent_of(name) for name in self._divided})

    def _colwise(self) -> list[str]:
        return [name for name, each in self._divided.items() if each.style.kind.startswith("colwise")]

    def _choices_of_gathered(self, split: bool) -> Iterator[frozenset[str]]:
        yield frozenset()
        if not split and len(self._regions()) > 1:
            yield from (frozenset({region}) for region in self._regions())

    def _partial(self, trial: Trial, split: bool) -> frozenset[str]:
        """Those of whose use nothing was seen, as that of experts, get parts of a sequence like all others."""
        unseen = self._all_whole() - trial.used if split else frozenset()
        return frozenset(trial.partial & self._all_whole()) | unseen

    def _distinct(self) -> list[int]:
        """Ranks that have different sizes; all of them look at the same ones, so that all decide alike."""
        sizes = {
            tuple(bounds(d.features, self._ranks, r)[1] - bounds(d.features, self._ranks, r)[0] for d in self._all()): r
            for r in range(self._ranks)
        }
        return sorted(sizes.values())

    def _all(self) -> Iterable[Divided]:
        return self._divided.values()

    def _all_whole(self) -> frozenset[str]:
        """Parameters that are not divided themselves."""
        mine = {
            f"{name}.{own}" for name, d in self._divided.items() for own, p in d.placements().items() if p.is_shard()
        }
        return frozenset(name for name, _ in self._skeleton.named_parameters()) - mine

    def _divided_trial(
        self,
        rank: int,
        level: int,
        mode: Mode,
        inputs: tuple[tuple[Any, ...], dict[str, Any], frozenset[int]],
        split: bool,
    ) -> _Outcome:
        args, kwargs, learning = inputs
        block = skeleton_of(self._skeleton)
        trial = Trial(block)
        activations = DryActivations(self._ranks, rank, self._dim, trial)
        here = {name: d.on(block.get_submodule(name)) for name, d in self._divided.items()}
        set_local_sizes(block, without(here, mode.gathered), self._ranks, level)
        for name, each in here.items():
            _make_local(each, self._ranks, rank)
            vars(each.module)["forward"] = divided_forward(each, activations, each.module.forward, parent_of(name))
        enter_in_parents(block, here, activations)
        trial.watch(self._colwise())
        for number, leaf in enumerate(tree_leaves((args, kwargs))):
            if number in learning:
                trial.mark_activation(leaf)
        hidden = hidden_of(args, kwargs)
        if split:
            args, kwargs = replace_hidden(args, kwargs, lambda x: trial.taint(activations.split(x)))
        elif hidden is not None:
            trial.mark_activation(hidden)
        activations.begin_block(activations.length, mode, hidden_of(args, kwargs))
        error = trial.run(args, kwargs)
        return _Outcome(trial, rank, error, activations.length, activations.own_length, self._dim)


def _furthest(problems: list[tuple[int, str]]) -> str:
    """The problem of the trial that went furthest, and of those the last, which set most sizes."""
    return max(reversed(problems), key=lambda tried: tried[0])[1]


def without(divided: Mapping[str, Divided], regions: frozenset[str]) -> dict[str, Divided]:
    """Those that lie in other regions."""
    return {name: each for name, each in divided.items() if parent_of(name) not in regions}


def _make_local(divided: Divided, ranks: int, rank: int) -> None:
    for name, placement in divided.placements().items():
        parameter = divided.module._parameters.get(name)
        if parameter is None or placement.is_replicate():
            continue
        shape = list(parameter.shape)
        start, stop = bounds(shape[placement.dim], ranks, rank)  # type: ignore[attr-defined]
        shape[placement.dim] = stop - start  # type: ignore[attr-defined]
        divided.module._parameters[name] = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)


def _as_meta(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(None if is_cache(value) else value for value in inputs[0])
    kwargs = {name: None if name in CACHES or is_cache(value) else value for name, value in inputs[1].items()}
    as_meta = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta", requires_grad=False), (args, kwargs))
    result: tuple[tuple[Any, ...], dict[str, Any]] = as_meta
    return result


def _kinds(inputs: Any) -> tuple[Any, ...]:
    """What kinds of inputs a block gets: for others it may do something else."""
    leaves, shape = tree_flatten(inputs)
    return str(shape), *(leaf.dim() if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


def learning_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """Which of the leaves have gradients, besides the hidden state."""
    hidden, values = hidden_of(args, kwargs), (*args, *kwargs.values())
    nested = any(not isinstance(value, Tensor) and type(value) not in PLAIN for value in values)
    leaves = enumerate(tree_leaves((args, kwargs)) if nested else values)
    return frozenset(n for n, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and leaf is not hidden)


@dataclass(frozen=True)
class _Outcome:
    trial: Trial
    rank: int
    error: str | None
    length: int | None
    own_length: int | None
    dim: int

    @property
    def progress(self) -> int:
        """How far it went."""
        return len(self.trial.reductions) + len(self.trial.places) + len(self.trial.used)

    def differs_from(self, whole: Trial) -> str | None:
        """What is wrong with it."""
        if self.error is not None:
            return self.error
        unused = sorted(whole.used - self.trial.used)
        if unused:
            return f"{unused[0]} would never be used"
        return (
            _first_difference(whole.reductions, self.trial.reductions)
            or wrong_place(whole.places, self.trial.places, self.length, self.own_length)
            or self._wrong_output(whole)
            or self.trial.wrong
            or self.trial.in_both_ways()
        )

    def _wrong_output(self, whole: Trial) -> str | None:
        pairs = [(w, g) for w, g in zip(whole.outputs, self.trial.outputs, strict=False) if isinstance(w, Tensor)]
        if not pairs or len(whole.outputs) != len(self.trial.outputs):
            return "it returns no tensor" if not pairs else "it returns something else"
        for number, (wanted, got) in enumerate(pairs):
            shape = self._expected(wanted, got)
            if list(got.shape) != shape and (number == 0 or wanted.dim() <= 3):  # others: weights of a rank's heads
                return f"its output has the shape {tuple(got.shape)} instead of {tuple(shape)}"
        return None

    def _expected(self, wanted: Tensor, got: Tensor) -> list[int]:
        shape = list(wanted.shape)
        if self.own_length is not None and self.trial.is_tainted(got):
            if len(shape) <= self.dim or shape[self.dim] != self.length:
                return [*shape, -1]  # ranks would have different ones
            shape[self.dim] = self.own_length
        return shape

    def split_outputs(self, whole: Trial) -> frozenset[int]:
        """Which leaves of the results run along the split sequence."""
        pairs = enumerate(zip(whole.outputs, self.trial.outputs, strict=True))
        return frozenset(k for k, (w, got) in pairs if isinstance(got, Tensor) and self._is_split(w, got))

    def _is_split(self, wanted: Tensor, got: Tensor) -> bool:
        return self.trial.is_tainted(got) and list(got.shape) == self._expected(wanted, got)


def _first_difference(whole: list[tuple[Any, ...]], divided: list[tuple[Any, ...]]) -> str | None:
    for wanted, found in zip(whole, divided, strict=False):
        if wanted[:2] != found[:2]:
            return f"{found[0]} runs over {found[1]} elements where the whole block has {wanted[1]} ({told(found[2])})"
    return None if len(whole) == len(divided) else "it runs other operations than the whole block"
