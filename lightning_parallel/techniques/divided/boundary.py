"""Divided tensors on their way into and out of what a compiler reads.

A graph gets and returns plain tensors: a rank's own elements. Which elements they are is told beside them, by a mark,
and is a constant of the graph. A mark is the cuts of a divided tensor, the ranks of an alike parameter, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided, InGraph, alike

Forward = Callable[..., Any]


def across(module: nn.Module, forward: Forward, compiled: Callable[[Forward], Forward]) -> Forward:
    """Compiles a forward that takes, returns, and finds in the module's parameters, tensors that ranks have divided.

    Args:
        module: whose forward it is.
        forward: takes and returns divided tensors.
        compiled: what makes a compiled function of one that takes and returns plain tensors.

    Returns:
        The compiled forward, for plain and divided tensors.
    """
    tables = [part._parameters for part in module.modules()]
    told: list[Any] = []

    def inside(own: list[Any], marks: list[Any], form: Any, places: list[Any]) -> Any:
        with InGraph():
            args, kwargs = tree_unflatten([_made(*each) for each in zip(own, marks, strict=True)], form)
            plain = [tables[number][name] for number, name, _ in places]
            for parameter, (number, name, mark) in zip(plain, places, strict=True):
                tables[number][name] = _made(parameter, mark)
            output = forward(*args, **kwargs)
            for parameter, (number, name, _) in zip(plain, places, strict=True):
                tables[number][name] = parameter
            for ranks in _ranks(marks, places):
                ranks.last_in_graph = None
            told.clear()
            return tree_map(lambda leaf: _told(leaf, told), output)

    run = compiled(inside)

    def outside(*args: Any, **kwargs: Any) -> Any:
        places = [(number, name, _mark(parameter)) for number, table in enumerate(tables)
                  for name, parameter in table.items() if isinstance(parameter, Divided)]  # fmt: skip
        leaves, form = tree_flatten((args, kwargs))
        own = [leaf.own if isinstance(leaf, Divided) else leaf for leaf in leaves]
        with _plain(tables, places):
            output = run(own, list(map(_mark, leaves)), form, places)
        leaves, form = tree_flatten(output)
        return tree_unflatten([_made(*each) for each in zip(leaves, told, strict=True)], form)

    return outside


@contextmanager
def _plain(tables: Any, places: list[Any]) -> Iterator[None]:
    """Inside, divided parameters are own elements: compilers look at all that a module has before they read a line."""
    before = [(tables[number], name, tables[number][name]) for number, name, _ in places]
    for table, name, divided in before:
        table[name] = divided.own
    try:
        yield
    finally:
        for table, name, divided in before:
            table[name] = divided


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
