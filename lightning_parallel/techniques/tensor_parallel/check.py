"""Whether a block computes the same when its features are divided: found out on meta tensors, before its first forward.

The block runs once whole and once divided, without values and without communication. Both must give hidden states of
the same shape, and every product and reduction between activations must run over the same number of elements: a model
that reshapes by the number of heads of the whole model would otherwise fail late, or mix what must not be mixed.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from lightning_parallel.techniques.shards import bounds
from lightning_parallel.techniques.tensor_parallel.dry import DryActivations
from lightning_parallel.techniques.tensor_parallel.entries import Entry, enter_in_parents, replace_hidden
from lightning_parallel.techniques.tensor_parallel.heads import LEVELS, set_local_sizes
from lightning_parallel.techniques.tensor_parallel.hidden import FIRST
from lightning_parallel.techniques.tensor_parallel.layout import Divided
from lightning_parallel.techniques.tensor_parallel.modules import divided_forward
from lightning_parallel.techniques.tensor_parallel.places import Places, is_model, line, places_of, told, wrong_place

log = logging.getLogger(__name__)

CACHES = ("past_key_values", "past_key_value", "layer_past")


ENTRIES: tuple[Entry, ...] = ("linear", "parent")


@dataclass(frozen=True)
class Finding:
    """How a block is to be run.

    Args:
        entry: where activations enter its regions.
        level: which of its sizes are set to this rank's.
        partial: the parameters, by their names in the block, of whose gradient each rank has a summand.
        outputs: which leaves of its results run along the split sequence.
        unchecked: why it could not be tried without values, None where it could.
    """

    entry: Entry
    level: int
    partial: frozenset[str]
    outputs: frozenset[int] | None = FIRST
    unchecked: str | None = None


class RefusedBlockError(ValueError):
    """A block that cannot be divided as the plan says."""


def skeleton_of(block: nn.Module) -> nn.Module:
    """The block without values or hooks."""
    memo: dict[int, Any] = {}
    for tensor in (*block.parameters(), *block.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    for module in block.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            memo[id(hooks)] = OrderedDict()
    return copy.deepcopy(block, memo)


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
        key = split, _kinds((args, kwargs))
        if key not in self._found:
            try:
                self._found[key] = self._find(*_as_meta((args, kwargs)), split)
            except RefusedBlockError as refused:
                self._found[key] = refused
        found = self._found[key]
        if isinstance(found, RefusedBlockError):
            raise found
        return found

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], split: bool) -> Finding:
        whole = Trial(self._skeleton)
        error = whole.run(args, kwargs, frozenset())
        if error is not None:
            log.info("%s cannot be run without values (%s), so that dividing it is not checked", self._name, error)
            entry: Entry = "parent" if split else "linear"
            return Finding(entry, 0, self._all_whole() if split else frozenset(), unchecked=error)
        problems: list[tuple[int, str]] = []
        for level in LEVELS:
            for start in ENTRIES if split else ENTRIES[:1]:
                trials = [self._divided_trial(rank, level, start, args, kwargs, split) for rank in self._distinct()]
                wrong = [(trial.progress, p) for trial in trials if (p := trial.differs_from(whole))]
                if not wrong:
                    partial = trials[0].trial.partial
                    outputs = trials[0].split_outputs(whole)
                    return Finding(start, level, frozenset(partial & self._all_whole()), outputs)
                problems += wrong[:1]
        problem = max(problems, key=lambda tried: tried[0])[1]  # of the one that went furthest
        raise RefusedBlockError(
            f"{self._name} ({type(self._skeleton).__name__}) cannot be divided over {self._ranks} tensor-parallel "
            f"ranks: {problem}. Let it take the number of heads from the tensors it gets, leave its modules out of the "
            "plan's styles" + (", or set sequence_parallel=False" if split else "")
        )

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
        self, rank: int, level: int, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], split: bool
    ) -> _Outcome:
        block = skeleton_of(self._skeleton)
        trial = Trial(block)
        activations = DryActivations(self._ranks, rank, self._dim, trial.taint)
        here = {name: d.on(block.get_submodule(name)) for name, d in self._divided.items()}
        set_local_sizes(block, here, self._ranks, level)
        for each in here.values():
            _make_local(each, self._ranks, rank)
            vars(each.module)["forward"] = divided_forward(each, activations, each.module.forward)
        if entry == "parent":
            enter_in_parents(block, here, activations)
        if split:
            args, kwargs = replace_hidden(args, kwargs, activations.split)
        tainted = frozenset(id(leaf) for leaf in tree_leaves((args, kwargs)) if leaf is activations.hidden)
        error = trial.run(args, kwargs, tainted)
        return _Outcome(trial, error, activations.length, activations.own_length, self._dim)


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
    args, kwargs = inputs
    kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
    as_meta = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta", requires_grad=False), (args, kwargs))
    result: tuple[tuple[Any, ...], dict[str, Any]] = as_meta
    return result


def _kinds(inputs: Any) -> tuple[Any, ...]:
    """What kinds of inputs a block gets: for others it may do something else."""
    leaves, shape = tree_flatten(inputs)
    return str(shape), *(leaf.dim() if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


@dataclass
class Trial:
    """One run of a block on meta tensors: what it reduces over, and which parameters met divided activations."""

    block: nn.Module
    reductions: list[tuple[Any, ...]] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)
    places: list[Places] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    outputs: list[Any] = field(default_factory=list)
    _tainted: dict[int, Tensor] = field(default_factory=dict)
    _origins: dict[int, tuple[Tensor, frozenset[str]]] = field(default_factory=dict)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tainted: frozenset[int]) -> str | None:
        """Runs the block; returns what went wrong, with the line of the model where it did."""
        for name, parameter in self.block.named_parameters():
            self._origins[id(parameter)] = (parameter, frozenset({name}))
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in tainted:
                self.taint(leaf)
        try:
            with torch.no_grad(), torch.device("meta"), _Watch(self):
                result = self.block(*args, **kwargs)
        except Exception as exception:  # whatever the model raises, it cannot be run like this
            return told_error(exception)
        self.outputs = tree_leaves(result)
        return None

    def returned_parameter(self) -> str | None:
        """A parameter of whose gradient ranks have a summand, and the whole by what the block returns of it alone."""
        origins = [self._origins.get(id(leaf)) for leaf in self.outputs]
        names = frozenset().union(*(origin[1] for origin in origins if origin is not None)) & self.partial
        return f"it returns what it computes from {min(names)} alone" if names else None

    def is_tainted(self, tensor: Tensor) -> bool:
        """Whether ranks have different ones."""
        return id(tensor) in self._tainted

    def taint(self, tensor: Tensor) -> Tensor:
        """From here on ranks have different activations."""
        self._tainted[id(tensor)] = tensor  # held, so that no other tensor gets its id
        return tensor

    def follow(self, function: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Notes one operation."""
        tainted = any(id(tensor) in self._tainted for tensor in inputs)
        origins = [self._origins.get(id(tensor)) for tensor in inputs]
        names = frozenset().union(*(origin[1] for origin in origins if origin is not None))
        self.used |= names
        if tainted:
            self.partial |= names
        for tensor in outputs:
            if tainted:
                self.taint(tensor)
            elif inputs and all(origin is not None for origin in origins):
                self._origins[id(tensor)] = (tensor, names)
        if (sizes := _reduced_sizes(function, args, inputs, bool(names))) is not None:
            self.reductions.append(sizes)
        if (places := places_of(function, args, inputs, outputs)) is not None:
            self.places.append(replace(places, divided=tainted))


