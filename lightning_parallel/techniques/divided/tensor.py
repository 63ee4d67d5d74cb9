"""A tensor that looks whole, and of which each rank has and computes some elements.

The user's model sees the shape of the whole. Operations of which a rule is known act on a rank's own elements; a plain
tensor that meets them gives the elements at the same places. Everything else gets the whole, gathered, with the right
gradient: what is not known is slower, never wrong.

All ranks of a group must take the same way: rules decide by shapes, and by which elements ranks have, never by values.

| a rank has | what it is | its gradient |
|---|---|---|
| a plain tensor | the same on all ranks | complete on each |
| a `Divided` | its own elements of some dimensions | complete, added up over the ranks that have copies |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, is_grad_enabled
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.collectives.by_elements import completed, joined, part, reduced_later, shared_out
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.gathered import note
from lightning_parallel.techniques.divided.looks import AT_ONCE, LooksWhole, laid_out, note_strides, state_of
from lightning_parallel.techniques.divided.python_functions import (
    body_of,
    called_below,
    in_transform,
    outside_of_transforms,
    takes_wholes,
)
from lightning_parallel.techniques.divided.regather import checkpoint_around
from lightning_parallel.techniques.divided.table import (
    REMEMBERED,
    REORDERED,
    RULES,
    Again,
    Cuts,
    Form,
    Key,
    LocalCall,
    changed_by,
    form_of,
    in_order,
    pattern_of,
    same_cuts,
    viewed,
    whole_shape,
)
from lightning_parallel.techniques.tools.absent import Absent
from lightning_parallel.techniques.tools.means import original
from lightning_parallel.techniques.tools.shards import as_gradient, local, made_as_dtensors_are


class Divided(LooksWhole):
    """The whole tensor for whoever looks at it; on this rank some elements of it.

    There are two forms. As a rule it is a wrapper without memory, and code that goes around Python is caught. What
    `torch.compile` traces cannot make one; there it is another name for the rank's own elements.

    Args:
        own: this rank's elements, a plain tensor with its history.
        cuts: which they are; none for a parameter that all ranks have alike, see `alike`.
    """

    looked_at: ClassVar[bool] = False  # of a parameter: only code outside of its module reads this form of it
    ranks: Ranks
    """Of an alike parameter: the ranks that add up its gradients."""

    @staticmethod
    def __new__(cls, own: Tensor, cuts: Cuts) -> Divided:  # noqa: D102
        if not torch.compiler.is_dynamo_compiling():
            return wrapped(own, form_of(own.shape, cuts, next(iter(cuts.values())).ranks))
        made: Divided = own.as_subclass(_Traced)
        made.own, made.cuts, made._shape = own, cuts, whole_shape(own.shape, cuts)
        made._gathers, made.stored, made._known = None, None, None
        return made

    def whole(self, reader: str = "") -> Tensor:
        """The gathered tensor, plain, used alike by all ranks; all ranks that divide it must call this.

        Args:
            reader: the operation that needs it, for the log; nothing is told without one.
        """
        if not self.cuts:
            return shared_out(self.own, self.ranks)
        if (known := self.known) is not None:
            return known
        key = "whole", torch.is_grad_enabled(), state_of(self.own)
        if key in (gathers := self.gathers):
            return gathers[key]
        made = self.own
        for dim, elements in self.cuts.items():
            if reader:
                note(elements.ranks, reader, self.own, self._shape)
            made = joined(made, dim, elements)
        gathers[key] = laid_out(made, self)
        return gathers[key]

    @property
    def grad(self) -> Tensor | None:
        """Its gradient, divided alike."""
        gradient = (self.own if self.stored is None else self.stored).grad
        if gradient is None or not self.cuts or local(gradient).shape != self.own.shape:
            return gradient
        return Divided(local(gradient) if self.stored is not None else completed(gradient, self.cuts), self.cuts)

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
            if takes_wholes():
                return of_wholes(original(func), args, kwargs)
            for each in args[0] if args and type(args[0]) in (list, tuple) else args:
                if isinstance(each, Wrapper):
                    settle(each.form.viewed)
        result = by_rule(func, args, kwargs)
        return _made_of(result, func, args, kwargs) if isinstance(result, LocalCall) else result


def _made_of(call: LocalCall, func: Any, args: Any, kwargs: Any) -> Any:
    made = carried_out(call, args, kwargs)
    if args and isinstance(args[0], Wrapper) and args[0].form.strides is not None:
        note_strides(made, func, args, kwargs)
    return made


class Wrapper(Divided):
    """The form that has a shape, but no memory.

    What all have lies in slots: every operation makes one, and a table of attributes would cost a quarter of that. The
    names of these are torch's, see `made_as_dtensors_are`.
    """

    __slots__ = ("_local_tensor", "_spec")
    form: Form
    origin: Divided | None = None  # over whose memory this one lies
    stored = _known = _gathers = None
    cuts: Any = property(attrgetter("form.cuts"))  # no function of Python, for every operation asks
    _shape: Any = property(attrgetter("form.shape"))
    split, unflatten, norm, transpose, flatten, view, reshape, permute, contiguous = AT_ONCE

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The remembered call, if there is one; what a rule decides, if not."""
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

    def forget(self) -> None:
        """See `Divided.forget`; with what shares this memory, views of its whole change."""
        super().forget()
        for each in self.form.viewed:
            each.whole("views")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        """Gives wholes to code that `__torch_function__` does not see; it is reached below autograd."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return wrapped(args[0].own.detach(), args[0].form)
        what = "a tensor that ranks have divided"
        remedy = "call it from a torch.autograd.Function, or give it tensor.clone() under torch.no_grad()"
        return called_below(func, args, kwargs, Divided, lambda each: each.whole(str(func)), what, remedy, _take)


Wrapper.own, Wrapper.form = (vars(Wrapper)[slot] for slot in ("_local_tensor", "_spec"))  # other names of the slots

OWN = cast(Callable[[Wrapper], Tensor], vars(Wrapper)["own"].__get__)
"""What lies in the slot, where a class derived from this one looks at it before it is given."""


class Viewed(Wrapper):
    """One of which code has views of the gathered whole: what changes in one of both in place changes in the other."""

    _shown: tuple[Tensor, int, int]  # the whole, and the versions of it and of the own elements when they agreed

    @property
    def own(self) -> Tensor:  # type: ignore[override]
        """This rank's elements, as they are after changes of views."""
        self.take_changes()
        return OWN(self)

    def take_changes(self) -> None:
        """Writes what views changed to the own elements."""
        own, (whole, version, _) = OWN(self), self._shown
        if whole._version != version:
            is_weight = own.is_leaf and own.requires_grad  # who changes a view of one does so without gradients
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_weight):
                own.copy_(own_of(whole, self.cuts))
            self._shown = whole, whole._version, own._version

    def whole(self, reader: str = "") -> Tensor:
        """See `Divided.whole`: the one of which there are views, unless it learns and they, made before, do not."""
        own, whole = self.own, self._shown[0]
        if own.requires_grad and torch.is_grad_enabled() and not whole.requires_grad:
            return super().whole(reader)
        if own._version != self._shown[2]:
            whole.copy_(super().whole(reader))
            self._shown = whole, whole._version, own._version
        return whole

    def forget(self) -> None:
        """See `Divided.forget`; changes through `data` count for autograd in the whole as little as in the own."""
        through_data = self.own._version == self._shown[2]
        super().forget()
        if through_data:
            self._shown[0].data.copy_(super().whole("views").detach())


