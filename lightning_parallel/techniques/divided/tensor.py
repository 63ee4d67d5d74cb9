"""The `Divided` tensor: a sharded tensor that has the shape of the full tensor and computes on this rank's local shard.

The user's model sees the shape of the full tensor. An operation that has a rule runs on the local shards; a plain
tensor that takes part contributes its elements at the same positions. Every other operation gets the full tensor,
gathered with the right gradient: an operation without a rule is slower, never wrong.

All ranks of a group must take the same path: rules decide by shapes and by which elements ranks have, never by values.

| tensor on a rank | values | its gradient |
|---|---|---|
| plain tensor | replicated: the same on all ranks | complete on each rank |
| `Divided` | local shard along some dimensions | complete, for the local shard |
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.collectives.conjugate_collectives import (
    defer_gradient_average,
    has_deferred_average,
    joined,
    part,
)
from lightning_parallel.techniques.divided.metadata import (
    FAST_METHODS,
    FullShapeTensor,
    Layout,
    layout_key,
    layouts_of,
    memory_of,
    state_of,
    with_layout,
)
from lightning_parallel.techniques.divided.python_functions import in_transform, run_below_autograd, takes_full_tensors
from lightning_parallel.techniques.divided.step_parameters import Part, computing_in
from lightning_parallel.techniques.divided.table import (
    CACHEABLE,
    REORDERED,
    RULES,
    Again,
    Cuts,
    Form,
    Key,
    LocalCall,
    form_of,
    global_shape,
    pattern_of,
    positional_first,
    same_cuts,
    stride_like,
    written_by,
)
from lightning_parallel.techniques.tools.absent import Absent, is_in_place
from lightning_parallel.techniques.tools.leaves import outside_transforms
from lightning_parallel.techniques.tools.means import original
from lightning_parallel.techniques.tools.shards import as_shard, construct_dtensor, local


class Divided(FullShapeTensor):
    """Sharded tensor with the metadata of the full tensor; this rank holds some of its elements, the local shard.

    There are two forms. Eager code gets a `Wrapper` without memory, so that code that bypasses `__torch_function__` is
    caught. Code that `torch.compile` traces cannot create one; it gets `_Traced`, an alias of the local shard.

    Args:
        own: the local shard, a plain tensor with its autograd history.
        cuts: which elements of the full tensor it has: `Elements` by dimension.
    """

    @staticmethod
    def __new__(cls, own: Tensor, cuts: Cuts) -> Divided:  # noqa: D102
        if not torch.compiler.is_dynamo_compiling():
            stride = None if own.is_contiguous() else stride_like(own, global_shape(own.shape, cuts))
            form = form_of(own.shape, cuts, next(iter(cuts.values())).ranks, stride)
            wrapper: Wrapper = construct_dtensor(Wrapper, own, form, own.requires_grad)
            return wrapper
        traced: Divided = own.as_subclass(_Traced)
        traced.own, traced.cuts, traced._shape = own, cuts, global_shape(own.shape, cuts)
        traced._gathers, traced.stored, traced._known = None, None, None
        return traced

    def whole(self, reader: str = "") -> Tensor:
        """Return the full tensor: gathered, plain, and the same on all ranks. Collective over the ranks that shard it.

        Args:
            reader: name of the operation that needs the full tensor, for the log; nothing is logged without a name.
        """
        if (known := self.known) is not None:
            return known
        key = "whole", torch.is_grad_enabled(), state_of(self.own)
        if key in (gathers := self.gathers):
            return gathers[key]
        full = self.own
        for dim, elements in self.cuts.items():
            ranks, call = elements.ranks, (reader, self._shape)
            if reader and not torch.compiler.is_dynamo_compiling() and not (ranks.told and call in ranks.told):
                received = (self._shape.numel() - self.own.numel()) * self.own.element_size()
                times, total = ranks.gathered.get(call, (0, 0))
                ranks.gathered[call] = times + 1, total + received  # logged at the end of the step
            full = joined(full, dim, elements)
        gathers[key] = with_layout(full, self.form.stride) if isinstance(self, Wrapper) else full
        return gathers[key]

    def as_subclass(self, cls: Any) -> Any:
        """Return the full tensor as a subclass, with rules of its own or none; torch dispatches no rule here."""
        return self.whole("as_subclass").as_subclass(cls)

    def set_(self, *given: Any) -> Any:
        """Act as `self.data = other` for a parameter; torch dispatches no rule here either.

        Raises:
            ValueError: another shape; or `self` is no parameter, and would have to share the other's memory.
        """
        if self.stored is not None and isinstance(given[0], Tensor) and given[0].shape == self._shape:
            self.data = given[0].detach()
            return self
        raise ValueError(
            f"set_ cannot give a divided tensor of shape {tuple(self._shape)} other memory; write x.copy_(...), or use "
            "the other tensor itself"
        )

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient, sharded as the tensor is."""
        gradient = (self.own if self.stored is None else self.stored).grad
        if gradient is None or local(gradient).shape != self.own.shape:
            return gradient
        return Divided(local(gradient), self.cuts)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        stored = self.own if self.stored is None else self.stored
        stored.grad = None if value is None else as_shard(local_elements_of(value, self.cuts), stored)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and not REORDERED.isdisjoint(kwargs):
            args, kwargs = positional_first(original(func), args, kwargs)
        kwargs = kwargs or {}
        if Absent in types:  # a tensor of another pipeline stage absorbs every operation
            return Absent.__torch_function__(func, types, args, kwargs)
        if not torch.compiler.is_dynamo_compiling():
            if not set(types).isdisjoint(Part.__subclasses__()):
                return NotImplemented  # parts of experts, whose rules take precedence
            if takes_full_tensors():
                return run_on_full_tensors(original(func), args, kwargs)
            for argument in args[0] if args and type(args[0]) in (list, tuple) else args:
                if isinstance(argument, Wrapper):
                    write_back_changes(argument.form.viewed)
        return _computed(func, args, kwargs)[0]


