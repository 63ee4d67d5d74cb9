"""What a step changes of the model around its forward, to put it back afterwards, where earlier stages do not come.

A stage leaves the step when its last block has returned. Modes, flags and plain attributes are as the call found them
from then on; what the step leaves changed where it runs to its end is told to all ranks, and theirs too. Values of
parameters nobody keeps twice: a step that changes them where earlier stages would miss it is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.observed.buffers import memory_of
from lightning_parallel.techniques.observed.positions import ancestors
from lightning_parallel.techniques.observed.refusals import UNDIVIDED
from lightning_parallel.techniques.pipeline_parallel.absent import absent_in
from lightning_parallel.techniques.pipeline_parallel.cut import Cut
from lightning_parallel.techniques.tools.elsewhere import hidden_tensors
from lightning_parallel.techniques.tools.leaves import leaf_of

TRAINS, LEARNS = attrgetter("training"), attrgetter("requires_grad")
PLAIN = (bool, int, float, str, type(None))

Path = tuple[str, str]
"""The FQN of a module, and one of its attributes."""

Was = tuple[list[bool], list[Any], list[bool], list[Any]]
"""The modes of all modules, the parameters and whether each learns, the plain attributes of what has blocks in it."""


@dataclass(frozen=True)
class Left:
    """What a step has left changed where it ran to its end.

    Attributes:
        modes: FQN of modules -> whether they train.
        attributes: plain ones of modules that have blocks in them, and their new values.
        put_back: whether parameters learn as before, if the step froze or thawed some; None where it did neither.
        written: whether it changed values of parameters outside of modules.
        behind: the FQN of those in blocks that had run before.
    """

    modes: Mapping[str, bool] = field(default_factory=dict)
    attributes: Mapping[Path, Any] = field(default_factory=dict)
    put_back: bool | None = None
    written: bool = False
    behind: frozenset[str] = frozenset()


class StepsChanges:
    """What the step that runs changes of the model, outside of its blocks.

    Args:
        model: of which this rank holds its stages' part.
        made: where it is cut.
    """

    def __init__(self, model: nn.Module, made: Cut) -> None:
        named = dict(model.named_modules())
        self._names, self._modules = list(named), list(named.values())
        self._held = [name for name, _ in model.named_parameters()]
        places = [name.rpartition(".") for name in self._held]
        self._tables = [named[owner]._parameters for owner, _, _ in places]
        self._keys = [key for _, _, key in places]
        self._hidden = frozenset(hidden_tensors(model))
        around = {name for block in made.seen.blocks for name in ancestors(block)}
        self._around = {name: named[name].__dict__ for name in sorted(around) if name}
        self._end_of_block = {block: 2 * number + 2 for number, block in enumerate(made.seen.blocks)}
        self._blocks = {block: named[block] for block in made.seen.blocks}
        self._begin()

    def _begin(self) -> None:
        self._written: dict[str, int] = {}  # and the last position
        self._written_early: set[str] = set()  # on a stage that left the step
        self._toggled: dict[str, tuple[bool, Tensor]] = {}  # whether each learned before the first time, and the last
        self._learns: dict[str, bool] = {}  # of parameters of which the step has changed it
        self._modes: dict[str, bool] = {}
        self._put_back: bool | None = None
        self._behind: frozenset[str] = frozenset()
        found = [(name, key) for name, table in self._around.items() for key in table if type(table[key]) in PLAIN]
        self._paths: list[Path] = [path for path in found if path[1] != "training"]
        self._places = [self._around[name] for name, _ in self._paths], [key for _, key in self._paths]
        self._attributes = list(map(dict.get, *self._places))

    # ---------------------------------------------------------------- one call of the step

    def now(self) -> Was:
        """The model as a call of the step finds it."""
        with torch._C.DisableTorchFunctionSubclass():  # rows that arrive are not waited for
            parameters = list(map(getitem, self._tables, self._keys))
            learn = list(map(LEARNS, parameters))
        return list(map(TRAINS, self._modules)), parameters, learn, list(map(dict.get, *self._places))

    def take_back(self, before: Was, first: bool) -> None:
        """A stage has left the step: the next call finds what this one found.

        Args:
            before: what that was.
            first: whether this was the first microbatch, of which it is kept what the call had changed.
        """
        now = self.now()
        if now[0] != before[0] or now[2] != before[2]:
            self._take_back_flags(before, now, first)
        if not all(map(is_, now[3], before[3])):
            for (name, key), value, changed in zip(self._paths, before[3], now[3], strict=True):
                if changed is not value and type(changed) in PLAIN:
                    self._around[name][key] = value
        if first:
            self._written_early |= self._written.keys() & set(self._held)
            self._written, self._toggled = {}, {}

    def _take_back_flags(self, before: Was, now: Was, first: bool) -> None:
        for module, trains in zip(self._modules, before[0], strict=True):
            module.training = trains
        pairs = zip(self._held, now[2], before[2], strict=True)
        self._learns.update({name: new for name, new, old in pairs if first and new != old})
        for parameter, learns, changed in zip(before[1], before[2], now[2], strict=True):
            if learns != changed:
                parameter.requires_grad = learns
                leaf_of(parameter)  # which learns as the parameter does

    def wrote(self, tensors: Iterable[Tensor], position: int) -> None:
        """Code outside of modules changes tensors in place; what hooks of a block change in it is done there."""
        for name, _ in self._named(tensors):
            if not _is_called([self._blocks[each] for each in ancestors(name) if each in self._blocks]):
                self._written[name] = position

    def toggled(self, tensors: Iterable[Tensor]) -> None:
        """Code outside of modules is about to say whether tensors learn."""
        for name, tensor in self._named(tensors):
            self._toggled[name] = self._toggled.get(name, (tensor.requires_grad, tensor))[0], tensor

    def _named(self, tensors: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Those that are parameters, or lie in the memory of one, with its name."""
        with torch._C.DisableTorchFunctionSubclass():
            names: dict[int, str] = {}
            for name, table, key in zip(self._held, self._tables, self._keys, strict=True):
                names[id(table[key])] = names[-_memory(table[key])] = name
            for tensor in tensors:
                what = absent_in([tensor])
                stands = what in self._hidden or isinstance(tensor, nn.Parameter)
                found = what if what and stands else names.get(id(tensor), names.get(-_memory(tensor)))
                if found is not None:
                    yield found, tensor

    def ended(self, before: Was, first: bool) -> None:
        """The step has come to its end; see `take_back`."""
        now = self.now()
        if first:
            modes = zip(self._names, before[0], now[0], strict=True)
            self._modes = {name: new for name, old, new in modes if old != new}
            toggled, same = self._toggled.values(), now[2] == before[2]
            self._put_back = same and all(t.requires_grad == was for was, t in toggled) if toggled or not same else None
            self._behind = frozenset(name for name, last in self._written.items() if last >= self._end_of(name))
        self._take_back_flags(before, now, first)

    def _end_of(self, name: str) -> float:
        """The position behind the block in which a parameter lies."""
        return next((self._end_of_block[each] for each in ancestors(name) if each in self._end_of_block), float("inf"))

    # ---------------------------------------------------------------- the whole batch

    @property
    def left(self) -> Left:
        """What the last stage's step has left changed."""
        pairs = zip(self._paths, map(dict.get, *self._places), self._attributes, strict=True)
        attributes = {path: new for path, new, old in pairs if type(new) in PLAIN and new != old}
        return Left(self._modes, attributes, self._put_back, bool(self._written), self._behind)

    @property
    def has_toggled(self) -> bool:
        """Whether the step has frozen parameters in this batch, or let some learn."""
        return bool(self._learns)

    def settle(self, left: Left) -> None:
        """Leaves the model as the step leaves it that ran to its end.

        Raises:
            RuntimeError: this rank's stages have missed what the step did behind its blocks, or may have.
        """
        written, learns = self._written_early, self._learns
        for (name, key), value in left.attributes.items():
            self._around[name][key] = value
        self._begin()
        if left.behind or (written and not left.written):
            raise RuntimeError(_missed(min(left.behind or written), "the values of", "are"))
        if learns and left.put_back is None:
            raise RuntimeError(_missed(min(learns), "requires_grad of", "is"))
        modules = dict(zip(self._names, self._modules, strict=True)) if left.modes else {}
        for name, trains in left.modes.items():
            modules[name].training = trains
        for name, table, key in zip(self._held, self._tables, self._keys, strict=True) if learns else ():
            if name in learns and not left.put_back:
                table[key].requires_grad = learns[name]


def _is_called(modules: Sequence[nn.Module]) -> bool:
    """Whether a call of one of these modules, hooks included, has not returned yet."""
    frame = sys._getframe(1) if modules else None
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and any(frame.f_locals["self"] is each for each in modules):
            return True
        frame = frame.f_back
    return False


def _memory(tensor: Tensor) -> int:
    """A number for the memory of what this rank has of a tensor."""
    if isinstance(tensor, Divided):
        return memory_of(tensor.own)
    return memory_of(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def _missed(name: str, what: str, verb: str) -> str:
    return (
        f"{what} {name} {verb} changed in a step, to be put back or changed again behind the blocks, but in a pipeline "
        "only the last stage runs a step to its end, and the others leave it when their last block has returned; do it "
        "in hooks, as on_train_batch_start and on_train_batch_end or on_validation_start and on_validation_end, or "
        f"around trainer.validate, or {UNDIVIDED}"
    )
