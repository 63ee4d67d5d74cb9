"""Lets any optimizer step what a rank stores, while the user's optimizer keeps the module's parameters in its groups.

The user, Lightning and LR schedulers see the optimizer that `configure_optimizers` returned, with its state under the
module's parameters. Only while `step` runs, the parameters in its groups are replaced: by this rank's local shards for
optimizers that treat every element alike (41 us a block, against 1,618 through DTensor), and by whole tensors for all
others (Muon, LBFGS, a user's own), whose arithmetic over matrices and norms DTensor would refuse or round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_parallel.arguments import is_closure
from lightning_parallel.techniques.gradients.absent import AbsentTensor
from lightning_parallel.techniques.gradients.elementwise import is_elementwise
from lightning_parallel.techniques.gradients.groups import (
    Pair,
    emptied,
    exchange,
    filled,
    learns_as,
    turned,
)
from lightning_parallel.techniques.gradients.hooked_steps import HookedSteps
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.moved import stand_again, stand_for
from lightning_parallel.techniques.tools.shards import as_shard, is_sharded, shard_of, whole_tensor
from lightning_parallel.techniques.tools.telling import warn


class StoredOptimizer:
    """Makes `optimizer.step` act on stored parameters, and reads and writes its state in its single-device form.

    What is stepped for a parameter is itself, this rank's shard of it (`elementwise`), or the whole, gathered.

    | state                          | the groups hold | the state lies under | `wholes`        |
    |--------------------------------|-----------------|----------------------|-----------------|
    | between steps                  | parameters      | parameters, in parts | without memory  |
    | `_enter` … `_leave`            | what is stepped | what is stepped      | gathered        |
    | within a closure, after that   | parameters      | what is stepped      | out of date     |
    | `_leave`, then `_sleep`        | parameters      | parameters, in parts | without memory  |

    A closure that is evaluated again, as LBFGS does, goes from the third row to the second and back.

    Args:
        optimizer: the user's.
        step: says what is stored.
        mean: from this rank's loss the mean over all samples, for optimizers that look at what their closure returns.
        shards: whether any of the model's parameters is stored in shards.
        elsewhere: what stands for parameters that other ranks of a pipeline have.
        manual: whether steps of the user's run it, which may give gradients themselves.
        local: makes a context in which parameters of a pipeline are what this rank has of them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Step,
        mean: Callable[[Any], Any],
        shards: bool,
        elsewhere: Collection[nn.Parameter],
        manual: bool,
        local: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.optimizer, self._elsewhere, self._manual = optimizer, elsewhere, manual
        self._local, self._inside = local, ExitStack()
        self._step, self._mean, self._elementwise = step, mean, is_elementwise(optimizer)
        #: whether the optimizer may decide by what its closure returns, which `mean` makes the same on all ranks
        self.looks_at_loss = not self._elementwise
        self._groups: list[list[nn.Parameter]] | None = None
        self._shown: Sequence[Pair] = ()
        # under their `id`: a tensor takes a call of Python's to be hashed, and each is asked for in every step
        self._stepped: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}  # the same in every step: optimizers may keep them
        self._copied: dict[nn.Parameter, nn.Parameter] = {}
        self._rooms: dict[nn.Parameter, Tensor] = {}  # the memory of wholes
        self._absent: dict[nn.Parameter, AbsentTensor] = {}
        self._adopted: dict[int, nn.Parameter] = {}
        self._say_what_is_gathered()
        with torch.no_grad():
            for parameter in self.parameters():
                self._adopt(parameter)
        # else the optimizer's own step is all there is
        self.leads = shards or manual or not self._elementwise or local is not nullcontext
        if self.leads:
            HookedSteps(optimizer, self._before_step, self._after_step)
        if (
            local is not nullcontext
        ):  # it asks each parameter for its gradient, which hooks are told from stage to stage
            vars(optimizer)["zero_grad"] = wraps(optimizer.zero_grad)(partial(self._zero_grad, optimizer.zero_grad))

    def _zero_grad(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self._local():
            zero_grad(*args, **kwargs)

    def _say_what_is_gathered(self) -> None:
        sharded = any(is_sharded(self._step.stored(parameter)) for parameter in self.parameters())
        if sharded and not self._elementwise:
            warn(
                f"{type(self.optimizer).__name__} may look at several elements of a parameter at once, so every rank "
                "holds whole parameters and gradients while it steps; if it does not, add it to "
                "elementwise.ELEMENTWISE to save the memory"
            )

    def show(self, pairs: Sequence[Pair]) -> None:
        """From now on groups hold what stands for parameters in the user's code, but while the optimizer steps.

        Args:
            pairs: what stands for what.
        """
        exchange(self.optimizer, turned(self._shown))
        exchange(self.optimizer, pairs)
        self._shown = pairs

    def parameters(self) -> list[nn.Parameter]:
        """The module's, whatever the groups hold at the moment."""
        groups = self._groups or [group["params"] for group in self.optimizer.param_groups]
        parameters = [*chain.from_iterable(groups)]
        if not self._shown:
            return parameters
        held: dict[int, Any] = {id(shown): parameter for parameter, shown in self._shown}
        return [held.get(id(each), each) for each in parameters]

    # ---------------------------------------------------------------- stepping

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold what it steps, with gradients and state."""
        self._enter()
        try:
            yield
        finally:
            with self._inside.pop_all():
                self._leave()
                self._sleep()

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._groups is not None:  # the step before this one raised, and nobody knew
            self._after_step()
        optimizer, *positional = args
        closure = kwargs.get("closure", positional[0] if positional else None)
        if closure is None:
            self._enter_to_step()
            return None
        if not self._elementwise and any(parameter.grad is not None for parameter in self.parameters()):
            self._enter_to_step()  # it may move before it calls the closure, as sharpness-aware ones do
        outside = self._outside(closure)
        return (optimizer, outside, *positional[1:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure runs the user's step and backward, on the module's own parameters; then the optimizer goes on."""

        def run() -> Any:
            if self._groups is not None:  # evaluated again, as LBFGS does: the parameters have moved
                with self._inside.pop_all():
                    self._leave()
                    self._publish()
            result = closure()
            self._enter_to_step()
            return result if self._elementwise else self._mean(result)

        return run

    def _after_step(self) -> None:
        with self._inside.pop_all():
            self._leave()
            self._sleep()
            self._publish()

    def give_up(self) -> None:
        """A step raised, and its post-hook does not come: other ranks, which may have stepped, wait for its rows."""
        if self._groups is not None:
            self._after_step()

    def _publish(self) -> None:
        self._step.after_optimizer_step(self.parameters())

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the optimizer's own on what it steps; closures on the module's parameters, as in a step."""
        if self._groups is not None:  # it is the step that calls it
            return method(*args, **kwargs)
        self._enter_to_step()
        try:
            given = [self._outside(each) if is_closure(each) else each for each in (*args, *kwargs.values())]
            return method(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        finally:
            self._after_step()

    def _enter_to_step(self) -> None:
        if self._manual:
            self._step.average_given(self.parameters())
        self._enter()

    @torch.no_grad()
    def _enter(self) -> None:
        if self._groups is not None:
            return
        self._inside.enter_context(self._local())
        if self._shown:
            exchange(self.optimizer, turned(self._shown))
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._step.before_optimizer_step([*chain.from_iterable(self._groups)])
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._wake(parameter) for parameter in group["params"]]
        for parameter, tensor in () if self._elementwise else self._stepped.values():
            stand_for(parameter, tensor)  # in lists of the optimizer's own, and in its closures

    @torch.no_grad()
    def _leave(self) -> None:
        if self._groups is None:
            return
        for parameter, _ in () if self._elementwise else self._stepped.values():
            stand_again(parameter)
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            for tensor, parameter in zip(group["params"], parameters, strict=True):
                self._store(tensor, parameter)
            group["params"][:] = parameters
        self._groups = None

    def _wake(self, parameter: nn.Parameter) -> Tensor:
        tensor = self._to_step(parameter)
        if tensor is parameter:
            return tensor
        tensor.grad = self._gradient(parameter, tensor)
        if id(parameter) not in self._adopted:
            self._adopt(parameter)
        state = self.optimizer.state
        if id(parameter) not in self._stepped and (values := state.pop(parameter, None)) is not None:
            state[tensor] = values
            if self._wholes and self._is_whole(tensor, parameter):
                _convert(values, whole_tensor)
        self._stepped[id(parameter)] = parameter, tensor
        return tensor

    def _is_whole(self, tensor: Tensor, parameter: nn.Parameter) -> bool:
        return tensor is self._wholes.get(parameter)

    def _to_step(self, parameter: nn.Parameter) -> Tensor:
        if self._elsewhere and parameter in self._elsewhere:
            if parameter not in self._absent:
                self._absent[parameter] = AbsentTensor.like(parameter)
            return self._absent[parameter]
        stored = self._step.stored(parameter)
        if not isinstance(stored, DTensor):
            return stored
        if self._elementwise:
            return stored._local_tensor
        if not is_sharded(stored):
            made = self._copied[parameter] = learns_as(parameter, stored._local_tensor, self._copied.get(parameter))
            return made
        value = whole_tensor(stored).to(stored.device)
        room = self._rooms.setdefault(parameter, value)
        whole = self._wholes[parameter] = learns_as(parameter, room, self._wholes.get(parameter))
        return filled(whole, room, value)

    def _gradient(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor | None:
        gradient = None if parameter in self._elsewhere else parameter.grad
        if isinstance(gradient, DTensor):
            whole = self._wholes and self._is_whole(tensor, parameter)
            gradient = whole_tensor(gradient) if whole else gradient._local_tensor
        return gradient if gradient is None or gradient.device == tensor.device else gradient.to(tensor.device)

    def _store(self, tensor: Tensor, parameter: nn.Parameter) -> None:
        if tensor is parameter:
            return
        if tensor.grad is None and not isinstance(tensor, AbsentTensor):
            parameter.grad = None  # it is the optimizer that zeroed it
        tensor.grad = None
        if not self._elementwise and isinstance(tensor, nn.Parameter):
            stored = self._step.stored(parameter)
            assert isinstance(stored, DTensor)
            stored.to_local().copy_(shard_of(tensor, stored).to_local())

    # ---------------------------------------------------------------- state between steps

    @torch.no_grad()
    def _sleep(self) -> None:
        """Between steps the state lies under the module's parameters, and each rank keeps its part of it."""
        state = self.optimizer.state
        for parameter, tensor in self._stepped.values():
            if (values := state.pop(tensor, None)) is not None:
                state[parameter] = values
            if self._wholes and self._is_whole(tensor, parameter):
                self._rest(parameter)
                emptied(tensor, self._rooms[parameter])
        self._stepped.clear()
        if self._shown:
            exchange(self.optimizer, self._shown)

    def _adopt(self, parameter: nn.Parameter) -> None:
        """Divides state that was made for a whole parameter: by Adagrad when it was made, or loaded while frozen.

        Of what another rank holds it is given up.
        """
        if parameter in self._elsewhere:
            _convert(self.optimizer.state.get(parameter), partial(_without_values, parameter))
        elif isinstance(self._step.stored(parameter), DTensor):
            self._rest(parameter)
        else:
            return
        self._adopted[id(parameter)] = parameter

    def _rest(self, parameter: nn.Parameter) -> None:
        if parameter in self.optimizer.state:
            stored = self._step.stored(parameter)
            _convert(self.optimizer.state[parameter], lambda value: self._part(value, stored))

    def _part(self, value: Tensor, stored: Tensor | None) -> Tensor:
        if isinstance(value, DTensor):
            return value.to_local() if self._elementwise else value
        if not isinstance(stored, DTensor) or not is_sharded(stored) or value.dim() == 0 or value.shape != stored.shape:
            return value
        if not self._elementwise and type(value) not in (Tensor, nn.Parameter):
            return value  # every rank keeps a subclass whole, such as torchao's state in 8 bits: few can be sliced
        part = shard_of(value, stored).to_local().clone()  # a view would keep the whole in memory
        return part if self._elementwise else as_shard(part, stored)

    # ---------------------------------------------------------------- checkpoints

    @torch.no_grad()
    def state_dict(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The state as one device would have it, with every tensor changed: gathered, or left as it is.

        Args:
            change: of a tensor of the whole's shape, of which this rank may hold a part.
        """
        if self._has_own_form():
            with self.stored():
                own: dict[str, Any] = _mapped(change, self.optimizer.state_dict())
            return own
        state: dict[str, Any] = self.optimizer.state_dict()
        held = {index: values for index, values in state["state"].items() if self._is_held(index)}
        state["state"] = {index: self._whole(values, index, change) for index, values in held.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state that one device would have, each rank its own part of every tensor that it holds."""
        if self._has_own_form():
            parts = _mapped(torch.clone, state)
        else:
            mine = {index: values for index, values in state["state"].items() if self._is_held(index)}
            parts = {**state, "state": {index: self._parts(values, index) for index, values in mine.items()}}
        with self.stored():
            held = self.optimizer.state
            made: dict[Tensor, Any] = {key: held[key] for key in self._absent.values() if key in held}
            self.optimizer.load_state_dict(parts)
            for key in self._absent.values():
                self.optimizer.state.pop(key, None)
            self.optimizer.state.update(made)

    def _has_own_form(self) -> bool:
        """Whether the optimizer writes its state in a way of its own, as those that combine others do."""
        return type(self.optimizer).state_dict is not Optimizer.state_dict

    def _whole(self, values: Any, index: Any, change: Callable[[Tensor], Tensor]) -> Any:
        stored = self._stored_of(index)

        def whole(value: Tensor) -> Tensor:
            part_of = stored if self._elementwise and isinstance(stored, DTensor) and is_sharded(stored) else None
            if part_of is not None and value.dim() > 0 and value.shape == part_of.to_local().shape:
                value = as_shard(value, part_of)
            return change(value)

        return _mapped(whole, values)

    def _parts(self, values: Any, index: Any) -> Any:
        stored = self._stored_of(index)

        def own(value: Tensor) -> Tensor:
            part = self._part(value, stored) if self._elementwise else value
            is_copy = part is not value and not isinstance(value, DTensor)
            # A checkpoint's tensors may be pages of its file: copy them. Few subclasses of tensors have `clone`.
            return part if is_copy else part.to(part.device, copy=True)

        return _mapped(own, values)

    def _is_held(self, index: Any) -> bool:
        return not isinstance(index, int) or self.parameters()[index] not in self._elsewhere

    def _stored_of(self, index: Any) -> Tensor | None:
        """What is stored for the parameter of this number; optimizers may have state for other keys too."""
        return self._step.stored(self.parameters()[index]) if isinstance(index, int) else None


def _convert(state: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the tensors of a parameter's state in place: optimizers may hold on to the dictionary."""
    for name, value in state.items() if isinstance(state, dict) else ():
        state[name] = change(value) if isinstance(value, Tensor) else value


def _without_values(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Numbers of steps are numbers, also of a parameter that another rank has."""
    return AbsentTensor.like(value) if value.dim() or value.shape == parameter.shape else value


def _mapped(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    return pytree.tree_map_only(Tensor, change, values)
