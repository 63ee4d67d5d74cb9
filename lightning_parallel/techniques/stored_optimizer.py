"""Lets any optimizer step what a rank stores, while the user's optimizer keeps the module's parameters in its groups.

The user, Lightning and LR schedulers see the optimizer that `configure_optimizers` returned. Only while `step` runs,
the parameters in its groups are replaced by what `Step.stored` returns: by the plain local tensors of DTensors for
optimizers that treat every element alike (41 us a block against 1,618 through DTensor), by the DTensors themselves for
others, whose arithmetic over whole matrices DTensor keeps right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from lightning_parallel.techniques.technique import Step

ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Optimizers in which no element of a parameter looks at another one."""


class StoredOptimizer:
    """Makes `optimizer.step` act on stored parameters, and reads and writes its state in its single-device form."""

    def __init__(self, optimizer: Optimizer, step: Step) -> None:
        self.optimizer = optimizer
        self._step = step
        self._elementwise = type(optimizer) in ELEMENTWISE
        self._keys: dict[nn.Parameter, Tensor] = {}
        self._whole: list[list[nn.Parameter]] | None = None
        self._adopt_initial_state()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    # ---------------------------------------------------------------- stepping

    @contextmanager
    def stored(self) -> Iterator[list[Tensor]]:
        """Inside, the optimizer's groups hold the stored parameters, with their gradients; yields all of them."""
        self._enter()
        try:
            yield [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        finally:
            self._leave()

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer, *positional = args
        closure = kwargs.get("closure", positional[0] if positional else None)
        if closure is None:
            self._enter()
            return None
        outside = self._outside(closure)
        return (optimizer, outside, *positional[1:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure runs the user's step and backward, on the module's own parameters; then the optimizer goes on."""

        def run() -> Any:
            if self._whole is not None:  # evaluated again, as LBFGS does: the parameters have moved
                self._leave()
                self._publish()
            result = closure()
            self._enter()
            return result

        return run

    def _after_step(self, *_: Any) -> None:
        self._leave()
        self._publish()

    def _publish(self) -> None:
        self._step.after_optimizer_step([p for group in self.optimizer.param_groups for p in group["params"]])

    @torch.no_grad()
    def _enter(self) -> None:
        if self._whole is not None:
            return
        self._whole = [list(group["params"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._with_gradient(parameter) for parameter in group["params"]]

    @torch.no_grad()
    def _leave(self) -> None:
        if self._whole is None:
            return
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            for tensor, parameter in zip(group["params"], whole, strict=True):
                if tensor is not parameter:
                    tensor.grad = None
            group["params"][:] = whole
        self._whole = None

    def _with_gradient(self, parameter: nn.Parameter) -> Tensor:
        tensor = self._key(parameter)
        if tensor is not parameter:
            gradient = parameter.grad
            local = isinstance(gradient, DTensor) and not isinstance(tensor, DTensor)
            gradient = gradient.to_local() if local and isinstance(gradient, DTensor) else gradient
            tensor.grad = None if gradient is None else gradient.to(tensor.device)
        return tensor

    def _key(self, parameter: nn.Parameter) -> Tensor:
        """The tensor under which the optimizer keeps the parameter's state; the state follows when it is replaced."""
        stored = self._step.stored(parameter)
        tensor = stored.to_local() if self._elementwise and isinstance(stored, DTensor) else stored
        before = self._keys.get(parameter)
        if before is not None and before is not tensor and before in self.optimizer.state:
            self.optimizer.state[tensor] = self.optimizer.state.pop(before)
        self._keys[parameter] = tensor
        return tensor

    # ---------------------------------------------------------------- state

    @torch.no_grad()
    def state_dict(self, keep: bool) -> dict[str, Any]:
        """The state as one device would have it: whole tensors, on the host where `keep`, else without values.

        Every rank takes part in the gathering; those that do not keep the result hold one tensor at a time.
        """
        with self.stored():
            state: dict[str, Any] = self.optimizer.state_dict()
        state["state"] = {
            index: {name: _whole(value, self._stored_of(index), keep) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state that one device would have, each rank its own part of every tensor."""
        parts = {
            index: {name: self._part(value, self._stored_of(index)) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        with self.stored():
            self.optimizer.load_state_dict({**state, "state": parts})

    def _stored_of(self, index: int) -> Tensor:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return self._step.stored(parameters[index])

    def _part(self, value: Any, stored: Tensor) -> Any:
        if not isinstance(value, Tensor) or not isinstance(stored, DTensor) or value.dim() == 0:
            return value
        if value.shape == stored.shape:
            part = shard_of(value, stored)
            return part.to_local() if self._elementwise else part
        return shard_of(value, stored) if value.shape[0] == stored.shape[0] else _replicated(value, stored)

    @torch.no_grad()
    def _adopt_initial_state(self) -> None:
        """Some optimizers (Adagrad) make their state when they are made, for the parameters as they were given."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                key = self._key(parameter)
                if key is not parameter and parameter in self.optimizer.state:
                    state = self.optimizer.state.pop(parameter)
                    stored = self._step.stored(parameter)
                    self.optimizer.state[key] = {name: self._initial(value, stored) for name, value in state.items()}

    def _initial(self, value: Any, stored: Tensor) -> Any:
        if isinstance(value, DTensor):
            return value.to_local() if self._elementwise else value
        return self._part(value, stored)


def shard_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole, divided as `like` is; no communication."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole.to(like.device), mesh, placements, src_data_rank=None)


def _replicated(value: Tensor, like: DTensor) -> DTensor:
    placements = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(value.to(like.device), like.device_mesh, placements, run_check=False)


def _whole(value: Any, stored: Tensor, keep: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(stored, DTensor) and not isinstance(value, DTensor) and _is_row_shard(value, stored):
        value = DTensor.from_local(
            value, stored.device_mesh, stored.placements, run_check=False, shape=stored.shape, stride=stored.stride()
        )
    return gathered(value, keep)


def _is_row_shard(value: Tensor, stored: DTensor) -> bool:
    return value.dim() > 0 and value.shape == stored.to_local().shape and any(map(_is_shard, stored.placements))


def _is_shard(placement: object) -> bool:
    return isinstance(placement, Shard)


def gathered(value: Tensor, keep: bool) -> Tensor:
    """A tensor whole and on the host where `keep`; elsewhere only its shape. All ranks of its mesh must call."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu() if keep else torch.empty_like(whole, device="meta")