class Wrapper(Divided):
    """Eager form of `Divided`: it has a shape, but no memory.

    Its data is in slots: every operation creates one, and an attribute dict would add a quarter to the cost. The
    slots have the names that torch expects, see `construct_dtensor`.
    """

    __slots__ = ("_local_tensor", "_spec")
    form: Form
    stored = _known = _gathers = None
    cuts: Any = property(attrgetter("form.cuts"))  # implemented in C, as every operation reads it
    _shape: Any = property(attrgetter("form.shape"))
    split, unflatten, norm, transpose, flatten, view, reshape, permute, contiguous = FAST_METHODS

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the cached call if there is one; otherwise apply the rule of the operation."""
        if Part in types:
            args, kwargs = computing_in(args, kwargs)
        if kwargs and not REORDERED.isdisjoint(kwargs):
            args, kwargs = positional_first(original(func), args, kwargs)
        if func not in CACHEABLE or not ((is_grad_enabled() and not in_transform()) or not takes_full_tensors()):
            return super().__torch_function__(func, types, args, kwargs)
        arguments, names = ((*args, *kwargs.values()), tuple(kwargs)) if kwargs else (args, None)
        if (pattern := pattern_of(func, names, Wrapper, *map(type, arguments))) is None:
            return super().__torch_function__(func, types, args, kwargs)
        key: Key = (pattern, pattern.values(arguments))
        if not pattern.alone and not (key := pattern.further(key, arguments)):
            return super().__torch_function__(func, types, args, kwargs)
        form = arguments[pattern.first].form
        if form.viewed:
            write_back_changes(form.viewed)
        if (cached := form.calls.get(key)) is None:
            return _dispatch_uncached(form, key, func, args, kwargs or {})
        run_again, out_form = cached
        result = run_again(args, kwargs or {})
        return result if out_form is None else construct_dtensor(Wrapper, result, out_form, result.requires_grad)

    def note_change(self) -> None:
        """See `Divided.note_change`; views of tensors gathered from this memory become stale."""
        super().note_change()
        for view in self.form.viewed:
            if memory_of(view.own) == memory_of(self.own):
                view.versions = view.versions[0], -1

    def keep(self, whole: Tensor) -> None:
        """Store a tensor as the gathered full tensor of the present values."""
        if whole.requires_grad or not (self.own.requires_grad and is_grad_enabled()):
            self.gathers["whole", is_grad_enabled(), state_of(self.own)] = whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation that `__torch_function__` does not see, below autograd, on full tensors."""
        if func is torch.ops.aten.detach.default:
            shard = args[0].own.detach()
            return construct_dtensor(Wrapper, shard, args[0].form, shard.requires_grad)
        what = "a tensor divided over ranks"
        remedy = "call it from a torch.autograd.Function, or give it tensor.clone() under torch.no_grad()"
        return run_below_autograd(func, args, kwargs, Divided, lambda each: each.whole(str(func)), what, remedy, _take)


