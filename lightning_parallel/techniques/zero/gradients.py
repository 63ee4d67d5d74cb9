"""Gradients within a step, where it runs its backward itself: whoever reads one finds it whole.

ZeRO leaves each rank a part of a gradient. A step that clips gradients by hand between its backward and
`optimizer.step()` would find parts under stages 1 and 2, and under stage 3, whose wholes have none, nothing at all. So
from the end of such a backward to that of the step, `grad` of a parameter is gathered when it is read, and what becomes
of it reaches the part before anybody else looks there. All ranks must read the same ones, as they must in hooks.

| of a parameter, after a backward within a step       | what is done                                               |
|------------------------------------------------------|------------------------------------------------------------|
| its gradient is read                                 | gathered once, and kept                                    |
| its gradient is written                              | kept, and made a mean as by a backward                     |
| an optimizer steps, a backward begins, the step ends | what is kept is copied to the parts, unless these are gone |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function

from lightning_parallel.techniques.gradients.asked import OWN, ask, ask_no_more, is_inner, is_zeroing, watch
from lightning_parallel.techniques.tools.shards import shard_of, shard_of_part, whole_tensor

DIVIDED = ("tp", "ep")
"""Axes along which others divide parameters: what stands for one tells of all parts, and some ranks may have none."""


class StepsGradients:
    """Shows whole gradients to a step.

    Args:
        parts: by the `id` of a parameter, what has the part of its gradient.
        shards: whether parameters are sharded, too: then a shard stands where nothing that looks whole is shown for it.
    """

    def __init__(self, parts: Callable[[], dict[int, Any]], shards: bool = False) -> None:
        self._shards, self._watch = shards, watch(self._read, self._write)
        self._find, self._parts, self._asks = parts, dict[int, Any](), False
        self._gathered: dict[int, tuple[Any, Tensor]] = {}
        self._written: dict[int, tuple[Any, Any, Any]] = {}

        def told(parameter: nn.Parameter) -> Tensor | None:
            return self.of(parameter)

        told.__name__ = OWN.__get__.__name__
        self._told = told
        """What modes of torch, which look at what a step reads, are told of a read."""

    def show(self) -> None:
        """A backward within a step is over."""
        if ask(self._watch):
            self._parts, self._asks = self._find(), True

    def hide(self) -> None:
        """Another one begins, or the step is over."""
        if self._asks:
            self.settle()
            self._parts, self._asks = {}, False
            ask_no_more()

    @torch.no_grad()
    def settle(self) -> bool:
        """Copies to the parts what was read, and perhaps changed; what was written lies on parameters as given.

        Returns:
            Whether there is such: a gradient that the step gave, of which nobody has made a mean.
        """
        gathered, self._gathered = self._gathered, {}
        written, self._written = self._written, {}
        with torch._C.DisableTorchFunctionSubclass():
            for part, gradient in gathered.values():
                if isinstance(own := OWN.__get__(part), DTensor):  # else it was zeroed
                    if isinstance(gradient, DTensor):
                        own._local_tensor.copy_(shard_of_part(gradient, own))
                    else:
                        own._local_tensor.copy_(shard_of(gradient, own)._local_tensor)
            for part, parameter, gradient in written.values():
                OWN.__set__(part, None)
                OWN.__set__(parameter, gradient)
        return any(gradient is not None for *_, gradient in written.values())

    def of(self, parameter: Any) -> Tensor | None:
        """The whole gradient of a parameter that is being shown."""
        part = self._parts[id(parameter)]
        if id(part) in self._written:
            return cast("Tensor | None", self._written[id(part)][2])
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            own: Tensor | None = OWN.__get__(part)
            if not isinstance(own, DTensor):
                return own
            if is_zeroing(__name__):  # nothing is gathered for it
                self._gathered.pop(id(part), None)
                return own._local_tensor
            if id(part) not in self._gathered:
                besides = () if self._shards and parameter is part else DIVIDED
                self._gathered[id(part)] = part, whole_tensor(own, besides)
        return self._gathered[id(part)][1]

    def write(self, asked: Any, parameter: Any, gradient: Tensor | None) -> None:
        """A step writes the gradient of a parameter that is being shown.

        Args:
            asked: of which it is written.
            parameter: the same where it is whole.
            gradient: whole, or None.
        """
        part = self._parts[id(asked)]
        self._gathered.pop(id(part), None)
        self._written[id(part)] = part, parameter, gradient

    def shows(self, parameter: Any) -> bool:
        """Whether whoever asks for the gradient of this one now is shown a whole."""
        return id(parameter) in self._parts and not is_inner(__name__)

    def _read(self, parameter: nn.Parameter) -> Tensor | None:
        if not self.shows(parameter):
            return cast("Tensor | None", OWN.__get__(parameter))
        if not torch._C._is_torch_function_mode_enabled() or is_zeroing(__name__):
            return self.of(parameter)
        return handle_torch_function(self._told, (parameter,), parameter)

    def _write(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if self.shows(parameter):
            self.write(parameter, parameter, gradient)
        else:
            OWN.__set__(parameter, gradient)
