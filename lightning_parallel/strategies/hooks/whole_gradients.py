"""Gradients as one device has them, for hooks that look at gradients: to log norms, to clip, to change them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.strategies.hooks.foreign_hooks import before_steps
from lightning_parallel.strategies.hooks.looking import HOOKS, SILENT, names_gradients
from lightning_parallel.strategies.hooks.showing import Showing
from lightning_parallel.strategies.lightning_package import Callback
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.trainer.lightnings import somebody_overrides
from lightning_parallel.techniques.gradients.asked import ask, ask_no_more, is_asked
from lightning_parallel.techniques.step import Step

T = TypeVar("T")

BEFORE_BACKWARD = ("on_before_backward", "backward")
AFTER_BACKWARD = ("on_after_backward",)
BEFORE_STEP = ("on_before_optimizer_step", "configure_gradient_clipping")


class WholeGradients:
    """Whole gradients for hooks that look at them, in a whole tree. All ranks must come.

    | hooks                               | gradients of other stages are sent, and parts are shown as wholes |
    |-------------------------------------|-------------------------------------------------------------------|
    | around a backward, before a step    | where somebody overrides one, for all of them                     |
    | all others                          | where one reads a gradient, from its first read on                |

    Args:
        divided: the module.
        callbacks: all that have hooks too.
        host: all ranks, for messages of the host.
        in_parts: whether ranks may have parts of gradients.
    """

    def __init__(
        self, divided: DividedModel, callbacks: list[Callback], host: dist.ProcessGroup, in_parts: bool
    ) -> None:
        self._divided, self._host, self.in_parts = divided, host, in_parts
        self._hooked = False  # whether optimizers have hooks before their steps
        self._given_back = ExitStack()
        self._wanted: set[tuple[str, ...]] = set()
        self.now: Showing | None = None
        """In a whole tree, what shows gradients at the moment."""
        self.in_hook = Showing(divided, tree=False)
        """Shows them to hooks that do not look at the model, but may have parameters all the same."""
        automatic, self._each = divided.module.automatic_optimization, False
        self.in_steps = False
        """Whether steps of automatic optimization may look at the gradients of batches before."""
        if automatic and (in_parts or divided.mesh.world_size > 1):  # else hooks see what the step around them sees
            owners, module = (divided.module, *callbacks), divided.module
            each = any(names_gradients(owner, hook, module) for owner in owners for hook in HOOKS)
            if divided.pipeline.ranks == 1:
                each = each or names_gradients(module, "training_step", module)
                self.in_steps = names_gradients(module, "training_step", module, SILENT - {"zero_grad"})
            self._each, self.in_steps = map(any, zip(*gather_objects((each, self.in_steps), host), strict=True))
            for hooks in (BEFORE_BACKWARD, AFTER_BACKWARD, BEFORE_STEP):
                if any(gather_objects(somebody_overrides(hooks, divided.module, callbacks), host)):
                    self._wanted.add(hooks)

    def meet_foreign_hooks(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuses hooks of torch's that would find something else than on one device, as the training begins.

        Those before steps of optimizers find whole gradients, of all batches that have accumulated.
        """
        self._divided.refuse_foreign_hooks(optimizers)
        found = before_steps(optimizers)
        self._hooked = any(gather_objects(bool(found), self._host))
        for table, key in found if self.in_parts else ():
            own, table[key] = table[key], self.shown_to(table[key])
            self._given_back.callback(_put_back, table, key, own)

    def close(self) -> None:
        """Gives hooks back as they were."""
        self._given_back.close()

    def shown_to(self, run: Callable[..., T]) -> Callable[..., T]:
        """For hooks that read no gradient, as most do not, this is all that is run in each step."""
        showing = self.in_hook

        @functools.wraps(run)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            if (outer := self.now or (showing if showing.opened else None)) is not None:
                result = run(*args, **kwargs)
                outer.let_go()
                return result
            if not ask(showing.first):
                return run(*args, **kwargs)
            try:
                return run(*args, **kwargs)
            finally:
                if showing.opened:
                    showing.close()
                else:
                    ask_no_more()

        return wrapped

    def held(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters among these that this rank holds."""
        shown = set() if self.now is None else set(map(id, self.now.elsewhere))
        return [parameter for parameter in parameters if id(parameter) not in shown]

    def unsynced(self, step: Step) -> AbstractContextManager[None]:
        """Inside, gradients are reduced with those of a later batch, unless a hook looks at those of each."""
        looked_at = self._each or self._hooked or not self._wanted.isdisjoint((BEFORE_BACKWARD, AFTER_BACKWARD))
        return nullcontext() if looked_at else step.unsynced()

    def shown(self, hooks: tuple[str, ...]) -> AbstractContextManager[None]:
        """Around hooks of these names."""
        return self._shown() if hooks in self._wanted else nullcontext()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        with self._divided.shown():
            before, showing = self.now, Showing(self._divided, tree=True)
            self.now = showing
            try:
                showing.open()
                yield
            finally:
                self.now = before
                showing.close()

    @contextmanager
    def at_first_read(self, at_once: bool) -> Iterator[None]:
        """Around a hook, in a whole tree: it finds whole gradients once it reads one.

        Args:
            at_once: whether some ranks only may read, for which everything is brought before.
        """
        if (outer := self.now or (self.in_hook if self.in_hook.opened else None)) is not None:
            if at_once:
                outer.gather()
            yield
            outer.let_go()
            return
        showing, waiting = Showing(self._divided, tree=True), self.in_hook.first
        takes_turn = is_asked(waiting)  # of a hook that has read none, and runs this one
        if takes_turn:
            ask_no_more()
        if not ask(showing.first):
            yield
            return
        self.now = showing
        try:
            if at_once:
                ask_no_more()
                showing.gather()
            yield
        finally:
            self.now = None
            showing.close()
            if takes_turn:
                ask(waiting)


def _put_back(table: dict[Any, Any], key: Any, hook: Any) -> None:
    if key in table:  # else its user has taken it away
        table[key] = hook
