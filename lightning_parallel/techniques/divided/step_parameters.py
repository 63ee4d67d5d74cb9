"""Sharded parameters: DTensors between steps, which compute as full tensors while a step runs.

The type of the tensor decides: during a step and its backward pass, DTensors that one axis shards have the class `Part`
(those of experts a subclass). An operation on a `Part` computes with a `Divided` tensor over the same memory; reading
its gradient, shape or `requires_grad` reads the stored DTensor. So modules, closures, checkpoints that recompute and
hooks of `fully_shard` see the same object at all times, and no parameter is swapped for another.
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
from lightning_parallel.techniques.tools.leaves import autograd_leaf, replaced_error
from lightning_parallel.techniques.tools.shards import pieces, shards_dim, user_attributes

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
METADATA_FUNCTIONS = {
    *(GRADIENT, GIVE, *LEARN),
    *(getattr(Tensor, name) for name in METHODS),
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
}
"""Functions that read or set the stored tensor itself, and compute nothing."""


class Part(DTensor):
    """Class of DTensors sharded over `axis` while a step runs: operations compute with their `Divided` tensors.

    Attributes:
        step: the parameters of the running step; None while an optimizer steps inside it, which updates the shards.
    """

    axis: ClassVar[str] = "tp"
    step: ClassVar[Parameters | None] = None
    computes: Any = None
    """The `Divided` tensor of a parameter that a module holds; `Parameters.of` sets it at the first use in a step."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if cls.step is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in METADATA_FUNCTIONS:  # answered by the stored tensor
            if func == GIVE and args[1] is not None and not isinstance(args[1], DTensor):
                cls.step.of(args[0]).grad = args[1]  # the gradient may have the shape of the full tensor
                return None
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if func in LEARN:
                    autograd_leaf(args[0])  # gives its local shard the same `requires_grad`
            if func == GRADIENT and type(result) is DTensor:
                cls.step.take(result)  # its gradient computes as the full tensor, too
            return result
        args, kwargs = computing_in(args, kwargs)
        return func(*args, **kwargs)


def part_class(stored: Any) -> type[Part] | None:
    """Return the class of a stored tensor during steps, by the one axis that shards it; None for any other sharding."""
    if type(stored) is not DTensor:
        return None
    axes = zip(stored.device_mesh.mesh_dim_names or (), stored.placements, strict=False)
    sharding_axes = [name for name, placement in axes if shards_dim(placement)]
    kinds: list[type[Part]] = [Part, *Part.__subclasses__()]
    return next((kind for kind in kinds if sharding_axes == [kind.axis]), None)


