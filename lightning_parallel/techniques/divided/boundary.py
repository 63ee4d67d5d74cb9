"""Divided tensors on their way into and out of what a compiler reads.

A graph gets and returns plain tensors: a rank's own elements. Which elements they are is told beside them, by a mark,
and is a constant of the graph. A mark is the cuts of a divided tensor, the ranks of an alike parameter, or None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided, alike
from lightning_parallel.techniques.divided.watched import watched
from lightning_parallel.techniques.tools.redirect import Redirected, redirect_forward

log = logging.getLogger(__name__)

Forward = Callable[..., Any]


class CompiledForward:
    """A compiled forward that takes, returns, and finds in the module's parameters, tensors that ranks have divided.

    With divided tensors it is one graph or runs as it is: behind a break, code would meet them in the form of graphs.
    Where it runs as it is, as where attention sends messages along a divided sequence, its parts are compiled, such as
    the feed-forward of a block.

    Args:
        module: whose forward it is.
        forward: takes and returns divided tensors.
        compiled: what makes a compiled function of one that takes and returns plain tensors: `torch.compile`.
        must_compile: whether a forward that does not become one graph is an error.
    """

    def __init__(
        self, module: nn.Module, forward: Forward, compiled: Callable[..., Forward], must_compile: bool
    ) -> None:
        self._module, self._forward, self._must_compile = module, forward, must_compile
        self._tables: list[dict[str, Any]] = [part._parameters for part in module.modules()]
        self._parts = [vars(part) for part in module.modules() if part is not module]
        self._told: list[Any] = []
        self._compiled = compiled
        self._plain, self._in_one_graph = compiled(forward), compiled(self._inside, fullgraph=True)
        self._eager = self._too_many = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph on a rank's own elements."""
        looked_at = [(table, name, each) for table in self._tables for name, each in table.items()
                     if isinstance(each, Divided) and each.looked_at]  # fmt: skip
        with _shown(attrgetter("stored"), looked_at):  # no module computes with these
            return self._called(*args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        places = [(number, name, _mark(parameter)) for number, table in enumerate(self._tables)
                  for name, parameter in table.items() if isinstance(parameter, Divided)]  # fmt: skip
        leaves, form = tree_flatten((args, kwargs))
        marks = list(map(_mark, leaves))
        if not places and all(mark is None for mark in marks):
            return self._plain(*args, **kwargs)
        if self._eager:
            return self._forward(*args, **kwargs)
        own = [leaf.own if isinstance(leaf, Divided) else leaf for leaf in leaves]
        divided = [(self._tables[number], name, self._tables[number][name]) for number, name, _ in places]
        try:
            with _shown(attrgetter("own"), divided), _functions(self._parts):
                output = self._in_one_graph(own, marks, form, places)
        except TorchDynamoException as error:  # nothing of the forward has run yet
            self._give_up(error)
            return self._forward(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self._go_without()
            return self._forward(*args, **kwargs)
        leaves, form = tree_flatten(output)
        leaves = watched(leaves, _ranks([*marks, *self._told], places), self._parameters())
        return tree_unflatten([_made(*each) for each in zip(leaves, self._told, strict=True)], form)

    def _inside(self, own: list[Any], marks: list[Any], form: Any, places: list[Any]) -> Any:
        """What the compiler reads: plain tensors come in and go out."""
        tables, told = self._tables, self._told
        with InGraph():
            args, kwargs = tree_unflatten([_made(*each) for each in zip(own, marks, strict=True)], form)
            plain = [tables[number][name] for number, name, _ in places]
            for parameter, (number, name, mark) in zip(plain, places, strict=True):
                tables[number][name] = _made(parameter, mark)
            output = self._forward(*args, **kwargs)
            for parameter, (number, name, _) in zip(plain, places, strict=True):
                tables[number][name] = parameter
            for ranks in _ranks(marks, places):
                ranks.last_in_graph = None
            told.clear()
            return tree_map(lambda leaf: _told(leaf, told), output)

    def _parameters(self) -> list[Tensor]:
        """The module's parameters, as they are now."""
        return [each for table in self._tables for each in table.values() if each is not None and each.requires_grad]

    def _go_without(self) -> None:
        """Tells once that a length or a mode came for which there is no graph; ranks are alike in that."""
        if self._must_compile:
            raise
        if not self._too_many:
            log.warning(
                "%s was compiled as often as torch allows (torch._dynamo.config.recompile_limit = %s), and runs as it "
                "is for other lengths: pad batches to a few lengths, or raise the limit",
                type(self._module).__name__,
                torch._dynamo.config.recompile_limit,
            )
        self._too_many = True

    def _give_up(self, error: TorchDynamoException) -> None:
        if self._must_compile:
            raise error
        self._eager = True
        log.warning(
            "%s runs as it is, and only its parts are compiled: with tensors that ranks have divided it is one graph "
            "or none, and torch.compile says: %s",
            type(self._module).__name__,
            _said(error),
        )
        for part in _parts(self._module):
            redirect_forward(part, lambda forward, part=part: CompiledForward(part, forward, self._compiled, False))  # type: ignore[misc]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules within that have parts of their own: a graph of a single map is worth nothing."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # these have no forward
            yield from _parts(child)
        elif any(True for _ in child.children()):
            yield child


def _said(error: TorchDynamoException) -> str:
    """The message of a break on purpose, else the first line."""
    lines = str(error).strip().splitlines()
    return next((line.partition("Message: ")[2] for line in lines if "Message: " in line), lines[0])


class InGraph(TorchFunctionMode):
    """Asks for rules in place of compilers, which do not look for divided tensors in tuples: `torch.cat((a, b))`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, Divided) for leaf in tree_leaves((args, kwargs))):
            return Divided.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@contextmanager
def _shown(form: Callable[[Divided], Any], slots: list[tuple[dict[str, Any], str, Divided]]) -> Iterator[None]:
    """Inside, divided parameters have another form: compilers look at all that a module has before they read a line."""
    for table, name, divided in slots:
        table[name] = form(divided)
    try:
        yield
    finally:
        for table, name, divided in slots:
            table[name] = divided


@contextmanager
def _functions(parts: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, forwards of parts that a technique redirected are plain functions: graphs tell objects apart by identity.

    So blocks of a kind share a graph.
    """
    redirected = [(table, forward) for table in parts if isinstance(forward := table.get("forward"), Redirected)]
    for table, forward in redirected:
        table["forward"] = forward.wrapped
    try:
        yield
    finally:
        for table, forward in redirected:
            table["forward"] = forward


def _mark(leaf: Any) -> Any:
    if not isinstance(leaf, Divided):
        return None
    return leaf.cuts or leaf.ranks


def _ranks(marks: list[Any], places: list[Any]) -> list[Ranks]:
    """The groups that divide what comes in."""
    found = []
    for mark in [*marks, *[mark for _, _, mark in places]]:
        if isinstance(mark, Ranks):
            found.append(mark)
        elif mark is not None:
            found += [elements.ranks for elements in mark.values()]
    return found


def _made(own: Any, mark: Any) -> Any:
    """The divided tensor of these own elements and this mark."""
    if mark is None:
        return own
    return Divided(own, mark) if isinstance(mark, dict) else alike(own, mark)


def _told(leaf: Any, told: list[Any]) -> Any:
    """A leaf's own elements, the only thing that a graph can return; its cuts are added to `told`."""
    divided = isinstance(leaf, Divided)
    told.append(leaf.cuts if divided else None)
    return leaf.own if divided else leaf
