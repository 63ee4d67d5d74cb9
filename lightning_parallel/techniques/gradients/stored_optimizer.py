"""Lets any optimizer step what a rank stores, while the user's optimizer keeps the module's parameters in its groups.

The user, Lightning and LR schedulers see the optimizer that `configure_optimizers` returned, with its state under the
module's parameters. Only while `step` runs, the parameters in its groups are replaced: by this rank's local shards for
optimizers that treat every element alike (41 us a block, against 1,618 through DTensor), and by whole tensors for all
others (Muon, a user's own), whose arithmetic over matrices and norms DTensor would refuse or round differently.
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
from lightning_parallel.techniques.tools.moved import stand_again, stand_for
from lightning_parallel.techniques.tools.shards import as_shard, bear, gathered, is_sharded, shard_of, whole_tensor
from lightning_parallel.techniques.tools.telling import warn

METHODS = ("train", "eval", "first_step", "second_step", "ascent_step", "descent_step")
"""Methods of third parties' optimizers that act on parameters as `step` does: schedule-free and sharpness-aware."""

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Pair = tuple[Tensor, Tensor]
"""A parameter of which ranks hold parts, and what stands for it."""


def exchange(optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
    """Put the second of each pair where the first is: in the groups, and as the key of its state."""
    after_of = {id(before): after for before, after in pairs}
    for group in optimizer.param_groups if pairs else ():
        group["params"][:] = [after_of.get(id(parameter), parameter) for parameter in group["params"]]
    for before, after in pairs:
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)