Wrapper.own, Wrapper.form = (vars(Wrapper)[slot] for slot in ("_local_tensor", "_spec"))  # second names of the slots


@dataclass(eq=False)
class View:
    """A gathered full tensor that user code holds, or holds views of.

    In-place changes of these views are written back to the local shard before the next operation. The views cannot
    follow the `Divided` tensor: changing it in place while a view is alive is an error.

    Attributes:
        whole: the gathered full tensor.
        divided: the tensor it was gathered from.
        own: this rank's local shard.
        versions: of `whole` and `own` when they last agreed; -1 after a change of `data`, which torch does not count.
    """

    whole: Tensor
    divided: Wrapper
    own: Tensor
    versions: tuple[int, int]

    @property
    def is_alive(self) -> bool:
        """Whether user code still holds the gathered tensor or views, which hold it as their base."""
        held = 2 + sum(each is self.whole for each in self.divided.gathers.values())  # attribute and argument below
        return cast(Any, self.whole)._use_count() > 1 or sys.getrefcount(self.whole) > held

    def write_back_views(self) -> None:
        """Write what views changed to the local shard.

        Raises:
            RuntimeError: the `Divided` tensor was changed in place, and live views would not see it.
        """
        shard, (full_version, shard_version) = self.own, self.versions
        if shard._version != shard_version and (self.is_alive or self.whole._version != full_version):
            raise RuntimeError(
                f"a divided tensor of shape {tuple(self.whole.shape)} was changed in place, but a view of its gathered "
                "copy exists and would not change; write x = x + 1 instead of x += 1, or clone the view"
            )
        if self.whole._version != full_version:
            is_weight = shard.is_leaf and shard.requires_grad  # views of a weight are changed without gradients
            with torch.set_grad_enabled(is_grad_enabled() and not is_weight):
                shard.copy_(local_elements_of(self.whole, self.divided.cuts))
            self.divided.forget()  # includes tensors gathered for aliases, such as `data`, which count no version
            self.divided.keep(self.whole)
            self.versions = self.whole._version, shard._version


