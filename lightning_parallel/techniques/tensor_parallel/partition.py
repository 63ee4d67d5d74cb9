"""The divided model: while it computes, its modules find parameters that look whole.

Between steps a parameter is what the lifecycle stores: a DTensor where `tp` divides it. While a module computes, its
table holds a `Divided` in its place, over the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import has_torch_function_unary

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401  (enters them in the table)
from lightning_parallel.techniques.divided.rules.parameters import alike
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.leaves import leaf_of, taken_out
from lightning_parallel.techniques.tools.redirect import Forward, Surrounded, redirect_forward
from lightning_parallel.techniques.tools.shards import axes_dividing, divides, given_by_users, pieces

T = TypeVar("T")


class Place:
    """Where a module finds a parameter, and what it finds there while it computes.

    As long as what is stored stays the same, what looks whole is the same tensor in each forward.

    Args:
        table: the module's parameters.
        name: the parameter's in it.
        path: its FQN.
    """

    def __init__(self, table: dict[str, Any], name: str, path: str) -> None:
        self.table, self.name, self.path = table, name, path
        self.kept: Any = None
        """What was stored when `shown` was made."""
        self.shown: Any = None
        self.out = False
        """Whether it stands there, unless the user's code has put something else there."""
        self._memory: Any = None
        """Where the elements were when it was made."""

    @property
    def parameter(self) -> Any:
        """What stands there now."""
        return self.table[self.name]

    def show(self) -> bool:
        """Puts what looks whole there, if what is stored stands there and is not sharded further at the moment."""
        raise NotImplementedError


class DividedPlace(Place):
    """The place of a parameter of which ranks have different elements.

    Args:
        table: see `Place`.
        name: see `Place`.
        path: see `Place`.
        cuts: which elements.
    """

    def __init__(self, table: dict[str, Any], name: str, path: str, cuts: Cuts) -> None:
        super().__init__(table, name, path)
        self._cuts, self._axes = cuts, axes_dividing(table[name])

    def show(self) -> bool:
        """See `Place.show`; one whose views were changed is made anew."""
        kept, shown = self.table[self.name], self.shown
        if kept is not self.kept or kept._local_tensor is not self._memory or type(shown) is not Wrapper:
            if not isinstance(kept, DTensor) or axes_dividing(kept) > self._axes:
                return False
            shown = Divided(leaf_of(kept), self._cuts)
            shown.stored, shown._is_param = kept, True
            vars(shown).update({**given_by_users(kept), **vars(shown)})
            self.kept, self.shown, self._memory = kept, shown, kept._local_tensor
        elif shown.own.requires_grad is not kept.requires_grad:
            leaf_of(kept)
        self.table[self.name], self.out = shown, True
        return True


class AlikePlace(Place):
    """The place of a parameter that all ranks have alike, of whose gradients they have summands.

    Args:
        table: see `Place`.
        name: see `Place`.
        path: see `Place`.
        ranks: that add them up.
    """

    def __init__(self, table: dict[str, Any], name: str, path: str, ranks: Ranks) -> None:
        super().__init__(table, name, path)
        self._ranks = ranks

    def show(self) -> bool:
        """See `Place.show`."""
        kept = self.table[self.name]
        if self.out:
            return False
        if kept is not self.kept or kept.data_ptr() != self._memory or type(self.shown) is not Wrapper:
            # What functional_call put there is shown as it is.
            if isinstance(kept, (Divided, DTensor)) or not isinstance(kept, nn.Parameter):
                return False
            shown = alike(kept, self._ranks)
            vars(shown).update({**given_by_users(kept), **vars(shown)})
            self.kept, self.shown, self._memory = kept, shown, kept.data_ptr()
            self.shown._is_param = True
        self.table[self.name], self.out = self.shown, True
        return True


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
        self._hidden: list[Place] = []
        """Where they look whole now."""
        for unit in self._units:
            redirect_forward(unit.module, unit.wrap, Surrounded)
            for part in unit.parts:  # a layer that recomputes what is in it calls them alone, in backward
                redirect_forward(part.module, part.wrap, Surrounded)

    @property
    def partial(self) -> list[str]:
        """The names of parameters of whose gradients ranks have summands."""
        return [name for unit in self._units for name in unit.summands]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that all ranks have alike, as they are now, by the names that `partial` has."""
        return {name: place.parameter for unit in self._units for name, place in unit.alike.items()}

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
            if unit.met:
                unit.begin()
        self.ranks.met.clear()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, parameters look whole; those that ZeRO has sharded at the moment stay as they are."""
        outer, self._hidden = self._hidden, list[Place]()
        try:
            self.show()
            yield
        except BaseException:
            put_back(self._hidden)
            raise
        finally:
            hidden, self._hidden = self._hidden, outer
        unless_lost(None, put_back(hidden))

    def show(self) -> None:
        """Within `shown`: those that have come since, too."""
        for unit in self._units:
            self._hidden += unit.show()


