"""A tensor that looks whole, and of which each rank has and computes some elements.

The user's model sees the shape of the whole. Operations of which a rule is known act on a rank's own elements; a plain
tensor that meets them gives the elements at the same places. Everything else gets the whole, gathered, with the right
gradient: what is not known is slower, never wrong.

All ranks of a group must take the same way: rules decide by shapes, and by which elements ranks have, never by values.

| a rank has | what it is | its gradient |
|---|---|---|
| a plain tensor | the same on all ranks | complete on each |
| a `Divided` | its own elements of some dimensions | complete, of these elements |
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

from lightning_parallel.collectives.by_elements import averaged_later, becomes_mean, joined, part
from lightning_parallel.techniques.divided.looks import (
    AT_ONCE,
    Layout,
    LooksWhole,
    known_by,
    laid_out,
    layouts_of,
    memory_of,
    state_of,
)
from lightning_parallel.techniques.divided.parts import Part, computing_in
from lightning_parallel.techniques.divided.python_functions import called_below, in_transform, takes_wholes
from lightning_parallel.techniques.divided.table import (
    REMEMBERED,
    REORDERED,
    RULES,
    Again,
    Cuts,
    Form,
    Key,
    LocalCall,
    form_of,
    in_order,
    pattern_of,
    same_cuts,
    stride_like,
    viewed,
    whole_shape,
    written_by,
)
from lightning_parallel.techniques.tools.absent import Absent, is_in_place
from lightning_parallel.techniques.tools.leaves import outside_transforms
from lightning_parallel.techniques.tools.means import original
from lightning_parallel.techniques.tools.shards import as_gradient, local, made_as_dtensors_are


class Divided(LooksWhole):
    """The whole tensor for whoever looks at it; on this rank some elements of it.

    There are two forms. As a rule it is a wrapper without memory, and code that goes around Python is caught. What
    `torch.compile` traces cannot make one; there it is another name for the rank's own elements.

    Args:
        own: this rank's elements, a plain tensor with its history.
        cuts: which they are.
    """

    @staticmethod
    def __new__(cls, own: Tensor, cuts: Cuts) -> Divided:  # noqa: D102
        if not torch.compiler.is_dynamo_compiling():
            stride = None if own.is_contiguous() else stride_like(own, whole_shape(own.shape, cuts))
            form = form_of(own.shape, cuts, next(iter(cuts.values())).ranks, stride)
            wrapper: Wrapper = made_as_dtensors_are(Wrapper, own, form, own.requires_grad)
            return wrapper
        made: Divided = own.as_subclass(_Traced)
        made.own, made.cuts, made._shape = own, cuts, whole_shape(own.shape, cuts)
        made._gathers, made.stored, made._known = None, None, None
        return made

    def whole(self, reader: str = "") -> Tensor:
        """The gathered tensor, plain, used alike by all ranks; all ranks that divide it must call this.

        Args:
            reader: the operation that needs it, for the log; nothing is told without one.
        """
        if (known := self.known) is not None:
            return known
        key = "whole", torch.is_grad_enabled(), state_of(self.own)
        if key in (gathers := self.gathers):
            return gathers[key]
        made = self.own
        for dim, elements in self.cuts.items():
            ranks, call = elements.ranks, (reader, self._shape)
            if reader and not torch.compiler.is_dynamo_compiling() and not (ranks.told and call in ranks.told):
                received = (self._shape.numel() - self.own.numel()) * self.own.element_size()
                times, total = ranks.gathered.get(call, (0, 0))
                ranks.gathered[call] = times + 1, total + received  # logged when the step is over
            made = joined(made, dim, elements)
        gathers[key] = laid_out(made, self.form.stride) if isinstance(self, Wrapper) else made
        return gathers[key]

    def as_subclass(self, cls: Any) -> Any:
        """The whole, of a class with rules of its own, or none; torch asks nobody for a rule of this one."""
        return self.whole("as_subclass").as_subclass(cls)

    def set_(self, *given: Any) -> Any:
        """As `data = given`, of a parameter; torch asks nobody for a rule of this one either.

        Raises:
            ValueError: memory of another shape, or a tensor that others may go on to write to.
        """
        if self.stored is not None and isinstance(given[0], Tensor) and given[0].shape == self._shape:
            self.data = given[0].detach()
            return self
        raise ValueError(
            f"set_ would give a tensor of shape {tuple(self._shape)} that ranks divide other memory; write "
            "x.copy_(...), or use the other tensor itself"
        )

    @property
    def grad(self) -> Tensor | None:
        """Its gradient, divided alike."""
        gradient = (self.own if self.stored is None else self.stored).grad
        if gradient is None or local(gradient).shape != self.own.shape:
            return gradient
        return Divided(local(gradient), self.cuts)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        stored = self.own if self.stored is None else self.stored
        stored.grad = None if value is None else as_gradient(own_of(value, self.cuts), stored)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and not REORDERED.isdisjoint(kwargs):
            args, kwargs = in_order(original(func), args, kwargs)
        kwargs = kwargs or {}
        if Absent in types:  # what another stage of a pipeline has absorbs every operation
            return Absent.__torch_function__(func, types, args, kwargs)
        if not torch.compiler.is_dynamo_compiling():
            if not set(types).isdisjoint(Part.__subclasses__()):
                return NotImplemented  # parts of experts, whose rules come first
            if takes_wholes():
                return of_wholes(original(func), args, kwargs)
            for each in args[0] if args and type(args[0]) in (list, tuple) else args:
                if isinstance(each, Wrapper):
                    settle(each.form.viewed)
        return _computed(func, args, kwargs)[0]


class Wrapper(Divided):
    """The form that has a shape, but no memory.

    What all have lies in slots: every operation makes one, and a table of attributes would cost a quarter of that. The
    names of these are torch's, see `made_as_dtensors_are`.
    """

    __slots__ = ("_local_tensor", "_spec")
    form: Form
    stored = _known = _gathers = None
    cuts: Any = property(attrgetter("form.cuts"))  # no function of Python, for every operation asks
    _shape: Any = property(attrgetter("form.shape"))
    split, unflatten, norm, transpose, flatten, view, reshape, permute, contiguous = AT_ONCE

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The remembered call, if there is one; what a rule decides, if not."""
        if Part in types:
            args, kwargs = computing_in(args, kwargs)
        if kwargs and not REORDERED.isdisjoint(kwargs):
            args, kwargs = in_order(original(func), args, kwargs)
        if func not in REMEMBERED or not ((is_grad_enabled() and not in_transform()) or not takes_wholes()):
            return super().__torch_function__(func, types, args, kwargs)
        given, names = ((*args, *kwargs.values()), tuple(kwargs)) if kwargs else (args, None)
        if (pattern := pattern_of(func, names, Wrapper, *map(type, given))) is None:
            return super().__torch_function__(func, types, args, kwargs)
        key: Key = (pattern, pattern.values(given))
        if not pattern.alone and not (key := pattern.further(key, given)):
            return super().__torch_function__(func, types, args, kwargs)
        form = given[pattern.first].form
        if form.viewed:
            settle(form.viewed)
        if (known := form.calls.get(key)) is None:
            return _met_first(form, key, func, args, kwargs or {})
        again, looks = known
        own = again(args, kwargs or {})
        return own if looks is None else made_as_dtensors_are(Wrapper, own, looks, own.requires_grad)

    def note_change(self) -> None:
        """See `Divided.note_change`; views of what was gathered from this memory are stale."""
        super().note_change()
        for each in self.form.viewed:
            if memory_of(each.own) == memory_of(self.own):
                each.versions = each.versions[0], -1

    def keep(self, whole: Tensor) -> None:
        """Keeps what is the gathered tensor now."""
        if whole.requires_grad or not (self.own.requires_grad and is_grad_enabled()):
            self.gathers["whole", is_grad_enabled(), state_of(self.own)] = whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        """Gives wholes to code that `__torch_function__` does not see; it is reached below autograd."""
        if func is torch.ops.aten.detach.default:
            own = args[0].own.detach()
            return made_as_dtensors_are(Wrapper, own, args[0].form, own.requires_grad)
        what = "a tensor that ranks have divided"
        remedy = "call it from a torch.autograd.Function, or give it tensor.clone() under torch.no_grad()"
        return called_below(func, args, kwargs, Divided, lambda each: each.whole(str(func)), what, remedy, _take)


