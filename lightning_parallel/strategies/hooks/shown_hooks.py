"""The hooks of a run's module and callbacks, which find parameters and gradients as one device has them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from lightning_parallel.strategies.hooks.looking import (
    HOOKS,
    asks_for_groups,
    is_of_some_ranks,
    is_users,
    looks_at_model,
    names_gradients,
)
from lightning_parallel.strategies.hooks.whole_gradients import WholeGradients
from lightning_parallel.strategies.hooks.whole_parameters import WholeParameters, Wholes
from lightning_parallel.strategies.lightning_package import Callback, StochasticWeightAveraging, WeightAveraging
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.strategies.trainer.optimizers import StoredOptimizers

T = TypeVar("T")

Place = tuple[int, str]
"""The number of a module or a callback, and the name of its hook."""

STEP: Place = (0, "optimizer_step")
"""The one hook in which steps of the module are run."""

AVERAGING = (StochasticWeightAveraging, WeightAveraging)
"""Lightning's callbacks that read and write all parameters in their hooks."""

UPDATING = {"on_train_batch_end", "on_train_epoch_end"}
"""The hooks of `WeightAveraging` that look at parameters only where they update the average, by ..."""
UPDATE = "update_parameters"
"""... this method of it, which gathers them then."""


class ShownHooks:
    """Stands around the user's hooks for the time of a run.

    Args:
        divided: the module.
        callbacks: all that have hooks too.
        host: all ranks, for messages of the host.
        optimizers: the trainer's.
        in_parts: whether ranks may have parts of gradients.

    Attributes:
        gradients: shown to every hook that reads one.
    """

    def __init__(
        self,
        divided: DividedModel,
        callbacks: Iterable[Callback],
        host: dist.ProcessGroup,
        optimizers: StoredOptimizers,
        in_parts: bool,
    ) -> None:
        self._divided, self.gradients = divided, WholeGradients(divided, [*callbacks], host, in_parts)
        self._parameters = WholeParameters(divided, host, optimizers)
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._owners: list[Any] = [divided.module, *callbacks, *lightnings.averages_of(callbacks)]
        looking = self._looking() if divided.in_parts else []
        if in_parts and self._steps_by_gradients():
            looking.append(STEP)
        users = [(k, hook) for k, hook in self._all() if in_parts and is_users(self._owners[k], hook)]
        found = gather_objects((looking, users, [each for each in users if self._is_for_some_ranks(*each)]), host)
        looks, all_users, at_once = (set[Place]().union(*(each[k] for each in found)) for k in range(3))
        for place in sorted(looks | all_users):
            self._wrap(place, place in looks, place in at_once)

    @property
    def ask_for_groups(self) -> bool:
        """Whether a training step may ask for the parameters in groups of optimizers; none of a pipeline does."""
        return self._divided.pipeline.ranks == 1 and asks_for_groups(self._divided.module)

    def _all(self) -> list[Place]:
        return [(k, hook) for k in range(len(self._owners)) for hook in sorted(HOOKS)]

    def _looking(self) -> list[Place]:
        divided, module = self._divided, self._divided.module
        with divided.shown():
            parts = {name.partition(".")[0] for name, _ in module.named_parameters()} | divided.beside.attributes
        if divided.pipeline.ranks > 1 and looks_at_model(module, "optimizer_step", module, parts):
            raise ValueError(
                f"{type(module).__name__}.optimizer_step looks at the model, but while it runs a rank of a pipeline "
                "has the parameters of its stage only; look at gradients in on_before_optimizer_step and at weights in "
                "on_train_batch_end, which find all of them on every rank"
            )
        looking = [
            (k, hook) for k, hook in [*self._all(), STEP] if looks_at_model(self._owners[k], hook, module, parts)
        ]
        updates = [(k, UPDATE) for k, owner in enumerate(self._owners) if isinstance(owner, AveragedModel)]
        return looking + updates + [(k, hook) for k, hook in self._all() if _averages(self._owners[k], hook)]

    def _steps_by_gradients(self) -> bool:
        """Whether the module's own `optimizer_step` looks at gradients, as one that computes them twice."""
        module = self._divided.module
        alone = self._divided.pipeline.ranks == 1 and module.automatic_optimization
        return alone and is_users(module, STEP[1]) and names_gradients(module, STEP[1], module)

    def _is_for_some_ranks(self, number: int, hook: str) -> bool:
        owner, module = self._owners[number], self._divided.module
        return names_gradients(owner, hook, module) and is_of_some_ranks(owner, hook, module)

    def close(self) -> None:
        """Gives hooks back as they were."""
        self.gradients.close()
        for owner, hook, own in reversed(self._wrapped):
            vars(owner).pop(hook)
            if own is not None:
                vars(owner)[hook] = own
        self._wrapped.clear()

    def _wrap(self, place: Place, looks: bool, at_once: bool) -> None:
        owner, hook = self._owners[place[0]], place[1]
        run = getattr(owner, hook)
        around = self._around_steps if place == STEP else self._in_whole_tree
        wrapped = around(place, run, at_once) if looks or at_once else self.gradients.shown_to(run)
        self._wrapped.append((owner, hook, vars(owner).get(hook)))
        vars(owner)[hook] = functools.wraps(run)(wrapped)

    def _in_whole_tree(self, place: Place, run: Callable[..., T], at_once: bool) -> Callable[..., T]:
        reader = f"{type(self._owners[place[0]]).__name__}.{place[1]}"

        def wrapped(*args: Any, **kwargs: Any) -> T:
            with self._parameters.shown(reader), self.gradients.at_first_read(at_once):
                return run(*args, **kwargs)

        return wrapped

    def _around_steps(self, place: Place, run: Callable[..., T], at_once: bool) -> Callable[..., T]:
        """For a hook that runs steps: within these ranks have their parts, and then it finds the same wholes again."""
        reader = f"{type(self._owners[place[0]]).__name__}.{place[1]}"

        def wrapped(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None, **kwargs: Any) -> T:
            wholes: Wholes = {}
            with ExitStack() as around:

                def show() -> None:
                    around.enter_context(self._parameters.shown(reader, wholes))
                    around.enter_context(self.gradients.at_first_read(at_once))

                def closure() -> Any:
                    around.close()
                    result = optimizer_closure()
                    show()  # not where it raised: others may not come
                    return result

                show()
                return run(epoch, batch_idx, optimizer, optimizer_closure and closure, **kwargs)

        return wrapped


def _averages(owner: Any, hook: str) -> bool:
    """Whether a hook is Lightning's, of a callback that reads or writes all parameters there, on all ranks alike."""
    if isinstance(owner, WeightAveraging) and hook in UPDATING:
        return is_users(owner, "should_update")  # which may say otherwise on other ranks: then all come in any case
    return isinstance(owner, AVERAGING) and getattr(type(owner), hook, None) is not getattr(Callback, hook, None)
