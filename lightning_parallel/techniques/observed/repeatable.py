"""Whether a block does the same in every call, or something that depends on what earlier calls left in Python.

A pipeline runs blocks on several ranks and once for each microbatch, so a counter or a flag that blocks share, or that
a block keeps for itself, would have other values there.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lightning_parallel.techniques.tools.caches import is_cache
from lightning_parallel.techniques.tools.redirect import default_dtype
from lightning_parallel.values import map_leaves

Operations = list[Hashable]
SAMPLED = 1024  # elements of a known tensor that are compared


def operation(func: Any, args: Any, kwargs: Any, known: Iterable[Tensor]) -> Hashable:
    """An operation as a value, equal for two calls if they do the same.

    Args:
        func: the operation.
        args: its arguments, tensors by their shapes.
        kwargs: the same by name.
        known: the tensors among them whose values are known.
    """
    leaves = [_shape(leaf) if isinstance(leaf, Tensor) else str(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
    values = [tuple(tensor.detach().reshape(-1)[:SAMPLED].tolist()) for tensor in known]
    return (str(func), *leaves, *map(str, values))


def _shape(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype


class Repeatable:
    """A call of a block that is to be compared with more of the same.

    Args:
        call: calls the block.
        args: with these.
        kwargs: and these, by name.
    """

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = call
        self._arguments = map_leaves(_copied, [list(args), kwargs])  # a block may change what it gets
        self._random = _random_state()
        self._dtype = torch.get_default_dtype()  # a precision sets it while a step runs

    def settles(self, noted: Callable[[Callable[[], Any]], Operations]) -> bool:
        """Whether two further calls do the same; the first one may have made a table for later ones.

        Args:
            noted: runs something and tells its operations.

        Raises:
            Exception: that of a block which cannot be called again.
        """
        after = _random_state()
        try:
            with default_dtype(self._dtype):
                return noted(self._again()) == noted(self._again())
        finally:
            _set_random(after)

    def _again(self) -> Callable[[], Any]:
        _set_random(self._random)
        args, kwargs = map_leaves(_copied, self._arguments)  # outside: it is none of the block's operations
        return lambda: self._call(*args, **kwargs)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if not is_cache(value):
        return value
    with _disable_current_modes():  # the block does not read what other layers put there
        return copy.deepcopy(value)


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