class _Traced(Divided):
    """Form of `Divided` in compiled graphs: an alias of the local shard that reports the shape of the full tensor.

    Compilers dispatch functions to rules, but not methods that torch has written in Python: these call the functions.
    """

    form = Form(torch.Size(), {}, (), [])  # placeholder: nothing is stored in it

    def split(self, split_size: Any, dim: int = 0) -> Any:
        """See `torch.split`."""
        return torch.split(self, split_size, dim)

    def norm(self, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        """See `torch.norm`."""
        return torch.norm(self, p, dim, keepdim, dtype=dtype)

    def unflatten(self, dim: int, sizes: Any) -> Any:
        """See `torch.unflatten`."""
        return torch.unflatten(self, dim, sizes)

    def __pow__(self, other: Any) -> Any:
        return torch.pow(self, other)

    def __rpow__(self, other: Any) -> Any:
        return torch.pow(other, self)

    def __rsub__(self, other: Any) -> Any:
        return torch.rsub(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return torch.div(other, self)

    def __iter__(self) -> Any:
        return iter(torch.unbind(self))


def _again(call: LocalCall, alone: bool) -> Again:
    """Return a function that runs a cached call on the arguments of its operation and returns the local result.

    Args:
        call: the call that a rule returned.
        alone: whether the arguments are one `Divided` tensor followed by values, none of them passed by name.
    """
    run, rest = call.run, call.rest
    if call.cuts is None or call.takes_divided:
        return lambda args, kwargs: run(*args, **kwargs)
    if rest is not None:
        return lambda args, _: run(args[0].own, *rest)
    if alone:
        return lambda args, _: run(args[0].own, *args[1:])
    ranks = next(iter(call.cuts.values())).ranks

    def prepare(given: Any) -> Any:  # the tensor that this rank computes with in place of an argument
        needs_grad = type(given) is nn.Parameter and given.requires_grad and is_grad_enabled()
        if needs_grad and has_deferred_average(given, ranks):
            return defer_gradient_average(given, ranks)
        return local_part(given)

    return lambda args, kwargs: run(*map(prepare, args), **{name: prepare(each) for name, each in kwargs.items()})


def _computed(func: Any, args: Any, kwargs: Any) -> tuple[Any, LocalCall | None]:
    """Return the result of an operation by its rule, and the `LocalCall` that the rule chose, or None."""
    rule = RULES.get(func) or RULES.get(original(func))
    result: Any = NotImplemented
    if rule is not None and (args or "query" in kwargs):  # rules read the first argument by position
        result = rule(func if func in RULES else original(func), args, kwargs)
    elif rule is None and getattr(func, "__module__", None) == dist.distributed_c10d.__name__:
        with torch._C.DisableTorchFunctionSubclass():  # a collective writes to its arguments: see `run_below_autograd`
            return func(*args, **kwargs), None
    if result is NotImplemented:
        result = run_on_full_tensors(original(func), args, kwargs)
    call = result if isinstance(result, LocalCall) else None
    if call is not None:
        local_result = _again(call, alone=False)(args, kwargs)
        result = local_result if call.cuts is None else Divided(local_result, call.cuts)
    if torch.compiler.is_dynamo_compiling() or (call is not None and call.cuts is None):
        return result, call
    return with_full_layout(result, func, args, kwargs), call


def _dispatch_uncached(form: Form, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that is not cached yet for the form of its first `Divided` tensor, and cache the call."""
    result, call = _computed(func, args, kwargs)
    if call is None or torch.compiler.is_dynamo_compiling():  # a compiler reads a function of the user's
        return result
    run_again = _again(call, call.cuts is not None and key[0].alone and not kwargs)
    if call.cuts is None:
        form.remember(key, (run_again, None))
        return result
    if call.run in (Tensor.reshape, Tensor.contiguous):
        layouts, without_copy = _layouts(args[0], func, args, kwargs), run_again

        def copying(args: Any, kwargs: Any) -> Tensor:  # the call may return a view where one device makes a copy
            shard: Tensor = without_copy(args, kwargs)
            return shard.clone() if memory_of(shard) == memory_of(args[0].own) else shard

        if layouts is not None and layouts[0] is not None and not layouts[0].is_view:
            run_again = copying
    form.remember(key, (run_again, result.form))
    return result


def with_full_layout(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Give the result of a rule the stride that it has on one device; copy it where one device copies."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    wrappers = [each for each in results if isinstance(each, Wrapper)]
    if not wrappers or func not in RULES or any(each is argument for each in wrappers for argument in args):
        return result
    first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Wrapper))
    if func is F.scaled_dot_product_attention:  # each of its kernels chooses the layout of its result
        # A local result with a dimension of size 1 (one head) does not show the order: take that of the queries.
        shows_order = not result.own.is_contiguous() or 1 not in result.own.shape
        if not shows_order and first.shape == result.shape and 0 not in first.form.stride:
            stride = stride_like(torch.empty_strided(first.shape, first.form.stride, device="meta"), result.shape)
            result.form = form_of(result.own.shape, result.cuts, result.only.ranks, stride)
        return result
    layouts = _layouts(first, func, args, kwargs)
    if layouts is None or len(layouts) != len(results):
        return result
    for tensor, layout in zip(results, layouts, strict=True):
        if not isinstance(tensor, Wrapper) or layout is None:
            continue
        if not layout.is_view and memory_of(tensor.own) == memory_of(first.own):
            tensor.own = tensor.own.clone()
        if tensor.form.stride != layout.stride:
            tensor.form = form_of(tensor.own.shape, tensor.cuts, tensor.only.ranks, layout.stride)
    return result


def _layouts(first: Wrapper, func: Any, args: Any, kwargs: Any) -> list[Layout | None] | None:
    """See `layouts_of`; cached in the form of the first `Divided` tensor where all arguments are hashable."""
    key = func, *map(layout_key, args), *kwargs, *map(layout_key, kwargs.values())
    try:
        if key in first.form.calls:
            return cast("list[Layout | None] | None", first.form.calls[key])
    except TypeError:  # an argument without a hash
        return layouts_of(func, args, kwargs)
    layouts = layouts_of(func, args, kwargs)
    first.form.remember(key, layouts)
    return layouts


def local_part(value: Any) -> Any:
    """Return the local shard of a `Divided` tensor; any other value as it is."""
    return value.own if isinstance(value, Divided) else value


def is_divided(value: Any) -> TypeGuard[Divided]:
    """Whether a value is a `Divided` tensor, of which ranks have different elements."""
    return isinstance(value, Divided)


def run_on_full_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on gathered full tensors, log the gathers, and write back what the operation changes in place.

    Functions of `torch.nn.init` run without gradients. Collective over the ranks that shard the arguments.
    """
    name = getattr(func, "__name__", str(func))
    # Arguments that it changes, by its name, `out` or schema; functions of torch.nn.init get all by name.
    in_place = tree_leaves(args[:1] or tuple(kwargs.values())[:1]) if is_in_place(name) else []
    written = [*in_place, *tree_leaves(kwargs.get("out")), *written_by(func, args, kwargs)]
    changed = [each for each in written if isinstance(each, Divided)]
    if not changed:
        result = _on_full_tensors(func, args, kwargs, name)
        compiled = torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active()
        arguments = [] if compiled else filter(is_divided, tree_leaves((args, kwargs)))
        gains_views = False
        for each in arguments:  # in-place changes of the gathered tensor must reach the `Divided` one
            whole, watched = each.whole(), each.only.ranks.viewed
            base = whole if whole._base is None else whole._base
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            is_viewed = any(leaf is base or leaf._base is base for leaf in results)
            if is_viewed and not any(view.whole is whole for view in watched):
                whole = whole.clone()  # the result of a collective may not be changed in place
                if 0 in each.form.stride:  # clone() undoes expand()
                    whole = with_layout(whole, each.form.stride)
                each.keep(whole)
                watched.append(View(whole, each, each.own, (whole._version, each.own._version)))
                gains_views = True
        return _on_full_tensors(func, args, kwargs, name) if gains_views else result
    with torch.set_grad_enabled(is_grad_enabled() and getattr(func, "__module__", "") != "torch.nn.init"):
        wholes = {id(each): each.whole(name).clone() for each in changed}
        arguments = tuple(args), kwargs
        args, kwargs = tree_map_only(Divided, lambda d: wholes[id(d)] if id(d) in wholes else d.whole(name), arguments)
        result = func(*args, **kwargs)
        for each in changed:
            _take(each, wholes[id(each)])
        divided_of = {id(wholes[id(each)]): each for each in changed}
        return tree_map_only(Tensor, lambda leaf: divided_of.get(id(leaf), leaf), result)


def write_back_changes(viewed: list[View]) -> None:
    """Write back in-place changes of views of gathered tensors, and drop the entries of which no view is left."""
    for each in (*viewed, *viewed):  # twice: writing back one view is an error for other live views
        each.write_back_views()
    viewed[:] = [each for each in viewed if each.is_alive]


def _take(divided: Divided, whole: Tensor) -> None:
    divided.own.copy_(local_elements_of(whole, divided.cuts))
    divided.note_change()


def to_full_tensors(value: Any, name: str) -> Any:
    """Replace the `Divided` tensors in a value by full tensors, logged under `name`. Collective over their ranks."""
    return tree_map_only(Divided, lambda each: each.whole(name), value)


def _on_full_tensors(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    # Suspend transforms of `torch.func` during the gather: they do not take autograd Functions like the collectives'.
    with outside_transforms():
        args, kwargs = to_full_tensors((tuple(args), kwargs), name)
    return func(*args, **kwargs)


def local_elements_of(tensor: Tensor, cuts: Cuts) -> Tensor:
    """Return this rank's elements, by `cuts`, of a tensor that is plain or sharded in any way."""
    if is_divided(tensor) and same_cuts(tensor.cuts, cuts):
        return tensor.own
    tensor = tensor.whole("another division") if is_divided(tensor) else tensor
    for dim, elements in cuts.items():
        tensor = part(tensor, dim, elements)
    return tensor
