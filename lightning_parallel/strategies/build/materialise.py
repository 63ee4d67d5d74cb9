"""Makes of a model on meta, or whole on every rank, what each rank keeps; and the whole model after the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.build.deferred_init import Conversions, DeferredInit
from lightning_parallel.strategies.build.kept_tensors import kept_tensors, replace_kept_tensors
from lightning_parallel.strategies.build.orphan_modules import OrphanModules
from lightning_parallel.strategies.lightning_package import _update_properties
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.shards import as_shard, bear, is_sharded, shard_of, whole_tensor

log = logging.getLogger(__name__)


class Deferred:
    """The tensors of a model that are still on meta, and how to make them."""

    def __init__(self) -> None:
        self._record: DeferredInit | None = None
        self._wanted: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._orphans: OrphanModules | None = None

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """Modules built inside are remembered, to be made on `device`."""
        self._record = self._record or DeferredInit(device)
        with self._record:
            yield

    def converting(self) -> AbstractContextManager[Any]:
        """Conversions of remembered tensors are remembered."""
        return nullcontext() if self._record is None else Conversions(self._record)

    def find(self, module: nn.Module) -> None:
        """Notes what is on meta, before techniques replace parameters by their shards."""
        named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        self._wanted = {name: tensor for name, tensor in named.items() if tensor.is_meta}
        self._kept = self._recorded(kept_tensors(module))
        self._orphans = OrphanModules(module, set(self._wanted) - set(self._recorded(self._wanted)))

    def _recorded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        record = self._record
        return {} if record is None else {name: tensor for name, tensor in tensors.items() if record.owns(tensor)}

    def draw(self, group: dist.ProcessGroup) -> None:
        """Leaves random states as the build would have, without making its tensors yet. Collective over `group`."""
        if self._record is not None:
            self._share_start(self._record, group)
            self._record.replay({}, lambda *_: None)

    @torch.no_grad()
    def materialise(
        self, module: nn.Module, device: torch.device, shards: torch.device, group: dist.ProcessGroup
    ) -> None:
        """Makes every tensor, one after the other, and lets each rank keep its part.

        All ranks draw from the random state of rank 0, so that shards are parts of one model even without a seed.
        """
        if not self._wanted and not self._kept:
            return
        _allocate(module, device, shards)
        tree = elsewhere.tree_of(module)
        with nullcontext() if tree is None else tree.whole():
            self._make(module, device, group)
        self._record, self._wanted, self._kept, self._orphans = None, {}, {}, None

    def _make(self, module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> None:
        if self._record is not None:
            self._share_start(self._record, group)
            self._replay(self._record, module)
        if self._orphans is not None:
            self._orphans.reset(device, lambda name, tensor: _fill(module, name, tensor))

    @staticmethod
    def _share_start(record: DeferredInit, group: dist.ProcessGroup) -> None:
        state = [record.rng_state]
        dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
        record.rng_state = state[0]

    def _replay(self, record: DeferredInit, module: nn.Module) -> None:
        made: dict[int, Tensor] = {}

        def receive(name: str, tensor: Tensor) -> None:
            if name in self._wanted:
                _fill(module, name, tensor)
            else:
                made[id(self._kept[name])] = tensor.clone()

        record.replay(self._kept | self._recorded(self._wanted), receive)
        replace_kept_tensors(module, made)


def _allocate(module: nn.Module, device: torch.device, shards: torch.device) -> None:
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _empty_parameter(parameter, device, shards)
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def _empty_parameter(parameter: nn.Parameter, device: torch.device, shards: torch.device) -> nn.Parameter:
    value: Tensor
    if isinstance(parameter, DTensor):
        value = as_shard(torch.empty_like(parameter.to_local(), device=shards), parameter)
    else:
        value = torch.empty_like(parameter, device=device)
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    bear(made, parameter)
    return made


def _fill(module: nn.Module, name: str, whole: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    part = module.get_submodule(owner)
    parameter = part._parameters.get(attribute)
    target = part._buffers[attribute] if parameter is None else parameter
    assert target is not None
    if isinstance(target, DTensor):
        target.to_local().copy_(shard_of(whole.to(target.dtype), target).to_local())
    else:
        target.copy_(whole)


def real_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers that hold values."""
    tensors = [*module.parameters(), *module.buffers()]
    return (tensor for tensor in tensors if not tensor.is_meta and not is_sharded(tensor))


def has_sharded_parameters(module: nn.Module) -> bool:
    """Whether ranks hold different parts of the module's parameters."""
    return any(map(is_sharded, module.parameters()))


def move_whole_tensors(module: nn.Module, device: torch.device) -> None:
    """Moves what is not sharded; shards are where their technique put them."""
    _update_properties(module, device=device)
    for part in module.modules():
        if _moves_more(part) and not has_sharded_parameters(part):
            part._apply(partial(Tensor.to, device=device))  # type: ignore[no-untyped-call]
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and parameter.device != device:
            parameter.data = parameter.data.to(device)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[name] = buffer.to(device)


def _moves_more(part: nn.Module) -> bool:
    """Whether a module has something to move besides parameters and buffers, such as what a metric has counted."""
    return type(part)._apply is not nn.Module._apply


@torch.no_grad()
def make_whole(module: nn.Module) -> None:
    """Gives the user's module whole parameters on the host again. Every rank must call."""
    whole: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in whole:
                    value = whole_tensor(parameter).cpu()
                    made = whole[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    bear(made, parameter)
                part._parameters[name] = whole[id(parameter)]


def fits_on_host(module: nn.Module, copies: int) -> bool:
    """Whether this node's free memory holds a whole model for each of its ranks, with room to spare."""
    needed = sum(p.numel() * p.element_size() for p in module.parameters()) * copies
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS does not say
        return True
    return needed < 0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
