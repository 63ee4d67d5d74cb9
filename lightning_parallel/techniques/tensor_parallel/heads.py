"""Sizes that attention modules keep as numbers: how many heads there are, how wide they are together.

A rank has some of the heads. A module that takes their number from an attribute gets this rank's number there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_parallel.techniques.tensor_parallel.layout import HEAD_COUNTS, Divided, parent_of

KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_heads", "num_query_groups")
WIDTHS = ("split_size", "embed_dim", "hidden_size", "all_head_size", "inner_dim", "n_embd", "d_model", "dim",
          "q_size", "kv_size", "hidden_dim", "inner_size", "intermediate_size")  # fmt: skip
LEVELS = range(4)
"""What is set: nothing; the module's numbers of heads; also those in its `config`; also its widths."""

Undo = Callable[[], None]


def set_local_sizes(model: nn.Module, divided: Mapping[str, Divided], ranks: int, level: int) -> list[Undo]:
    """Gives the modules that hold divided ones this rank's sizes; returns how to take that back.

    Args:
        model: a block.
        divided: its divided modules, by their names in it.
        ranks: among how many ranks.
        level: one of `LEVELS`.
    """
    undo: list[Undo] = []
    parents = {parent_of(name) for name, each in divided.items() if each.style.kind == "rowwise"} if level else set()
    for name in sorted(parents):
        module = model.get_submodule(name)
        widths = {each.features for other, each in divided.items() if parent_of(other) == name}
        for attribute, value in _changes(module, widths, ranks, level):
            undo.append(_set(module, attribute, value))
    return undo


def _changes(module: nn.Module, widths: set[int], ranks: int, level: int) -> Iterator[tuple[str, Any]]:
    counts = (*HEAD_COUNTS, *KEY_VALUE_COUNTS)
    yield from _divided_numbers(vars(module), counts, ranks)
    config = vars(module).get("config")
    if level >= 2 and config is not None:
        own = copy.copy(config)
        for name, value in _divided_numbers(vars(config), counts, ranks):
            setattr(own, name, value)
        yield "config", own
    if level >= 3:
        total = {n: v for n, v in vars(module).items() if isinstance(v, int) and v in _multiples(widths)}
        yield from _divided_numbers(total, WIDTHS, ranks)


def _multiples(widths: set[int]) -> set[int]:
    """A fused projection has several times the width of one of its parts."""
    return widths | {width // 3 for width in widths if width % 3 == 0}


def _divided_numbers(values: Mapping[str, Any], names: tuple[str, ...], ranks: int) -> Iterator[tuple[str, int]]:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value % ranks == 0:
            yield name, value // ranks


def _set(module: nn.Module, name: str, value: Any) -> Undo:
    before, vars(module)[name] = vars(module)[name], value
    return lambda: vars(module).update({name: before})
