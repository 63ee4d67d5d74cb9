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
from lightning_parallel.techniques.tools.absent import Absent
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.moved import renew_weights, stand_again, stand_for, tied
from lightning_parallel.techniques.tools.shards import bear
from lightning_parallel.techniques.tools.staged import Home, Staged, StageRanks, hollow, stage, unstage

KEY = "_lightning_parallel_stages"
SHARED = "_lightning_parallel_shared"  # on parameters of which ranks that run other layers have copies


@dataclass
class _Remote:
    """A parameter or a buffer of other stages at one of its places."""

    module: nn.Module
    entries: dict[str, Any]  # the module's own table
    name: str
    fqn: str
    absent: Absent  # stands there in a step
    tensor: Tensor  # stands there between steps: the module's own without memory, or on meta before there are values
    # tables and names of tensors that this rank may hold under another name of a tied one
    tied: list[tuple[dict[str, Any], str]]


class StageTree:
    """Takes what other stages have out of a module's tables, and puts there what stands for it. Starts `local`.

    Args:
        model: whole.
        names: FQN of each parameter and buffer of other stages -> its name in messages.
        device: where their values would be.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
        self._model = model
        self.written = set[str]()  # the names in messages of absent parameters to which code wrote
        self.exposed = False  # whether user code runs between steps
        self._ranks: StageRanks | None = None
        self._places: list[tuple[dict[str, Any], str, Home]] = []
        self._staged: list[tuple[dict[str, Any], str, Tensor]] = []  # what was staged, and where it was
        self._remotes: list[_Remote] = []
        self._orders: list[tuple[dict[str, Any], list[str]]] = []  # tables with remotes, and all their names in order
        self._ties = {name: group for group in tied(model.named_parameters(remove_duplicate=False)) for name in group}
        made: dict[int, tuple[Absent, Tensor]] = {}
        for module, entries, name, fqn, tensor in _entries(model):
            if fqn in names:
                if id(tensor) not in made:
                    is_parameter, what = isinstance(tensor, nn.Parameter), names[fqn]
                    learns = tensor.requires_grad and is_parameter
                    absent = Absent(tensor, device, what, learns=learns, parameter=is_parameter)
                    absent.writes = self.written.add if is_parameter else None
                    bear(absent, tensor)
                    made[id(tensor)] = absent, tensor
                    if not tensor.is_meta:
                        tensor.data = hollow(tensor, device)
                others = [each.rpartition(".") for each in self._ties.get(fqn, ())]
                places = [(model.get_submodule(owner)._parameters, key) for owner, _, key in others]
                self._remotes.append(_Remote(module, entries, name, fqn, *made[id(tensor)], places))
                if not self._orders or self._orders[-1][0] is not entries:
                    self._orders.append((entries, list(entries)))
        self._recurrent = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
        self._remote_ids = {id(each.tensor) for each in self._remotes}
        self._take_out()
        vars(model)[KEY] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module is whole: nothing is taken out of it."""
        return type(None), ()

    # ---------------------------------------------------------------- states

    def attach(self, ranks: StageRanks, held: Sequence[set[str]]) -> None:
        """Says which ranks of the pipeline hold each tensor, by the FQNs of what each of them holds.

        Tensors of other stages that `configure_model` built on meta get the ranks' device.
        """
        self._ranks, places = ranks, list[tuple[dict[str, Any], str, Home]]()
        made: dict[int, Tensor] = {}
        for each in self._remotes:
            if each.tensor.is_meta:
                if (key := id(each.tensor)) not in made:
                    made[key] = hollow(each.tensor, ranks.device)
                    if isinstance(each.tensor, nn.Parameter):
                        made[key] = nn.Parameter(made[key], each.tensor.requires_grad)
                        bear(made[key], each.tensor)
                each.tensor = made[key]
        self._remote_ids = {id(each.tensor) for each in self._remotes}
        with self.whole():
            for _, entries, name, fqn, _ in _entries(self._model):
                holders = [rank for rank, names in enumerate(held) if not names.isdisjoint(self._ties.get(fqn, (fqn,)))]
                if 0 < len(holders) < len(held):  # what all ranks have needs no other class
                    places.append((entries, name, ranks.home(holders)))
        self._places = places

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
        parameters = [each for each in self._remotes if each.entries is each.module._parameters]
        for each in parameters:
            each.entries[each.name] = each.absent
            stand_for(each.tensor, each.absent)
        self._put_in_order()
        try:
            yield
        finally:
            for each in parameters:
                stand_again(each.tensor)
                each.entries.pop(each.name, None)

    def _put_in(self) -> None:
        for each in self._remotes:
            vars(each.module).pop(each.name, None)
            each.entries[each.name] = each.tensor
            for entries, key in each.tied:  # this rank may hold it under another of its names
                if (own := entries.get(key)) is not None and id(own) not in self._remote_ids:
                    each.entries[each.name] = own
                    break
        self._put_in_order()
        for recurrent in self._recurrent:
            renew_weights(recurrent)

    def _put_in_order(self) -> None:
        """Makes the tables' entries follow each other as in the whole module; what was added since comes last."""
        for entries, order in self._orders:
            if [*entries] != order:
                known = {name: entries.pop(name) for name in order if name in entries}
                later = dict(entries)
                entries.clear()
                entries.update(known | later)

    def _take_out(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for each in self._remotes:
                each.entries.pop(each.name, None)
                if each.absent.requires_grad != each.tensor.requires_grad:  # a hook has frozen it, or lets it learn
                    each.absent.requires_grad_(each.tensor.requires_grad)
                vars(each.module)[each.name] = each.absent
            for recurrent in self._recurrent:
                renew_weights(recurrent)

    # ---------------------------------------------------------------- questions

    @property
    def remote(self) -> dict[str, Tensor]:
        """Parameters and buffers of other stages by FQN, without values; always the same objects."""
        return {each.fqn: each.tensor for each in self._remotes}

    @property
    def absent(self) -> dict[str, Absent]:
        """What stands for these in a step, by FQN."""
        return {each.fqn: each.absent for each in self._remotes}

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


def _entries(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any], str, str, Tensor]]:
    """The module, the table, the name, the FQN and the tensor of each parameter and buffer at each of its places."""
    for prefix, module in model.named_modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                if tensor is not None:
                    yield module, entries, name, f"{prefix}.{name}" if prefix else name, tensor


def put_in_place(model: nn.Module, parameter: nn.Parameter, made: nn.Parameter) -> None:
    """Puts another parameter into all places of one."""
    bear(made, parameter)
    for _, entries, name, _, own in _entries(model):
        if own is parameter:
            entries[name] = made


def mark_emptied(model: nn.Module) -> None:
    """Marks modules of which other ranks hold all parameters: patterns of the plan do not find them on this one.

    The tree is local, or in a step.
    """
    for module in model.modules():
        held = [p for part in module.modules() for p in part._parameters.values() if p is not None]
        away = [each for part in module.modules() for each in vars(part).values() if isinstance(each, Absent)]
        parameters = [each for each in (*held, *away) if isinstance(each, nn.Parameter)]
        if parameters and all(isinstance(each, Absent) for each in parameters):
            for part in module.modules():
                vars(part)[ELSEWHERE] = True
