"""Operations on elements by themselves, and those that only ask or only change how a tensor is kept."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.techniques.divided.looks import hides_layout
from lightning_parallel.techniques.divided.meeting import as_divided, as_they_are, brought_together, names_in_step
from lightning_parallel.techniques.divided.randomness import drawn_apart, kept_in_dropout, places_of
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, operations, rule, same_cuts
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, local_part, of_wholes
from lightning_parallel.techniques.tools.absent import is_in_place

UNTAGGED = ("divide", "expit", "floor_divide", "greater", "greater_equal", "hardswish", "isclose", "less",
            "less_equal", "logsigmoid", "masked_fill", "multiply", "negative", "not_equal", "rsub", "softsign",
            "subtract", "tanhshrink", "threshold", "true_divide", "where")  # fmt: skip
"""Act on each element by itself, but are composed of others, or lack torch's tag that says so."""
UNLIKE = ("equal", "frexp", "mvlgamma", "rrelu")
"""Have the tag, but make one number of all elements, several results, or random numbers."""
KEEPING = ("clone", "float", "double", "half", "bfloat16", "long", "int", "bool", "short", "byte",
           "zeros_like", "ones_like", "full_like", "empty_like", "zero_", "fill_", "copy_",
           "detach_", "cuda")  # fmt: skip
OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
             "__rdiv__", "__div__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
             "__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__or__", "__xor__", "__rand__", "__ror__",
             "__rxor__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__iadd__", "__isub__",
             "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__iand__", "__ior__", "__ixor__")  # fmt: skip


