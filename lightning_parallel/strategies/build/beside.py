"""Parameters that a module has in lists, dicts and helpers of its own too, beside its tree.

Techniques put others in the place of a module's parameters: parts between steps, and while a step runs what looks
whole. What somebody took of them before, as for a penalty or an average of weights, follows, and so do their `id`s, by
which many tell parameters apart.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.jit import ScriptModule

from lightning_parallel.strategies.build.within import MOST_WITHIN, Exchanged, holds, replaced
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.techniques.step import StepFn
from lightning_parallel.techniques.tools.telling import warn

T = TypeVar("T")

SHOWN = 4
HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
OF_LIBRARIES = {*vars(nn.Module()), *vars(LightningModule())} - HOOKS


class Beside:
    """The places beside the tree of a module in which there are parameters of it.

    Args:
        module: the user's, with all its parameters.

    Attributes:
        attributes: the names under which modules have them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = module.named_parameters(remove_duplicate=False)
        self._stand = {name: parameter for name, parameter in named if parameter is not None}
        self._first = {name: weakref.ref(parameter) for name, parameter in self._stand.items()}
        owners = [(name, module.get_submodule(name.rpartition(".")[0])) for name in self._stand]
        # A module of TorchScript has tables of its own, in which nobody exchanges anything.
        here = [(name, owner) for name, owner in owners if not isinstance(owner, ScriptModule)]
        self._in_tree = [(name, name.rpartition(".")[2], owner) for name, owner in here]
        self._places: list[tuple[dict[str, Any], str]] = []
        self._data, self._told = set[str](), set[str]()
        self.attributes: set[str] = set()
        self.look()

    def look(self) -> None:
        """Finds the places in which there is now what the tree has."""
        ids, tree = set(map(id, self._stand.values())), {(id(owner), own) for _, own, owner in self._in_tree}
        self._places, without = [], dict[int, Any]()
        for path, part in self._module.named_modules():
            for attribute, value in vars(part).items():
                # what other ranks hold is an attribute of its module, too
                if attribute in OF_LIBRARIES or (id(part), attribute) in tree:
                    continue
                found = holds(value, ids, without)
                if found is None:
                    self._data.add(f"{path}.{attribute}".removeprefix("."))
                elif found:
                    self._places.append((vars(part), attribute))
        self.attributes = {attribute for _, attribute in self._places}

    def before(self) -> dict[str, nn.Parameter]:
        """The module's parameters as they were at first, by FQN, of which something else still holds a reference."""
        return {name: parameter for name, first in self._first.items() if (parameter := first()) is not None}

    def follow(self) -> Exchanged:
        """Puts there what the tree has now; returns what takes that back."""
        there, back = dict[int, Any](), dict[int, Any]()
        for name, own, owner in self._in_tree:
            before, now = self._stand[name], owner._parameters.get(own, vars(owner).get(own))
            if now is not before and now is not None:
                there[id(before)], back[id(now)], self._stand[name] = now, before, now
        self._exchange(there)
        return back

    def tell_of_others(self) -> None:
        """Warns of parameters that were replaced, and that somebody holds in a place that nobody can look for."""
        if not self._held_by_others():
            return
        gc.collect()  # what only garbage holds is no longer used
        if names := self._held_by_others():
            warn(
                f"{', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}: ranks train parts in the place of "
                "these parameters, but something beside the module still holds them as they were: a global, a closure, "
                "a default argument, an optimizer of another run or an object without a dict. What computes with that "
                "has values that do not learn; read them from the module, or keep them in an attribute of it"
            )

    def _held_by_others(self) -> list[str]:
        """The names of those parameters; not of those of other stages, where they are what they were."""
        here = {name for name, parameter in self._module.named_parameters(remove_duplicate=False)}
        held = ((name, parameter) for name, parameter in self.before().items() if name in here)
        return [name for name, parameter in held if parameter is not self._stand[name]]

    def leave(self) -> None:
        """Holds no parameters any longer, of which another run would tell that somebody holds them."""
        self._stand, self._in_tree, self._places = {}, [], []

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, what the tree has at the beginning is there too; of what somebody takes meanwhile `look` knows."""
        before = dict(self._stand)
        back = self.follow()
        try:
            yield
        finally:
            self._exchange(back)
            self._stand = before

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """A step that finds there what it finds in the tree."""

        def following(*args: Any, **kwargs: Any) -> T:
            with self.shown():  # a step takes parameters anew each time
                return run(*args, **kwargs)

        return following

    def _exchange(self, exchanged: Exchanged) -> None:
        seen: dict[int, tuple[Any, Any]] = {}
        for table, attribute in self._places if exchanged else ():
            if attribute in table:
                table[attribute] = replaced(table[attribute], exchanged, seen)
        if exchanged:
            self._tell_of_data()

    def _tell_of_data(self) -> None:
        untold, self._told = self._data - self._told, {*self._data}
        if untold:
            warn(
                f"{', '.join(sorted(untold))} of the module: there are more than {MOST_WITHIN:,} objects within, so it "
                "counts as data, and parameters that are kept in it do not follow what ranks compute with; keep "
                "parameters in an attribute of their own"
            )
