"""What a divided tensor tells of itself: the shape of the whole, and otherwise what its own elements are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import ge
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import Self

from lightning_parallel.collectives.elements import Elements
from lightning_parallel.collectives.made_of import Version, version
from lightning_parallel.techniques.divided.table import Cuts, form_of
from lightning_parallel.techniques.tools.leaves import leaf_of


class LooksWhole(Tensor):
    """A tensor that answers questions for the whole of which this rank has some elements."""

    own: Tensor
    cuts: Cuts
    stored: Tensor | None
    """Of a parameter: the tensor that the module holds between steps, and that has the gradient."""
    _shape: torch.Size
    _known: tuple[Tensor, tuple[bool, Version]] | None
    _gathers: dict[Any, Tensor] | None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole."""
        return self.size() if _is_listened_to() else self._shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """How many dimensions."""
        return len(self._shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of its elements."""
        return self.own.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which this rank has its elements."""
        return self.own.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to it."""
        return self.own.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        (self.own if self.stored is None else self.stored).requires_grad_(value)
        if self.stored is not None:
            leaf_of(self.stored)  # the own elements learn as it does

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether it has no history."""
        return self.own.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The end of its history."""
        return self.own.grad_fn

    def dim(self) -> int:
        """See `ndim`."""
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole, or of one dimension of it."""
        if _is_listened_to():
            return _told(LooksWhole.size, self, *(() if dim is None else (dim,)))
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """How many elements the whole has."""
        if _is_listened_to():
            return int(_told(LooksWhole.numel, self))
        return self._shape.numel()

    def __len__(self) -> int:
        return int(self.size(0))

    def as_subclass(self, cls: Any) -> Any:
        """The whole, of a class with rules of its own, or none; torch asks nobody for a rule of this one."""
        return as_wrapper(self).whole("as_subclass").as_subclass(cls)

    def set_(self, *given: Any) -> Any:
        """As `data = given`, of a parameter; torch asks nobody for a rule of this one either.

        Raises:
            ValueError: memory of another shape, or a tensor that others may go on to write to.
        """
        itself = as_wrapper(self)
        if itself.stored is not None and isinstance(given[0], Tensor) and given[0].shape == self._shape:
            itself.data = given[0].detach()
            return self
        raise ValueError(
            f"set_ would give a tensor of shape {tuple(self._shape)} that ranks divide other memory; write "
            "x.copy_(...), or use the other tensor itself"
        )

    @property
    def gathers(self) -> dict[Any, Tensor]:
        """What was gathered for products that read it: by dimension, whether with gradients, and dtype."""
        if self._gathers is None:
            self._gathers = {}
        return self._gathers

    def known_to_be(self, whole: Tensor) -> Self:
        """Itself, of which this rank has all elements beside its own; nothing learns them."""
        self._known = whole, state_of(self.own)
        return self

    @property
    def known(self) -> Tensor | None:
        """The whole, where each rank has it at no cost, as that of a batch; None once something changed it."""
        if self._known is None or self._known[1] != state_of(self.own):
            return None
        return self._known[0]

    def forget(self) -> None:
        """Lets go of what was gathered, after an operation changed the elements in place."""
        self._gathers = self._known = None

    @property
    def only(self) -> Elements:
        """The elements of the first divided dimension."""
        return next(iter(self.cuts.values()))

    def __repr__(self) -> str:  # type: ignore[override]
        if not self.cuts:  # without a collective: ranks may print alone
            return repr(self.own)
        here = ", ".join(f"dim {dim}: {elements!r}" for dim, elements in self.cuts.items())
        return f"Divided(shape={tuple(self._shape)}, dtype={self.dtype}, this rank has {here})"


def _is_listened_to() -> bool:
    """Whether modes hear what is asked; in a graph these are numbers."""
    return torch._C._is_torch_function_mode_enabled() and not torch.compiler.is_dynamo_compiling()


def _told(question: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
    """The answer to a question about a whole, with a word to modes of torch that look at what a step asks."""
    return handle_torch_function(question, (tensor,), tensor, *args)


def asking_at_once(method: Any) -> Callable[..., Any]:
    """A method of which the tensor is the one argument that may have rules.

    Torch would look through all arguments for others that have some, which takes as long as what rules do.
    """

    @functools.wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_torch_function_unary(self) or torch._C._is_torch_function_mode_enabled():
            return method(self, *args, **kwargs)
        return type(self).__torch_function__(method, (), (self, *args), kwargs)

    return ask


AT_ONCE = [asking_at_once(method) for method in (
    Tensor.split, Tensor.unflatten, Tensor.norm, Tensor.transpose, Tensor.flatten, Tensor.view, Tensor.reshape,
    Tensor.permute, Tensor.contiguous)]  # fmt: skip
"""Methods that the form without memory has itself."""


def strides_of(divided: LooksWhole) -> list[int] | None:
    """The strides of the whole, which lies in memory in the order in which own elements do; None: as dimensions do.

    What views leave out is not seen: a slice lies as densely as a copy of it. A dimension that was expanded has the
    stride 0.
    """
    if torch.compiler.is_dynamo_compiling() or (divided.own.is_contiguous() and not is_noted(divided)):
        return None
    own, step = strides_with_gaps(divided), 1
    strides = [0] * len(own)
    for dim in sorted(range(len(own)), key=lambda dim: (own[dim], -dim)):
        if own[dim] or divided.shape[dim] == 1:
            strides[dim] = step
            step *= divided.shape[dim]
    return strides


def laid_out(whole: Tensor, divided: LooksWhole) -> Tensor:
    """The whole in memory as it is told to lie there, for who reads it by strides, as `as_strided` does."""
    strides = strides_of(divided)
    if strides is None or whole.stride() == (*strides,):
        return whole
    for dim, stride in enumerate(strides):
        whole = whole if stride else whole.narrow(dim, 0, 1)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    turned = whole.permute(order).contiguous()
    return turned.permute([order.index(dim) for dim in range(len(order))]).expand(divided.shape)


# ---------------------------------------------------------------- what shares memory on one device


def tells_strides(divided: LooksWhole) -> bool:
    """Whether the whole would be contiguous, or a view of it possible, where they are for what this rank has.

    The order of a dimension of which a rank has one element, or none, cannot be seen there; nor that a slice leaves out
    what other ranks have. Each rank answers for itself: nothing is sent for what follows.
    """
    lengths = [elements.length for elements in divided.cuts.values()]
    if torch.compiler.is_dynamo_compiling():
        even = all(len({*elements.lengths}) == 1 for elements in divided.cuts.values())
        return even and min(lengths) > 1
    return min(lengths) > 1 and as_wrapper(divided).form.strides is None


def copied_as_whole(divided: LooksWhole, made: Tensor, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """What an operation made of own elements; a copy, if it is a view of them, but torch would copy the whole.

    Args:
        divided: the tensor.
        made: of its own elements.
        func: what torch calls for the whole.
        args: its further arguments.
        kwargs: likewise.
    """
    if torch.compiler.is_dynamo_compiling():
        return made.clone()  # graphs leave out what nobody changes
    if _memory(made) != _memory(divided.own):
        return made
    whole = _strided_as(divided)
    found = func(whole, *args, **kwargs)
    return made if found is whole or found._base is whole else made.clone()


def no_view(made: Tensor) -> Tensor:
    """What an operation of several has made, of which the last made a view that nobody else has, as one of its own."""
    if torch.compiler.is_dynamo_compiling() or not made._is_view():
        return made
    found: Tensor = torch.ops.aten._unsafe_view(made, made.shape)
    return found


def note_strides(made: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Notes how a result, or a tuple of them, would lie on one device, where what this rank has does not tell it.

    A view lies as what it is a view of; a result of its own in the order of dimensions in which that lies, of which
    torch sees none in a dimension of one element.
    """
    made = [each for each in (made if isinstance(made, tuple) else (made,)) if isinstance(each, LooksWhole)]
    if torch.compiler.is_dynamo_compiling() or not made or not args or made[0] is args[0]:
        return
    is_view = isinstance(args[0], LooksWhole) and _memory(made[0].own) == _memory(args[0].own)
    if is_noted(args[0]) if is_view else any(map(_hides_order, tree_leaves((args, kwargs)))):
        found = func(*tree_map_only(Tensor, _strided_as, args), **tree_map_only(Tensor, _strided_as, kwargs))
        for one, whole in zip(made, found if isinstance(found, (tuple, list)) else (found,), strict=True):
            if is_view or not _in_order(whole.stride()):
                lies_as(one, whole.stride())


def _hides_order(given: Any) -> bool:
    """Whether dimensions of a tensor come in another order on one device than those of what this rank makes of it."""
    if not isinstance(given, LooksWhole) or not as_wrapper(given).form.hides_order:
        return False
    return not _in_order(strides_with_gaps(given))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _in_order(strides: tuple[int, ...]) -> bool:
    return all(map(ge, strides, strides[1:]))


def is_noted(divided: Any) -> bool:
    """Whether the strides of the whole are noted in the form of a tensor."""
    return isinstance(divided, LooksWhole) and as_wrapper(divided).form.strides is not None


def lies_as(made: LooksWhole, strides: tuple[int, ...]) -> None:
    """Notes the strides of the whole on one device."""
    as_wrapper(made).form = form_of(made.own.shape, made.cuts, made.only.ranks, strides)


def as_wrapper(divided: LooksWhole) -> Any:
    """The tensor, as one that has a form, which it has where no compiler reads."""
    return divided


def strides_with_gaps(divided: LooksWhole) -> tuple[int, ...]:
    """The strides of the whole on one device, where what this rank has tells them.

    Of dimensions with the same stride one of which the rank has one element lies within the other.
    """
    noted: tuple[int, ...] | None = as_wrapper(divided).form.strides
    if noted is not None:
        return noted
    own, shape = divided.own, divided.shape
    strides, step, dense = [0] * own.dim(), 1, 1
    for dim in sorted(range(own.dim()), key=lambda dim: (own.stride(dim), own.shape[dim] > 1, -dim)):
        if shape[dim] == 1 or (own.shape[dim] > 1 and own.stride(dim) == 0):
            continue
        strides[dim] = step + (own.stride(dim) != dense)  # how wide a gap is does not matter
        step, dense = strides[dim] * shape[dim], own.stride(dim) * max(own.shape[dim], 1)
    return tuple(strides)


def _strided_as(tensor: Tensor) -> Tensor:
    """A tensor without memory that has the shape and strides of the whole."""
    strides = strides_with_gaps(tensor) if isinstance(tensor, LooksWhole) and tensor.cuts else tensor.stride()
    return torch.empty_strided(tensor.shape, strides, device="meta", dtype=tensor.dtype)


def state_of(tensor: Tensor) -> tuple[bool, Version]:
    """Whether it learns, and the version of its values."""
    return tensor.requires_grad, version(tensor)
