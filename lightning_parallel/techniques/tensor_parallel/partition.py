"""The divided model: while it computes, its modules find parameters that look whole.

Between steps a parameter is what the lifecycle stores: a DTensor where `tp` divides it. While a module computes, its
table holds a `Divided` in its place, over the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, alike
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward
from lightning_parallel.techniques.tools.shards import divides, pieces

Slot = tuple[dict[str, Any], str]
"""The place of a parameter: a module's table, and its name there."""

Hidden = tuple[dict[str, Any], str, Tensor, Divided]
"""A parameter that is stored, its place, and what looks whole there for a while."""


class Partition:
    """Redirects the forwards of blocks, and of modules outside of them, so that they find parameters that look whole.

    Args:
        model: of whose parameters some are divided.
        blocks: the repeated layers that this rank has, by name.
        ranks: the ranks that divide parameters.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], ranks: Ranks) -> None:
        self.ranks = ranks
        inside = {part for block in blocks.values() for part in block.modules()}
        outside = {
            name: module
            for name, module in model.named_modules()
            if module not in inside and any(True for _ in module.parameters(recurse=False))
        }
        self._units = [Unit(name, block, ranks, deep=True) for name, block in blocks.items()]
        self._units += [Unit(name, module, ranks, deep=False) for name, module in outside.items()]
        for unit in self._units:
            redirect_forward(unit.module, unit.wrap)
            for part in unit.parts:  # a layer that recomputes what is in it calls them alone, in backward
                redirect_forward(part.module, part.wrap)

    @property
    def partial(self) -> list[str]:
        """The names of parameters of whose gradients ranks have summands."""
        return [name for unit in self._units for name in unit.summands]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that all ranks have alike, as they are now, by the names that `partial` has."""
        return {name: table[own] for unit in self._units for name, (table, own) in unit.alike.items()}

    @property
    def met(self) -> frozenset[str]:
        """The names of parameters that have met divided tensors, in this batch too."""
        return frozenset(name for unit in self._units for name in (*unit.summands, *unit.met))

    def meet(self, names: frozenset[str]) -> None:
        """Takes these parameters, as far as there are such here, for ones that have met divided tensors."""
        for unit in self._units:
            unit.met |= names & unit.alike.keys()

    def begin(self) -> None:
        """Before a batch: gradients of parameters that met divided tensors are from now on summed once a step."""
        for unit in self._units:
            unit.begin()
        self.ranks.met.clear()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, parameters look whole; those that ZeRO has sharded at the moment stay as they are."""
        hidden: list[Hidden] = []
        try:
            for unit in self._units:
                hidden += unit.show()
            yield
        finally:
            put_back(hidden)


class Unit:
    """A module in whose forward the parameters of it, and of those in it, look whole.

    Args:
        name: its FQN.
        module: a block, or a module outside of blocks.
        ranks: the ranks that divide parameters.
        deep: whether the parameters of modules within belong to it, as those of a block do.
    """

    def __init__(self, name: str, module: nn.Module, ranks: Ranks, deep: bool) -> None:
        self.name, self.module, self.ranks, self._deep = name, module, ranks, deep
        self.summands: list[str] = []
        """The names of alike parameters of whose gradients ranks have summands."""
        self.met: set[str] = set()
        """Names of those that met divided tensors since the batch began."""
        self._divided: list[tuple[dict[str, Any], str, Cuts, torch.Size]] = []
        self._wholes: dict[int, tuple[Divided, Tensor]] = {}
        self._alike: dict[str, tuple[Divided, int]] = {}
        self.alike: dict[str, Slot] = {}
        """Where the parameters are that all ranks have alike."""
        for own, parameter in module._parameters.items():
            if parameter is not None:
                self._enter(f"{name}.{own}" if name else own, (module._parameters, own), parameter)
        inner = [(own, part) for own, part in module.named_modules() if own and part._parameters] if deep else []
        self.parts = [Unit(f"{name}.{own}", part, ranks, deep=False) for own, part in inner]
        """The modules within that have divided parameters of their own."""
        for part in self.parts:
            self._divided += part._divided
            self.alike.update(part.alike)
        self.parts = [part for part in self.parts if part._divided]

    def _enter(self, name: str, slot: Slot, parameter: Any) -> None:
        cuts = cuts_of(parameter, self.ranks)
        if cuts:
            self._divided.append((*slot, cuts, parameter._local_tensor.shape))
        else:
            self.alike[name] = slot

    def begin(self) -> None:
        """See `Partition.begin`."""
        self.summands += sorted(self.met - {*self.summands})
        self.met.clear()

    def wrap(self, forward: Forward) -> Forward:
        """The forward of the module, in which parameters look whole."""
        first = next(((table, own) for table, own, *_ in self._divided), None)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._deep and first is not None and isinstance(first[0][first[1]], Divided):
                return forward(*args, **kwargs)
            hidden = self.show()
            try:
                output = forward(*args, **kwargs)
                if not torch.compiler.is_dynamo_compiling() and self.ranks.met:
                    self._note()
            finally:
                put_back(hidden)
            return output

        return run

    def _note(self) -> None:
        """Keeps the names of parameters that met divided tensors in this forward."""
        self.met |= {name for name, (table, own) in self.alike.items() if id(table[own]) in self.ranks.met}

    def show(self) -> list[Hidden]:
        """Puts divided and alike parameters into the module's tables in place of what is stored; see `put_back`."""
        hidden: list[Hidden] = []
        for place, (table, own, cuts, shape) in enumerate(self._divided):
            kept = table[own]
            if isinstance(kept, DTensor) and kept._local_tensor.shape == shape:  # else ZeRO has sharded it again
                table[own] = shown = self._looking_whole(place, kept, cuts)
                hidden.append((table, own, kept, shown))
        for name in self.summands:
            table, own = self.alike[name]
            kept = table[own]
            if not isinstance(kept, (Divided, DTensor)):
                table[own] = shown = self._looking_alike(name, kept)
                hidden.append((table, own, kept, shown))
        return hidden

    def _looking_whole(self, place: int, kept: DTensor, cuts: Cuts) -> Divided:
        """The parameter as modules find it: the same tensor in each forward, as long as what is stored is the same."""
        shown, memory = self._wholes.get(place, (None, None))
        if shown is None or kept._local_tensor is not memory or not _is_of(shown, kept):
            shown = Divided(leaf_of(kept), cuts)
            shown.stored = kept
            self._wholes[place] = shown, kept._local_tensor
        return shown

    def _looking_alike(self, name: str, kept: Tensor) -> Divided:
        """The same of a parameter that all ranks have alike."""
        if torch.compiler.is_dynamo_compiling():
            return alike(kept, self.ranks)
        shown, memory = self._alike.get(name, (None, 0))
        if shown is None or shown.own is not kept or memory != kept.data_ptr():
            shown = alike(kept, self.ranks)
            self._alike[name] = shown, kept.data_ptr()
        return shown


def put_back(hidden: list[Hidden]) -> None:
    """What is stored stands in the tables of modules again."""
    for table, own, kept, shown in hidden:
        table[own] = kept
        shown.forget()


def _is_of(shown: Divided, kept: DTensor) -> bool:
    """Whether this is what modules find for a parameter; of one whose views were changed a step makes another."""
    if torch.compiler.is_dynamo_compiling() or type(shown) is not Wrapper or shown.stored is not kept:
        return False
    return shown.own.requires_grad is kept.requires_grad


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
