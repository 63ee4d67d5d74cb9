"""Parameters of units that a step reads outside of their blocks: penalties on weights, copies of a block, tied weights.

Between the forwards of its blocks a unit is sharded, so code of the step's own would find shards there. While a step
runs these have the class `Away`, which every use of them in Python passes through. The first function that reads values
of one gathers its unit; from then on the unit is whole from the beginning of every step to its end, as is what belongs
to no unit. All ranks must read in the same step, as they must run the same blocks. Where ranks have parts of the whole,
the step shows what looks whole for it (`Division.show`), as for what was there when it began.

| a unit | in a forward | in a backward |
|---|---|---|
| as a rule | whole while its blocks run | whole while its blocks go back; then its gradients are reduced |
| read outside of its blocks | whole | whole; its gradients are reduced at the end |
| differentiated twice (`create_graph`) | whole | whole: the graph of its backward reads it, too |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.techniques.divided.parts import computing
from lightning_parallel.techniques.divided.table import is_in_place
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.gradients.buckets import nothing
from lightning_parallel.techniques.tools.global_shard import global_of
from lightning_parallel.techniques.tools.shards import shard_of
from lightning_parallel.techniques.zero.gradients import StepsGradients
from lightning_parallel.techniques.zero.sharded.groups import groups_of

ABOUT = frozenset(
    (
        *("__get__", "__set__", "__delete__", "__hash__", "__repr__", "__len__", "size", "numel", "nelement", "dim"),
        *("ndimension", "stride", "storage_offset", "element_size", "get_device", "data_ptr", "is_contiguous"),
        *("is_floating_point", "is_complex", "is_signed", "is_pinned", "is_shared", "is_same_size", "requires_grad_"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "untyped_storage"),
    )
)
"""Functions that ask about a tensor, and need not its values."""

LIKE = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    )
)
"""Functions that make a tensor of the shape or the kind of another one, and need not its values either."""

VALUES = frozenset((Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag))
"""Attributes by which its values are read or written."""


class Away(DTensor):
    """The class of a sharded parameter while a step runs and its unit is not whole.

    Attributes:
        reads: makes it whole.
    """

    reads: OutsideReads

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, attribute = kwargs or {}, function.__name__, getattr(function, "__self__", None)
        if attribute is Tensor.grad:
            return args[0]._gradient(function, *args[1:])
        if name in ABOUT and attribute not in VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if name in LIKE:
            return function(*tree_map_only(cls, _without_values, tuple(args)), **kwargs)
        first = args[0].reads.standing(args[0]) if args and type(args[0]) is cls else None
        if isinstance(first, DTensor) and attribute is Tensor.data:
            with torch._C.DisableTorchFunctionSubclass():
                return function(first, *args[1:])
        whole_args, kwargs = tree_map_only(cls, lambda each: each.reads.whole(each), (tuple(args), kwargs))
        result = function(*whole_args, **kwargs)
        if isinstance(first, DTensor) and is_in_place(name):
            first._local_tensor.copy_(shard_of(whole_args[0].detach(), first)._local_tensor)
        return result

    def _gradient(self, function: Any, *given: Any) -> Any:
        """Reads or writes `grad`; a whole that a step gives belongs to the whole parameter."""
        whole = bool(given) and type(given[0]) is Tensor
        looks_whole = whole or any(isinstance(each, Divided) for each in given)
        if looks_whole and isinstance(standing := self.reads.standing(self), Divided):
            standing.grad = given[0]
            return None
        if whole:
            gathered = self.reads.gathered(self)
            gathered.grad = shard_of(given[0], gathered) if isinstance(gathered, DTensor) else given[0]
            return None
        with torch._C.DisableTorchFunctionSubclass():
            found = function(self, *given)
        return found if found is None else global_of(found)

    def __deepcopy__(self, memo: Any) -> Any:
        whole = self.reads.whole(self)
        if isinstance(whole, Divided):
            return memo.setdefault(id(self), copy.deepcopy(whole, memo))
        return memo.setdefault(id(self), nn.Parameter(whole.detach().clone(), whole.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)


class OutsideReads:
    """What steps read of units outside of their blocks.

    Args:
        units: those that are gathered together, for each such group.
        others: modules whose parameters are whole during every step.
        gradients: shows whole ones to a step that has run a backward.
    """

    def __init__(self, units: Sequence[Sequence[Any]], others: Sequence[Any], gradients: StepsGradients) -> None:
        self._units = [(group, group[0]._get_fsdp_state()) for group in units]
        self._others = [module._get_fsdp_state() for module in others]
        self._kept: list[Any] = []
        """The states of units that are whole during steps."""
        self._away: dict[int, tuple[Sequence[Any], Any, Any]] = {}
        self._watched: list[Any] = []
        self.gradients = gradients
        self.show: Callable[[], None] = nothing
        """Shows what looks whole for what was gathered within a step, see `Division.show`."""
        for units, state in self._units:
            for group in groups_of(state):
                group.pre_backward = partial(self._before_backward, units, state, group.pre_backward)

    def _before_backward(self, units: Sequence[Any], state: Any, before: Callable[..., None], *args: Any) -> None:
        before(*args)
        if torch.is_grad_enabled() and self._away:  # within a step
            self._keep(units, state)

    def keeps(self, group: Any) -> bool:
        """Whether a group of parameters, as `fully_shard` has it, is whole during steps."""
        return any(group in groups_of(state) for state in self._kept)

    def gather(self) -> None:
        """Makes what steps read whole, anew where it is whole already."""
        for units, state in self._units:
            if state in self._kept:
                _reshard(units)
                _unshard(units)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the forward of a step: what was read before is whole, and what is read now is noticed."""
        self.gather()
        for units, state in self._units:
            if state not in self._kept:
                for parameter in _parameters(state):
                    self._away[id(parameter.sharded_param)] = units, state, parameter
                    self._watch(parameter.sharded_param)
        try:
            yield
        finally:
            for tensor in self._watched:
                tensor.__class__ = DTensor
                del vars(tensor)["reads"]
            self._watched.clear()
            self._away.clear()
            for units, state in self._units:
                if state in self._kept:
                    _reshard(units)

    def _watch(self, tensor: Any) -> None:
        vars(tensor)["reads"], tensor.__class__ = self, Away
        self._watched.append(tensor)

    def standing(self, part: Any) -> Any:
        """What code sees for a part where its unit is whole, as it is from now on: the whole, or what looks whole."""
        return computing(self.gathered(part))

    def gathered(self, part: Any) -> Any:
        """What a rank has for a part where its unit is whole: a part still, of what others divide."""
        if id(part) not in self._away:
            return part
        units, state, parameter = self._away[id(part)]
        self._keep(units, state)
        return parameter.unsharded_param

    def _keep(self, units: Sequence[Any], state: Any) -> None:
        """From now on a unit is whole during steps."""
        if state not in self._kept:
            self._kept.append(state)
            _unshard(units)
            for each in _parameters(state):  # it may have been frozen, or let learn, while it was away
                each.unsharded_param.requires_grad_(each.sharded_param.requires_grad)
            self.show()

    def whole(self, part: Any) -> Any:
        """The whole of which code reads a part."""
        standing = self.standing(part)
        return standing.full_tensor() if isinstance(standing, DTensor) else standing


def _without_values(part: Away) -> Tensor:
    """A plain tensor that is like the whole of a part, over one element."""
    with torch._C.DisableTorchFunctionSubclass():
        return part._local_tensor.new_empty((), device=part.device_mesh.device_type).expand(part.shape)


def _parameters(state: Any) -> list[Any]:
    return [parameter for group in groups_of(state) for parameter in group.fsdp_params]


def _unshard(units: Sequence[Any]) -> None:
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()


def _reshard(units: Sequence[Any]) -> None:
    for unit in units:
        unit.set_reshard_after_forward(True, recurse=False)
        unit.reshard()
