"""Rules of operations on single elements, and of those that only read metadata, or change dtype, device or layout."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.techniques.divided.alignment import align_shardings, as_divided, names_in_step, shared_sharding
from lightning_parallel.techniques.divided.metadata import layout_is_unknown
from lightning_parallel.techniques.divided.randomness import indices_key, kept_in_dropout, rng_for_elements
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, operations, rule, same_cuts
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, local_part, run_on_full_tensors
from lightning_parallel.techniques.tools.absent import is_in_place

UNTAGGED = ("divide", "expit", "floor_divide", "greater", "greater_equal", "hardswish", "isclose", "less",
            "less_equal", "logsigmoid", "masked_fill", "multiply", "negative", "not_equal", "rsub", "softsign",
            "subtract", "tanhshrink", "threshold", "true_divide", "where")  # fmt: skip
"""Act on each element alone, but are composed of other operations, or lack torch's tag `pointwise`."""
UNLIKE = ("equal", "frexp", "mvlgamma", "rrelu")
"""Have the tag, but return one number for all elements, several results, or random numbers."""
KEEPING = ("clone", "float", "double", "half", "bfloat16", "long", "int", "bool", "short", "byte",
           "zeros_like", "ones_like", "full_like", "empty_like", "zero_", "fill_", "copy_",
           "detach_", "cuda")  # fmt: skip
OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
             "__rdiv__", "__div__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
             "__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__or__", "__xor__", "__rand__", "__ror__",
             "__rxor__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__iadd__", "__isub__",
             "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__iand__", "__ior__", "__ixor__")  # fmt: skip


def _is_pointwise(name: str) -> bool:
    """Whether each overload of an operation that takes a tensor has torch's tag `pointwise`."""
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
"""Change their argument in place if `inplace` is true, their last argument and the only boolean one."""
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
    in_place = NAMES[func] in MAY_CHANGE and (kwargs.get("inplace") or any(each is True for each in args[1:]))
    in_place = in_place or func in IN_PLACE
    leaves, form = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if "out" in kwargs or (func is torch.where and len(leaves) == 1):
        return NotImplemented
    names = names_in_step(leaves, max([tensor.dim() for tensor in tensors]))
    if not in_place:
        if len(tensors) == 1 and tensors[0] is args[0] and is_divided(tensors[0]):
            return LocalCall(func, tensors[0].cuts)
        cuts = shared_sharding(leaves, names)
        if cuts is not None and len(leaves) == len(args) + len(kwargs):
            return LocalCall(func, cuts)
    aligned = align_shardings(leaves, names)
    if aligned is None or (in_place and not (is_divided(args[0]) and same_cuts(args[0].cuts, aligned[1]))):
        return NotImplemented
    own_args, own_kwargs = tree_unflatten(aligned[0], form)
    result = func(*own_args, **own_kwargs)
    if in_place:
        args[0].note_change()
        return args[0]
    return as_divided(result, aligned[1])


@rule(Tensor.contiguous, remembered=True)
def _made_contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    if not is_divided(divided):
        return NotImplemented
    if layout_is_unknown(divided):
        return Divided(func(divided.own, *args[1:], **kwargs).clone(), divided.cuts)
    return LocalCall(func, divided.cuts)


@rule(*operations("to", "type", "type_as"))
def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """Conversion of dtype or device; a second tensor gives only these."""
    divided, *rest = args
    rest = [local_part(other) for other in rest]
    if not isinstance(divided, Divided) and not any(isinstance(other, Divided) for other in kwargs.values()):
        return func(divided, *rest, **kwargs)
    if not is_divided(divided) or not (rest or kwargs):
        return NotImplemented
    converted = func(divided.own, *rest, **kwargs)
    if not isinstance(converted, Tensor):
        return NotImplemented
    if converted.device.type != divided.own.device.type and converted.device.type == "cpu":
        return NotImplemented  # the ranks' collectives may not work there
    if converted is divided.own:
        return divided
    return Divided(converted, divided.cuts)


@rule(*DRAWN)
def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0] if args else None
    if not is_divided(divided) or any(isinstance(leaf, Tensor) for leaf in (*args[1:], *kwargs.values())):
        return NotImplemented
    rest, is_random, p = args[1:], True, args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    in_place = func in IN_PLACE
    if func in DROPS:  # dropout(input, p, training, inplace), rrelu(input, lower, upper, training, inplace)
        position = 2 if func in LEAKS else 1
        by_keyword = kwargs.get("training", kwargs.get("train", func is functional.dropout))
        # no numbers are drawn in evaluation, nor if dropout keeps all or no elements
        is_random = bool(rest[position] if len(rest) > position else by_keyword) and (func in LEAKS or p not in (0, 1))
        in_place |= bool(rest[position + 1] if len(rest) > position + 1 else kwargs.get("inplace", False))
    own: Any = divided.own
    if is_random and func in DROPOUT and torch.compiler.is_dynamo_compiling():  # as an untraced operation
        ranks = divided.only.ranks
        ranks.draws_in_graph += 1
        keep_mask = kept_in_dropout(own.detach(), p, indices_key(divided.cuts), ranks.draws_in_graph)
        factor = keep_mask.to(own.dtype) / (1 - p)
        result = own.mul_(factor) if in_place else own * factor
    else:
        with rng_for_elements(own.device, indices_key(divided.cuts)) if is_random else nullcontext():
            result = func(own, *rest, **kwargs)
    if in_place:
        divided.note_change()
        return divided
    return as_divided(result, divided.cuts)


@rule(*operations("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"))
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor of a given shape, which is replicated."""
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
    """Use the full tensor, in its layout on one device; but a view does not know the rest of its base's memory."""
    divided, offset = args[0], args[3] if len(args) > 3 else kwargs.get("storage_offset")
    own, reach = divided.own, sum((n - 1) * step for n, step in zip(divided.shape, divided.stride(), strict=True)) + 1
    is_part = own._is_view() and (own.storage_offset() > 0 or own.numel() < own._base.numel())
    has_gaps = reach > divided.numel() and not torch.compiler.is_dynamo_compiling()
    if has_gaps or (offset is not None and is_part):
        raise ValueError(
            f"as_strided of a {tuple(divided.shape)} view of a divided tensor reads memory of the tensor, which the "
            "view does not have; write x.as_strided(...) for the tensor x itself, or use slices and unfold"
        )
    return NotImplemented


@rule(Tensor.numpy, Tensor.__array__)
def _as_array(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a read-only array of the full tensor: writes would be lost, while on one device they reach the tensor.

    Where there are accelerators, the array of a tensor on the host is a copy on one device, too.
    """
    array = run_on_full_tensors(func, args, kwargs)
    if is_divided(args[0]) and not torch.accelerator.is_available():
        array.setflags(write=False)
    return array
