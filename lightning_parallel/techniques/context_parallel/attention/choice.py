"""Which method sends least: positions times heads that a rank sends for one layer, forward and backward.

With c ranks, teams of u of them, and s positions in all:

| | a rank sends | |
|---|---|---|
| ring, all_gather | 6 (c - 1) / c s h_kv | keys and values twice, their gradients once |
| ulysses | 4 (c - 1) / c² s (h + h_kv) | queries, keys, values and output; the same of gradients |
| hybrid | ulysses among u, with s u / c positions, and a ring of c / u with h_kv / u heads | |

A ring sends less where positions do not meet, as in the causal order: what is counted is what it will send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.context_parallel.attention.blocks import block_of, causal, full
from lightning_parallel.techniques.context_parallel.attention.layout import Layout
from lightning_parallel.techniques.context_parallel.attention.ulysses import heads_fit

METHODS = ("auto", "ring", "ulysses", "all_gather", "hybrid")


class Choice(NamedTuple):
    """A method, how many ranks swap positions for heads in it (1: none), and why it was taken."""

    method: str
    team: int
    reason: str


def chosen(
    method: str,
    elements: Elements,
    heads: int,
    key_heads: int,
    layout_of: Callable[[int], Layout],
    is_causal: bool = False,
    has_rows: bool = False,
) -> Choice:
    """The method that is taken. All ranks find the same.

    Args:
        method: that the user asked for.
        elements: the positions that each rank has.
        heads: of queries.
        key_heads: of keys and values.
        layout_of: how the ranks are laid out in teams of a size.
        is_causal: whether positions meet earlier ones only.
        has_rows: whether there is a mask in which positions differ.

    Raises:
        ValueError: heads that the method cannot divide.
    """
    ranks = elements.ranks.count
    if method in ("ring", "all_gather"):
        return Choice(method, 1, "as asked for")
    if method == "ulysses":
        _require_fit(heads, key_heads, ranks)
        return Choice(method, ranks, "as asked for")
    if method == "hybrid":
        return Choice(method, _largest_team(heads, key_heads, ranks), "as asked for")
    if has_rows:
        return Choice(
            "ring", 1, "a mask says which positions meet: a ring sends no others, and keeps its own rows of it"
        )
    sent = {
        team: _sent(layout_of(team), elements.size, heads, key_heads, is_causal)
        for team in _teams(heads, key_heads, ranks)
    }
    best = min(sent, key=lambda team: (sent[team], team))
    others = ", ".join(f"{_name(team, ranks)} {sent[team]:g}" for team in sorted(sent, key=sent.__getitem__)[1:])
    compared = f"a rank sends {sent[best]:g} heads of positions for a layer"
    return Choice(_method(best, ranks), best, f"{compared}, with {others}" if others else f"{compared}; no other fits")


def _teams(heads: int, key_heads: int, ranks: int) -> list[int]:
    return [team for team in range(1, ranks + 1) if ranks % team == 0 and heads_fit(heads, key_heads, team)]


def _method(team: int, ranks: int) -> str:
    return "ring" if team == 1 else "ulysses" if team == ranks else "hybrid"


def _name(team: int, ranks: int) -> str:
    return f"hybrid in teams of {team}" if 1 < team < ranks else _method(team, ranks)


def _sent(layout: Layout, size: int, heads: int, key_heads: int, is_causal: bool) -> float:
    """How many positions times heads a rank sends, on average."""
    members, ranks = len(layout.team.circle), layout.ranks
    swapped = 2 * (members - 1) * (2 * heads / members + 2 * max(1.0, key_heads / members)) * size / ranks
    relations = causal if is_causal else full
    meeting = sum(
        block_of(queries, keys, relations(queries, keys)).length
        for number, queries in enumerate(layout.runs)
        for other, keys in enumerate(layout.runs)
        if number != other
    )
    return swapped + 6 * max(1.0, key_heads / members) * meeting / len(layout.runs)


def _require_fit(heads: int, key_heads: int, ranks: int) -> None:
    if heads_fit(heads, key_heads, ranks):
        return
    fit = [str(size) for size in range(1, heads + 1) if heads_fit(heads, key_heads, size)]
    raise ValueError(
        f"method='ulysses' divides heads over {ranks} ranks, but attention has {heads} of queries and {key_heads} of "
        f"keys and values; use {_or(fit)} ranks, or method='ring'"
    )


def _largest_team(heads: int, key_heads: int, ranks: int) -> int:
    teams = [team for team in _teams(heads, key_heads, ranks) if 1 < team < ranks]
    if teams:
        return max(teams)
    sizes = [str(size) for size in range(4, 4 * ranks + 1) if _has_team(heads, key_heads, size)][:4]
    remedy = f"use {_or(sizes)} ranks, or method='ring'" if sizes else "use method='ring'"
    raise ValueError(
        f"method='hybrid' divides heads within teams and positions over several teams, but {ranks} ranks cannot form "
        f"teams for attention with {heads} heads of queries and {key_heads} of keys and values; {remedy}"
    )


def _has_team(heads: int, key_heads: int, ranks: int) -> bool:
    return any(1 < team < ranks for team in _teams(heads, key_heads, ranks))


def _or(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
