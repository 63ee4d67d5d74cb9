"""Runs `optimizer.step()` on the tensors that a rank stores. Between steps, groups and state have module parameters.

The user, Lightning and LR schedulers see the optimizer that `configure_optimizers` returned, with its state under the
module's parameters. Only while `step` runs, the parameters in its groups are replaced: by plain local shards for
elementwise optimizers (41 us per block, against 1,618 us through DTensor), and by full tensors for all others (Muon, a
user's class), whose arithmetic over matrices and norms DTensor would refuse or round differently.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_parallel.techniques.gradients.elementwise import ELEMENTWISE, steps_as_one_of
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.replaced_parameters import redirect_to, stop_redirect
from lightning_parallel.techniques.tools.shards import (
    as_shard,
    copy_user_attributes,
    full_tensor_of,
    gathered,
    is_sharded,
    shard_of,
)
from lightning_parallel.techniques.tools.user_warnings import warn

METHODS = ("train", "eval", "first_step", "second_step", "ascent_step", "descent_step")
"""Methods of third-party optimizers that change parameters as `step` does: schedule-free and sharpness-aware."""

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Pair = tuple[Tensor, Tensor]
"""A sharded parameter, and the tensor that replaces it in the groups."""


def exchange(optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
    """Replace the first tensor of each pair by the second, in the groups and as a key of the state."""
    after_of = {id(before): after for before, after in pairs}
    for group in optimizer.param_groups if pairs else ():
        group["params"][:] = [after_of.get(id(parameter), parameter) for parameter in group["params"]]
    for before, after in pairs:
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)


class StoredOptimizer:
    """Lets `optimizer.step` act on stored tensors, and converts its state from and to the form of a single device.

    The stepped tensor of a parameter is the parameter itself, its local shard (elementwise optimizers), or a gathered
    full tensor. While an optimizer steps in a pipeline, its groups have the parameters of this rank's stage only.

    | when                 | tensors in the groups | keys of the state   | full tensors    |
    |----------------------|-----------------------|---------------------|-----------------|
    | between steps        | parameters            | parameters; sharded | without memory  |
    | within a closure     | parameters            | parameters; sharded | without memory  |
    | `_enter` … `_end`    | stepped tensors       | stepped tensors     | gathered        |

    Args:
        optimizer: the user's optimizer.
        step: determines the stored tensor of each parameter.
        mean: maps this rank's loss to the mean over all samples, for optimizers that use the loss of their closure.
        shards: whether any parameter of the model is stored as a shard.
        elsewhere: replacements of the parameters of other pipeline stages.
        manual: whether the user's `training_step` runs the optimizer, and may set gradients itself.
        local: makes a context in which the module tree of a pipeline stage is `local` (see `StageTree`).
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
        self.optimizer, self._manual, self._shards = optimizer, manual, shards
        self._elsewhere: Collection[nn.Parameter] = elsewhere
        self._local, self._inside = local, ExitStack()
        self._step, self._mean = step, mean
        # a custom form of state is written and read while the optimizer has full tensors
        self._elementwise = steps_as_one_of(ELEMENTWISE, optimizer) and not self._has_own_form()
        #: whether the optimizer may use the loss of its closure, which `mean` makes the same on all ranks
        self.uses_loss_of_closure = not self._elementwise
        self._groups: list[list[nn.Parameter]] | None = None
        self._shown: Sequence[Pair] = ()
        # `id` -> parameter, stepped tensor; by `id`, as hashing a tensor calls Python code, for each one in every step
        self._stepped: dict[int, tuple[nn.Parameter, Tensor]] = {}
        # parameter -> full tensor and its memory, the same objects in every step: optimizers may keep references
        self._wholes: dict[nn.Parameter, tuple[nn.Parameter, Tensor]] = {}
        self._adopted: dict[int, nn.Parameter] = {}  # parameters whose state was sharded once, see `_adopt`
        self._replaced: dict[str, Any] = {}  # name of a method -> attribute of the optimizer before, replacement
        sharded = any(is_sharded(step.stored(parameter)) for parameter in self.parameters())
        if sharded and not self._elementwise:
            warn(
                f"{type(optimizer).__name__} may combine elements of a parameter, so every rank holds full parameters "
                "and gradients while it steps. If it steps each element by itself, add it to elementwise.ELEMENTWISE, "
                "and do not override state_dict, to save the memory"
            )
        with torch.no_grad():
            for parameter in self.parameters():
                self._adopt(parameter)
        in_pipeline = local is not nullcontext
        if shards or manual or in_pipeline or not self._elementwise:  # else its `step` needs no help
            for name in ("step", *(name for name in METHODS if name in dir(type(optimizer)))):
                self._replace(name, self._run_step if name == "step" else self._run)
        if in_pipeline:  # it reads the gradient of each parameter, which outside of `local` is a collective of stages
            self._replace("zero_grad", self._run_locally)

    def _replace(self, name: str, run: Callable[..., Any]) -> None:
        """Replace a method of this optimizer by `run` until `close`; `run` gets the original, args and kwargs."""
        original = getattr(self.optimizer, name)

        @functools.wraps(original)
        def replacement(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return run(original, args, kwargs) if self._replaced else original(*args, **kwargs)

        self._replaced[name] = vars(self.optimizer).get(name), MethodType(replacement, self.optimizer)
        vars(self.optimizer)[name] = self._replaced[name][1]

    def reach(self, wrapper: Any) -> None:
        """Let a `LightningOptimizer` use the replaced `METHODS` of the optimizer."""
        names = [name for name in METHODS if name in self._replaced]
        vars(wrapper).update({name: self._replaced[name][1] for name in names})

    def close(self, wrappers: Iterable[Any]) -> None:
        """Restore the original methods of the optimizer and its wrappers."""
        for owner in (self.optimizer, *wrappers):
            for name, (before, method) in self._replaced.items():
                if vars(owner).get(name) is method:  # else a scheduler has wrapped it
                    del vars(owner)[name]
                    if before is not None and owner is self.optimizer:
                        vars(owner)[name] = before
        self._replaced = {}

    @property
    def has_shards(self) -> bool:
        """Whether state or parameters of the optimizer may be distributed over ranks; the same on all ranks."""
        return self._shards or self._local is not nullcontext

    def full_bytes(self) -> int:
        """Return the size of the full state in bytes."""
        state = self.optimizer.state
        leaves = [(p, leaf) for p in self.parameters() for leaf in pytree.tree_leaves(state.get(p))]
        return sum(p.numel() * leaf.element_size() for p, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0)

    @torch.no_grad()
    def full_state(self) -> dict[Any, Any]:
        """Gather the state of all parameters, by their numbers, to the host of every rank. Collective over all ranks.

        For an optimizer with a custom `state_dict`, the result of that is the state, except in a pipeline.
        """
        gather = functools.partial(gathered, keep=True)
        if self._has_own_form() and self._local is nullcontext:
            return self.state_dict(gather)
        numbers: dict[int, Any] = {id(parameter): number for number, parameter in enumerate(self.parameters())}
        state = {numbers.get(id(key), key): values for key, values in self.optimizer.state.items()}
        return self._whole_states(state, gather)

    def set_full_state(self, state: dict[Any, Any]) -> None:
        """Set the full state after a run, when the module and the groups have full parameters: step these from now on.

        Args:
            state: the result of `full_state`.
        """
        in_pipeline = self._local is not nullcontext
        self._step, self._elsewhere, self._local, self._shards = Step(), (), nullcontext, False
        self._wholes.clear()
        self._adopted.clear()
        if self._has_own_form() and not in_pipeline:
            # optimizers inside this one have state under the stepped tensors of the run
            self.optimizer.load_state_dict(state)
            return
        parameters = self.parameters()
        for number, values in state.items():
            self.optimizer.state[parameters[number] if isinstance(number, int) else number] = values

    def _run_locally(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._local():
            return own(*args, **kwargs)

    def expose(self, pairs: Sequence[Pair]) -> None:
        """From now on, have the second tensor of each pair in the groups, except while the optimizer steps.

        Args:
            pairs: parameters and the tensors that user code sees in their place; () restores the parameters.
        """
        exchange(self.optimizer, [(shown, held) for held, shown in self._shown])
        exchange(self.optimizer, pairs)
        self._shown = pairs

    def parameters(self) -> list[nn.Parameter]:
        """Return the module's parameters in the order of the groups, whatever the groups have at the moment."""
        groups = self._groups or [group["params"] for group in self.optimizer.param_groups]
        parameters = [*chain.from_iterable(groups)]
        if not self._shown:
            return parameters
        originals: dict[int, Any] = {id(shown): parameter for parameter, shown in self._shown}
        return [originals.get(id(each), each) for each in parameters]

    # ---------------------------------------------------------------- stepping

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Context manager: the groups have the stepped tensors inside, with gradients and state."""
        self._enter()
        try:
            yield
        finally:
            self._end()

    def _run_step(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `step` between its hooks: the user's hooks expect the module's parameters, as those that average them."""
        if self._groups is not None:  # a nested call from a step
            return own(*args, **kwargs)
        optimizer, attributes = self.optimizer, vars(self.optimizer)
        before, after = (attributes.get(name, {}) for name in HOOKS)
        for hook in before.values():
            if (changed := hook(optimizer, (optimizer, *args), kwargs)) is not None:
                (_, *args), kwargs = changed
        attributes.update({name: OrderedDict() for name in HOOKS})
        try:
            result = self._run(own, args, kwargs)
        finally:
            attributes.update(zip(HOOKS, (before, after), strict=True))
        for hook in after.values():
            hook(optimizer, (optimizer, *args), kwargs)
        return result

    def _run(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `step` or another method on stepped tensors; its closure runs on the module's parameters before that."""
        if self._groups is not None:  # a nested call from a step
            return own(*args, **kwargs)
        values = (*args, *kwargs.values())
        closures = [callable(each) and not isinstance(each, (nn.Module, type)) for each in values]
        wrapped = [self._outside(each) if closure else each for each, closure in zip(values, closures, strict=True)]
        try:
            if True not in closures:
                self._enter_to_step()
            result = own(*wrapped[: len(args)], **dict(zip(kwargs, wrapped[len(args) :], strict=True)))
        except Exception:
            self._end(publish=True)  # other ranks may have stepped, and wait for the rows of this rank
            raise
        self._end(publish=True)
        return result

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure, so that the user's step and backward run on the module's parameters; then enter the step."""

        def run() -> Any:
            if self._groups is not None:
                if self._shards:
                    raise RuntimeError(
                        f"{type(self.optimizer).__name__} evaluates its closure again within one step, but ranks hold "
                        "shards of the parameters, and by then the step runs on gathered copies; use "
                        "DataParallelStrategy, or call first_step and second_step around two backward passes"
                    )
                self._end(publish=True)
            result = closure()
            self._enter_to_step()
            return result if self._elementwise else self._mean(result)

        return run

    def _enter_to_step(self) -> None:
        """Average gradients that the user may have set, then `_enter`. Collective in manual optimization."""
        if self._manual:
            self._step.average_user_gradients(self.parameters())
        self._enter()

    @torch.no_grad()
    def _enter(self) -> None:
        """Put the stepped tensors into the groups. Collective if full tensors are gathered."""
        if self._groups is not None:
            return
        self._inside.enter_context(self._local())
        exchange(self.optimizer, [(shown, held) for held, shown in self._shown])
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._step.before_optimizer_step([*chain.from_iterable(self._groups)])
        for group in self.optimizer.param_groups:
            local_parameters = group["params"]
            if self._elsewhere:
                local_parameters = [parameter for parameter in local_parameters if parameter not in self._elsewhere]
            group["params"][:] = [self._wake(parameter) for parameter in local_parameters]
        for parameter, tensor in () if self._elementwise else self._stepped.values():
            redirect_to(parameter, tensor)  # for references in attributes and closures of the optimizer

    @torch.no_grad()
    def _end(self, publish: bool = False) -> None:
        """Undo `_enter`: store the stepped values, shard the state again, and put the parameters into the groups.

        `publish`: whether other ranks need the values, such as rows to gather; then collective.
        """
        if self._groups is None:  # the step has evaluated no closure, or raised before `_enter`
            return
        state = self.optimizer.state
        with self._inside.pop_all():
            for parameter, _ in () if self._elementwise else self._stepped.values():
                stop_redirect(parameter)
            for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
                group["params"][:] = parameters
            self._groups = None
            for parameter, tensor in self._stepped.values():
                if state and (values := state.pop(tensor, None)) is not None:
                    state[parameter] = values
                if tensor.grad is None:
                    parameter.grad = None  # the optimizer has zeroed it
                tensor.grad = None
                if self._elementwise:  # `tensor` is the stored shard
                    continue
                stored: Any = self._step.stored(parameter)
                stored.to_local().copy_(shard_of(tensor, stored).to_local())
                if parameter in self._wholes:
                    full, memory = self._wholes[parameter]
                    self._rest(parameter)
                    memory.untyped_storage().resize_(0)
                    full.data = memory
            self._stepped.clear()
            exchange(self.optimizer, self._shown)
            if publish:
                self._step.after_optimizer_step(self.parameters())

    def _wake(self, parameter: nn.Parameter) -> Tensor:
        """Return the stepped tensor of a parameter, with its gradient and state. Collective if it is gathered."""
        stored = self._step.stored(parameter)
        if not isinstance(stored, DTensor):
            return stored
        gathers = not self._elementwise and is_sharded(stored)
        tensor = stored._local_tensor if self._elementwise else self._whole_of(parameter, stored, gathers)
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = full_tensor_of(gradient) if gathers else gradient._local_tensor
        tensor.grad = gradient if gradient is None or gradient.device == tensor.device else gradient.to(tensor.device)
        if id(parameter) not in self._adopted:
            self._adopt(parameter)
        state = self.optimizer.state
        if state and (values := state.pop(parameter, None)) is not None:
            state[tensor] = values
            if gathers:
                _convert(values, full_tensor_of)
        self._stepped[id(parameter)] = parameter, tensor
        return tensor

    def _whole_of(self, parameter: nn.Parameter, stored: DTensor, gathers: bool) -> nn.Parameter:
        """Return the full parameter to step; optimizers may read its `requires_grad` and attributes that users set."""
        value = full_tensor_of(stored).to(stored.device) if gathers else stored._local_tensor
        full = nn.Parameter(value, parameter.requires_grad)
        if gathers:
            full, memory = self._wholes.setdefault(parameter, (full, value))
            memory.untyped_storage().resize_(value.untyped_storage().nbytes())
            full.data = memory
            full.copy_(value)
        copy_user_attributes(full, parameter)
        full.requires_grad_(parameter.requires_grad)
        return full

    # ---------------------------------------------------------------- state between steps

    def _adopt(self, parameter: nn.Parameter) -> None:
        """Shard state that has the shape of the full parameter: made by Adagrad's `__init__`, or loaded while frozen.

        State of a parameter of another pipeline stage is dropped.
        """
        if parameter in self._elsewhere:
            self.optimizer.state.pop(parameter, None)
        elif isinstance(self._step.stored(parameter), DTensor):
            self._rest(parameter)
        else:
            return
        self._adopted[id(parameter)] = parameter

    def _rest(self, parameter: nn.Parameter) -> None:
        """Shard the state of a parameter."""
        if parameter in self.optimizer.state:
            stored = self._step.stored(parameter)
            _convert(self.optimizer.state[parameter], lambda value: self._part(value, stored))

    def _part(self, value: Tensor, stored: Tensor | None) -> Tensor:
        """Return the shard of a state tensor that has the full shape of `stored`; any other tensor unchanged."""
        if isinstance(value, DTensor):
            return value.to_local() if self._elementwise else value
        if not isinstance(stored, DTensor) or not is_sharded(stored) or value.dim() == 0 or value.shape != stored.shape:
            return value
        if not self._elementwise and type(value) not in (Tensor, nn.Parameter):
            return value  # subclasses, such as torchao's 8-bit state, stay full on every rank: few can be sliced
        part = shard_of(value, stored).to_local().clone()  # a view would keep the full tensor in memory
        return part if self._elementwise else as_shard(part, stored)

    # ---------------------------------------------------------------- checkpoints

    @torch.no_grad()
    def state_dict(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the state in the form of a single device, with `change` applied to every tensor.

        Args:
            change: maps a tensor with the full shape, which may be sharded; e.g. gathers it, collectively.
        """
        if self._has_own_form():
            with self.stored():
                custom: dict[str, Any] = pytree.tree_map_only(Tensor, change, self.optimizer.state_dict())
            return custom

        state: dict[str, Any] = self.optimizer.state_dict()
        return {**state, "state": self._whole_states(state["state"], change)}

    def _whole_states(self, state: dict[Any, Any], change: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
        """Apply `change` to all tensors of a state; local shards become DTensors before."""

        def changed(value: Tensor, stored: Tensor | None) -> Tensor:
            if self._elementwise and isinstance(stored, DTensor) and is_sharded(stored) and value.dim() > 0:
                value = as_shard(value, stored) if value.shape == stored.to_local().shape else value
            return change(value)

        return self._of_held(state, changed)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state in the form of a single device; each rank keeps its shards of it. No communication."""

        def local_copy(value: Tensor, stored: Tensor | None) -> Tensor:
            part = self._part(value, stored) if self._elementwise else value
            is_copy = part is not value and not isinstance(value, DTensor)
            # A checkpoint's tensors may be memory-mapped: copy them. Few tensor subclasses have `clone`.
            return part if is_copy else part.to(part.device, copy=True)

        if self._has_own_form():
            parts = pytree.tree_map_only(Tensor, torch.clone, state)
        else:
            is_local = [not self._elsewhere or each not in self._elsewhere for each in self.parameters()]
            groups = [
                {**group, "params": [index for index in group["params"] if is_local[index]]}
                for group in state["param_groups"]
            ]
            parts = {**state, "state": self._of_held(state["state"], local_copy), "param_groups": groups}
        with self.stored():
            self.optimizer.load_state_dict(parts)

    def _has_own_form(self) -> bool:
        """Return whether the optimizer overrides `state_dict`, as optimizers that combine others do."""
        return type(self.optimizer).state_dict is not Optimizer.state_dict

    def _of_held(self, state: dict[Any, Any], change: Callable[..., Tensor]) -> dict[Any, Any]:
        """Apply `change` to the states of parameters of this stage; drop others; keep keys that are no numbers."""
        parameters, result = self.parameters(), dict[Any, Any]()
        for index, values in state.items():
            parameter = parameters[index] if isinstance(index, int) else None
            if parameter is None or parameter not in self._elsewhere:
                stored = None if parameter is None else self._step.stored(parameter)
                result[index] = pytree.tree_map_only(Tensor, functools.partial(change, stored=stored), values)
        return result


def _convert(state: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the tensors of a parameter's state, in place: optimizers may keep the dictionary."""
    for name, value in state.items() if isinstance(state, dict) else ():
        state[name] = change(value) if isinstance(value, Tensor) else value