class _Traced(Divided):
    """The form within graphs: a name for the rank's own elements that tells the shape of the whole.

    Compilers ask for rules of functions, but not of methods that torch has written in Python: these call functions.
    """

    form = Form(torch.Size(), {})  # nothing is noted in it

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


def wrapped(own: Tensor, form: Form) -> Wrapper:
    """The divided tensor of this form of which this rank has these elements."""
    made: Wrapper = made_as_dtensors_are(Wrapper, own, form, own.requires_grad)
    return made


def by_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on divided tensors, or the call that gives it."""
    known = RULES.get(func) or RULES.get(func := original(func))
    if known is not None and (args or "query" in kwargs):  # rules read the first argument by its place
        result = known(func, args, kwargs)
        if result is not NotImplemented:
            return result
    elif (body := body_of(func)) is not None:
        return body(*args, **kwargs)
    elif (
        getattr(func, "__module__", None) == dist.distributed_c10d.__name__
    ):  # writes to its arguments: see `called_below`
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return of_wholes(func, args, kwargs)


def carried_out(call: LocalCall, args: Any, kwargs: Any) -> Any:
    """The result of a call that a rule decided on."""
    made = _again(call, alone=False)(args, kwargs)
    return made if call.cuts is None else Divided(made, call.cuts)


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
    return lambda args, kwargs: run(*map(own_use, args), **{name: own_use(each) for name, each in kwargs.items()})


def _met_first(form: Form, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that the form of its first divided tensor does not remember yet."""
    if not isinstance(result := by_rule(func, args, kwargs), LocalCall):
        if form.hides_order:
            note_strides(result, func, args, kwargs)
        return result
    made = carried_out(result, args, kwargs)
    if type(made) is not _Traced:  # what a compiler makes that reads a function of the user's
        note_strides(made, func, args, kwargs)
        alone = key[0].alone and len(form.cuts) > 0 and not kwargs
        form.remember(key, _again(result, alone), None if result.cuts is None else made.form)
    return made


