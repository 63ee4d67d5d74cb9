"""What a block writes to its modules and inputs, which a recomputation finds as the forward did, and does not write.

Running statistics, counters, numbers of tokens by expert, a loss that is kept in an attribute for the step to read: a
block that is not recomputed reads and writes them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lightning_parallel.collectives.made_of import version
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.values import tensors_of

T = TypeVar("T")

OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes in which modules keep their parts, and hooks."""
WATCHED = (bool, int, float, complex, str, type(None), tuple, list, dict, set, Tensor)
"""What may be put back. Modules, functions and other objects stay as they are: nobody knows what is in them."""
HOLDING = frozenset((list, tuple, dict, set))
"""What is copied with what is in it; a block may keep long lists of anything else, which are copied at once."""
PLAIN = frozenset((Tensor, nn.Parameter))
ABSENT = object()
_not_compiled: Callable[[T], T] = cast(Any, torch.compiler.disable)
"""What runs behind the break of a graph would be compiled, too."""

Place = tuple[dict[str, Any], str, int]
"""The attributes or the buffers of a module, a key among them, and the number of the module."""
Slot = tuple[dict[str, Any], str, str]
"""A table of parameters, a key in it, and the path of the parameter."""
Versions = dict[tuple[int | str, int], Any]
"""Of tensors, by the number of a module or the path of a parameter, and by which object it is."""


@dataclass
class Found:
    """What a forward found, for its recomputations.

    Attributes:
        modules: what modules held at their places, with copies of tensors that the block is known to write.
        parameters: the same of parameters.
        learned: of all parameters of the block, whether they did.
        versions: of tensors of modules and of parameters; none after the forward.
        given: the tensors that the block got, with their versions; none after the forward.
        late: tensors that the block wrote for the first time.
    """

    modules: list[tuple[Place, Any]]
    parameters: list[tuple[Slot, Tensor]]
    learned: list[bool]
    versions: Versions
    given: list[tuple[Tensor, Any]]
    late: list[Tensor] = field(default_factory=list)


