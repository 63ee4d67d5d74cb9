"""Runs code for its values where they come from the batch alone, and for its shapes where a parameter goes in.

So a forward of a model of any size costs neither memory nor arithmetic, while masks, positions and whatever the model
decides by looking at its batch are real. A dependent tensor is on meta; what only looks at its shape is real again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_parallel.techniques.observed.answers import Answers, plausible
from lightning_parallel.values import map_tensors, tensors_of

aten = torch.ops.aten
MARK = "_lightning_parallel_made_at"

SHAPE_ONLY = {
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}
"""Operations that give values, and look at nothing but the shape and the dtype of their first argument."""


VALUES_LEAVE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""What PyTorch calls operations whose values, or shapes that depend on values, go to Python."""

SPLITS = {aten.split_with_sizes, aten.split_with_sizes_copy}


class Watch:
    """Hears what happens while code runs in shapes only; this one does nothing about it."""

    def called(self, func: Any, args: Any, kwargs: Any) -> None:
        """Python calls a function of torch's, which may run several operations."""

    def touched(self, inputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """An operation gets these tensors, dependent or not, and changes some of them; told before everything else."""

    def read(self, tensor: Tensor) -> None:
        """An operation reads a dependent tensor; a parameter is told as itself."""

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor]) -> Any:
        """An operation on `inputs`, some of them dependent, made a result on meta; returns the mark to put on it."""
        return True

    def known(self, inputs: Sequence[Tensor], result: Any, asked: bool) -> None:
        """An operation made a result of tensors with values alone; `asked` if Python may learn some of them."""

    def computed(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], result: Any) -> None:
        """The same, and what the operation is."""

    def asked(self, tensor: Tensor) -> None:
        """Python gets a made-up value of a dependent tensor."""

    def required(self, tensor: Tensor) -> None:
        """A tensor is to have gradients."""

    def differentiated(self, tensors: Sequence[Tensor] | None) -> None:
        """The code asks for gradients of these tensors, or of all."""


