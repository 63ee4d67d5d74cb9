"""Parameters that `configure_optimizers` reads: copies that it makes, as for averages or penalties, are of wholes.

There a rank has its parts of parameters, which are what optimizers get. A copy of a part would be one too, and meet
whole tensors, or divided ones that look whole, when a step runs. So what reads a part there gets the whole; what is
written to it is the parameter's afterwards. All ranks read alike, as they run the same code.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.techniques.tools.shards import shard_of, whole_tensor

ABOUT = frozenset(
    (
        *("__get__", "__set__", "__delete__", "__hash__", "__repr__", "__len__", "size", "numel", "nelement", "dim"),
        *("ndimension", "element_size", "get_device", "is_floating_point", "is_complex", "requires_grad_"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    )
)
"""Functions that ask about a tensor, or for what becomes of its gradients, and need not its values."""

VALUES = frozenset((Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag))
"""Attributes by which its values are read or written."""


class ReadWhole(DTensor):
    """The class of a part while `configure_optimizers` runs.

    Attributes:
        made: the whole, once it was read.
    """

    made: nn.Parameter | None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, attribute = kwargs or {}, getattr(function, "__self__", None)
        if (function.__name__ in ABOUT and attribute not in VALUES) or _in_optimizer():
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        args, kwargs = tree_map_only(cls, _whole, (tuple(args), kwargs))
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.setdefault(id(self), copy.deepcopy(_whole(self)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole: Any = _whole(self)
        return whole.__reduce_ex__(protocol)


def _whole(part: Any) -> nn.Parameter:
    made: nn.Parameter | None = vars(part)["made"]
    if made is None:
        with torch._C.DisableTorchFunctionSubclass():
            made = vars(part)["made"] = nn.Parameter(whole_tensor(part.detach()).clone(), part.requires_grad)
    return made


def _in_optimizer() -> bool:
    """Whether this is called from an optimizer, which makes states of what it steps."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False


@contextmanager
def read_whole(module: LightningModule) -> Iterator[None]:
    """Inside, the module's `configure_optimizers` reads wholes of parameters of which this rank has parts."""
    configure, own = module.configure_optimizers, vars(module).get("configure_optimizers")

    @functools.wraps(configure)
    def configured(*args: Any, **kwargs: Any) -> Any:
        held: list[Any] = list(module.parameters())
        with _reading([each for each in held if type(each) is DTensor]):
            return configure(*args, **kwargs)

    vars(module)["configure_optimizers"] = configured
    try:
        yield
    finally:
        vars(module).pop("configure_optimizers")
        if own is not None:
            vars(module)["configure_optimizers"] = own


@contextmanager
def _reading(parts: Iterable[Any]) -> Iterator[None]:
    for part in parts:
        vars(part)["made"], part.__class__ = None, ReadWhole
    try:
        yield
    finally:
        for part in parts:
            part.__class__, made = DTensor, vars(part).pop("made")
            if made is not None:
                part._local_tensor.copy_(shard_of(made.detach(), part)._local_tensor)
