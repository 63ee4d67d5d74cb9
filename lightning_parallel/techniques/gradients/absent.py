"""Parameters that other ranks of a pipeline step, for optimizers that do something to each parameter of theirs.

Lookahead draws weights towards older ones, with and without gradients. A rank has no memory for the parameters of other
stages, and their own ranks do the same to them: so what is written to them here is nothing, and whatever is computed
from them has a shape only. It must not get into what this rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

REMEDY = (
    "a rank of a pipeline has the parameters of its own stage only, so its optimizer must do to each parameter what "
    "needs no other one: pass by those whose gradient is None, keep what belongs to a parameter in its state, made of "
    "it as by torch.zeros_like, or use ZeroStrategy, by which any optimizer steps whole parameters"
)


class AbsentTensor(Tensor):
    """A tensor of a parameter that another rank steps: with a shape, a dtype and a device, and no values.

    Args:
        shape: on meta, with strides.
        device: where it claims to be.
    """

    def __new__(cls, shape: Tensor, device: torch.device) -> AbsentTensor:  # noqa: D102
        make: Any = Tensor._make_wrapper_subclass
        made: AbsentTensor = make(cls, shape.shape, strides=shape.stride(), dtype=shape.dtype, device=device)
        return made

    @classmethod
    def like(cls, tensor: Tensor) -> AbsentTensor:
        """One with the shape of a tensor, which may be without memory."""
        return cls(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.device)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if "_foreach_" in func._opname:
            return _one_by_one(func, args, kwargs)
        return _in_shapes(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _in_shapes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = next(leaf.device for leaf in inputs if isinstance(leaf, AbsentTensor))
    for tensor in _written(func, args, kwargs):
        if not isinstance(tensor, AbsentTensor):
            raise RuntimeError(
                f"an optimizer writes to a tensor of shape {tuple(tensor.shape)} what it computes ({func}) from one of "
                f"a parameter that another rank has; {REMEDY}"
            )
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        raise RuntimeError(f"an optimizer asks for values ({func}) of a parameter that another rank has; {REMEDY}")
    if isinstance(kwargs.get("device"), (torch.device, str)):
        device, kwargs = torch.device(kwargs["device"]), {**kwargs, "device": "meta"}
    itself: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        itself[id(made)] = tensor
        return made

    meta_args, meta_kwargs = pytree.tree_map_only(Tensor, twin, (args, kwargs))
    result = func(*meta_args, **meta_kwargs)
    return pytree.tree_map_only(Tensor, lambda made: itself.get(id(made), AbsentTensor(made, device)), result)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation changes in place."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in pytree.tree_leaves(given.get(argument.name)) if isinstance(leaf, Tensor))


def _one_by_one(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on lists, for what this rank has as ever, and for each absent tensor with what stands beside it."""
    count = max(len(arg) for arg in args if isinstance(arg, (list, tuple)))

    def at(numbers: list[int]) -> tuple[Any, Any]:
        def some(arg: Any) -> Any:
            return [arg[n] for n in numbers] if isinstance(arg, (list, tuple)) and len(arg) == count else arg

        return [some(arg) for arg in args], {key: some(arg) for key, arg in kwargs.items()}

    def is_absent(number: int) -> bool:
        return any(isinstance(leaf, AbsentTensor) for leaf in pytree.tree_leaves(at([number])))

    results: list[Any] = [None] * count
    here = [number for number in range(count) if not is_absent(number)]
    absent = [[number] for number in range(count) if is_absent(number)]
    for numbers, run in ((here, func), *((each, lambda *a, **k: _in_shapes(func, a, k)) for each in absent)):
        if numbers:
            some_args, some_kwargs = at(numbers)
            made = run(*some_args, **some_kwargs)
            for number, each in zip(numbers, made if made is not None else [None] * len(numbers), strict=True):
                results[number] = each
    return results if func._schema.returns else None
