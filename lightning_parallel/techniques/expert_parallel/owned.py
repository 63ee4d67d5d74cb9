"""Whose the parameters of experts are: one that something else has too, as a tied weight, stays whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_parallel.plan.experts import Experts, listed_in

Owner = tuple[str, int]
"""An expert of a list, by the name of the list and its number; all stacked experts are one owner."""

STACKED: Owner = ("", 0)


def own_parameters(model: nn.Module, found: Sequence[Experts]) -> set[nn.Parameter]:
    """The parameters with dimensions that stand nowhere but in one expert of a list, or in stacked experts.

    Raises:
        ValueError: an expert stands in two lists.
    """
    owners: dict[nn.Module, set[Owner | None]] = {}
    for module, owner in _owners(model, found):
        owners.setdefault(module, set()).add(owner)
    of: dict[nn.Parameter, set[Owner | None]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                of.setdefault(parameter, set()).update(owners.get(module, {None}))
    return {parameter for parameter, by in of.items() if len(by) == 1 and None not in by}


def _owners(model: nn.Module, found: Sequence[Experts]) -> Iterator[tuple[nn.Module, Owner]]:
    lists: dict[nn.Module, str] = {}
    for each in found:
        module = model.get_submodule(each.name)
        if each.form == "stacked":
            yield module, STACKED
            continue
        for number, member in enumerate(listed_in(module)):
            if member in lists:
                raise ValueError(
                    f"an expert stands in {lists[member]} and in {each.name}, whose ranks would divide it differently; "
                    "share its parameters instead of the module, or the whole list, or leave ExpertParallel out"
                )
            lists[member] = each.name
            yield from ((part, (each.name, number)) for part in member.modules())
