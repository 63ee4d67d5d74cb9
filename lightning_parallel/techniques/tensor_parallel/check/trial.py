"""One run of a block on meta tensors: which operations it runs, and where what ranks divide meets what they have alike.

Ranks have a summand of the gradient of whatever they have alike, once it meets something of which each has its part. A
parameter's summands are summed after backward. An activation's are not, unless it enters by a collective that sums: a
block where one does not must be run in another way.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.tensor_parallel.check.features import Reads
from lightning_parallel.techniques.tensor_parallel.check.places import Places, is_model, line, places_of, told

aten = torch.ops.aten
ACTIVATION = ""
"""Among the names of parameters: an activation whose gradient must come whole."""

WITHOUT_GRADIENT = {"detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
                    "new_zeros", "new_ones", "new_full", "new_empty"}  # fmt: skip


@dataclass
class Trial:
    """What a run shows.

    Attributes:
        block: what runs.
        reductions: what it reduces over.
        partial: the parameters that met what ranks divide.
        alike: the parameters that went, with activations, into what all ranks have alike.
        places: where it counts positions or features.
        used: the parameters that it used.
        outputs: what it returned, flat.
        wrong: what would give a wrong gradient.
        reads: which features of colwise modules it read.
    """

    block: nn.Module
    reductions: list[tuple[Any, ...]] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)
    alike: set[str] = field(default_factory=set)
    places: list[Places] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    outputs: list[Any] = field(default_factory=list)
    wrong: str | None = None
    reads: Reads = field(default_factory=Reads)
    _tainted: dict[int, Tensor] = field(default_factory=dict)
    _origins: dict[int, tuple[Tensor, frozenset[str]]] = field(default_factory=dict)
    _of_parameters: dict[int, Tensor] = field(default_factory=dict)
    _faces: dict[int, Tensor] = field(default_factory=dict)

    def watch(self, modules: Iterable[str]) -> None:
        """Looks at what is done with what these give."""
        for name in modules:
            self.block.get_submodule(name).register_forward_hook(lambda _, __, y, name=name: self.reads.begin(name, y))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Runs the block; returns what went wrong, with the line of the model where it did."""
        for name, parameter in self.block.named_parameters():
            self._origins[id(parameter)] = (parameter, frozenset({name}))
            self._of_parameters[id(parameter)] = parameter
        _let_experts_pass(self.block)
        try:
            with torch.no_grad(), torch.device("meta"), _Watch(self):
                result = self.block(*args, **kwargs)
        except Exception as exception:  # whatever the model raises, it cannot be run like this
            return told_error(exception)
        self.outputs = tree_leaves(result)
        self.alike |= self._names(leaf for leaf in self.outputs if isinstance(leaf, Tensor))
        return None

    # ---------------------------------------------------------------- what is known of a tensor

    def taint(self, tensor: Tensor) -> Tensor:
        """From here on ranks have different ones."""
        self._tainted[id(tensor)] = tensor  # held, so that no other tensor gets its id
        return tensor

    def is_tainted(self, tensor: Tensor) -> bool:
        """Whether ranks have different ones."""
        return id(tensor) in self._tainted

    def mark_activation(self, tensor: Tensor) -> Tensor:
        """Ranks have it alike, and its gradient must come whole."""
        self._origins[id(tensor)] = (tensor, frozenset({ACTIVATION}))
        return tensor

    def is_activation(self, tensor: Tensor) -> bool:
        """Whether ranks have it alike, and its gradient must come whole."""
        return not self.is_tainted(tensor) and ACTIVATION in self._names([tensor])

    def take(self, tensor: Tensor) -> None:
        """The gradient of this tensor comes whole: a collective sees to it."""
        if not self.is_tainted(tensor):
            self.alike |= self._names([tensor])

    def mark_face(self, tensor: Tensor) -> Tensor:
        """Only the shape of this tensor may be looked at."""
        self._faces[id(tensor)] = tensor
        return tensor

    def _names(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        origins = [self._origins.get(id(tensor)) for tensor in tensors if not self.is_tainted(tensor)]
        return frozenset().union(*(origin[1] for origin in origins if origin is not None))

    def in_both_ways(self) -> str | None:
        """A parameter of whose gradient ranks have a summand by one way, and the whole by another."""
        names = (self.partial & self.alike) - {ACTIVATION}
        return f"{min(names)} acts both on what ranks divide and on what they have alike" if names else None

    # ---------------------------------------------------------------- operations

    def follow(self, function: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Notes one operation."""
        name: str = function._opname
        names, parameters = self._names(inputs), [t for t in inputs if id(t) in self._of_parameters]
        self.used |= names - {ACTIVATION}
        if any(id(tensor) in self._faces for tensor in inputs):
            self.wrong = self.wrong or f"{name} looks at what the region gets ({told(line())})"
        tainted = any(map(self.is_tainted, inputs))
        if tainted:
            self._meet(name, names)
        self._pass_on(outputs, names if name not in WITHOUT_GRADIENT else frozenset(), tainted)
        if parameters and len(parameters) == len(inputs):
            self._of_parameters.update({id(tensor): tensor for tensor in outputs})
        self.reads.follow(inputs, outputs)
        if (sizes := _reduced_sizes(function, args, inputs, bool(parameters))) is not None:
            self.reductions.append(sizes)
        if (places := places_of(function, args, inputs, outputs)) is not None:
            self.places.append(replace(places, divided=tainted))

    def _pass_on(self, outputs: list[Tensor], names: frozenset[str], tainted: bool) -> None:
        for tensor in outputs:
            if tainted:
                self.taint(tensor)
            elif names and tensor.is_floating_point():
                self._origins[id(tensor)] = (tensor, names)

    def _meet(self, name: str, names: frozenset[str]) -> None:
        self.partial |= names - {ACTIVATION}
        if ACTIVATION in names:
            self.wrong = self.wrong or (
                f"{name} brings together what ranks divide and an activation that they have alike, whose gradient "
                f"nobody would sum ({told(line())})"
            )


def _let_experts_pass(block: nn.Module) -> None:
    """Experts that hold their weights in one tensor give what they get: they map tokens one by one."""
    for name, module in block.named_modules():
        weights = list(module.parameters(recurse=False))
        if name.rpartition(".")[2] == "experts" and any(weight.dim() == 3 for weight in weights):
            vars(module)["forward"] = lambda hidden, *_, **__: hidden.clone()


class _Watch(TorchDispatchMode):
    """Follows all operations; those that ask for values get some."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trial = trial

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _answer(function, args)
        if answer is not None:
            return answer
        if function._overloadpacket is aten.index:
            args = (args[0], [part for index in args[1] for part in _as_positions(index)])
        result = function(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._trial.follow(function, args, inputs, outputs)
        return result


def _answer(function: Any, args: Any) -> Any:
    """What code that asks for values gets: one element wherever nobody knows how many, and no."""
    packet = function._overloadpacket
    if packet is aten._local_scalar_dense:
        return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
    if packet is aten.nonzero:
        return torch.empty(1, args[0].dim(), dtype=torch.long, device="meta")
    return None


def _as_positions(index: Tensor | None) -> list[Tensor | None]:
    """A mask as the positions that it selects: one."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [torch.empty(1, dtype=torch.long, device="meta") for _ in range(index.dim())]


# Operations that mix elements of a dimension.
ALONG_DIM = {"_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "logsumexp", "flip", "roll", "glu",
             "mean", "sum", "amax", "amin", "var", "std", "var_mean", "prod", "argmax", "argmin", "linalg_vector_norm",
             "max", "min", "median", "cummax", "logcumsumexp"}  # fmt: skip
ALONG_LAST = {"topk", "sort", "kthvalue"}  # unless they are told otherwise
AFTER_A_NUMBER = {"topk", "linalg_vector_norm", "roll", "kthvalue"}
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
    return (name, _sizes_along(function, args, inputs[0]), line()) if name in ALONG_DIM else None


def _sizes_along(function: Any, args: tuple[Any, ...], tensor: Tensor) -> tuple[int, ...]:
    name: str = function._opname
    after = args[2 if name in AFTER_A_NUMBER else 1 :]
    numbers = (arg for arg in after if isinstance(arg, int | list) and not isinstance(arg, bool))
    dims = next(numbers, -1 if name in ALONG_LAST else None)
    if dims is None or not tensor.dim():
        return tuple(tensor.shape)
    return tuple(tensor.shape[dim] for dim in (dims if isinstance(dims, list) else [dims]))


def told_error(exception: Exception) -> str:
    """The error with the line of the model where it was raised."""
    lines = [frame for frame in traceback.extract_tb(exception.__traceback__) if is_model(frame.filename)]
    where = f" at {lines[-1].filename}:{lines[-1].lineno} ({lines[-1].line})" if lines else ""
    return f"{type(exception).__name__}: {exception}{where}"