Wrapper.own, Wrapper.form = (vars(Wrapper)[slot] for slot in ("_local_tensor", "_spec"))  # other names of the slots


@dataclass(eq=False)
class View:
    """A gathered tensor that code has, or of which it has views.

    What changes there in place is written back before the next operation. The views cannot follow the divided tensor:
    while there are any, a change of it in place is an error.

    Attributes:
        whole: the gathered tensor.
        divided: what it was gathered from.
        own: this rank's elements.
        versions: of `whole` and `own` when they agreed; -1 after a change through `data`, which torch does not count.
    """

    whole: Tensor
    divided: Wrapper
    own: Tensor
    versions: tuple[int, int]

    @property
    def is_alive(self) -> bool:
        """Whether code still has the gathered tensor, or views, which hold it as their base."""
        held = 2 + sum(each is self.whole for each in self.divided.gathers.values())  # here, and as the argument below
        return cast(Any, self.whole)._use_count() > 1 or sys.getrefcount(self.whole) > held

    def take_changes(self) -> None:
        """Write what views changed to this rank's elements.

        Raises:
            RuntimeError: the divided tensor was changed, and views would not see it.
        """
        own, (of_whole, of_own) = self.own, self.versions
        if own._version != of_own and (self.is_alive or self.whole._version != of_whole):
            raise RuntimeError(
                f"a tensor of shape {tuple(self.whole.shape)} that ranks divide was changed in place while there is a "
                "view of what was gathered from it, which would not change; write x = x + 1 in place of x += 1, or "
                "clone the view"
            )
        if self.whole._version != of_whole:
            is_weight = own.is_leaf and own.requires_grad  # who changes a view of one does so without gradients
            with torch.set_grad_enabled(is_grad_enabled() and not is_weight):
                own.copy_(own_of(self.whole, self.divided.cuts))
            self.divided.forget()  # also what was gathered for aliases, as `data`, which count no version
            self.divided.keep(self.whole)
            self.versions = self.whole._version, own._version


