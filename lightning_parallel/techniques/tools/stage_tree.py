"""The module tree of a pipeline stage: replacements for the parameters and buffers that other stages hold.

| state    | when                              | tensors of this stage | tensors of other stages                |
|----------|-----------------------------------|-----------------------|----------------------------------------|
| local    | techniques and checkpoints work   | as techniques need    | `Absent` attributes, in no table       |
| in steps | the user's step runs              | as techniques need    | `Absent`, in the tables                |
| exposed  | hooks, callbacks and helpers run  | `Staged`              | `Staged` without memory, in the tables |

A table is the `_parameters` or `_buffers` of a module. Modules keep their class, children and hooks in all states.
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
from lightning_parallel.techniques.tools.replaced_parameters import redirect_to, renew_weights, stop_redirect, tied
from lightning_parallel.techniques.tools.shards import copy_user_attributes
from lightning_parallel.techniques.tools.staged import Home, Staged, StageRanks, hollow, stage, unstage

KEY = "_lightning_parallel_stages"
SHARED = "_lightning_parallel_shared"  # marks parameters of which ranks of other stages have copies


@dataclass
class _Remote:
    """A parameter or buffer of another stage, at one of its places."""

    module: nn.Module
    entries: dict[str, Any]  # the table of `module`: its `_parameters` or `_buffers`
    name: str  # the key in this table
    fqn: str
    absent: Absent  # in the module during a step
    tensor: Tensor  # in the module between steps: the original without memory; on meta until `attach`
    # tables and keys of all places of a tied tensor: this rank may hold it at another one
    tied: list[tuple[dict[str, Any], str]]


class StageTree:
    """Replaces the tensors of other stages in a model; starts in the state `local`.

    Args:
        model: the full model.
        names: FQN of each parameter and buffer of other stages -> its name in messages.
        device: the device on which their values would be.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
        self._model = model
        self.written = set[str]()  # names in messages of the absent parameters to which code wrote
        self.exposed = False  # whether the state is `exposed`
        self._ranks: StageRanks | None = None
        self._places: list[tuple[dict[str, Any], str, Home]] = []
        self._staged: list[tuple[dict[str, Any], str, Tensor]] = []  # tables, keys, staged tensors
        self._remotes: list[_Remote] = []
        self._orders: list[tuple[dict[str, Any], list[str]]] = []  # tables with remote tensors, all their keys in order
        self._ties = {name: group for group in tied(model.named_parameters(remove_duplicate=False)) for name in group}
        replacements: dict[int, tuple[Absent, Tensor]] = {}
        for module, entries, name, fqn, tensor in _entries(model):
            if fqn in names:
                if id(tensor) not in replacements:
                    is_parameter, what = isinstance(tensor, nn.Parameter), names[fqn]
                    requires_grad = tensor.requires_grad and is_parameter
                    absent = Absent(tensor, device, what, learns=requires_grad, parameter=is_parameter)
                    absent.writes = self.written.add if is_parameter else None
                    copy_user_attributes(absent, tensor)
                    replacements[id(tensor)] = absent, tensor
                    if not tensor.is_meta:
                        tensor.data = hollow(tensor, device)
                tied_names = [each.rpartition(".") for each in self._ties.get(fqn, ())]
                places = [(model.get_submodule(owner)._parameters, key) for owner, _, key in tied_names]
                self._remotes.append(_Remote(module, entries, name, fqn, *replacements[id(tensor)], places))
                if not self._orders or self._orders[-1][0] is not entries:
                    self._orders.append((entries, list(entries)))
        self._recurrent = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
        self._remote_ids = {id(each.tensor) for each in self._remotes}
        self._take_out()
        vars(model)[KEY] = self
        for module in model.modules():
            parts = list(module.modules())
            absents = [each for part in parts for each in vars(part).values() if isinstance(each, Absent)]
            held = [each for part in parts for each in part._parameters.values() if each is not None]
            if not held and any(isinstance(each, nn.Parameter) for each in absents):
                for part in parts:
                    vars(part)[ELSEWHERE] = True  # patterns of the plan skip the module on this rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the tree out of copies of the model."""
        return type(None), ()

    # ---------------------------------------------------------------- states

    def attach(self, ranks: StageRanks, held: Sequence[set[str]]) -> None:
        """Set which ranks of the pipeline hold each tensor: `held` has the FQNs of the tensors of each rank.

        Tensors of other stages that `configure_model` built on meta move to the ranks' device.
        """
        self._ranks, places = ranks, list[tuple[dict[str, Any], str, Home]]()
        on_device: dict[int, Tensor] = {}
        for remote in self._remotes:
            if remote.tensor.is_meta:
                if (key := id(remote.tensor)) not in on_device:
                    on_device[key] = hollow(remote.tensor, ranks.device)
                    if isinstance(remote.tensor, nn.Parameter):
                        on_device[key] = nn.Parameter(on_device[key], remote.tensor.requires_grad)
                        copy_user_attributes(on_device[key], remote.tensor)
                remote.tensor = on_device[key]
        self._remote_ids = {id(remote.tensor) for remote in self._remotes}
        with self.whole():
            for _, entries, name, fqn, _ in _entries(self._model):
                holders = [rank for rank, names in enumerate(held) if not names.isdisjoint(self._ties.get(fqn, (fqn,)))]
                if 0 < len(holders) < len(held):  # a tensor that all ranks hold needs no `Staged` class
                    places.append((entries, name, ranks.home(holders)))
        self._places = places

    def expose(self) -> None:
        """Enter the state `exposed`, for user code between steps."""
        if self._ranks is None or self.exposed:
            return
        self.exposed = self._ranks.exposed = True
        self._put_in()
        for entries, name, home in self._places:
            if (tensor := entries.get(name)) is not None:
                kind = type(tensor)
                if kind in home.kinds:  # the fast path: this runs for each parameter at both ends of each step
                    tensor.__class__ = home.kinds[kind]
                elif not issubclass(kind, Staged):
                    if kind not in (Tensor, nn.Parameter, DTensor, GlobalShard):
                        tensor.data_ptr()  # wait: a class such as that of a pending gather lasts until the first use
                    stage(tensor, home)
                self._staged.append((entries, name, tensor))
        self._ranks.tensors = [tensor for _, _, tensor in self._staged]

    def conceal(self) -> None:
        """Return from `exposed` to the state `local`.

        Raises:
            RuntimeError: code between steps replaced a parameter or buffer by another tensor.
            Exception: an operation between steps raised this on holders only, and its result has not been read since.
        """
        if self._ranks is None or not self.exposed:
            return
        replaced = [name for entries, name, tensor in self._staged if entries.get(name) is not tensor]
        failures = list[Exception]()
        held = {id(tensor): tensor for _, _, tensor in self._staged if id(tensor) not in self._remote_ids}
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [tensor.grad for tensor in held.values() if tensor.grad is not None]
        for tensor in (*self._ranks.gradients, *gradients, *held.values()):
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
                f"{', '.join(sorted(set(replaced)))}: a hook replaced parameters or buffers of a pipeline's stage; "
                "change them in place (with torch.no_grad(): p.copy_(…)), or make them in configure_model"
            )

    @contextmanager
    def local(self) -> Iterator[None]:
        """Context manager: the state is `local` inside."""
        exposed = self.exposed
        self.conceal()
        try:
            yield
        finally:
            if exposed:
                self.expose()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context manager: all tensors are in the tables inside; those of other stages have no values."""
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
        """Context manager: absent parameters are in the tables inside, for steps that iterate over all parameters.

        Original parameters of other stages, which lists of the user may hold, compute as the absent ones meanwhile.
        """
        parameters = [remote for remote in self._remotes if remote.entries is remote.module._parameters]
        for remote in parameters:
            remote.entries[remote.name] = remote.absent
            redirect_to(remote.tensor, remote.absent)
        self._put_in_order()
        try:
            yield
        finally:
            for remote in parameters:
                stop_redirect(remote.tensor)
                remote.entries.pop(remote.name, None)

    def _put_in(self) -> None:
        for remote in self._remotes:
            vars(remote.module).pop(remote.name, None)
            remote.entries[remote.name] = remote.tensor
            for entries, key in remote.tied:  # this rank may hold the tensor at another of its places
                if (held := entries.get(key)) is not None and id(held) not in self._remote_ids:
                    remote.entries[remote.name] = held
                    break
        self._put_in_order()
        for recurrent in self._recurrent:
            renew_weights(recurrent)

    def _put_in_order(self) -> None:
        """Restore the order that the entries of the tables have in the full model; entries added since come last."""
        for entries, order in self._orders:
            if [*entries] != order:
                ordered = {name: entries.pop(name) for name in order if name in entries}
                added = dict(entries)
                entries.clear()
                entries.update(ordered | added)

    def _take_out(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for remote in self._remotes:
                remote.entries.pop(remote.name, None)
                if remote.absent.requires_grad != remote.tensor.requires_grad:  # a hook froze or unfroze it
                    remote.absent.requires_grad_(remote.tensor.requires_grad)
                vars(remote.module)[remote.name] = remote.absent
            for recurrent in self._recurrent:
                renew_weights(recurrent)

    # ---------------------------------------------------------------- questions

    @property
    def remote(self) -> dict[str, Tensor]:
        """Parameters and buffers of other stages by FQN, without values; the same objects after `attach`."""
        return {each.fqn: each.tensor for each in self._remotes}

    @property
    def absent(self) -> dict[str, Absent]:
        """The absent tensors that replace `remote` in a step, by FQN."""
        return {each.fqn: each.absent for each in self._remotes}

    def gradients_changed(self) -> None:
        """Note that a backward pass has run: only holders know now which parameters have gradients."""
        if self._ranks is not None:
            self._ranks.knows_gradients = False

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Leave the tree local for good; tensors that user code kept from between steps can still be read."""
        try:
            self.conceal()
        finally:
            if self._ranks is not None:
                self._ranks.exposed, self._ranks = True, None

    def restore(self, make: Callable[[Tensor], Tensor]) -> None:
        """Put tensors of other stages back for good, with the values that `make` returns. The state must be `local`."""
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
    """Return the `StageTree` of a model; None if it is not divided into stages."""
    return cast("StageTree | None", vars(model).get(KEY))


def _entries(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any], str, str, Tensor]]:
    """Yield module, table, key, FQN and tensor of each parameter and buffer; a tied one at each of its places."""
    for prefix, module in model.named_modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                if tensor is not None:
                    yield module, entries, name, f"{prefix}.{name}" if prefix else name, tensor
