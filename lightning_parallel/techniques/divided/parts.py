"""Parameters that ranks have divided: DTensors between steps, and while one runs tensors that compute as the whole.

The type itself decides: for the time of a step, and of its backward pass, DTensors that one axis divides have the class
`Part` (or, of experts, one under it). What computes with one gets the `Divided` tensor over the same memory; what asks
for its gradient, its shape or whether it learns gets what is stored. So modules, closures, checkpoints that recompute
and hooks of `fully_shard` find the same object at any time, and nothing is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.tools.leaves import leaf_of, taken_out
from lightning_parallel.techniques.tools.shards import divides, given_by_users, pieces

GRADIENT, GIVE = Tensor.grad.__get__, Tensor.grad.__set__  # type: ignore[union-attr]
LEARN = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]
METHODS = (
    *("__hash__", "_is_view", "is_floating_point", "is_complex", "get_device", "register_post_accumulate_grad_hook"),
    *("size", "dim", "numel", "nelement", "ndimension", "__len__", "stride", "is_contiguous", "element_size"),
)
PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "requires_grad", "is_sparse", "is_cuda"),
    *("is_cpu", "is_meta", "is_quantized", "name", "_post_accumulate_grad_hooks", "_backward_hooks", "retains_grad"),
)
ABOUT = {
    *(GRADIENT, GIVE, *LEARN),
    *(getattr(Tensor, name) for name in METHODS),
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
}
"""What is asked of the stored tensor itself, and computes nothing."""


class Part(DTensor):
    """The class of DTensors that `tp` divides while a step runs: they compute as `Divided` tensors.

    Attributes:
        step: what computes for them; None while an optimizer steps within the user's step, which computes with parts.
    """

    axis: ClassVar[str] = "tp"
    step: ClassVar[Parameters | None] = None
    computes: Any = None
    """The `Divided` of one that a module holds, set when the step begins."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if cls.step is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in ABOUT:  # what the stored tensor says
            if func == GIVE and args[1] is not None and not isinstance(args[1], DTensor):
                cls.step.of(args[0]).grad = args[1]  # a gradient may look whole
                return None
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if func in LEARN:
                    leaf_of(args[0])  # it learns as the parameter does
            if func == GRADIENT and type(result) is DTensor:
                cls.step.take(result)  # the gradient that it has computes as the whole
            return result
        args, kwargs = computing_in(args, kwargs)
        return func(*args, **kwargs)


def part_class(stored: Any) -> type[Part] | None:
    """The class of a stored tensor in steps, by the one axis that divides it; None where others have sharded it too."""
    if type(stored) is not DTensor:
        return None
    axes = zip(stored.device_mesh.mesh_dim_names or (), stored.placements, strict=False)
    divided = [name for name, placement in axes if divides(placement)]
    kinds: list[type[Part]] = [Part, *Part.__subclasses__()]
    return next((kind for kind in kinds if divided == [kind.axis]), None)