class _Traced(Divided):
    """The form within graphs: a name for the rank's own elements that tells the shape of the whole.

    Compilers ask for rules of functions, but not of methods that torch has written in Python: these call functions.
    """

    form = Form(torch.Size(), {}, ())  # nothing is noted in it

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
    """What gives this rank's own elements of the result of a call, of what the operation got.

    Args:
        call: that a rule decided on.
        alone: whether one divided tensor comes first, and the rest are values, none given by its name.
    """
    run, rest = call.run, call.rest
    if call.cuts is None or call.of_themselves:
        return lambda args, kwargs: run(*args, **kwargs)
    if rest is not None:
        return lambda args, _: run(args[0].own, *rest)
    if alone:
        return lambda args, _: run(args[0].own, *args[1:])
    ranks = next(iter(call.cuts.values())).ranks

    def use(given: Any) -> Any:  # what a rank computes with where an argument stays as it is
        if type(given) is nn.Parameter and given.requires_grad and is_grad_enabled() and becomes_mean(given, ranks):
            return averaged_later(given, ranks)
        return local_part(given)

    return lambda args, kwargs: run(*map(use, args), **{name: use(each) for name, each in kwargs.items()})


def _computed(func: Any, args: Any, kwargs: Any) -> tuple[Any, LocalCall | None]:
    """The result of an operation by its rule, and the call that gives it where that is one."""
    rule = RULES.get(func) or RULES.get(original(func))
    result: Any = NotImplemented
    if rule is not None and (args or "query" in kwargs):  # rules read the first argument by its place
        result = rule(func if func in RULES else original(func), args, kwargs)
    elif rule is None and getattr(func, "__module__", None) == dist.distributed_c10d.__name__:
        with torch._C.DisableTorchFunctionSubclass():  # it writes to its arguments: see `called_below`
            return func(*args, **kwargs), None
    if result is NotImplemented:
        result = of_wholes(original(func), args, kwargs)
    call = result if isinstance(result, LocalCall) else None
    if call is not None:
        made = _again(call, alone=False)(args, kwargs)
        result = made if call.cuts is None else Divided(made, call.cuts)
    if torch.compiler.is_dynamo_compiling() or (call is not None and call.cuts is None):
        return result, call
    return lying_as_whole(result, func, args, kwargs), call


