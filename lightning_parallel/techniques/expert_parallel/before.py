"""The state before a pass whose results are thrown away, to be taken back: random numbers, and what lies on modules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True)
class Draws:
    """The state of torch's generators of the host and the device."""

    host: Tensor
    device: Tensor | None

    @classmethod
    def now(cls) -> Draws:
        """As it is."""
        on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), on_device)

    def same(self, other: Draws) -> bool:
        """Whether nothing was drawn in between."""
        if self.device is not None and other.device is not None and not self.device.equal(other.device):
            return False
        return self.host.equal(other.host) and (self.device is None) == (other.device is None)

    def restore(self) -> None:
        """Draws go on from there."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)


class Before:
    """What lay on modules: their attributes, with the contents of containers and tensors, and their buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [(module, _attributes(module), dict(module._buffers)) for module in modules]
        tensors = [each for _, own, buffers in self._modules for each in (*own.values(), *buffers.values())]
        self._tensors = [(each, each._version, each.clone()) for each in tensors if _changes(each)]
        held = [each for _, own, _ in self._modules for each in own.values() if isinstance(each, CONTAINERS)]
        self._containers = [(each, copy.copy(each)) for container in held for each in _nested(container)]

    def restore(self) -> None:
        """Puts it back, where it has changed."""
        for module, attributes, buffers in self._modules:
            for name in _attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.update(buffers)
        for tensor, version, value in self._tensors:
            if tensor._version != version:  # else autograd would take what it has kept for changed
                with torch.no_grad():
                    tensor.copy_(value)
        for container, content in self._containers:
            container.clear()
            container.update(content) if isinstance(container, (dict, set)) else container.extend(content)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"}


def _changes(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad and not value.is_inference() and not value.is_meta


def _nested(container: Any) -> list[Any]:
    """A container and those in it."""
    within = container.values() if isinstance(container, dict) else container
    return [container, *(deep for each in within if isinstance(each, CONTAINERS) for deep in _nested(each))]