class Effects:
    """Watches what a block writes to its modules, its parameters and what it is given.

    Its first forward tells, for which all is copied. Later ones copy what the block is known to write:

    | written for the first time in a later forward | then |
    |---|---|
    | an attribute that is set | nothing: what it was is there |
    | a tensor of a module | it is written once; the recomputation of this forward finds it as it is |
    | a parameter, or a tensor that the block is given | ValueError: gradients would be of what was written |

    Args:
        block: whose forward is recomputed.
    """

    def __init__(self, block: nn.Module) -> None:
        self._kind = type(block).__name__
        parts = list(block.named_modules())
        self._tables: list[tuple[dict[str, Any], int]] = [
            table for number, (_, part) in enumerate(parts) for table in ((vars(part), number), (part._buffers, number))
        ]
        self._places: list[Place] = []
        self._known = -1
        self._parameters: list[Slot] = [
            (part._parameters, name, f"{path}.{name}".lstrip(".")) for path, part in parts for name in part._parameters
        ]
        self._first = True
        self._writes_modules = set(range(len(parts)))
        """The numbers of the modules whose tensors the block may write."""
        self._written = self._parameters
        """Those of them that the block may write, mostly none."""
        self._writes_inputs = True

    def kept(self, given: Any) -> Any:
        """Lists, dicts and sets as they are now, with copies of tensors if the block may write to them."""
        return _with_copies(copied(given)) if self._writes_inputs else copied(given)

    @_not_compiled
    def before(self, given: Any) -> Found:
        """What the block finds that is about to get these arguments."""
        modules = [((table, key, n), self._kept(table.get(key), n)) for table, key, n in self._now()]
        slots = [slot for slot in self._written if slot[0][slot[1]] is not None]
        parameters = [(slot, _memory(slot[0][slot[1]]).clone()) for slot in slots]
        return Found(modules, parameters, self._learning(), self._versions(), _versions_of(given))

    @_not_compiled
    def after(self, found: Found) -> None:
        """The forward has run that found this."""
        now = self._versions()
        before = found.versions if found.versions != now else {}
        changed = {place for (place, which), then in before.items() if now.get((place, which), then) != then}
        paths = {place for place in changed if isinstance(place, str)}
        gives = any(version(own) != then for own, then in found.given)
        if self._first:
            self._learn(found, paths, gives)
        else:
            self._require_known(paths, gives)
            found.late = self._late(changed - self._writes_modules)
        self._writes_modules |= {place for place in changed if isinstance(place, int)}
        found.versions, found.given = {}, []

    def _learn(self, found: Found, paths: set[str], gives: bool) -> None:
        """After the first forward: of what the block may write there is left what it has written."""
        self._first, self._writes_inputs, self._writes_modules = False, gives, set()
        with _disable_current_modes():
            found.parameters = [each for each in found.parameters if each[0][2] in paths or _differs(*each)]
        self._written = [slot for slot, _ in found.parameters]

    def _require_known(self, paths: set[str], gives: bool) -> None:
        inputs = ["what it is given"] if gives and not self._writes_inputs else []
        if late := [*sorted(paths - {path for _, _, path in self._written}), *inputs]:
            raise ValueError(
                f"{self._kind} writes to {', '.join(late)} in its forward, which it did not the first time: "
                "ActivationCheckpoint kept no copy, and gradients would be of what is written; write in every forward, "
                "or in the step or a hook, as on_train_batch_end, or train without ActivationCheckpoint"
            )

    @contextmanager
    def again(self, found: Found) -> Iterator[None]:
        """Inside, the block finds what it found before the forward; afterwards it has what it has now."""
        places = self._now()
        learning = self._let_learn(found.learned)
        live = [table.get(key, ABSENT) for table, key, _ in places]
        with _disable_current_modes():  # what selective checkpointing remembers is of the forward alone
            memory = [*found.late, *[_memory(table[name]) for (table, name, _), _ in found.parameters]]
            written = [(each, each.clone()) for each in memory]
            for (table, name, _), value in found.parameters:
                _memory(table[name]).copy_(value)
            for (table, key, number), value in found.modules:
                given = self._kept(value, number)
                if given is not table.get(key) and isinstance(given, WATCHED):
                    table[key] = given
        try:
            yield
        finally:
            self._let_learn(learning)
            self._put_back(places, live)
            with _disable_current_modes():
                for each, value in written:
                    each.copy_(value)

    def _learning(self) -> list[bool]:
        tensors = [table[name] for table, name, _ in self._parameters]
        return [tensor is not None and tensor.requires_grad for tensor in tensors]

    def _let_learn(self, which: list[bool]) -> list[bool]:
        """Freezes the other parameters; returns which ones learned: a step may change that after the forward."""
        now = self._learning()
        for (table, name, _), learns, learned in zip(self._parameters, which, now, strict=True):
            if learns is not learned:
                table[name].requires_grad_(learns)
        return now

    def _put_back(self, places: list[Place], live: list[Any]) -> None:
        if self._now() is not places:
            known = {(id(table), key) for table, key, _ in places}
            for table, key in [(table, key) for table, key, _ in self._now() if (id(table), key) not in known]:
                if isinstance(table[key], WATCHED):
                    del table[key]
        for (table, key, _), value in zip(places, live, strict=True):
            if table.get(key, ABSENT) is not value and isinstance(value, WATCHED):
                table[key] = value

    def _versions(self) -> Versions:
        """By which it is known what a forward writes in place.

        Kernels of norms write statistics without counting that as a version, but they count batches beside them.
        """
        held = [(number, table.get(key)) for table, key, number in self._now()]
        found: Versions = {(number, id(each)): version(each) for number, each in held if isinstance(each, Tensor)}
        parameters = [(path, table[name]) for table, name, path in self._parameters]
        found |= {(path, id(each)): _own(each)._version for path, each in parameters if each is not None}
        return found

    def _late(self, late: set[int | str]) -> list[Tensor]:
        """The tensors of modules that were taken to write none."""
        held = [(number, table.get(key)) for table, key, number in self._now() if number in late]
        return [each.data for _, each in held if isinstance(each, Tensor) and not each.requires_grad]

    def _now(self) -> list[Place]:
        """The places that there are."""
        count = sum([len(table) for table, _ in self._tables])
        if count != self._known:
            self._known = count
            self._places = [(table, key, n) for table, n in self._tables for key in table if key not in OWN]
        return self._places

    def _kept(self, value: Any, number: int) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone() if number in self._writes_modules and not value.requires_grad else value
        return copied(value)


def _differs(slot: Slot, value: Tensor) -> bool:
    now = _memory(slot[0][slot[1]])
    return now.shape == value.shape and not torch.equal(value, now)  # what ZeRO took back is of another shape


def _memory(parameter: Any) -> Tensor:
    """What a rank has of a parameter, of which copies and writes count as no versions."""
    return _own(parameter).data


def _own(tensor: Any) -> Tensor:
    if type(tensor) in PLAIN:
        return cast(Tensor, tensor)
    own: Tensor = tensor.own if isinstance(tensor, Divided) else local(tensor)
    return own


def _versions_of(given: Any) -> list[tuple[Tensor, Any]]:
    return [(own, version(own)) for own in map(_own, tensors_of(given))]


@_not_compiled
def _with_copies(given: Any) -> Any:
    copies: dict[int, Tensor] = {}  # what is given twice, as queries and keys are, stays one tensor
    with _disable_current_modes():
        for each in tensors_of(given):
            copies[id(each)] = each if isinstance(each, nn.Parameter) else each.clone()
    return tree_map_only(Tensor, lambda each: copies.get(id(each), each), given)


def copied(value: Any) -> Any:
    """Lists, dicts and sets as they are now, with what is in them."""
    if type(value) in (list, tuple):
        return type(value)(value if HOLDING.isdisjoint(map(type, value)) else map(copied, value))
    if type(value) is dict:
        return {key: copied(member) for key, member in value.items()}
    return set(value) if type(value) is set else value