class ShapesOnly(TorchDispatchMode):
    """While active, results that depend on a parameter exist as shapes only.

    Args:
        parameters: the tensors whose values are not to be used.
        device: where the model would run; shapes claim to be there, though they are on meta.
        watch: hears what happens.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device, watch: Watch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self.device, self.watch = device, watch or Watch()
        self._answers, self._known = Answers(self), _KnownShapes()
        self._proxies: list[Tensor] = []
        self._written: list[Tensor] = []
        self._has_answered = False

    def __enter__(self) -> Any:
        self._answers.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Memory that was written to may be the user's: it bears no mark afterwards."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._answers.__exit__(*error)  # type: ignore[no-untyped-call]
        for tensor in self._written:
            vars(tensor).pop(MARK, None)
            vars(tensor.untyped_storage()).pop(MARK, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and str(kwargs["device"]).startswith("meta"):
            kwargs["device"] = self.device
        inputs = [self._itself(value) for value in _leaves(args, kwargs) if isinstance(value, Tensor)]
        dependent = [tensor for tensor in inputs if self.depends(tensor)]
        written = list(_written(func, args, kwargs))
        self.watch.touched(inputs, written)
        if not dependent:
            result = func(*args, **kwargs)
            self.watch.known(inputs, result, leaves_for_python(func))
            self.watch.computed(func, args, kwargs, inputs, result)
            return result
        if func._overloadpacket in SHAPE_ONLY:
            return self._by_shape(func, args, kwargs)
        for tensor in dependent:
            self.watch.read(tensor)
        answer = plausible(func, args)
        if answer is not None:
            return self._answered(answer, dependent)
        result, mark = self._on_meta(func, args, kwargs, inputs)
        self._mark_all((result, written), mark, inputs)  # of the statistics that kernels write, results tell nothing
        return result

    def _answered(self, answer: Any, dependent: list[Tensor]) -> Any:
        for tensor in dependent:
            self.tell_asked(tensor)
        return answer

    def tell_asked(self, tensor: Tensor) -> None:
        """A made-up value of a tensor is given away."""
        self._has_answered = True
        self.watch.asked(tensor)

    def depends(self, tensor: Tensor) -> bool:
        """Whether the tensor's values are unknown here."""
        return id(tensor) in self._parameters or tensor.is_meta or mark_of(tensor) is not None

    def proxy(self, tensor: Tensor) -> Tensor:
        """A tensor on meta that counts as the same one."""
        if tensor.is_meta:
            return tensor
        with _disable_current_modes():  # what asks for meta is given the true device otherwise
            twin = _twin(tensor)
        if id(tensor) in self._parameters:
            self._parameters[id(twin)] = self._parameters[id(tensor)]
            self._proxies.append(twin)  # its id must not become that of another one
        elif mark_of(tensor) is not None:
            vars(twin)[MARK] = mark_of(tensor)
        return twin

    def _itself(self, tensor: Tensor) -> Tensor:
        return self._parameters.get(id(tensor), tensor)

    def _by_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        first, *rest = args
        return func(torch.zeros((), dtype=first.dtype, device=self.device).expand(first.shape), *rest, **kwargs)

    def _on_meta(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[Any, Any]:
        """The result, and the mark to put on it."""
        if self._has_answered and func._overloadpacket in SPLITS:
            args = _fitting(*args)
        known = self._known.get(func, args, kwargs)
        if known is not None:
            result = pytree.tree_map_only(_OnMeta, _OnMeta.empty, known)
            return result, self.watch.made(func, args, kwargs, result, inputs)
        originals: dict[int, Tensor] = {}

        def twin(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return tensor
            shape = _twin(tensor)
            originals[id(shape)] = tensor
            keep.append(shape)
            return shape

        keep: list[Tensor] = []
        if func._overloadpacket is aten.index:
            args = (args[0], [part for index in args[1] for part in _as_positions(index, self.depends)])
        on_meta = pytree.tree_map_only(Tensor, twin, (args, kwargs))
        result = _shapes_of(func, on_meta[0], on_meta[1], lambda leaf: self._made_up(originals.get(id(leaf), leaf)))
        result = pytree.tree_map_only(Tensor, lambda tensor: originals.get(id(tensor), tensor), result)
        if any(isinstance(leaf, Tensor) and not self.depends(leaf) for leaf in _leaves((result,), {})):
            for tensor in filter(self.depends, inputs):
                self.tell_asked(tensor)
        self._known.add(func, args, kwargs, result)
        return result, self.watch.made(func, on_meta[0], on_meta[1], result, inputs)

    def _made_up(self, tensor: Tensor) -> Tensor:
        if self.depends(tensor):
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
        return tensor.clone()  # the operation may write to it

    def _mark_all(self, result: Any, mark: Any, inputs: list[Tensor]) -> None:
        if any(id(tensor) in self._parameters or mark_of(tensor) is not None for tensor in inputs):
            written = {id(tensor) for tensor in inputs}
            for tensor in _leaves((result,), {}):
                if isinstance(tensor, Tensor) and (tensor.is_meta or id(tensor) in written):
                    self._mark(tensor, mark, id(tensor) in written)

    def _mark(self, tensor: Tensor, mark: Any, written: bool) -> None:
        vars(tensor)[MARK] = mark
        if written:  # whatever else shares its memory depends on parameters now
            self._written.append(tensor)
            vars(tensor.untyped_storage())[MARK] = mark


def _leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The leaves among an operation's arguments; operations nest lists only."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from _leaves(value, {})
        else:
            yield value


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation changes in place."""
    names = _may_write(func)
    if names:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        if given.get("training", True):
            yield from (tensor for name in names for tensor in tensors_of(given.get(name)))


@cache
def _may_write(func: Any) -> tuple[str, ...]:
    arguments = func._schema.arguments
    if "batch_norm" in func._opname:  # some of them do not say that they count in these
        counts = "_no_" not in func._opname and "backward" not in func._opname
        return tuple(each.name for each in arguments if counts and each.name.startswith("running_"))
    return tuple(each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)


@dataclass(frozen=True)
class _OnMeta:
    """Shape, strides and dtype of a result on meta."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _OnMeta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _KnownShapes:
    """Results of operations by the shapes that they got.

    The layers of a model do the same again and again, and PyTorch works out many shapes in Python.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def get(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the operation for the same shapes before, None if that is not known."""
        return self._results.get(_call(func, args, kwargs)) if _makes_new(func) else None

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remembers the result of an operation, if making it is all that it does."""
        if _makes_new(func) and all(isinstance(leaf, Tensor) and leaf.is_meta for leaf in _leaves((result,), {})):
            self._results[_call(func, args, kwargs)] = pytree.tree_map_only(Tensor, _OnMeta.of, result)


@cache
def _makes_new(func: Any) -> bool:
    """Whether what an operation returns shares no memory with what it is given, and follows from shapes."""
    schema = func._schema
    alone = all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
    return alone and func._overloadpacket is not aten.index


def _call(func: Any, args: Any, kwargs: Any) -> Hashable:
    leaves = [
        _OnMeta.of(leaf) if isinstance(leaf, Tensor) else (type(leaf), str(leaf)) for leaf in _leaves(args, kwargs)
    ]
    lengths = [len(value) if isinstance(value, (list, tuple)) else -1 for value in args]
    return (func, torch.get_default_dtype(), *lengths, *kwargs, *leaves)


def _shapes_of(func: Any, args: Any, kwargs: Any, made_up: Callable[[Tensor], Tensor]) -> Any:
    """The results of an operation on meta; some have no rule for shapes, or one for fewer dtypes than they compute.

    Those run on made-up values. Integers that come out keep theirs: they may be the lengths of the rest.
    """
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        leaves, structure = pytree.tree_flatten((args, kwargs))
        real = [made_up(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        again_args, again_kwargs = pytree.tree_unflatten(real, structure)
        written = {id(made): leaf for made, leaf in zip(real, leaves, strict=True)}
        result = func(*again_args, **again_kwargs)

        def shape_of(made: Tensor) -> Tensor:
            same = written.get(id(made))
            return same if same is not None else _twin(made) if _learns(made) else made

        return pytree.tree_map_only(Tensor, shape_of, result)


def _learns(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _fitting(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, list[int], int]:
    """Arguments of a split; sizes that are made up, and so add up to something else, become as even as can be."""
    whole = tensor.shape[dim]
    if sum(sizes) == whole or not sizes:
        return tensor, list(sizes), dim
    base, extra = divmod(whole, len(sizes))
    return tensor, [base + (number < extra) for number in range(len(sizes))], dim


def _twin(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _as_positions(index: Tensor | None, depends: Callable[[Tensor], bool]) -> list[Tensor | None]:
    """A mask as the positions that it selects: one, where nobody knows how many."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    count = 1 if depends(index) else int(index.sum())
    return [torch.empty(count, dtype=torch.long, device="meta") for _ in range(index.dim())]


@cache
def leaves_for_python(func: Any) -> bool:
    """Whether an operation gives Python values of its tensors, or shapes that depend on them."""
    return not VALUES_LEAVE.isdisjoint(func.tags)


def zeros_for_shapes(value: Any, device: torch.device) -> Any:
    """The structure of a value with zeros for every shape in it, and everything else as it is."""

    def zeros(tensor: Tensor) -> Tensor:
        known = not tensor.is_meta and mark_of(tensor) is None
        return tensor if known else torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

    return map_tensors(zeros, value)


def mark_tensors(value: Any, mark: Callable[[int], Any]) -> None:
    """Gives the dependent tensors in a structure another mark, each the one for its number among all tensors."""
    for number, tensor in enumerate(tensors_of(value)):
        if mark_of(tensor) is not None:
            vars(tensor)[MARK] = mark(number)


def mark_of(tensor: Tensor) -> Any:
    """The mark of a dependent tensor, None for a parameter or a tensor that was on meta from the beginning."""
    own = vars(tensor).get(MARK)
    return vars(tensor.untyped_storage()).get(MARK) if own is None else own
