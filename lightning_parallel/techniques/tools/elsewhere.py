"""Tensors of the model that other stages of a pipeline have: what stands for them in this rank's module tree.

| state    | when                               | tensors of this stage | those of other stages             |
|----------|------------------------------------|-----------------------|-----------------------------------|
| local    | techniques and checkpoints do work | as techniques need    | `Absent` attributes, in no table  |
| in steps | the user's step runs               | as techniques need    | `Absent`, in the tables           |
| exposed  | hooks, callbacks and helpers run   | `Staged`              | `Staged` without memory, likewise |

Modules keep their class, their children and their hooks in all states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.plan.plan import ELSEWHERE
from lightning_parallel.techniques.tools.absent import Absent, Writes
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.moved import stand_again, stand_for
from lightning_parallel.techniques.tools.shards import bear
from lightning_parallel.techniques.tools.staged import Home, Staged, StageRanks, hollow, stage, unstage

KEY = "_lightning_parallel_stages"
SHARED = "_lightning_parallel_shared"


@dataclass
class _Table:
    """Parameters or buffers of one module, some of which other stages have.

    Attributes:
        prefix: of the FQN of the entries.
        entries: the module's own table.
        order: the names of all entries, in the order of the whole module.
        absent: for the step, by name.
        remote: for between steps, by name: the module's own without memory, or on meta before there are values.
        tied: by name, the tables and names of tensors that this rank may hold of a tied one.
    """

    module: nn.Module
    prefix: str
    entries: dict[str, Any]
    order: list[str]
    absent: dict[str, Absent]
    remote: dict[str, Tensor]
    tied: dict[str, list[tuple[dict[str, Any], str]]]


class StageTree:
    """Takes what other stages have out of a module's tables, and puts there what stands for it. Starts `local`.

    Args:
        model: whole.
        names: FQN of each parameter and buffer of other stages -> its name in messages.
        device: where their values would be.

    Attributes:
        writes: hears of code that writes to absent parameters.
        exposed: whether user code runs between steps.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
        self._model, self.writes, self.exposed = model, Writes(), False
        self._ranks: StageRanks | None = None
        self._places: list[tuple[dict[str, Any], str, Home]] = []
        self._staged: list[tuple[dict[str, Any], str, Tensor]] = []  # what was staged, and where it was
        self._ties = _ties(model)
        made: dict[int, tuple[Absent, Tensor]] = {}
        self._tables: list[_Table] = []
        for prefix, module in model.named_modules():
            for entries in (module._parameters, module._buffers):
                own = {name: t for name, t in entries.items() if t is not None and _full(prefix, name) in names}
                for name, tensor in own.items():
                    if id(tensor) not in made:
                        made[id(tensor)] = (
                            self._absent(tensor, device, names[_full(prefix, name)]),
                            _remote(tensor, device),
                        )
                if own:
                    absent = {name: made[id(tensor)][0] for name, tensor in own.items()}
                    remote = {name: made[id(tensor)][1] for name, tensor in own.items()}
                    tied = {name: self._tied_to(_full(prefix, name)) for name in own}
                    self._tables.append(_Table(module, prefix, entries, list(entries), absent, remote, tied))
        self._recurrent = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
        self._remote_ids = {id(remote) for _, remote in made.values()}
        self._take_out()
        vars(model)[KEY] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module is whole: nothing is taken out of it."""
        return type(None), ()

    def _absent(self, tensor: Tensor, device: torch.device, what: str) -> Absent:
        is_parameter = isinstance(tensor, nn.Parameter)
        absent = Absent(tensor, device, what, learns=tensor.requires_grad and is_parameter, parameter=is_parameter)
        absent.writes = self.writes if is_parameter else None
        bear(absent, tensor)
        return absent

    # ---------------------------------------------------------------- states

    def attach(self, ranks: StageRanks, held: Sequence[set[str]]) -> None:
        """Says which ranks of the pipeline hold each tensor, by the FQNs of what each of them holds."""
        self._ranks, places = ranks, list[tuple[dict[str, Any], str, Home]]()
        self._move_to(ranks.device)
        with self.whole():
            for prefix, module in self._model.named_modules():
                for entries in (module._parameters, module._buffers):
                    for name in entries:
                        ties = self._ties.get(_full(prefix, name), (_full(prefix, name),))
                        holders = [rank for rank, names in enumerate(held) if not names.isdisjoint(ties)]
                        if 0 < len(holders) < len(held):  # what all ranks have needs no other class
                            places.append((entries, name, ranks.home(holders)))
        self._places = places

    def _move_to(self, device: torch.device) -> None:
        """Gives a device to tensors of other stages that `configure_model` built on meta."""
        made: dict[int, Tensor] = {}
        for table in self._tables:
            for name, remote in table.remote.items():
                if remote.is_meta:
                    if id(remote) not in made:
                        made[id(remote)] = _made_of(hollow(remote, device), remote)
                    table.remote[name] = made[id(remote)]
        self._remote_ids = {id(remote) for table in self._tables for remote in table.remote.values()}

    def expose(self) -> None:
        """Puts the tree into the state between steps."""
        if self._ranks is None or self.exposed:
            return
        self.exposed = self._ranks.exposed = True
        self._put_in()
        for entries, name, home in self._places:
            if (tensor := entries.get(name)) is not None:
                kind = type(tensor)
                if kind in home.kinds:  # most are: this runs for each parameter at both ends of each step
                    tensor.__class__ = home.kinds[kind]
                elif not issubclass(kind, Staged):
                    if kind not in (Tensor, nn.Parameter, DTensor, GlobalShard):
                        tensor.data_ptr()  # a class until its first use, as of rows under way: they arrive now
                    stage(tensor, home)
                self._staged.append((entries, name, tensor))
        self._ranks.tensors = [tensor for _, _, tensor in self._staged]

    def conceal(self) -> None:
        """Takes `expose` back.

        Raises:
            RuntimeError: code between steps put another tensor in the place of a parameter.
            Exception: what an operation between steps raised on this rank alone, and nobody has read since.
        """
        if self._ranks is None or not self.exposed:
            return
        replaced = [name for entries, name, tensor in self._staged if entries.get(name) is not tensor]
        failures = list[Exception]()
        own = {id(tensor): tensor for _, _, tensor in self._staged if id(tensor) not in self._remote_ids}
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [tensor.grad for tensor in own.values() if tensor.grad is not None]
        for tensor in (*self._ranks.gradients, *gradients, *own.values()):
            if isinstance(tensor, Staged):
                tensor.__class__ = type(tensor).held  # type: ignore[assignment]
            if (failure := vars(tensor).pop("_failure", None)) is not None:
                failures.append(failure)
        self._staged.clear()
        self._ranks.gradients.clear()
        self._take_out()
        self.exposed = self._ranks.exposed = False
        if failures:
            raise failures[0]
        if replaced:
            raise RuntimeError(
                f"{', '.join(sorted(set(replaced)))}: a hook put another tensor in the place of a parameter or "
                "buffer of a pipeline's stage; change it in place (with torch.no_grad(): p.copy_(…)), or make it in "
                "configure_model"
            )

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the tree is local."""
        exposed = self.exposed
        self.conceal()
        try:
            yield
        finally:
            if exposed:
                self.expose()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the tables have all tensors: those of other stages have no values."""
        if self.exposed:
            yield
            return
        self._put_in()
        try:
            yield
        finally:
            self._take_out()

    @contextmanager
    def in_steps(self) -> Iterator[None]:
        """Inside, absent tensors are in the tables, as steps expect that ask for all parameters.

        Lists of the user's may hold the parameters of other stages: these stand for the absent ones.
        """
        tables = [table for table in self._tables if table.entries is table.module._parameters]
        kept = {id(remote): (remote, t.absent[name]) for t in tables for name, remote in t.remote.items()}
        for table in tables:
            table.entries.update(table.absent)
            if len(table.entries) > len(table.absent):
                _reorder(table)
        for remote, absent in kept.values():
            stand_for(remote, absent)
        try:
            yield
        finally:
            for remote, _ in kept.values():
                stand_again(remote)
            for table in tables:
                for name in table.absent:
                    table.entries.pop(name, None)

    def _put_in(self) -> None:
        for table in self._tables:
            for name, remote in table.remote.items():
                vars(table.module).pop(name, None)
                table.entries[name] = remote
                for entries, key in table.tied[name]:  # this rank may hold it under another of its names
                    if (own := entries.get(key)) is not None and id(own) not in self._remote_ids:
                        table.entries[name] = own
                        break
            if len(table.entries) > len(table.remote):  # else they were put there in order
                _reorder(table)
        if self._recurrent:
            _renew_weights(self._recurrent)

    def _take_out(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for table in self._tables:
                attributes = vars(table.module)
                for name, absent in table.absent.items():
                    table.entries.pop(name, None)
                    learns = table.remote[name].requires_grad
                    if absent.requires_grad != learns:  # a hook has frozen it, or lets it learn
                        absent.requires_grad_(learns)
                    attributes[name] = absent
            if self._recurrent:
                _renew_weights(self._recurrent)

    def _tied_to(self, name: str) -> list[tuple[dict[str, Any], str]]:
        places = [other.rpartition(".") for other in self._ties.get(name, ())]
        return [(self._model.get_submodule(owner)._parameters, key) for owner, _, key in places]

    # ---------------------------------------------------------------- questions

    @property
    def remote(self) -> dict[str, Tensor]:
        """Parameters and buffers of other stages by FQN, without values; always the same objects."""
        return {_full(table.prefix, name): tensor for table in self._tables for name, tensor in table.remote.items()}

    def gradients_changed(self) -> None:
        """A backward pass has run: only holders know which parameters have gradients."""
        if self._ranks is not None:
            self._ranks.knows_gradients = False

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Leaves the tree local for good; what was kept from between steps is read as before."""
        try:
            self.conceal()
        finally:
            if self._ranks is not None:
                self._ranks.exposed, self._ranks = True, None

    def restore(self, make: Callable[[Tensor], Tensor]) -> None:
        """Puts tensors of other stages back for good, as `make` makes them of those on meta. The tree is local."""
        self._put_in()
        for remote in dict.fromkeys(self.remote.values()):
            unstage(remote).data = make(remote)
            remote.grad = None
        for module in self._model.modules():
            vars(module).pop(ELSEWHERE, None)
        for parameter in self._model.parameters():
            vars(parameter).pop(SHARED, None)
        vars(self._model).pop(KEY, None)


