"""Tensors without values, in place of tensors that other stages of a pipeline hold.

An absent tensor has a shape, a dtype and a device. The result of any operation on an absent tensor is absent, too.
Reading its value raises, and so does writing it into a tensor of a module or into a view; an intermediate tensor into
which it is written, as by `x += weight`, becomes absent itself. The class serves both the analysis of a step, in which
all parameters are absent and a `Tracer` notes where each is read, and the run of a stage, in which the tensors of other
stages are absent.

    >>> weight = Absent(torch.ones(2, 2), torch.device("cpu"), "layers.0.weight")
    >>> (torch.ones(2) @ weight).shape
    torch.Size([2])
    >>> weight.sum().item()
    AbsentError: layers.0.weight is read, but another stage of the pipeline has it: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_parallel.techniques.tools.microbatches import part_sizes

UNDIVIDED = "use ZeroStrategy, which divides any model"
REMEDY = (
    "a stage has what the analyzed step (training_step in a fit) used there; use it at the same places in every step, "
    f"or {UNDIVIDED}"
)

aten = torch.ops.aten
BY_SHAPE = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like, aten.randn_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
}
"""Operations that use only the shape, dtype and device of their first argument."""

SPLITS = {aten.split_with_sizes, aten.split_with_sizes_copy}
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
TO_PYTHON = {"numpy", "__array__", "tolist", "__format__", "__dlpack__"}
"""Functions that read the memory of a tensor without calling an operation of PyTorch's dispatcher."""

MEMORY = {"apply_", "map_", "map2_", "data_ptr", "untyped_storage"}
"""Functions that crash the process if the tensor has no memory."""


ALONE = 2
"""Use count of a storage that no other tensor shares: one for the tensor, one for the object that queries the count."""

PLAIN = torch._C._disabled_torch_function_impl
SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__


