"""Gradients as one device has them, for hooks that look at gradients: to log norms, to clip, to change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.model.shown_gradient import ShownGradient
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.trainer.lightnings import sets_to_zero, somebody_overrides
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.shards import dtensor_of, local, shard_of

BEFORE_BACKWARD = ("on_before_backward", "backward")
AFTER_BACKWARD = ("on_after_backward",)
BEFORE_ZERO = ("on_before_zero_grad", "optimizer_zero_grad")
BEFORE_STEP = ("on_before_optimizer_step", "configure_gradient_clipping")


class WholeGradients:
    """Whole gradients for hooks that look at them, in a whole tree.

    Gradients of other stages are sent for it in every step, so a hook that nobody overrides costs nothing. All ranks
    must come.

    Args:
        divided: the module.
        callbacks: all that have hooks too.
        host: all ranks, for messages of the host.
    """

    def __init__(self, divided: DividedModel, callbacks: list[Callback], host: dist.ProcessGroup) -> None:
        self._divided = divided
        self._wanted: set[tuple[str, ...]] = set()
        self._elsewhere: list[nn.Parameter] = []
        automatic = divided.module.automatic_optimization
        if automatic and divided.mesh.world_size > 1:  # else hooks see what the step around them sees
            for hooks in (BEFORE_BACKWARD, AFTER_BACKWARD, BEFORE_STEP):
                if any(gather_objects(somebody_overrides(hooks, divided.module, callbacks), host)):
                    self._wanted.add(hooks)
        self.one_factor = BEFORE_BACKWARD not in self._wanted and automatic
        """Whether nobody can multiply a loss by what differs between ranks, after the step and before its backward."""
        self._unseen = automatic and not somebody_overrides(BEFORE_ZERO, divided.module, callbacks)

    def held(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters among these that this rank holds."""
        shown = {id(parameter) for parameter in self._elsewhere}
        return [parameter for parameter in parameters if id(parameter) not in shown]

    def release(self) -> Callable[[], None] | None:
        """Sets gradients to zero, as Lightning would after the step; None where it will not, or a hook sees it."""
        trainer = self._divided.module.trainer
        if self._divided.pipeline.ranks == 1 or not self._unseen or not sets_to_zero(trainer):
            return None
        (optimizer,) = trainer.optimizers
        if "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not Optimizer.zero_grad:
            return None
        return optimizer.zero_grad

    def unsynced(self, step: Step) -> AbstractContextManager[None]:
        """Inside, gradients are reduced with those of a later batch, unless a hook looks at those of each."""
        return step.unsynced() if self._wanted.isdisjoint((BEFORE_BACKWARD, AFTER_BACKWARD)) else nullcontext()

    def shown(self, hooks: tuple[str, ...]) -> AbstractContextManager[None]:
        """Around hooks of these names."""
        return self._shown() if hooks in self._wanted else nullcontext()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        arrived = self._arrived()
        with self._divided.shown(), _as_whole(self._divided.held()):
            self._set(arrived)
            try:
                yield
            finally:
                for parameter in self._elsewhere:
                    parameter.grad = None
                self._elsewhere.clear()

    def _arrived(self) -> Mapping[str, tuple[Tensor, _Placing | None]]:
        pipeline = self._divided.pipeline
        return {} if pipeline.ranks == 1 else pipeline.shared(_gradients(self._divided.module))

    def _set(self, arrived: Mapping[str, tuple[Tensor, _Placing | None]]) -> None:
        held = self._divided.held()
        for name, parameter in self._divided.module.named_parameters(remove_duplicate=False):
            if name in arrived and parameter not in held:
                part, layout = arrived[name]
                parameter.grad = part if layout is None else layout.on(part, self._divided.mesh.device_mesh)
                self._elsewhere.append(parameter)


@contextmanager
def _as_whole(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    divided = [(parameter, parameter.grad) for parameter in parameters if isinstance(parameter.grad, DTensor)]
    shown = [ShownGradient.of(gradient) for _, gradient in divided]
    for (parameter, _), seen in zip(divided, shown, strict=True):
        parameter.grad = seen
    try:
        yield
    finally:
        for parameter, gradient in divided:
            now = parameter.grad
            if isinstance(now, ShownGradient):
                parameter.grad = now.divided
            elif now is not None and not isinstance(now, DTensor):  # the user put another tensor in its place
                parameter.grad = shard_of(now.detach(), gradient)


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


def _gradients(module: nn.Module) -> dict[str, tuple[Tensor, _Placing | None]]:
    found = {name: parameter.grad for name, parameter in module.named_parameters(remove_duplicate=False)}
    return {name: (local(grad), _Placing.of(grad)) for name, grad in found.items() if grad is not None}
