"""Operations on elements by themselves, and those that only ask or only change how a tensor is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.techniques.divided.meeting import as_divided, in_step, learns
from lightning_parallel.techniques.divided.randomness import drawn_apart
from lightning_parallel.techniques.divided.table import is_in_place, operations, rule
from lightning_parallel.techniques.divided.tensor import Cuts, Divided, is_divided, same_cuts

ARITHMETIC = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide",
              "remainder", "fmod", "pow", "rsub", "maximum", "minimum", "fmax", "fmin", "atan2", "lerp", "addcmul",
              "addcdiv", "where", "xlogy", "copysign", "hypot", "logaddexp", "bitwise_and", "bitwise_or",
              "bitwise_xor")  # fmt: skip
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "greater", "less", "greater_equal", "less_equal",
               "isclose", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf",
               "isfinite")  # fmt: skip
FUNCTIONS = ("abs", "neg", "negative", "positive", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt",
             "rsqrt", "square", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sigmoid",
             "logit", "erf", "erfc", "reciprocal", "sign", "floor", "ceil", "round", "trunc", "frac", "clamp",
             "clip", "clamp_min", "clamp_max", "nan_to_num", "masked_fill", "relu", "relu6", "elu", "selu", "celu",
             "gelu", "silu", "mish", "softplus", "softsign", "leaky_relu", "logsigmoid", "hardtanh", "hardswish",
             "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "threshold", "bitwise_not", "sgn", "expit",
             "i0", "sinc", "lgamma", "digamma")  # fmt: skip
KEEPING = ("clone", "detach", "float", "double", "half", "bfloat16", "long", "int", "bool", "short", "byte",
           "contiguous", "zeros_like", "ones_like", "full_like", "empty_like", "zero_", "fill_",
           "detach_", "cuda")  # fmt: skip
OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
             "__rdiv__", "__div__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
             "__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__or__", "__xor__", "__rand__", "__ror__",
             "__rxor__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__iadd__", "__isub__",
             "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__iand__", "__ior__", "__ixor__")  # fmt: skip
CHANGING = (*(f"{name}_" for name in (*ARITHMETIC, *COMPARISONS, *FUNCTIONS)), "copy_")
ONE_BY_ONE = operations(*ARITHMETIC, *COMPARISONS, *FUNCTIONS, *KEEPING, *OPERATORS, *CHANGING)
DRAWN = operations("dropout", "alpha_dropout", "feature_alpha_dropout", "rand_like", "randn_like", "bernoulli", "rrelu",
                   "bernoulli_", "uniform_", "normal_", "dropout_", "exponential_")  # fmt: skip
IN_PLACE = frozenset(each for each in (*ONE_BY_ONE, *DRAWN) if is_in_place(each.__name__))


@rule(*ONE_BY_ONE)
def _element_by_element(func: Any, args: Any, kwargs: Any) -> Any:
    first, *rest = args
    if is_divided(first) and not any(isinstance(each, Tensor) for each in (*rest, *kwargs.values())):
        if func is torch.where and not rest:
            return NotImplemented
        return _result(func, first, func(first.own, *rest, **kwargs), first.cuts, func in IN_PLACE)
    if len(rest) == 1 and not kwargs and (usual := _of_two(first, rest[0])) is not None:
        one, other, cuts = usual
        return _result(func, first, func(one, other), cuts, func in IN_PLACE)
    leaves, form = tree_flatten((args, kwargs))
    if "out" in kwargs:
        return NotImplemented
    dims = max([leaf.dim() for leaf in leaves if isinstance(leaf, Tensor)])
    mine = in_step(leaves, dims)
    if mine is None:
        return NotImplemented
    own, cuts = mine
    changes = func in IN_PLACE
    if changes and not (is_divided(first) and same_cuts(first.cuts, cuts)):
        return NotImplemented
    own_args, own_kwargs = tree_unflatten(own, form)
    return _result(func, first, func(*own_args, **own_kwargs), cuts, changes)


def _of_two(one: Any, other: Any) -> tuple[Any, Any, Cuts] | None:
    """What `in_step` gives for two tensors where nothing has to be brought; None for the rest.

    Both are divided alike, or the second, as a mask, has none of the dimensions that are, and does not learn.
    """
    if not is_divided(one):
        return None
    if is_divided(other):
        return (
            (one.own, other.own, one.cuts) if one._shape == other._shape and same_cuts(one.cuts, other.cuts) else None
        )
    if not isinstance(other, Tensor) or isinstance(other, Divided) or learns(other):
        return None
    key = "apart", one._shape, other.shape, *one.cuts.items()
    return (one.own, other, one.cuts) if one.only.remembered(key, _meets_apart, one, other.shape) else None


def _meets_apart(divided: Divided, other: torch.Size) -> bool:
    """Whether a tensor that meets a divided one has none of the dimensions that are divided, and no further ones."""
    added = divided.dim() - len(other)
    sizes = [other[dim - added] if dim >= added else 1 for dim in divided.cuts]
    one_each = all(each.size > 1 and not each.everywhere for each in divided.cuts.values())
    return added >= 0 and one_each and all(size == 1 for size in sizes)


def _result(func: Any, first: Any, made: Any, cuts: Any, changes: bool) -> Any:
    if changes:
        first.forget()
        return first
    return as_divided(made, cuts)


@rule(*operations("to", "type", "type_as"))
def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """A second tensor tells nothing but a dtype and a device."""
    divided, *rest = args
    rest = [other.own if isinstance(other, Divided) else other for other in rest]
    if not isinstance(divided, Divided) and not any(isinstance(other, Divided) for other in kwargs.values()):
        return func(divided, *rest, **kwargs)
    if not is_divided(divided) or not (rest or kwargs):
        return NotImplemented
    made = func(divided.own, *rest, **kwargs)
    if not isinstance(made, Tensor):
        return NotImplemented
    if made.device.type != divided.own.device.type and made.device.type == "cpu":
        return NotImplemented  # there the ranks' collectives may not reach
    return divided if made is divided.own else Divided(made, divided.cuts)


@rule(*DRAWN)
def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0] if args else None
    if not is_divided(divided) or any(isinstance(leaf, Tensor) for leaf in (*args[1:], *kwargs.values())):
        return NotImplemented
    if not all(elements.alike_where_shared for elements in divided.cuts.values()):
        return NotImplemented  # copies must be drawn alike
    with drawn_apart(divided.own.device, divided.cuts.values()):
        made = func(divided.own, *args[1:], **kwargs)
    return _result(func, divided, made, divided.cuts, func in IN_PLACE)


@rule(*operations("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"))
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """Another tensor of a shape that is given, which ranks have alike."""
    if not isinstance(args[0], Divided) or any(isinstance(each, Divided) for each in (*args[1:], *kwargs.values())):
        return NotImplemented
    return func(args[0].own, *args[1:], **kwargs)


ASKED = ("is_floating_point", "is_complex", "element_size", "get_device", "__hash__", "is_pinned", "result_type")
PROPERTIES = ("is_cuda", "is_cpu", "is_sparse", "is_meta", "layout", "is_quantized", "itemsize", "is_nested",
              "is_mkldnn", "output_nr", "grad_dtype", "_version", "is_mps", "is_xpu", "is_sparse_csr")  # fmt: skip


@rule(*operations(*ASKED), *(getattr(Tensor, name).__get__ for name in PROPERTIES if name in dir(Tensor)))
def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    if func is Tensor.__hash__:
        return id(args[0])
    return func(*(each.own if isinstance(each, Divided) else each for each in args), **kwargs)


@rule(Tensor.stride, Tensor.is_contiguous, torch.numel, Tensor.nelement, Tensor.ndimension, Tensor.storage_offset)
def _asked_of_the_whole(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
