"""Parameters that a module has in lists, dicts and helpers of its own too, beside its tree.

Techniques put others in the place of a module's parameters: parts between steps, and while a step runs what looks
whole. What somebody took of them before, as for a penalty or an average of weights, follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel.techniques.step import Run, WrappedRun
from lightning_parallel.values import like

T = TypeVar("T")

OF_LIBRARIES = {*vars(nn.Module()), *vars(LightningModule())}
LIBRARIES = ("torch", "lightning", "torchmetrics", "builtins", "collections", "transformers")
DEEP = 4

Exchanged = Mapping[int, Any]
"""By the `id` of what stands somewhere, what is to stand there."""


class Beside:
    """The places beside the tree of a module in which there are parameters of it.

    Args:
        module: the user's, with all its parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        named = module.named_parameters(remove_duplicate=False)
        self._stand = {name: parameter for name, parameter in named if parameter is not None}
        ids = set(map(id, self._stand.values()))
        self._places = [
            (vars(part), attribute)
            for part in module.modules()
            for attribute, value in vars(part).items()
            if attribute not in OF_LIBRARIES and any(id(each) in ids for each in _within(value, DEEP))
        ]
        self.attributes = {attribute for _, attribute in self._places}
        """The names under which modules have them."""
        owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in self._stand if self._places}
        self._in_tree = [(name, name.rpartition(".")[2], owner) for name, owner in owners.items()]

    def follow(self) -> Exchanged:
        """Puts there what the tree has now; returns what takes that back."""
        there, back = dict[int, Any](), dict[int, Any]()
        for name, own, owner in self._in_tree:
            before, now = self._stand[name], owner._parameters.get(own, vars(owner).get(own))
            if now is not before and now is not None:
                there[id(before)], back[id(now)], self._stand[name] = now, before, now
        self._exchange(there)
        return back

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, what the tree has at the beginning is there too."""
        before = dict(self._stand)
        back = self.follow()
        try:
            yield
        finally:
            self._exchange(back)
            self._stand = before

    def run(self, run: Run[T]) -> Run[T]:
        """A step that finds there what it finds in the tree."""
        return _Following(run, self)

    def _exchange(self, exchanged: Exchanged) -> None:
        for table, attribute in self._places if exchanged else ():
            if attribute in table:
                table[attribute] = _replaced(table[attribute], exchanged, DEEP)


class _Following(WrappedRun[T]):
    """See `Beside.run`."""

    def __init__(self, inner: Run[T], beside: Beside) -> None:
        super().__init__(inner)
        self._beside = beside

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """See `Run.__call__`."""
        with self._beside.shown():
            return self.inner(*args, **kwargs)


def _within(value: Any, deep: int) -> Iterator[nn.Parameter]:
    """The parameters in a value, and in what it holds."""
    if isinstance(value, nn.Parameter):
        yield value
    elif deep:
        for member in _members(value):
            yield from _within(member, deep - 1)


def _members(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return []
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return list(value)
    return list(vars(value).values()) if _is_helper(value) else []


def _is_helper(value: Any) -> bool:
    """Whether a value is of a class of the user's, or of who else may keep parameters."""
    own = isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type)
    return own and type(value).__module__.partition(".")[0] not in LIBRARIES


def _replaced(value: Any, exchanged: Exchanged, deep: int) -> Any:
    """The value with what is exchanged within; containers that can be changed stay the same ones."""
    if isinstance(value, Tensor):
        return exchanged.get(id(value), value)
    before = _members(value) if deep else []
    members = [_replaced(member, exchanged, deep - 1) for member in before]
    if all(now is then for now, then in zip(members, before, strict=True)):
        return value
    if isinstance(value, (tuple, frozenset)):
        return like(value, members) if isinstance(value, tuple) else type(value)(members)
    _fill(value, members)
    return value


def _fill(value: Any, members: list[Any]) -> None:
    if isinstance(value, dict):
        keys, values = members[: len(value)], members[len(value) :]
        value.clear()
        value.update(zip(keys, values, strict=True))
    elif isinstance(value, (list, deque)):
        for place, member in enumerate(members):
            value[place] = member
    elif isinstance(value, set):
        value.clear()
        value.update(members)
    else:
        vars(value).update(zip(vars(value), members, strict=True))