def computing_in(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments in which what computes for parts stands in their place."""
    step = Part.step
    given = [
        (each.computes if each.computes is not None and step is not None else computing(each))
        if (kind := type(each)) is Part
        else computing(each)
        if kind is list or kind is tuple or issubclass(kind, Part)
        else each
        for each in args
    ]
    return tuple(given), {name: computing(each) for name, each in kwargs.items()} if kwargs else {}


def computing(value: Any) -> Any:
    """What computes for a value while a step runs, in lists and tuples too."""
    kind = type(value)
    if issubclass(kind, Part):
        return value if kind.step is None else kind.step.of(value)
    return kind(map(computing, value)) if kind is list or kind is tuple else value


def as_stored(run: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Runs what an optimizer does with a closure: within a step, too, it has parts, as it has between steps."""
    kinds: list[type[Part]] = [Part, *Part.__subclasses__()]
    steps = {kind: kind.step for kind in kinds}

    def within() -> Any:
        for kind, step in steps.items():
            kind.step = step
        try:
            return closure()
        finally:
            for kind in steps:
                kind.step = None

    for kind in steps:
        kind.step = None
    try:
        return run(within, *args, **kwargs)
    finally:
        for kind, step in steps.items():
            kind.step = step


# ---------------------------------------------------------------- the parameters of a model


class Parameters:
    """The parameters of a model of which ranks have divided some.

    Args:
        model: whose they are.
        ranks: that have divided them.
        made: makes the tensor that computes for a part, of what this rank has of it and its cuts.
    """

    kind: ClassVar[type[Part]] = Part
    """Their class while a step runs."""

    def __init__(self, model: nn.Module, ranks: Ranks, made: Callable[[Tensor, Cuts], Any]) -> None:
        self.ranks, self._made, self._entered = ranks, made, False
        self._tables = [(name, module._parameters) for name, module in model.named_modules() if module._parameters]
        self._parts: list[Any] = []
        """Those that became parts as this step began, or while it runs."""
        self._computing: dict[int, Any] = {}
        """What computes for each part, under its `id`: for wholes of `fully_shard`, which stay parts, too."""
        self._cuts: dict[int, tuple[Any, Cuts]] = {}
        """Of each spec of a DTensor, under its `id`."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, parts of parameters compute as the whole."""
        before, self.kind.step = self.kind.step, self
        if self._entered:  # a backward pass within a step, also one of given gradients while an optimizer has parts
            try:
                yield
            finally:
                self.kind.step = before
            return
        self._entered = True
        slots: list[tuple[str, dict[str, Any], str, Any]] = []
        replaced: list[str] = []
        try:
            self.find()
            found = set(map(id, self._parts))
            slots += [(prefix, table, name, each) for prefix, table in self._tables for name, each in table.items()
                      if id(each) in found]  # fmt: skip
            yield
        finally:
            for prefix, table, name, part in slots:
                if table.get(name) is not part:
                    replaced.append(f"{prefix}.{name}" if prefix else name)
                    table[name] = part
            for part in self._parts:
                part.__class__ = DTensor
            self._parts.clear()
            # The next step's values may be others under the same version: `fully_shard` gathers anew below autograd.
            for made in self._computing.values():
                if made._gathers is not None:
                    made.forget()
            self._computing = {key: made for key, made in self._computing.items() if made._is_param}  # no gradients
            self.kind.step, self._entered = before, False
        if replaced:
            raise taken_out(replaced[0])

    def find(self) -> None:
        """Within `computing`: those that have come since, too."""
        for _, table in self._tables:
            for parameter in table.values():
                kind: Any = type(parameter)
                if kind is DTensor or kind is self.kind:
                    self.take(parameter)

    def take(self, stored: Any) -> None:
        """Makes a stored tensor a part, if these ranks alone divide it."""
        made = self._computing.get(id(stored))
        if made is not None and made.stored is stored and made.memory is stored._local_tensor:
            if made.own.requires_grad is not stored.requires_grad:
                leaf_of(stored)  # it was frozen, or let learn, between steps
        elif type(stored) is self.kind or part_class(stored) is self.kind:
            vars(stored)["computes"] = None
        else:
            return
        if type(stored) is DTensor:
            stored.__class__ = self.kind
            self._parts.append(stored)

    def of(self, part: Any) -> Any:
        """The tensor that computes for a part: the same in each step, as long as what is stored stays the same."""
        made, memory = part.computes, part._local_tensor
        if made is None or made.stored is not part or made.memory is not memory:
            is_parameter = isinstance(part, nn.Parameter)
            spec, cuts = self._cuts.get(id(part._spec), (None, {}))
            if spec is not part._spec:  # the placement of what is stored is the one truth of its cuts
                cuts, count = {}, self.ranks.count
                for axis, placement in zip(part.device_mesh.mesh_dim_names, part.placements, strict=True):
                    if axis == self.ranks.name and divides(placement):
                        size = part.shape[placement.dim]
                        runs = [pieces(placement, size, count, rank) for rank in range(count)]
                        cuts[placement.dim] = self.ranks.elements(size, runs)
                self._cuts[id(part._spec)] = part._spec, cuts
            made = self._made(leaf_of(part) if is_parameter else memory, cuts)
            vars(made).update({**given_by_users(part), "stored": part, "memory": memory, "_is_param": is_parameter})
            part.computes = self._computing[id(part)] = made
        return made
