"""The divided model: while a step runs, its parameters compute as the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.parts import Part, is_part
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.leaves import leaf_of, taken_out
from lightning_parallel.techniques.tools.shards import divides, given_by_users, pieces


class Parameters:
    """The parameters of a model of which ranks have divided some.

    Args:
        model: whose they are.
        ranks: that have divided them.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self._tables = [(name, module._parameters) for name, module in model.named_modules() if module._parameters]
        self._parts: list[Any] = []
        """Those that became parts as this step began, or while it runs."""
        self._computing: dict[int, Any] = {}
        """What computes for each part, under its `id`: for wholes of `fully_shard`, which stay parts, too."""
        self._cuts: dict[int, tuple[Any, Cuts]] = {}
        """Of each spec of a DTensor, under its `id`."""
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and not elsewhere.is_shared(parameter):
                vars(parameter)["_replicated_path"] = name  # one that another stage has too is summed where it is used

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, parts of parameters compute as the whole."""
        if Part.step is self:
            yield
            return
        before, Part.step = Part.step, self
        slots: list[tuple[str, dict[str, Any], str, Any]] = []
        replaced: list[str] = []
        try:
            self.find()
            found = set(map(id, self._parts))
            slots += [(prefix, table, name, each) for prefix, table in self._tables for name, each in table.items()
                      if id(each) in found]  # fmt: skip
            yield
        finally:
            for prefix, table, name, part in slots:
                if table.get(name) is not part:
                    replaced.append(f"{prefix}.{name}" if prefix else name)
                    table[name] = part
            for part in self._parts:
                part.__class__ = DTensor
            self._parts.clear()
            # The next step's values may be others under the same version: `fully_shard` gathers anew below autograd.
            for made in self._computing.values():
                if made._gathers is not None:
                    made.forget()
            self._computing = {key: made for key, made in self._computing.items() if made._is_param}  # no gradients
            Part.step = before
        if replaced:
            raise taken_out(replaced[0])

    def find(self) -> None:
        """Within `computing`: those that have come since, too."""
        for _, table in self._tables:
            for parameter in table.values():
                kind: Any = type(parameter)
                if kind is DTensor or kind is Part:
                    self.take(parameter)

    def take(self, stored: Any) -> None:
        """See `Computing.take`."""
        made = vars(stored).get("computes")
        if made is not None and made.stored is stored and made.memory is stored._local_tensor:
            if made.own.requires_grad is not stored.requires_grad:
                leaf_of(stored)  # it was frozen, or let learn, between steps
        elif type(stored) is Part or is_part(stored):
            vars(stored)["computes"] = None
        else:
            return
        if type(stored) is DTensor:
            stored.__class__ = Part
            self._parts.append(stored)

    def of(self, part: Any) -> Any:
        """See `Computing.of`: the same in each step, as long as what is stored stays the same."""
        made, memory = part.computes, part._local_tensor
        if made is None or made.stored is not part or made.memory is not memory:
            is_parameter = isinstance(part, nn.Parameter)
            made = Divided(leaf_of(part) if is_parameter else memory, self._cuts_of(part))
            vars(made).update({**given_by_users(part), "stored": part, "memory": memory, "_is_param": is_parameter})
            part.computes = self._computing[id(part)] = made
        return made

    def _cuts_of(self, stored: Any) -> Cuts:
        spec, cuts = self._cuts.get(id(stored._spec), (None, {}))
        if spec is not stored._spec:
            cuts = cuts_of(stored, self.ranks)
            self._cuts[id(stored._spec)] = stored._spec, cuts
        return cuts


def cuts_of(parameter: Tensor, ranks: Ranks) -> Cuts:
    """The dimensions of a stored parameter that the ranks divide, and how; its placement is the one truth of it."""
    if not isinstance(parameter, DTensor):
        return {}
    names = parameter.device_mesh.mesh_dim_names or ()
    return {
        placement.dim: _elements(placement, parameter.shape[placement.dim], ranks)  # type: ignore[attr-defined]
        for axis, placement in zip(names, parameter.placements, strict=True)
        if axis == "tp" and divides(placement)
    }


def _elements(placement: Any, size: int, ranks: Ranks) -> Elements:
    return ranks.elements(size, [pieces(placement, size, ranks.count, rank) for rank in range(ranks.count)])
