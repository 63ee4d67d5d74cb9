"""Makes of a model that was born sharded, built on meta, or full on every rank what each rank keeps; and back."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.build.born_sharded import is_born, share_random_states
from lightning_parallel.strategies.build.meta_modules import MetaModules
from lightning_parallel.strategies.lightning_package import _update_properties
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.moved import Place, follow, places
from lightning_parallel.techniques.tools.shards import as_shard, bear, is_sharded, shard_of, whole_tensor


class Placement:
    """The parameters of a model on their way to where the plan wants them.

    Techniques divide the model with parameters on meta in the places of those that were born sharded. Then `finish`
    gathers one after the other, and each rank keeps what the techniques left there.

    Args:
        module: the user's, which techniques are about to divide.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._meta = module, MetaModules(module)
        self._born = list[tuple[DTensor, list[Place]]]()
        #: objects that were in the module before, of which somebody else may hold references
        self._old = list[tuple[weakref.ref[Any], list[Place]]]()
        for parameter, at in _with_places(module):
            if is_born(parameter):
                shape, stride = parameter.shape, parameter.stride()
                meta = nn.Parameter(
                    torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta"), parameter.requires_grad
                )
                bear(meta, parameter)
                self._born.append((as_shard(parameter._local_tensor, parameter), at))
                follow(parameter, at[0])
                for place in at:
                    place.put(meta)
            self._old.append((weakref.ref(parameter), at))

    @torch.no_grad()
    def finish(self, device: torch.device, shards: torch.device, host: dist.ProcessGroup) -> None:
        """Fill what the techniques left, one parameter at a time. Collective over all ranks.

        Args:
            device: this rank's.
            shards: where shards are kept, the device or the host.
            host: all ranks.
        """
        tree = elsewhere.tree_of(self._module)
        away = set[str]() if tree is None else set(tree.remote)
        here = [[place for place in at if place.path not in away] for _, at in self._born]
        keepers = _ranks_that_keep(here, host)
        # Stages of a pipeline have neighboring layers: taken in turn, none has all of its own before it frees others'.
        length = -(-len(here) // host.size())
        turns = [i for k in range(length) for i in range(k, len(here), length)]
        waiting = dict(enumerate(shard for shard, _ in self._born))
        self._born.clear()
        with nullcontext() if tree is None else tree.whole():
            for i in turns:
                whole = _gather(waiting.pop(i), keepers[i])
                if whole is not None:
                    _fill(here[i], whole, device, shards)
                del whole  # before the next one is allocated
            self._fill_meta(away, device, shards, host)
            for old, at in self._old:
                known = next((place for place in at if place.path not in away), at[0])
                parameter = old()
                if parameter is not None and parameter is not known.held():
                    follow(parameter, known)

    def _fill_meta(self, away: set[str], device: torch.device, shards: torch.device, host: dist.ProcessGroup) -> None:
        """Fill what the user built on meta, by the modules' own initialisation. Collective over `host`."""
        if self._meta.entries:
            share_random_states(host, device)
        for entries, value in self._meta.reset(device):
            kept = [entry for entry in entries if entry.path not in away]
            _fill([Place(*entry[:3]) for entry in kept if entry.is_parameter], value, device, shards)
            for entry in kept:
                if not entry.is_parameter:
                    entry.owner._buffers[entry.name] = value


def _with_places(module: nn.Module) -> list[tuple[Any, list[Place]]]:
    """The parameters of a module, each with all its places."""
    found: dict[int, tuple[Any, list[Place]]] = {}
    for place, parameter in places(module).items():
        found.setdefault(id(parameter), (parameter, []))[1].append(place)
    return [*found.values()]


def _ranks_that_keep(here: list[list[Place]], host: dist.ProcessGroup) -> list[list[int]]:
    """For each parameter the ranks that have a place for it; `here` has this rank's. Collective over `host`."""
    keeps = torch.tensor([bool(at) for at in here])
    kept_by = [torch.empty_like(keeps) for _ in range(host.size())]
    dist.all_gather(kept_by, keeps, group=host)
    return [ranks.nonzero().flatten().tolist() for ranks in torch.stack(kept_by, 1)]


def _gather(shard: DTensor, keepers: list[int]) -> Tensor | None:
    """The whole of a parameter that was born sharded, None on ranks that do not keep it. Collective over all ranks."""
    group, size = shard.device_mesh.get_group(), shard.shape[0]
    if len(keepers) == group.size():
        return whole_tensor(shard)
    rows, length, whole = shard.to_local(), -(-size // group.size()), None
    rows = torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])  # as many of every rank
    for keeper in keepers:
        if keeper == group.rank():
            made = rows.new_empty(group.size() * length, *rows.shape[1:])
            dist.gather(rows, [*torch.split(made, length)], group=group, group_dst=keeper)
            whole = made[:size]
        else:
            dist.gather(rows, group=group, group_dst=keeper)
    return whole


def _fill(at: list[Place], whole: Tensor, device: torch.device, shards: torch.device) -> None:
    """Put a parameter with this rank's part of a value into the places of one on meta; stages may have several."""
    made: dict[int, nn.Parameter] = {}
    value: Tensor
    for place in at:
        meta = place.held()
        if id(meta) not in made:
            if isinstance(meta, DTensor):
                own = torch.empty_like(meta.to_local(), device=shards)
                shard = value = as_shard(own, meta)
                own.copy_(shard_of(whole.to(meta.dtype), shard).to_local())
            elif not made and (whole.device, whole.dtype, whole.stride()) == (device, meta.dtype, meta.stride()):
                value = whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
            else:
                value = torch.empty_like(meta, device=device).copy_(whole)
            made[id(meta)] = nn.Parameter(value, meta.requires_grad)
            bear(made[id(meta)], meta)
        place.put(made[id(meta)])


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
    for parameter, at in _with_places(module):
        if isinstance(parameter, DTensor):
            made = nn.Parameter(whole_tensor(parameter).cpu(), requires_grad=parameter.requires_grad)
            bear(made, parameter)
            for place in at:
                place.put(made)
            follow(parameter, at[0], keeps_shard=True)


def fits_on_host(module: nn.Module, copies: int) -> bool:
    """Whether this node's free memory holds a whole model for each of its ranks, with room to spare."""
    needed = sum(p.numel() * p.element_size() for p in module.parameters()) * copies
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS does not say
        return True
    return needed < 0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
