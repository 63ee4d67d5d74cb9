"""Gradients as one device has them, while a hook runs that reads some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.hooks.shown_gradient import ShownGradient, taken_over
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.techniques.gradients.asked import OWN, ask_no_more, is_inner, is_zeroing, watch
from lightning_parallel.techniques.tools.shards import dtensor_of, local, shard_of


class Showing:
    """Parts of gradients look whole from `open` to `close`, and those of other stages are there.

    Args:
        divided: the module.
        tree: whether its tree is whole now: else there are no parameters of other stages.
    """

    def __init__(self, divided: DividedModel, tree: bool) -> None:
        self._divided, self.opened = divided, False
        self._shown: list[tuple[nn.Parameter, DTensor]] = []
        self.elsewhere: list[nn.Parameter] = []
        """Parameters of other stages that have a gradient for the time of the hook."""
        # before anybody walks over the tree, which may not change then
        self._named, self._held = dict[str, nn.Parameter](), dict[nn.Parameter, None]()
        if tree and divided.pipeline.ranks > 1:
            self._named, self._held = dict(_named(divided.module)), divided.held()
        self.first = watch(self._read, self._write)
        """Sees the first gradient that is read or given, which opens."""

    def _read(self, parameter: nn.Parameter) -> Tensor | None:
        if not is_inner(__name__) and not is_zeroing(__name__):
            ask_no_more()
            self.open()
        gradient: Tensor | None = OWN.__get__(parameter)
        return gradient

    def _write(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None and not is_inner(__name__):
            ask_no_more()
            self.open()
        OWN.__set__(parameter, gradient)

    def open(self) -> None:
        """Brings gradients of other stages; all ranks must come."""
        if self.opened:
            return
        self.opened = True
        if self._named:
            self._bring()
        self._show(self._held or self._divided.held())

    def gather(self) -> None:
        """Brings all of all gradients; all ranks must come."""
        self.open()
        for parameter in self._divided.module.parameters():
            if isinstance(parameter.grad, ShownGradient):
                parameter.grad.bring()

    def let_go(self) -> None:
        """A hook is over: what it wrote to views of gradients is in the parts."""
        for parameter, _ in self._shown:
            if isinstance(parameter.grad, ShownGradient):
                parameter.grad.let_go()

    def settle(self) -> None:
        """What was made new is in parts that look whole, as what was shown, before somebody clips or steps by it."""
        for parameter, gradient in self._shown:
            now = taken_over(parameter.grad, gradient, gradient)
            if now is not None and now is not gradient:
                gradient.to_local().copy_(local(now))
                parameter.grad = ShownGradient.of(gradient)
        pairs: Any = self._divided.pairs if self.opened else ()
        for divided, made in pairs:
            if made.grad is not None and not isinstance(made.grad, DTensor):
                made.grad = ShownGradient.of(shard_of(made.grad.detach(), divided))

    def close(self) -> None:
        """What was changed is in the parts."""
        if not self.opened:
            ask_no_more()
            return
        for parameter, gradient in self._shown:
            now = taken_over(parameter.grad, gradient, gradient)
            if now is not parameter.grad:
                parameter.grad = now
        for parameter in self.elsewhere:
            parameter.grad = None
        self._shown, self.elsewhere, self.opened = [], [], False

    def _bring(self) -> None:
        named = self._named.items()
        mine = {name: each for name, each in named if each in self._held}
        for name, (part, placing) in self._divided.pipeline.shared(_gradients(mine.items())).items():
            if name in self._named and name not in mine:
                parameter = self._named[name]
                parameter.grad = part if placing is None else placing.on(part, self._divided.mesh.device_mesh)
                self.elsewhere.append(parameter)

    def _show(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and not isinstance(gradient, ShownGradient):
                self._shown.append((parameter, gradient))
                parameter.grad = ShownGradient.of(gradient)


@dataclass(frozen=True)
class _Placing:
    """How a gradient is divided, in terms that ranks of another stage understand."""

    axes: tuple[str, ...]
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Placing | None:
        if not isinstance(tensor, DTensor):
            return None
        axes = tensor.device_mesh.mesh_dim_names
        assert axes is not None
        return cls(axes, tensor.placements, tensor.shape, tensor.stride())

    def on(self, part: Tensor, mesh: DeviceMesh) -> ShownGradient:
        """The part as that of a whole which the ranks of this stage share in the same way."""
        mine = mesh[self.axes]
        return ShownGradient.of(dtensor_of(part, mine, self.placements, self.shape, self.stride))


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, tuple[Tensor, _Placing | None]]:
    found = {name: parameter.grad for name, parameter in named}
    own = {name: grad.divided if isinstance(grad, ShownGradient) else grad for name, grad in found.items()}
    return {name: (local(grad), _Placing.of(grad)) for name, grad in own.items() if grad is not None}