def is_in_place(name: str) -> bool:
    """Return whether a function of this name changes its first argument: `add_`, `__iadd__`, `__setitem__` do."""
    if name.startswith("__i"):
        return name not in ("__invert__", "__index__", "__int__", "__iter__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class AbsentError(RuntimeError):
    """Raised when code uses a value that another stage of the pipeline holds."""


class WrittenError(AbsentError):
    """Raised when an operation writes an absent tensor into a tensor that has values."""


class ShapeChangedError(RuntimeError):
    """Raised when an operation such as `squeeze_` would change the shape of an absent tensor in place."""


def absent_error(what: str, how: str = "is read") -> AbsentError:
    """Return an error that names an absent tensor, the use that was attempted, and the remedy."""
    return AbsentError(f"{what} {how}, but another stage of the pipeline has it: {REMEDY}")


class Tracer(Protocol):
    """Callbacks through which the analysis of a step follows absent tensors."""

    def read(self, tensor: Absent) -> None:
        """Note that an operation reads `tensor`."""

    def asked(self, tensor: Absent) -> None:
        """Note that Python code gets a made-up value of `tensor`."""

    def wrote(self, tensor: Tensor, inputs: Sequence[Absent]) -> None:
        """Note that an operation on `inputs` writes into `tensor`, which has values."""

    def origin(self, inputs: Sequence[Absent]) -> Any:
        """Return the origin of the result of an operation on `inputs`."""

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count the FLOPs of an operation, which ran on meta tensors."""


class Absent(Tensor):
    """Shape, dtype and device of a tensor that another stage holds.

    Args:
        like: tensor with the shape, strides and dtype; its values are not used.
        device: the device on which the values would be.
        what: the name of the tensor in messages.
        tracer: follows the tensor during the analysis of a step; None at run time.
        origin: data of the tracer.
        learns: whether the tensor requires gradients.
        parameter: whether `isinstance(tensor, nn.Parameter)` is True.
    """

    what: str
    tracer: Tracer | None
    origin: Any
    writes: Callable[[str], object] | None  # called with `what` when code writes to the tensor or to a view of it

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        like: Tensor,
        device: torch.device,
        what: str,
        tracer: Tracer | None = None,
        origin: Any = None,
        learns: bool = False,
        parameter: bool = False,
    ) -> Absent:
        make = cast(Callable[..., Absent], Tensor._make_wrapper_subclass)
        with torch._C.DisableTorchFunctionSubclass():
            strides = like.stride() if like.layout == torch.strided else None
            tensor = make(cls, like.shape, strides=strides, dtype=like.dtype, device=device, requires_grad=learns)
        tensor.what, tensor.tracer, tensor.origin, tensor.writes = what, tracer, origin, None
        if parameter:
            vars(tensor)["_is_param"] = True
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.Tensor`. Of `Divided` tensors among the arguments only the full shape is used."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func == SET_DATA and isinstance(args[0], Absent):
            if args[0].writes is not None:
                args[0].writes(args[0].what)
            return None
        if name in TO_PYTHON or name in MEMORY:
            # these read memory: in an analysis, functions in TO_PYTHON get ones instead
            absent = next(value for value in (*args, *kwargs.values()) if isinstance(value, Absent))
            if absent.tracer is None or name in MEMORY:
                raise absent_error(absent.what)
            absent.tracer.read(absent)
            absent.tracer.asked(absent)
            return func(torch.ones(absent.shape, dtype=absent.dtype), *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if any(kind is not cls and kind.__torch_function__ is not PLAIN for kind in types):
                args, kwargs = pytree.tree_map_only(Tensor, _plain, (args, kwargs))
            return _called(func, name, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.what}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: Any) -> Absent:
        is_parameter = "_is_param" in vars(self)
        copied = memo[id(self)] = Absent(
            self, self.device, self.what, self.tracer, self.origin, self.requires_grad, is_parameter
        )
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise absent_error(self.what, "is written to a file")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on meta tensors and wrap the results as absent tensors."""
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
        first, packet, tracer = absent[0], func._overloadpacket, absent[0].tracer
        if packet in BY_SHAPE and isinstance(args[0], Absent):
            like = torch.zeros((), dtype=first.dtype, device=first.device).expand(first.shape)
            return func(like, *args[1:], **kwargs)
        if tracer is not None:
            for tensor in absent:
                tracer.read(tensor)
        if not DATA_DEPENDENT.isdisjoint(func.tags) and packet is not aten.index:
            return _made_up(func, args, absent)
        for value in _written(func, args, kwargs):
            if isinstance(value, Absent):
                if value.writes is not None:
                    value.writes(value.what)
            elif tracer is None:
                raise WrittenError(str(absent_error(first.what, "is written into a tensor of this stage")))
            else:
                tracer.wrote(value, absent)
        return _on_meta(func, leaves, structure, absent, tracer)


def _called(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a function of torch; where it writes an absent tensor into an intermediate one, make that one absent."""
    try:
        result = func(*args, **kwargs)
    except WrittenError as error:
        error.__traceback__ = None  # its frames refer to views of the tensor, and `_absorb` counts references
        if not _absorb(name, args, kwargs):
            raise
        return None if name == "__setitem__" else args[0]
    except ShapeChangedError:
        if name.endswith("_"):
            raise
        # `func` consists of several operations: run all of them on meta tensors, which may change their shape
        absent = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
        args, kwargs = pytree.tree_map_only(Tensor, lambda each: torch.empty_like(each, device="meta"), (args, kwargs))
        first, tracer = absent[0], absent[0].tracer
        origin = None if tracer is None else tracer.origin(absent)
        metas = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda meta: Absent(meta, first.device, first.what, tracer, origin), metas)
    _absorb(name, args, kwargs)  # in an analysis: at run time the write has raised
    return result


def _absorb(name: str, args: Any, kwargs: Any) -> bool:
    """Make the tensor absent into which a function writes; return whether that was possible.

    Only an intermediate tensor of the step can become absent: it is no parameter, no other tensor shares its memory,
    and there is no weak reference to it, as stages have to their buffers.
    """
    if not is_in_place(name) or type(args[0]) is not Tensor or args[0]._is_view():
        return False
    target = args[0]
    absent = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
    first, tracer = absent[0], absent[0].tracer
    if torch._C._storage_Use_Count(target.untyped_storage()._cdata) > ALONE:
        return False
    origin = None if tracer is None else tracer.origin(absent)
    requires_grad = target.requires_grad or any(tensor.requires_grad for tensor in absent)
    with torch.enable_grad():  # a clone is no leaf, so code may go on writing into it
        like = torch.empty_like(target, device="meta")
        replacement = Absent(like, target.device, first.what, tracer, origin, requires_grad).clone()
    try:
        torch.utils.swap_tensors(target, replacement)  # type: ignore[no-untyped-call]
    except RuntimeError:  # autograd has saved `target`, or there is a weak reference to it
        return False
    return True


def _plain(tensor: Tensor) -> Tensor:
    """Return an absent tensor of the same shape for a tensor of another subclass; any other tensor unchanged."""
    if isinstance(tensor, Absent) or type(tensor) is Tensor or type(tensor).__torch_function__ is PLAIN:
        return tensor
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return Absent(shape, tensor.device, f"a {type(tensor).__name__} tensor")


def _made_up(func: Any, args: Any, absent: Sequence[Absent]) -> Any:
    """Return a made-up result of an operation that depends on values: ones, True, or one selected element."""
    for value in absent:
        if value.tracer is None:  # at run time
            raise absent_error(value.what)
        value.tracer.asked(value)
    packet, tensor = func._overloadpacket, args[0]
    if packet is aten.equal:
        return True  # most checks of values pass with this result
    if packet is aten.nonzero:
        return torch.zeros(1, tensor.dim(), dtype=torch.long)
    if packet is aten.masked_select:
        return torch.zeros(1, dtype=tensor.dtype)
    ones = pytree.tree_map_only(Absent, lambda each: torch.ones(each.shape, dtype=each.dtype), args)
    return func(*ones)


def _on_meta(func: Any, leaves: list[Any], structure: Any, absent: Sequence[Absent], tracer: Tracer | None) -> Any:
    """Return the absent results of an operation, run on meta tensors; in-place operations return their argument."""
    first = absent[0]
    metas = {  # one meta tensor for each object: an operation may get a tensor twice
        id(leaf): torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        for leaf in leaves
        if isinstance(leaf, Tensor)
    }
    args, kwargs = pytree.tree_unflatten([metas.get(id(leaf), leaf) for leaf in leaves], structure)
    if func._overloadpacket is aten.index:
        args = (args[0], _indices(pytree.tree_unflatten(leaves, structure)[0][1]))
    elif func._overloadpacket in SPLITS and tracer is not None:
        tensor, sizes, *dim = args
        size = tensor.shape[dim[0] if dim else 0]
        fits = not sizes or sum(sizes) == size
        args = (tensor, sizes if fits else part_sizes(size, len(sizes)), *dim)  # made-up sizes: split evenly
    device = torch.device(kwargs.get("device") or first.device)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        result = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # no meta kernel, or none for these dtypes
        result = _on_zeros(func, leaves, structure)
    if tracer is not None:
        tracer.count(func, args, kwargs, result)
    origin = None if tracer is None else tracer.origin(absent)
    originals = {id(metas[id(leaf)]): leaf for leaf in leaves if id(leaf) in metas}
    aliases = any(value.alias_info is not None for value in func._schema.returns)  # results are views, or `p.data`

    def returned(meta: Tensor) -> Tensor:
        original = originals.get(id(meta))
        if original is None:
            wrapped = Absent(meta, device, first.what, tracer, origin)
            wrapped.writes = first.writes if aliases else None
            return wrapped
        if original.shape != meta.shape:
            raise ShapeChangedError(f"the shape of {first.what}, on another stage, is changed in place")
        if isinstance(original, Absent):
            original.origin = origin
        return cast(Tensor, original)

    return pytree.tree_map_only(Tensor, returned, result)


def _on_zeros(func: Any, leaves: Sequence[Any], structure: Any) -> Any:
    """Return results on meta, computed with zeros for absent values and the values of other tensors, e.g. lengths."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Absent):
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    args, kwargs = pytree.tree_unflatten(list(map(real, leaves)), structure)
    return pytree.tree_map_only(Tensor, lambda made: made.to("meta"), func(*args, **kwargs))


def _indices(indices: Sequence[Any]) -> list[Any]:
    """Return indices on meta; a mask becomes the positions that it selects: one if their number is unknown."""
    converted: list[Any] = []
    for index in indices:
        if not isinstance(index, Tensor):
            converted.append(index)
        elif index.dtype not in (torch.bool, torch.uint8):
            converted.append(torch.empty(index.shape, dtype=index.dtype, device="meta"))
        else:
            count = 1 if isinstance(index, Absent) or index.is_meta else int(index.sum())
            converted += [torch.empty(count, dtype=torch.long, device="meta") for _ in range(index.dim())]
    return converted


@cache
def _writes(func: Any) -> tuple[list[tuple[int, str]], int | None]:
    """Return places and names of the arguments that an operation changes, and the place of its training flag."""
    arguments = list(enumerate(func._schema.arguments))
    # schemas do not mark running statistics as written
    marked = [(place, arg.name) for place, arg in arguments if arg.is_write or arg.name.startswith("running_")]
    training = (place for place, arg in arguments if arg.name in ("training", "train", "use_input_stats"))
    return marked, next(training, None) if marked else None


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place: those in lists of `_foreach_`, statistics in training."""
    writes, training = _writes(func)
    if training is not None and training < len(args) and not args[training]:
        return
    for place, name in writes:
        value = args[place] if place < len(args) else kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        yield from (each for each in values if isinstance(each, Tensor))
