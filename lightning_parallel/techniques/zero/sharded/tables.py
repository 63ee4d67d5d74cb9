"""What stands in the tables of modules while a step runs: shards, wholes, or what others have put there.

`fully_shard` puts shards and wholes there, whatever it finds. Others put there what looks whole to tensor parallel, or,
as `torch.func.functional_call` does, tensors with which a step is to compute.

| while a step runs, there stands | as shards become whole, or wholes shards | as the step ends |
|---------------------------------|------------------------------------------|------------------|
| the shard, or the whole         | the other one                            | as it is         |
| something else, or nothing      | as it is                                 | ValueError       |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_parallel.techniques.tools.leaves import taken_out
from lightning_parallel.techniques.zero.sharded.groups import (
    groups_of,
    has_begun,
    is_known,
    slots_of,
    states_of,
    whole_of,
)

NOTHING: Any = object()

Slot = tuple[dict[str, Any], str, Any]
"""A table, a name in it, and what `fully_shard` keeps of the parameter there."""


class Tables:
    """Watches over the tables of a model.

    Args:
        root: the module around its steps.
    """

    def __init__(self, root: Any) -> None:
        self._model = root.model
        groups = [group for state in states_of(root) for group in groups_of(state)]
        self._slots: list[tuple[Any, list[Slot]]] = [(group, list(_slots(group))) for group in groups]

    @contextmanager
    def others_stay(self, group: Any) -> Iterator[None]:
        """Around what `fully_shard` does with the parameters of a group within a step."""
        found = [other for each, slots in self._slots if each is group for other in _others(slots)]
        yield
        for table, name, _, other in found:
            if other is NOTHING:
                del table[name]
            else:
                table[name] = other

    def require_own(self) -> None:
        """Raises where something else is left as a step ends: no optimizer would know it."""
        for _, slots in self._slots:
            for table, name, *_ in _others(slots):
                path = next(path for path, module in self._model.named_modules() if module._parameters is table)
                raise taken_out(f"{path}.{name}" if path else name)

    def put_back(self) -> None:
        """After a step that failed: shards and wholes stand in their places, and no whole without memory elsewhere."""
        without_memory: dict[int, Any] = {}
        for group, slots in ((group, slots) for group, slots in self._slots if has_begun(group)):
            for table, name, parameter, _ in _others(slots):
                table[name] = whole_of(parameter) if group.is_unsharded else parameter.sharded_param
            if not group.is_unsharded:
                known = filter(is_known, group.fsdp_params)
                without_memory |= {id(whole_of(parameter)): parameter.sharded_param for parameter in known}
        for table in [module._parameters for module in self._model.modules()]:
            table.update({name: without_memory.get(id(each), each) for name, each in table.items()})


def _slots(group: Any) -> Iterator[Slot]:
    for parameter in group.fsdp_params:
        for module, name in slots_of(parameter):
            yield module._parameters, name, parameter


def _others(slots: list[Slot]) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    for table, name, parameter in slots:
        there = table.get(name, NOTHING)
        if there is None or (there is not parameter.sharded_param and there is not whole_of(parameter)):
            yield table, name, parameter, there