def _is_pointwise(name: str) -> bool:
    """Whether each overload of an operation that takes a tensor has torch's tag for functions of single elements."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if name in UNLIKE or not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    overloads = [getattr(packet, each) for each in names if not each.endswith("out")]
    kinds = [{each.type.kind() for each in overload._schema.arguments[:2]} for overload in overloads]
    tags = [each.tags for each, kind in zip(overloads, kinds, strict=True) if "TensorType" in kind]
    return len(tags) > 0 and all(torch.Tag.pointwise in each for each in tags)


POINTWISE = (
    *UNTAGGED,
    *filter(_is_pointwise, sorted({*dir(torch), *dir(Tensor), *dir(functional), *dir(torch.special)})),
)
CHANGING = tuple(f"{name}_" for name in POINTWISE)
MAY_CHANGE = ("relu", "relu6", "elu", "selu", "celu", "silu", "mish", "leaky_relu", "hardtanh", "hardswish",
              "hardsigmoid", "threshold")  # fmt: skip
"""Change their argument if they are told so by `inplace`, the last of theirs and the only one that is a truth value."""
ONE_BY_ONE = operations(*POINTWISE, *KEEPING, *OPERATORS, *CHANGING)
LEAKS = frozenset(operations("rrelu"))
DROPS = frozenset(operations("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout_")) | LEAKS
DROPOUT = frozenset(operations("dropout", "dropout_"))
DRAWN = (*DROPS, *operations("rand_like", "randn_like", "bernoulli", "bernoulli_", "uniform_", "normal_",
                             "exponential_"))  # fmt: skip
IN_PLACE = frozenset(each for each in (*ONE_BY_ONE, *DRAWN) if is_in_place(each.__name__))


@rule(*IN_PLACE.intersection(ONE_BY_ONE))
@rule(*(each for each in ONE_BY_ONE if each not in IN_PLACE), remembered=True)
def _element_by_element(func: Any, args: Any, kwargs: Any) -> Any:
    changes = NAMES[func] in MAY_CHANGE and (kwargs.get("inplace") or any(each is True for each in args[1:]))
    changes = changes or func in IN_PLACE
    leaves, form = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if "out" in kwargs or (func is torch.where and len(leaves) == 1):
        return NotImplemented
    if changes:
        mine = brought_together(leaves, names_in_step(leaves, max([tensor.dim() for tensor in tensors])))
        if mine is None or not (is_divided(args[0]) and same_cuts(args[0].cuts, mine[1])):
            return NotImplemented
        own_args, own_kwargs = tree_unflatten(mine[0], form)
        func(*own_args, **own_kwargs)
        args[0].note_change()
        return args[0]
    if len(tensors) == 1 and tensors[0] is args[0] and is_divided(tensors[0]):
        return LocalCall(func, tensors[0].cuts)
    names = names_in_step(leaves, max([tensor.dim() for tensor in tensors]))
    cuts = as_they_are(leaves, names)
    if cuts is not None and len(leaves) == len(args) + len(kwargs):
        return LocalCall(func, cuts)
    mine = brought_together(leaves, names)
    if mine is None:
        return NotImplemented
    own_args, own_kwargs = tree_unflatten(mine[0], form)
    return as_divided(func(*own_args, **own_kwargs), mine[1])


@rule(Tensor.contiguous, remembered=True)
def _made_contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    if not is_divided(divided):
        return NotImplemented
    if hides_layout(divided):
        return Divided(func(divided.own, *args[1:], **kwargs).clone(), divided.cuts)
    return LocalCall(func, divided.cuts)


@rule(*operations("to", "type", "type_as"))
def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """A second tensor tells nothing but a dtype and a device."""
    divided, *rest = args
    rest = [local_part(other) for other in rest]
    if not isinstance(divided, Divided) and not any(isinstance(other, Divided) for other in kwargs.values()):
        return func(divided, *rest, **kwargs)
    if not is_divided(divided) or not (rest or kwargs):
        return NotImplemented
    made = func(divided.own, *rest, **kwargs)
    if not isinstance(made, Tensor):
        return NotImplemented
    if made.device.type != divided.own.device.type and made.device.type == "cpu":
        return NotImplemented  # there the ranks' collectives may not reach
    if made is divided.own:
        return divided
    return Divided(made, divided.cuts)


@rule(*DRAWN)
def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0] if args else None
    if not is_divided(divided) or any(isinstance(leaf, Tensor) for leaf in (*args[1:], *kwargs.values())):
        return NotImplemented
    rest, draws, p = args[1:], True, args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    changes = func in IN_PLACE
    if func in DROPS:  # dropout(input, p, training, inplace), rrelu(input, lower, upper, training, inplace)
        place = 2 if func in LEAKS else 1
        by_name = kwargs.get("training", kwargs.get("train", func is functional.dropout))
        # no numbers are drawn in evaluation, nor where dropout keeps all or nothing
        draws = bool(rest[place] if len(rest) > place else by_name) and (func in LEAKS or p not in (0, 1))
        changes |= bool(rest[place + 1] if len(rest) > place + 1 else kwargs.get("inplace", False))
    own: Any = divided.own
    if draws and func in DROPOUT and torch.compiler.is_dynamo_compiling():  # with the draws made where none reads
        ranks = divided.only.ranks
        ranks.draws_in_graph += 1
        kept = kept_in_dropout(own.detach(), p, places_of(divided.cuts), ranks.draws_in_graph)
        factor = kept.to(own.dtype) / (1 - p)
        made = own.mul_(factor) if changes else own * factor
    else:
        with drawn_apart(own.device, places_of(divided.cuts)) if draws else nullcontext():
            made = func(own, *rest, **kwargs)
    if changes:
        divided.note_change()
        return divided
    return as_divided(made, divided.cuts)


@rule(*operations("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"))
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """Another tensor of a shape that is given, which ranks have alike."""
    if not isinstance(args[0], Divided) or any(isinstance(each, Divided) for each in (*args[1:], *kwargs.values())):
        return NotImplemented
    return func(args[0].own, *args[1:], **kwargs)


ASKED = ("is_floating_point", "is_complex", "element_size", "get_device", "__hash__", "is_pinned", "result_type",
         "data_ptr", "untyped_storage", "retain_grad")  # fmt: skip
PROPERTIES = ("is_cuda", "is_cpu", "is_sparse", "is_meta", "layout", "is_quantized", "itemsize", "is_nested",
              "is_mkldnn", "output_nr", "grad_dtype", "_version", "is_mps", "is_xpu", "is_sparse_csr")  # fmt: skip


@rule(*operations(*ASKED), *(getattr(Tensor, name).__get__ for name in PROPERTIES if name in dir(Tensor)))
def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    if func is Tensor.__hash__:
        return id(args[0])
    return func(*map(local_part, args), **kwargs)


@rule(torch.numel, Tensor.nelement, Tensor.ndimension, Tensor.storage_offset,
      Tensor.stride, Tensor.is_contiguous, Tensor.dim_order)  # fmt: skip
def _asked_of_the_whole(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule(*operations("as_strided"))
def _by_strides(func: Any, args: Any, kwargs: Any) -> Any:
    """Of the whole, where it lies as on one device; a view does not know what else is in the memory that it views."""
    divided, given = args[0], args[3] if len(args) > 3 else kwargs.get("storage_offset")
    own, reach = divided.own, sum((n - 1) * step for n, step in zip(divided.shape, divided.stride(), strict=True)) + 1
    is_part = own._is_view() and (own.storage_offset() > 0 or own.numel() < own._base.numel())
    has_gaps = reach > divided.numel() and not torch.compiler.is_dynamo_compiling()
    if has_gaps or (given is not None and is_part):
        raise ValueError(
            f"as_strided of a view, {tuple(divided.shape)}, of a tensor that ranks divide reads the memory of what it "
            "views, which the view does not know; write x.as_strided(...) for the tensor x itself, or use slices and "
            "unfold"
        )
    return NotImplemented


@rule(Tensor.numpy, Tensor.__array__)
def _as_array(func: Any, args: Any, kwargs: Any) -> Any:
    """An array of the whole that only reads: nobody would hear of what is written, which on one device is the tensor's.

    Where there are accelerators, what lies on the host is a copy there too.
    """
    made = of_wholes(func, args, kwargs)
    if is_divided(args[0]) and not torch.accelerator.is_available():
        made.setflags(write=False)
    return made