class Unit:
    """A module in whose forward the parameters of it, and of those in it, look whole.

    Args:
        name: its FQN.
        module: a block, or a module outside of blocks.
        ranks: the ranks that divide parameters.
        deep: whether the parameters of modules within belong to it, as those of a block do.
    """

    def __init__(self, name: str, module: nn.Module, ranks: Ranks, deep: bool) -> None:
        self.module, self.ranks, self._deep = module, ranks, deep
        self.summands: list[str] = []
        """The names of alike parameters of whose gradients ranks have summands."""
        self.met: set[str] = set()
        """Names of those that met divided tensors since the batch began."""
        self._divided: list[DividedPlace] = []
        self.alike: dict[str, AlikePlace] = {}
        """The parameters that all ranks have alike, and no other stage of a pipeline has, by name."""
        for own, parameter in module._parameters.items():
            if parameter is not None:
                self._enter(f"{name}.{own}" if name else own, own, parameter)
        inner = [(own, part) for own, part in module.named_modules() if own and part._parameters] if deep else []
        self.parts = [Unit(f"{name}.{own}", part, ranks, deep=False) for own, part in inner]
        """The modules within that have divided parameters of their own."""
        for part in self.parts:
            self._divided += part._divided
            self.alike.update(part.alike)
        self.parts = [part for part in self.parts if part._divided]
        self._look_where()

    def _enter(self, name: str, own: str, parameter: Any) -> None:
        cuts, table = cuts_of(parameter, self.ranks), self.module._parameters
        if cuts:
            self._divided.append(DividedPlace(table, own, name, cuts))
        elif not elsewhere.is_shared(parameter):  # on another stage it may not meet any: it is summed where it is used
            self.alike[name] = AlikePlace(table, own, name, self.ranks)

    def begin(self) -> None:
        """See `Partition.begin`."""
        self.summands += sorted(self.met - {*self.summands})
        self.met.clear()
        for unit in (self, *self.parts):
            unit._look_where(self.summands)

    def wrap(self, forward: Forward) -> Forward:
        """The forward of the module, in which parameters look whole."""
        compute = _direct(self.module._parameters, forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            hidden: Sequence[Place] = ()
            try:
                for table, name in self._slots:
                    shown = table[name]
                    if type(shown) is not Wrapper:  # else what calls it shows them: the step, or a block
                        hidden = self.show()
                        break
                    stored: Any = shown.stored  # none of what the user put there, as by functional_call
                    if stored is not None and shown.own.requires_grad is not stored.requires_grad:
                        leaf_of(stored)  # code froze it, or lets it learn, past what is shown
            except KeyError as error:
                raise taken_out(str(error.args[0])) from error
            try:
                output = compute(*args, **kwargs)
                if self.ranks.met:
                    self._note()
            except BaseException:
                put_back(hidden)
                raise
            return unless_lost(output, put_back(hidden)) if hidden else output

        return run

    def _look_where(self, summands: Sequence[str] = ()) -> None:
        summed = [self.alike[name] for name in summands if name in self.alike]
        self._places: list[Place] = [*self._divided, *summed]
        """Where parameters look whole while the module computes."""
        self._slots = [(place.table, place.name) for place in self._places]

    def _note(self) -> None:
        """Keeps the names of parameters that met divided tensors in this forward."""
        self.met |= {name for name, place in self.alike.items() if id(place.parameter) in self.ranks.met}

    def show(self) -> list[Place]:
        """Puts what looks whole into the module's tables; returns where, see `put_back`."""
        return [place for place in self._places if place.show()]


def _direct(table: Mapping[str, Any], forward: Forward) -> Forward:
    """For that of `nn.Linear`, a forward that asks for its rule at once: torch's way there costs as much as the rule.

    Args:
        table: the parameters of the module.
        forward: of any module; torch's own serves for what is no divided product, for a bias that is none of the
            parameters, as one that is computed, and where modes look at operations.
    """
    if getattr(forward, "__func__", None) is not nn.Linear.forward:
        return forward

    def compute(input: Any) -> Any:  # noqa: A002  (as torch names it)
        weight, is_known = table.get("weight"), type(input) is Tensor or type(input) is Wrapper
        is_asked = is_known and type(weight) is Wrapper and has_torch_function_unary(weight)
        if not is_asked or "bias" not in table or torch._C._is_torch_function_mode_enabled():
            return forward(input)
        return Wrapper.__torch_function__(F.linear, (), (input, weight, table["bias"]))

    return compute


def put_back(hidden: Iterable[Place]) -> list[str]:
    """What is stored stands in the tables of modules again; returns the FQNs of what the user's code had replaced."""
    lost: list[str] = []
    for place in hidden:
        table, name, shown = place.table, place.name, place.shown
        try:  # a call of `get` would be one for each parameter in each forward
            if table[name] is not shown:
                lost.append(place.path)
        except KeyError:
            lost.append(place.path)
        table[name], place.out = place.kept, False
        if type(shown) is not Wrapper or shown._gathers is not None or shown._known is not None:
            shown.forget()
    return lost


def unless_lost(output: T, lost: Sequence[str]) -> T:
    """What a forward made, if `put_back` says that it left all parameters in their places."""
    if lost:
        raise taken_out(lost[0])
    return output


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