def _met_first(form: Form, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that the form of its first divided tensor does not remember yet."""
    result, call = _computed(func, args, kwargs)
    if call is None or torch.compiler.is_dynamo_compiling():  # which reads a function of the user's
        return result
    again = _again(call, call.cuts is not None and key[0].alone and len(form.cuts) > 0 and not kwargs)
    if call.cuts is None:
        form.remember(key, (again, None))
        return result
    if call.run in (Tensor.reshape, Tensor.contiguous):
        layouts, shaped = _layouts(args[0], func, args, kwargs), again

        def copying(args: Any, kwargs: Any) -> Tensor:  # the call may give a view, where one device makes a copy
            own: Tensor = shaped(args, kwargs)
            return own.clone() if memory_of(own) == memory_of(args[0].own) else own

        if layouts is not None and layouts[0] is not None and not layouts[0].is_view:
            again = copying
    form.remember(key, (again, result.form))
    return result


def lying_as_whole(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a rule, with the stride that it has on one device; a copy where one device copies."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    made = [each for each in results if isinstance(each, Wrapper)]
    if not made or func not in RULES or any(each is given for each in made for given in args):
        return result
    first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Wrapper))
    if func is F.scaled_dot_product_attention:  # each of its kernels lays out its result as it likes
        # That of one head of this rank does not tell where positions lie: it gets the order of the queries.
        tells = not result.own.is_contiguous() or 1 not in result.own.shape
        if not tells and first.shape == result.shape and 0 not in first.form.stride:
            stride = stride_like(torch.empty_strided(first.shape, first.form.stride, device="meta"), result.shape)
            result.form = form_of(result.own.shape, result.cuts, result.only.ranks, stride)
        return result
    layouts = _layouts(first, func, args, kwargs)
    if layouts is None or len(layouts) != len(results):
        return result
    for each, layout in zip(results, layouts, strict=True):
        if not isinstance(each, Wrapper) or layout is None:
            continue
        if not layout.is_view and memory_of(each.own) == memory_of(first.own):
            each.own = each.own.clone()
        if each.form.stride != layout.stride:
            each.form = form_of(each.own.shape, each.cuts, each.only.ranks, layout.stride)
    return result


def _layouts(first: Wrapper, func: Any, args: Any, kwargs: Any) -> list[Layout | None] | None:
    """See `layouts_of`: remembered by the form of the first divided tensor where a call is known by values."""
    key = func, *map(known_by, args), *kwargs, *map(known_by, kwargs.values())
    try:
        if key in first.form.calls:
            return cast("list[Layout | None] | None", first.form.calls[key])
    except TypeError:  # something that has no hash
        return layouts_of(func, args, kwargs)
    found = layouts_of(func, args, kwargs)
    first.form.remember(key, found)
    return found


def local_part(value: Any) -> Any:
    """A rank's own elements of a divided tensor; any other value as it is."""
    return value.own if isinstance(value, Divided) else value


def is_divided(value: Any) -> TypeGuard[Divided]:
    """Whether a value is a tensor of which ranks have different elements."""
    return isinstance(value, Divided)


def of_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    """The result on gathered tensors, told in the log, and what it changes; autograd sees no torch.nn.init."""
    name = getattr(func, "__name__", str(func))
    # What it changes, as its name, its arguments or its schema tell; functions of torch.nn.init name all that they get.
    in_place = tree_leaves(args[:1] or tuple(kwargs.values())[:1]) if is_in_place(name) else []
    written = [*in_place, *tree_leaves(kwargs.get("out")), *written_by(func, args, kwargs)]
    changed = [each for each in written if isinstance(each, Divided)]
    if not changed:
        result = _on_wholes(func, args, kwargs, name)
        compiled = torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active()
        given = [] if compiled else filter(is_divided, tree_leaves((args, kwargs)))
        gains_views = False
        for each in given:  # what changes in the gathered tensor in place changes in the divided one
            watched = each.only.ranks.viewed
            if viewed(each.whole(), result) and not any(view.whole is each.whole() for view in watched):
                whole = each.whole().clone()  # a collective's result may not be changed in place
                whole = laid_out(whole, each.form.stride) if 0 in each.form.stride else whole  # a clone is not expanded
                each.keep(whole)
                watched.append(View(whole, each, each.own, (whole._version, each.own._version)))
                gains_views = True
        return _on_wholes(func, args, kwargs, name) if gains_views else result
    with torch.set_grad_enabled(is_grad_enabled() and getattr(func, "__module__", "") != "torch.nn.init"):
        wholes = {id(each): each.whole(name).clone() for each in changed}
        given = tuple(args), kwargs
        args, kwargs = tree_map_only(Divided, lambda d: wholes[id(d)] if id(d) in wholes else d.whole(name), given)
        result = func(*args, **kwargs)
        for each in changed:
            _take(each, wholes[id(each)])
        back = {id(wholes[id(each)]): each for each in changed}
        return tree_map_only(Tensor, lambda leaf: back.get(id(leaf), leaf), result)


def settle(viewed: list[View]) -> None:
    """Takes what changed in views of gathered tensors, and lets go of those of which no view is left."""
    for each in (*viewed, *viewed):  # again, as what one of them took is a change that others do not follow
        each.take_changes()
    viewed[:] = [each for each in viewed if each.is_alive]


def _take(divided: Divided, whole: Tensor) -> None:
    divided.own.copy_(own_of(whole, divided.cuts))
    divided.note_change()


def made_whole(value: Any, name: str) -> Any:
    """The value with wholes in the place of divided tensors; the name says what needs them."""
    return tree_map_only(Divided, lambda each: each.whole(name), value)


def _on_wholes(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    # No transform of `torch.func` acts while this gathers: they take no function of autograd as those of collectives.
    with outside_transforms():
        args, kwargs = made_whole((tuple(args), kwargs), name)
    return func(*args, **kwargs)


def own_of(tensor: Tensor, cuts: Cuts) -> Tensor:
    """This rank's elements of a tensor, plain or divided in any way."""
    if is_divided(tensor) and same_cuts(tensor.cuts, cuts):
        return tensor.own
    tensor = tensor.whole("another division") if is_divided(tensor) else tensor
    for dim, elements in cuts.items():
        tensor = part(tensor, dim, elements)
    return tensor