@dataclass(frozen=True)
class _Outcome:
    trial: Trial
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
            or self.trial.returned_parameter()
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


class _Watch(TorchDispatchMode):
    def __init__(self, trial: Trial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trial = trial

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._trial.follow(function, args, inputs, outputs)
        return result


# Operations that mix elements of a dimension.
ALONG_DIM = {"_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "logsumexp", "flip", "roll", "glu",
             "mean", "sum", "amax", "amin", "var", "std", "var_mean", "prod", "argmax", "argmin", "linalg_vector_norm",
             "max", "min", "median", "cummax", "logcumsumexp"}  # fmt: skip
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "dot", "mv"}
WHOLE_SHAPE = {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "convolution", "native_group_norm",
               "unfold", "max_pool2d_with_indices", "avg_pool2d"}  # fmt: skip


NORMS = {"native_layer_norm", "rms_norm", "_fused_rms_norm"}


def _reduced_sizes(
    function: Any, args: tuple[Any, ...], inputs: list[Tensor], with_parameters: bool
) -> tuple[Any, ...] | None:
    """The operation, the sizes over which it runs, and where the model calls it; None for those on single elements."""
    name: str = function._opname
    if name in NORMS:
        return name, tuple(args[1]), line()
    if name in WHOLE_SHAPE:
        return name, tuple(inputs[0].shape), line()
    if with_parameters:
        return None
    if "scaled_dot_product" in name:
        return name, (inputs[0].shape[-1], inputs[1].shape[-2]), line()
    if name in PRODUCTS:
        left = inputs[1] if name in ("addmm", "baddbmm") else inputs[0]
        return name, left.shape[-1], line()
    return (name, _sizes_along(args, inputs[0]), line()) if name in ALONG_DIM else None


def _sizes_along(args: tuple[Any, ...], tensor: Tensor) -> tuple[int, ...]:
    dims = next((arg for arg in args[1:] if isinstance(arg, int | list) and not isinstance(arg, bool)), None)
    if dims is None or not tensor.dim():
        return tuple(tensor.shape)
    return tuple(tensor.shape[dim] for dim in (dims if isinstance(dims, list) else [dims]))


def told_error(exception: Exception) -> str:
    """The error with the line of the model where it was raised."""
    lines = [frame for frame in traceback.extract_tb(exception.__traceback__) if is_model(frame.filename)]
    where = f" at {lines[-1].filename}:{lines[-1].lineno} ({lines[-1].line})" if lines else ""
    return f"{type(exception).__name__}: {exception}{where}"