class StoredOptimizer:
    """Makes `optimizer.step` act on stored parameters, and reads and writes its state in its single-device form.

    What is stepped for a parameter is itself, this rank's shard of it (elementwise optimizers), or the gathered whole.
    While an optimizer of a pipeline steps, its groups hold the parameters of this rank's stage only.

    | state                   | the groups hold | the state lies under | wholes          |
    |-------------------------|-----------------|----------------------|-----------------|
    | between steps           | parameters      | parameters, in parts | without memory  |
    | within a closure        | parameters      | parameters, in parts | without memory  |
    | `_enter` … `_leave`     | what is stepped | what is stepped      | gathered        |

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
        self.optimizer, self._manual, self._shards = optimizer, manual, shards
        self._elsewhere: Collection[nn.Parameter] = elsewhere
        self._local, self._inside = local, ExitStack()
        self._step, self._mean = step, mean
        # a state in a form of its own is written and read while the optimizer holds wholes
        self._elementwise = steps_as_one_of(ELEMENTWISE, optimizer) and not self._has_own_form()
        #: whether the optimizer may decide by what its closure returns, which `mean` makes the same on all ranks
        self.looks_at_loss = not self._elementwise
        self._groups: list[list[nn.Parameter]] | None = None
        self._shown: Sequence[Pair] = ()
        # under their `id`: a tensor takes a call of Python's to be hashed, and each is asked for in every step
        self._stepped: dict[int, tuple[nn.Parameter, Tensor]] = {}
        # the whole and its memory, the same in every step: optimizers may keep them
        self._wholes: dict[nn.Parameter, tuple[nn.Parameter, Tensor]] = {}
        self._adopted: dict[int, nn.Parameter] = {}
        self._replaced: dict[str, Any] = {}
        sharded = any(is_sharded(step.stored(parameter)) for parameter in self.parameters())
        if sharded and not self._elementwise:
            warn(
                f"{type(optimizer).__name__} may look at several elements of a parameter at once, so every rank "
                "holds whole parameters and gradients while it steps; if it does not, add it to "
                "elementwise.ELEMENTWISE, and leave state_dict to Optimizer, to save the memory"
            )
        with torch.no_grad():
            for parameter in self.parameters():
                self._adopt(parameter)
        in_pipeline = local is not nullcontext
        if shards or manual or in_pipeline or not self._elementwise:  # else its own step is all there is
            for name in ("step", *(name for name in METHODS if name in dir(type(optimizer)))):
                self._replace(name, self._run_step if name == "step" else self._run)
        if in_pipeline:  # it asks each parameter for its gradient, which hooks are told from stage to stage
            self._replace("zero_grad", self._run_locally)

    def _replace(self, name: str, run: Callable[..., Any]) -> None:
        """Let `run` lead a method of this optimizer until `close`; it gets the optimizer's own method."""
        own = getattr(self.optimizer, name)

        @functools.wraps(own)
        def led(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return run(own, args, kwargs) if self._replaced else own(*args, **kwargs)

        self._replaced[name] = vars(self.optimizer).get(name), MethodType(led, self.optimizer)
        vars(self.optimizer)[name] = self._replaced[name][1]

    def reach(self, wrapper: Any) -> None:
        """Let a wrapper that Lightning made run the methods of the optimizer that act on what is stored."""
        names = [name for name in METHODS if name in self._replaced]
        vars(wrapper).update({name: self._replaced[name][1] for name in names})

    def close(self, wrappers: Iterable[Any]) -> None:
        """Give the optimizer its own methods back; the groups hold the module's parameters."""
        for owner in (self.optimizer, *wrappers):
            for name, (before, method) in self._replaced.items():
                if vars(owner).get(name) is method:  # a scheduler may have wrapped it
                    del vars(owner)[name]
                    if before is not None and owner is self.optimizer:
                        vars(owner)[name] = before
        self._replaced = {}

    @property
    def has_shards(self) -> bool:
        """Whether ranks may have parts of the state, or of the optimizer's parameters; the same on all of them."""
        return self._shards or self._local is not nullcontext

    def whole_bytes(self) -> int:
        """The bytes that the state takes on one device."""
        state = self.optimizer.state
        leaves = [(p, it) for p in self.parameters() for it in pytree.tree_leaves(state.get(p))]
        return sum(p.numel() * it.element_size() for p, it in leaves if isinstance(it, Tensor) and it.dim() > 0)

    @torch.no_grad()
    def whole_state(self) -> dict[Any, Any]:
        """Gather the state of every parameter, by its number, to the host of every rank. Collective.

        Third-party optimizers need not have the `state_dict` of torch's. What one of their own returns is the state.
        """
        whole = functools.partial(gathered, keep=True)
        if self._has_own_form() and self._local is nullcontext:
            return self.state_dict(whole)
        numbers: dict[int, Any] = {id(parameter): number for number, parameter in enumerate(self.parameters())}
        state = {numbers.get(id(key), key): values for key, values in self.optimizer.state.items()}
        return self._whole_states(state, whole)

    def set_whole_state(self, state: dict[Any, Any]) -> None:
        """From now on step the module's own parameters, which are whole after the run, and are in the groups.

        Args:
            state: what `whole_state` returned before.
        """
        in_pipeline = self._local is not nullcontext
        self._step, self._elsewhere, self._local, self._shards = Step(), (), nullcontext, False
        self._wholes.clear()
        self._adopted.clear()
        if self._has_own_form() and not in_pipeline:
            # optimizers within it have their states under what was stepped in the run
            self.optimizer.load_state_dict(state)
            return
        parameters = self.parameters()
        for number, values in state.items():
            self.optimizer.state[parameters[number] if isinstance(number, int) else number] = values

    def _run_locally(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._local():
            return own(*args, **kwargs)

    def show(self, pairs: Sequence[Pair]) -> None:
        """From now on groups hold what stands for parameters in the user's code, but while the optimizer steps.

        Args:
            pairs: what stands for what.
        """
        exchange(self.optimizer, [(shown, held) for held, shown in self._shown])
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
            self._end()

    def _run_step(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `step` between the user's hooks of it, which look for the module's parameters, as averages do."""
        if self._groups is not None:  # a step runs it
            return own(*args, **kwargs)
        optimizer, held = self.optimizer, vars(self.optimizer)
        before, after = (held.get(name, {}) for name in HOOKS)
        for hook in before.values():
            if (changed := hook(optimizer, (optimizer, *args), kwargs)) is not None:
                (_, *args), kwargs = changed
        held.update({name: OrderedDict() for name in HOOKS})
        try:
            result = self._run(own, args, kwargs)
        finally:
            held.update(zip(HOOKS, (before, after), strict=True))
        for hook in after.values():
            hook(optimizer, (optimizer, *args), kwargs)
        return result

    def _run(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `step`, or another method, on what is stored; a closure runs on the module's parameters before that."""
        if self._groups is not None:  # a step runs it
            return own(*args, **kwargs)
        values = (*args, *kwargs.values())
        closures = [callable(each) and not isinstance(each, (nn.Module, type)) for each in values]
        given = [self._outside(each) if closure else each for each, closure in zip(values, closures, strict=True)]
        try:
            if True not in closures:
                self._enter_to_step()
            result = own(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        except Exception:
            self._end(publish=True)  # other ranks may have stepped, and wait for this one's rows
            raise
        self._end(publish=True)
        return result

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure runs the user's step and backward, on the module's own parameters; then the optimizer goes on."""

        def run() -> Any:
            if self._groups is not None:
                if self._shards:
                    raise RuntimeError(
                        f"{type(self.optimizer).__name__} evaluates its closure again within one step, but ranks hold "
                        "shards of the parameters, and its step runs on gathered copies of them by then; use "
                        "DataParallelStrategy, or call first_step and second_step around two backward passes"
                    )
                self._end(publish=True)
            result = closure()
            self._enter_to_step()
            return result if self._elementwise else self._mean(result)

        return run

    def _enter_to_step(self) -> None:
        if self._manual:
            self._step.average_given(self.parameters())
        self._enter()

    @torch.no_grad()
    def _enter(self) -> None:
        if self._groups is not None:
            return
        self._inside.enter_context(self._local())
        exchange(self.optimizer, [(shown, held) for held, shown in self._shown])
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._step.before_optimizer_step([*chain.from_iterable(self._groups)])
        for group in self.optimizer.param_groups:
            mine = group["params"]
            if self._elsewhere:
                mine = [parameter for parameter in mine if parameter not in self._elsewhere]
            group["params"][:] = [self._wake(parameter) for parameter in mine]
        for parameter, tensor in () if self._elementwise else self._stepped.values():
            stand_for(parameter, tensor)  # in lists of the optimizer's own, and in its closures

    @torch.no_grad()
    def _end(self, publish: bool = False) -> None:
        """Store what was stepped; the state lies under the module's parameters, each rank keeps its part of it."""
        if self._groups is None:  # its step has evaluated no closure, or raised before
            return
        state = self.optimizer.state
        with self._inside.pop_all():
            for parameter, _ in () if self._elementwise else self._stepped.values():
                stand_again(parameter)
            for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
                group["params"][:] = parameters
            self._groups = None
            for parameter, tensor in self._stepped.values():
                if state and (values := state.pop(tensor, None)) is not None:
                    state[parameter] = values
                if tensor.grad is None:
                    parameter.grad = None  # it is the optimizer that zeroed it
                tensor.grad = None
                if self._elementwise:  # its shard is what is stored
                    continue
                stored: Any = self._step.stored(parameter)
                stored.to_local().copy_(shard_of(tensor, stored).to_local())
                if parameter in self._wholes:
                    whole, room = self._wholes[parameter]
                    self._rest(parameter)
                    room.untyped_storage().resize_(0)
                    whole.data = room
            self._stepped.clear()
            exchange(self.optimizer, self._shown)
            if publish:
                self._step.after_optimizer_step(self.parameters())

    def _wake(self, parameter: nn.Parameter) -> Tensor:
        """The tensor to step for a parameter, with its gradient and state."""
        stored = self._step.stored(parameter)
        if not isinstance(stored, DTensor):
            return stored
        gathers = not self._elementwise and is_sharded(stored)
        tensor = stored._local_tensor if self._elementwise else self._whole_of(parameter, stored, gathers)
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = whole_tensor(gradient) if gathers else gradient._local_tensor
        tensor.grad = gradient if gradient is None or gradient.device == tensor.device else gradient.to(tensor.device)
        if id(parameter) not in self._adopted:
            self._adopt(parameter)
        state = self.optimizer.state
        if state and (values := state.pop(parameter, None)) is not None:
            state[tensor] = values
            if gathers:
                _convert(values, whole_tensor)
        self._stepped[id(parameter)] = parameter, tensor
        return tensor

    def _whole_of(self, parameter: nn.Parameter, stored: DTensor, gathers: bool) -> nn.Parameter:
        """The parameter to step whole: optimizers may ask whether it learns, or for attributes that users gave it."""
        value = whole_tensor(stored).to(stored.device) if gathers else stored._local_tensor
        whole, room = self._wholes.get(parameter, (None, value))
        if whole is None:
            whole = nn.Parameter(value, parameter.requires_grad)
        if gathers:
            room.untyped_storage().resize_(value.untyped_storage().nbytes())
            whole.data = room
            whole.copy_(value)
        else:
            whole.data = value
        bear(whole, parameter)
        whole.requires_grad_(parameter.requires_grad)
        if gathers:
            self._wholes[parameter] = whole, room
        return whole

    # ---------------------------------------------------------------- state between steps

    def _adopt(self, parameter: nn.Parameter) -> None:
        """Divides state that was made for a whole parameter: by Adagrad when it was made, or loaded while frozen.

        Of what another rank holds it is given up.
        """
        if parameter in self._elsewhere:
            self.optimizer.state.pop(parameter, None)
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
                own: dict[str, Any] = pytree.tree_map_only(Tensor, change, self.optimizer.state_dict())
            return own

        state: dict[str, Any] = self.optimizer.state_dict()
        return {**state, "state": self._whole_states(state["state"], change)}

    def _whole_states(self, state: dict[Any, Any], change: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
        def whole(value: Tensor, stored: Tensor | None) -> Tensor:
            in_parts = self._elementwise and isinstance(stored, DTensor) and is_sharded(stored)
            if in_parts and value.dim() > 0 and value.shape == stored.to_local().shape:  # type: ignore[union-attr]
                value = as_shard(value, stored)  # type: ignore[arg-type]
            return change(value)

        return self._of_held(state, whole)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state that one device would have, each rank its own part of every tensor that it holds."""

        def own(value: Tensor, stored: Tensor | None) -> Tensor:
            part = self._part(value, stored) if self._elementwise else value
            is_copy = part is not value and not isinstance(value, DTensor)
            # A checkpoint's tensors may be pages of its file: copy them. Few subclasses of tensors have `clone`.
            return part if is_copy else part.to(part.device, copy=True)

        if self._has_own_form():
            parts = pytree.tree_map_only(Tensor, torch.clone, state)
        else:
            here = [not self._elsewhere or each not in self._elsewhere for each in self.parameters()]
            groups = [
                {**group, "params": [index for index in group["params"] if here[index]]}
                for group in state["param_groups"]
            ]
            parts = {**state, "state": self._of_held(state["state"], own), "param_groups": groups}
        with self.stored():
            self.optimizer.load_state_dict(parts)

    def _has_own_form(self) -> bool:
        """Whether the optimizer writes its state in a way of its own, as those that combine others do."""
        return type(self.optimizer).state_dict is not Optimizer.state_dict

    def _of_held(self, state: dict[Any, Any], change: Callable[..., Tensor]) -> dict[Any, Any]:
        """The states of parameters that this rank holds, their tensors changed; other keys than numbers stay."""
        parameters, made = self.parameters(), dict[Any, Any]()
        for index, values in state.items():
            parameter = parameters[index] if isinstance(index, int) else None
            if parameter is None or parameter not in self._elsewhere:
                stored = None if parameter is None else self._step.stored(parameter)
                made[index] = pytree.tree_map_only(Tensor, functools.partial(change, stored=stored), values)
        return made


def _convert(state: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the tensors of a parameter's state in place: optimizers may hold on to the dictionary."""
    for name, value in state.items() if isinstance(state, dict) else ():
        state[name] = change(value) if isinstance(value, Tensor) else value