def computing_in(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of an operation with `Divided` tensors in place of parts."""
    step = Part.step
    prepared = [
        (argument.computes if argument.computes is not None and step is not None else computing(argument))
        if (kind := type(argument)) is Part
        else computing(argument)
        if kind is list or kind is tuple or issubclass(kind, Part)
        else argument
        for argument in args
    ]
    return tuple(prepared), {name: computing(argument) for name, argument in kwargs.items()} if kwargs else {}


def computing(value: Any) -> Any:
    """Return the value with `Divided` tensors in place of parts, also in lists and tuples, while a step runs."""
    kind = type(value)
    if issubclass(kind, Part):
        return value if kind.step is None else kind.step.of(value)
    return kind(map(computing, value)) if kind is list or kind is tuple else value


def optimizer_step_on_shards(run: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Run an optimizer's step on the stored shards, as it gets them between steps; its closure uses full tensors."""
    kinds: list[type[Part]] = [Part, *Part.__subclasses__()]
    steps = {kind: kind.step for kind in kinds}

    def computing_closure() -> Any:
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
        return run(computing_closure, *args, **kwargs)
    finally:
        for kind, step in steps.items():
            kind.step = step


# ---------------------------------------------------------------- the parameters of a model


class Parameters:
    """The parameters of a model whose shards compute as full tensors while a step runs.

    Args:
        model: the model.
        ranks: the ranks that shard them.
        made: creates the tensor that computes for a part, from the local shard and its cuts.
    """

    kind: ClassVar[type[Part]] = Part
    """Class of the sharded parameters while a step runs."""

    def __init__(self, model: nn.Module, ranks: Ranks, made: Callable[[Tensor, Cuts], Any]) -> None:
        self.ranks, self._made, self._entered = ranks, made, False
        self._tables = [(name, module._parameters) for name, module in model.named_modules() if module._parameters]
        self._parts: list[Any] = []
        """Tensors that became parts when this step began, or while it runs."""
        self._computing: dict[int, Any] = {}
        """The `Divided` tensor of each part, by `id`; also for full tensors of `fully_shard`, which stay parts."""
        self._cuts: dict[int, tuple[Any, Cuts]] = {}
        """The cuts of each DTensor spec, by `id`."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context in which parts of parameters compute as full tensors."""
        before, self.kind.step = self.kind.step, self
        if self._entered:  # a backward pass in a step, also one of given gradients while an optimizer updates shards
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
            ids = set(map(id, self._parts))
            slots += [(prefix, table, name, param) for prefix, table in self._tables for name, param in table.items()
                      if id(param) in ids]  # fmt: skip
            yield
        finally:
            for prefix, table, name, part in slots:
                if table.get(name) is not part:
                    replaced.append(f"{prefix}.{name}" if prefix else name)
                    table[name] = part
            for part in self._parts:
                part.__class__ = DTensor
            self._parts.clear()
            # The next step's values may have the same version: `fully_shard` gathers again below autograd.
            for tensor in self._computing.values():
                if tensor._gathers is not None:
                    tensor.forget()
            self._computing = {key: each for key, each in self._computing.items() if each._is_param}  # drop gradients
            self.kind.step, self._entered = before, False
        if replaced:
            raise replaced_error(replaced[0])

    def find(self) -> None:
        """Make parts of all sharded parameters, also of new ones during a step; call it within `computing`."""
        for _, table in self._tables:
            for parameter in table.values():
                kind: Any = type(parameter)
                if kind is DTensor or kind is self.kind:
                    self.take(parameter)

    def take(self, stored: Any) -> None:
        """Make a stored tensor a part if the ranks of this object, and no others, shard it."""
        tensor = self._computing.get(id(stored))
        if tensor is not None and tensor.stored is stored and tensor.memory is stored._local_tensor:
            if tensor.own.requires_grad is not stored.requires_grad:
                autograd_leaf(stored)  # `requires_grad` was changed between steps
        elif type(stored) is self.kind or part_class(stored) is self.kind:
            vars(stored)["computes"] = None
        else:
            return
        if type(stored) is DTensor:
            stored.__class__ = self.kind
            self._parts.append(stored)

    def of(self, part: Any) -> Any:
        """Return the `Divided` tensor of a part: the same in each step, as long as the stored memory stays the same."""
        tensor, memory = part.computes, part._local_tensor
        if tensor is None or tensor.stored is not part or tensor.memory is not memory:
            is_parameter = isinstance(part, nn.Parameter)
            spec, cuts = self._cuts.get(id(part._spec), (None, {}))
            if spec is not part._spec:  # the placements of the stored tensor are the only source of its cuts
                cuts, count = {}, self.ranks.count
                for axis, placement in zip(part.device_mesh.mesh_dim_names, part.placements, strict=True):
                    if axis == self.ranks.name and shards_dim(placement):
                        size = part.shape[placement.dim]
                        runs = [pieces(placement, size, count, rank) for rank in range(count)]
                        cuts[placement.dim] = self.ranks.elements(size, runs)
                self._cuts[id(part._spec)] = part._spec, cuts
            tensor = self._made(autograd_leaf(part) if is_parameter else memory, cuts)
            vars(tensor).update({**user_attributes(part), "stored": part, "memory": memory, "_is_param": is_parameter})
            part.computes = self._computing[id(part)] = tensor
        return tensor