def tree_of(model: nn.Module) -> StageTree | None:
    """The tree of a model of which other stages of a pipeline have tensors."""
    return cast("StageTree | None", vars(model).get(KEY))


def _remote(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        tensor.data = hollow(tensor, device)
    return tensor


def _made_of(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, nn.Parameter):
        return value.detach()
    made = nn.Parameter(value.detach(), like.requires_grad)
    bear(made, like)
    return made


def _reorder(table: _Table) -> None:
    entries = table.entries
    known = {name: entries.pop(name) for name in table.order if name in entries}
    later = dict(entries)
    entries.clear()
    entries.update({**known, **later})


def _renew_weights(recurrent: Sequence[nn.RNNBase]) -> None:
    """Recurrent layers keep a list of their weights."""
    for module in recurrent:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def put_in_place(model: nn.Module, parameter: nn.Parameter, made: nn.Parameter) -> None:
    """Puts another parameter into all places of one."""
    bear(made, parameter)
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is parameter:
                module._parameters[name] = made


def _ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(same) for same in names.values() if len(same) > 1 for name in same}


def mark_emptied(model: nn.Module) -> None:
    """Marks what other ranks run: patterns of the plan no longer find modules of which nothing is left on this one."""
    for module in model.modules():
        if is_elsewhere(module):
            for part in module.modules():
                vars(part)[ELSEWHERE] = True


def is_elsewhere(module: nn.Module) -> bool:
    """Whether other ranks hold all its parameters. The tree is local, or in a step."""
    tables = [(vars(part), part._parameters) for part in module.modules()]
    if any(p is not None and not isinstance(p, Absent) for _, table in tables for p in table.values()):
        return False
    absent = (each for names, table in tables for each in (*names.values(), *table.values()))
    return any(isinstance(each, Absent) and isinstance(each, nn.Parameter) for each in absent)


def mark_shared(model: nn.Module, is_shared: Callable[[str], bool]) -> None:
    """Marks the parameters of which ranks that run other layers have copies; asks for each by its FQN."""
    for name, parameter in model.named_parameters():
        if is_shared(name):
            vars(parameter)[SHARED] = True


def is_shared(parameter: Tensor) -> bool:
    """Whether ranks that run other layers have copies of it."""
    return SHARED in vars(parameter)


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
