"""Tensors without values, in place of what another stage of a pipeline holds.

An absent tensor has a shape, a dtype and a device. Operations absorb it: the result of an operation on an absent tensor
is absent. Reading its value raises, and so does writing it into a tensor that a module or a view has; an intermediate
tensor into which it is written, as by `x += weight`, becomes absent itself. One class serves the analysis of a
step, in which all parameters are absent and a tracer notes where each is read, and the run of a stage, in which
whatever lies on other stages is absent.

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
    "a stage has what the analyzed step (training_step in a fit) uses on it; use it at the same places in every step, "
    f"or {UNDIVIDED}"
)

aten = torch.ops.aten
BY_SHAPE = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like, aten.randn_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
}
"""Operations that look at the shape, dtype and device of their first argument only."""

SPLITS = {aten.split_with_sizes, aten.split_with_sizes_copy}
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
TO_PYTHON = {"numpy", "__array__", "tolist", "__format__", "__dlpack__"}
"""Functions that read memory below every operation."""

MEMORY = {"apply_", "map_", "map2_", "data_ptr", "untyped_storage"}
"""Functions that end the process where there is no memory."""


ALONE = 2
"""References to the memory of a tensor that no other tensor shares: the tensor, and who asks for the memory."""

PLAIN = torch._C._disabled_torch_function_impl
SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument: `add_`, `__iadd__`, `__setitem__`, not `__add__`."""
    if name.startswith("__i"):
        return name not in ("__invert__", "__index__", "__int__", "__iter__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class AbsentError(RuntimeError):
    """A value was used that another stage of the pipeline has."""


class WrittenError(AbsentError):
    """An operation writes an absent tensor into one that has values."""


class ShapeChangedError(RuntimeError):
    """An operation changes the shape of an absent tensor in place, as `squeeze_`, which the tensor cannot follow."""


def refusal(what: str, how: str = "is read") -> AbsentError:
    """An error that names an absent tensor, what was done with it, and the remedy."""
    return AbsentError(f"{what} {how}, but another stage of the pipeline has it: {REMEDY}")


class Tracer(Protocol):
    """Follows absent tensors through a step that is analyzed."""

    def read(self, tensor: Absent) -> None:
        """An operation reads this tensor."""

    def asked(self, tensor: Absent) -> None:
        """Python gets a made-up value of this tensor."""

    def wrote(self, tensor: Tensor, inputs: Sequence[Absent]) -> None:
        """An operation on these inputs writes into a tensor that has values."""

    def origin(self, inputs: Sequence[Absent]) -> Any:
        """The origin of the result of an operation on these inputs."""

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation ran, with tensors on meta."""


class Absent(Tensor):
    """Shape, dtype and device of a tensor that another stage holds.

    Args:
        like: has the shape, the strides and the dtype; its values are not used.
        device: where the values would be.
        what: the name of the tensor in messages.
        tracer: follows the tensor while a step is analyzed; None at run time.
        origin: known to the tracer.
        learns: whether it requires gradients.
        parameter: whether it is one, for `isinstance(tensor, nn.Parameter)`.
    """

    what: str
    tracer: Tracer | None
    origin: Any
    writes: Callable[[str], object] | None  # is told the name when code writes to the tensor, or to a view of it

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
            made = make(cls, like.shape, strides=strides, dtype=like.dtype, device=device, requires_grad=learns)
        made.what, made.tracer, made.origin, made.writes = what, tracer, origin, None
        if parameter:
            vars(made)["_is_param"] = True
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.Tensor`. Divided tensors among the arguments count by the shape that they have as a whole."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func == SET_DATA and isinstance(args[0], Absent):
            if args[0].writes is not None:
                args[0].writes(args[0].what)
            return None
        if name in TO_PYTHON or name in MEMORY:
            # they look into memory: values are made up while a step is analyzed
            absent = next(each for each in (*args, *kwargs.values()) if isinstance(each, Absent))
            if absent.tracer is None or name in MEMORY:
                raise refusal(absent.what)
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
        made = memo[id(self)] = Absent(
            self, self.device, self.what, self.tracer, self.origin, self.requires_grad, is_parameter
        )
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal(self.what, "is written to a file")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation on meta, and wraps what it returns."""
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
        first, packet, tracer = absent[0], func._overloadpacket, absent[0].tracer
        if packet in BY_SHAPE and isinstance(args[0], Absent):
            like = torch.zeros((), dtype=first.dtype, device=first.device).expand(first.shape)
            return func(like, *args[1:], **kwargs)
        if tracer is not None:
            for each in absent:
                tracer.read(each)
        if not DATA_DEPENDENT.isdisjoint(func.tags) and packet is not aten.index:
            return _made_up(func, args, absent)
        for value in _written(func, args, kwargs):
            if isinstance(value, Absent):
                if value.writes is not None:
                    value.writes(value.what)
            elif tracer is None:
                raise WrittenError(str(refusal(first.what, "is written into a tensor of this stage")))
            else:
                tracer.wrote(value, absent)
        return _on_meta(func, leaves, structure, absent, tracer)


def _called(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    try:
        result = func(*args, **kwargs)
    except WrittenError as error:
        error.__traceback__ = None  # whose frames know views of the tensor
        if not _absorb(name, args, kwargs):
            raise
        return None if name == "__setitem__" else args[0]
    except ShapeChangedError:
        if name.endswith("_"):
            raise
        # a function of several operations, at once on shapes alone
        absent = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
        args, kwargs = pytree.tree_map_only(Tensor, lambda each: torch.empty_like(each, device="meta"), (args, kwargs))
        first, tracer = absent[0], absent[0].tracer
        origin = None if tracer is None else tracer.origin(absent)
        made = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda meta: Absent(meta, first.device, first.what, tracer, origin), made)
    if is_in_place(name) and type(args[0]) is Tensor:  # only an analysis writes into a tensor with values
        _absorb(name, args, kwargs)
    return result


def _absorb(name: str, args: Any, kwargs: Any) -> bool:
    """Makes the tensor absent into which a function writes; returns whether it could.

    Only an intermediate tensor of the step can be: it is no parameter, nothing else looks into its memory, and nobody
    has a weak reference to it, as stages have to their buffers.
    """
    if not is_in_place(name) or type(args[0]) is not Tensor or args[0]._is_view():
        return False
    target = args[0]
    absent = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
    first, tracer = absent[0], absent[0].tracer
    if torch._C._storage_Use_Count(target.untyped_storage()._cdata) > ALONE:
        return False
    origin = None if tracer is None else tracer.origin(absent)
    learns = target.requires_grad or any(each.requires_grad for each in absent)
    with torch.enable_grad():  # a copy is no leaf: code may go on writing into it
        like = torch.empty_like(target, device="meta")
        made = Absent(like, target.device, first.what, tracer, origin, learns).clone()
    try:
        torch.utils.swap_tensors(target, made)  # type: ignore[no-untyped-call]
    except RuntimeError:  # autograd keeps it, or somebody has a weak reference
        return False
    return True


def _plain(tensor: Tensor) -> Tensor:
    """A tensor of another class, as an absent one of the shape that it shows."""
    if isinstance(tensor, Absent) or type(tensor).__torch_function__ is PLAIN:
        return tensor
    if type(tensor) is Tensor or (isinstance(tensor, torch.nn.Parameter) and type(tensor) is torch.nn.Parameter):
        return tensor
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return Absent(shape, tensor.device, f"a {type(tensor).__name__} tensor")


def _made_up(func: Any, args: Any, absent: Sequence[Absent]) -> Any:
    """The answer to an operation that asks for a value: ones and True, as many as fit."""
    for each in absent:
        if each.tracer is None:
            raise refusal(each.what)
        each.tracer.asked(each)
    packet, tensor = func._overloadpacket, args[0]
    if packet is aten._local_scalar_dense:
        return {torch.bool: True}.get(tensor.dtype, 1.0 if tensor.is_floating_point() else 1)
    if packet is aten.equal:
        return True  # the way that most checks of values take
    if packet is aten.nonzero:
        return torch.zeros(1, tensor.dim(), dtype=torch.long)
    if packet is aten.masked_select:
        return torch.zeros(1, dtype=tensor.dtype)
    ones = pytree.tree_map_only(Absent, lambda each: torch.ones(each.shape, dtype=each.dtype), args)
    return func(*ones)


def _on_meta(func: Any, leaves: list[Any], structure: Any, absent: Sequence[Absent], tracer: Tracer | None) -> Any:
    """The result of an operation on shapes alone; operations in place return what they were given."""
    first = absent[0]
    metas = {  # one for each: an operation may get a tensor twice
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
        args = (tensor, sizes if fits else part_sizes(size, len(sizes)), *dim)  # made-up sizes: as even as can be
    device = torch.device(kwargs.get("device") or first.device)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        result = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # no rule for shapes, or none for these dtypes
        result = _on_zeros(func, leaves, structure)
    if tracer is not None:
        tracer.count(func, args, kwargs, result)
    origin = None if tracer is None else tracer.origin(absent)
    given = {id(metas[id(leaf)]): leaf for leaf in leaves if id(leaf) in metas}
    aliases = any(each.alias_info is not None for each in func._schema.returns)  # a view, or `p.data`

    def returned(meta: Tensor) -> Tensor:
        same = given.get(id(meta))
        if same is None:
            made = Absent(meta, device, first.what, tracer, origin)
            made.writes = first.writes if aliases else None
            return made
        if same.shape != meta.shape:
            raise ShapeChangedError(f"the shape of {first.what}, which another stage has, is changed in place")
        if isinstance(same, Absent):
            same.origin = origin
        return cast(Tensor, same)

    return pytree.tree_map_only(Tensor, returned, result)


def _on_zeros(func: Any, leaves: Sequence[Any], structure: Any) -> Any:
    """The result of an operation with zeros for absent values, as shapes; real tensors may be lengths of others."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Absent):
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    args, kwargs = pytree.tree_unflatten(list(map(real, leaves)), structure)
    return pytree.tree_map_only(Tensor, lambda made: made.to("meta"), func(*args, **kwargs))


def _indices(indices: Sequence[Any]) -> list[Any]:
    """Indices on meta; a mask as the positions that it selects: one, where nobody knows how many."""
    found: list[Any] = []
    for index in indices:
        if not isinstance(index, Tensor):
            found.append(index)
        elif index.dtype not in (torch.bool, torch.uint8):
            found.append(torch.empty(index.shape, dtype=index.dtype, device="meta"))
        else:
            count = 1 if isinstance(index, Absent) or index.is_meta else int(index.sum())
            found += [torch.empty(count, dtype=torch.long, device="meta") for _ in range(index.dim())]
    return found


@cache
def _writes(func: Any) -> tuple[list[tuple[int, str]], int | None]:
    """Places and names of the arguments that an operation changes, and the place of what says whether it trains."""
    arguments = list(enumerate(func._schema.arguments))
    # running statistics are not marked in schemas
    marked = [(place, each.name) for place, each in arguments if each.is_write or each.name.startswith("running_")]
    training = (place for place, each in arguments if each.name in ("training", "train", "use_input_stats"))
    return marked, next(training, None) if marked else None


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that an operation changes in place: in lists for `_foreach_`, statistics only where it trains."""
    writes, training = _writes(func)
    if training is not None and training < len(args) and not args[training]:
        return
    for place, name in writes:
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from (
            each for each in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(each, Tensor)
        )