def own_use(given: Any) -> Any:
    """What a rank computes with where an argument stays as it is."""
    if isinstance(given, Divided):
        return given.own if given.cuts else reduced_later(given.own, given.ranks)
    return given


def is_divided(value: Any) -> TypeGuard[Divided]:
    """Whether a value is a tensor of which ranks have different elements; an alike parameter is none."""
    return isinstance(value, Divided) and len(value.cuts) > 0  # torch 2.11 compiles no bool of a dict


def of_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    """The result on gathered tensors, told in the log, and what it changes; autograd sees no torch.nn.init."""
    name = getattr(func, "__name__", str(func))
    changed = [each for each in changed_by(func, name, args, kwargs) if isinstance(each, Divided)]
    if not changed:
        result = _on_wholes(func, args, kwargs, name)
        compiled = torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active()
        given = [] if compiled else filter(is_divided, tree_leaves((args, kwargs)))
        found = [each for each in given if not isinstance(each, Viewed) and viewed(each.whole(), result)]
        for each in found:
            let_change(each)
        return _on_wholes(func, args, kwargs, name) if found else result
    with torch.set_grad_enabled(is_grad_enabled() and getattr(func, "__module__", "") != "torch.nn.init"):
        return _changing(func, args, kwargs, name, changed)


def let_change(divided: Any) -> None:
    """From now on what changes in place in the gathered whole changes in the divided tensor, and vice versa."""
    each = divided if divided.origin is None else divided.origin
    if type(each) is not Viewed:
        whole = laid_out(each.whole().clone(), each)  # a collective's result may not be changed in place
        each.forget()
        for elements in each.cuts.values():
            elements.ranks.note_viewed(each, None if each.stored is not None else checkpoint_around())
        vars(each)["_shown"], each.__class__ = (whole, whole._version, each.own._version), Viewed


def settle(viewed: Sequence[Any]) -> None:
    """Takes what changed in views of wholes, for all that have the memory of these tensors in common."""
    if any(each._shown[0]._version != each._shown[1] for each in viewed):
        for each in viewed:
            each.take_changes()
        for each in viewed:
            each.whole("views")


def _take(divided: Divided, whole: Tensor) -> None:
    divided.own.copy_(own_of(whole, divided.cuts))
    divided.forget()


def _changing(func: Any, args: Any, kwargs: Any, name: str, changed: list[Divided]) -> Any:
    wholes = {id(each): each.whole(name).clone() for each in changed}
    given = tuple(args), kwargs
    args, kwargs = tree_map_only(Divided, lambda d: wholes[id(d)] if id(d) in wholes else d.whole(name), given)
    result = func(*args, **kwargs)
    for each in changed:
        _take(each, wholes[id(each)])
    back = {id(wholes[id(each)]): each for each in changed}
    return tree_map_only(Tensor, lambda leaf: back.get(id(leaf), leaf), result)


def _on_wholes(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    with outside_of_transforms():
        args, kwargs = tree_map_only(Divided, lambda each: each.whole(name), (tuple(args), kwargs))
    return func(*args, **kwargs)


def own_of(tensor: Tensor, cuts: Cuts) -> Tensor:
    """This rank's elements of a tensor, plain or divided in any way."""
    if is_divided(tensor) and same_cuts(tensor.cuts, cuts):
        return tensor.own
    tensor = tensor.whole("another division") if is_divided(tensor) else tensor
    for dim, elements in cuts.items():
        tensor = part(tensor, dim, elements)
    return tensor
