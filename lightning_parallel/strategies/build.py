"""Models that are never whole in memory: parameters are born as shards, or built on meta, and moved to their places."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import _update_properties
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.global_shard import GlobalShard, whole_of
from lightning_parallel.techniques.tools.moved import Place, current, follow, places
from lightning_parallel.techniques.tools.shards import (
    as_shard,
    bear,
    is_sharded,
    parameter_part,
    shard_of,
    whole_tensor,
)

BORN = "all_ranks"
"""The name of the axis over which parameters are sharded from their birth."""

CONVERSIONS = frozenset(("detach", "to", "type", "double", "float", "half", "bfloat16"))
"""Operations of whose results `nn.Module.to` and its kin make parameters, which keep the attributes that users gave."""


class BornShard(GlobalShard):
    """A parameter that was born sharded: while it is built its shape and dtype may change, as by new token embeddings.

    The shards of a model that trains refuse that.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `GlobalShard`."""
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            shard, value = args
            if (shard.shape, shard.dtype) != (value.shape, value.dtype):
                whole = whole_of(value) if isinstance(value, DTensor) else value
                made: Any = parameter_part(nn.Parameter(whole.detach()), shard.device_mesh, shard.placements)
                with torch._C.DisableTorchFunctionSubclass():
                    func(shard, made)
                shard._local_tensor, shard._spec = made._local_tensor, made._spec
                return None
        result = super().__torch_function__(func, types, args, kwargs)
        if func.__name__ in CONVERSIONS and isinstance(result, GlobalShard) and result is not args[0]:
            result.__class__ = BornShard  # `nn.Parameter` asks for one of the same class
            bear(result, args[0])
        return result


@contextmanager
def born_sharded(world: dist.ProcessGroup, host: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Inside, parameters become shards when modules register them. Collective over `host`, all ranks.

    A rank has one whole parameter at a time. Initialisation runs on shards, which compute as the whole: ranks draw
    alike from the random state of rank 0, as one process draws, and each keeps its rows. `Placement` later moves each
    parameter to where the plan wants it.

    Args:
        world: all ranks, for tensors on the device.
        host: all ranks, for messages of the host.
        device: this rank's.
    """
    if world.size() == 1:
        yield
        return
    mesh, own = DeviceMesh.from_group(world, device.type, mesh_dim_names=(BORN,)), RandomState.now(device=device)

    def register(module: nn.Module, name: str, parameter: Any) -> Any:
        parameter = current(parameter)
        if type(parameter) is not nn.Parameter or parameter.is_meta or not parameter.dim() or not parameter.numel():
            return parameter  # a class of the user's, or of a lazy module's, stays as it is
        made: Any = parameter_part(parameter, mesh, [Shard(0)])
        made.__class__ = BornShard
        follow(parameter, made)
        return made

    share_random_states(host, device)
    handle, shared = register_module_parameter_registration_hook(register), RandomState.now(device=device)
    try:
        yield
    finally:
        handle.remove()
        if shared.equals(RandomState.now(device=device)):
            own.restore(device=device)  # the model is there already, and nothing was drawn


def is_born(tensor: object) -> bool:
    """Whether a tensor is a shard over all ranks, as `configure_model` made it."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == (BORN,)


def share_random_states(host: dist.ProcessGroup, device: torch.device) -> None:
    """Let all ranks draw as rank 0 will. Collective over `host`, all ranks."""
    states = [RandomState.now(device=device)]
    dist.broadcast_object_list(states, src=dist.get_global_rank(host, 0), group=host)
    states[0].restore(device=device)


class _Writes(TorchDispatchMode):
    """Notes which storages are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formal = kwargs or {}, func._schema.arguments
        actual = [*zip(formal, args, strict=False), *((each, kwargs.get(each.name)) for each in formal)]
        written = [value for each, value in actual if each.alias_info is not None and each.alias_info.is_write]
        self.storages.update(_storage(each) for each in tree_leaves(written) if isinstance(each, Tensor))
        return func(*args, **kwargs)


class Entry(NamedTuple):
    """A place in which a module holds a tensor on meta."""

    owner: nn.Module
    name: str
    path: str
    meta: Tensor
    is_parameter: bool

    def swap(self, tensor: Tensor | None) -> Tensor | None:
        """Put a tensor there; returns what was there."""
        table: dict[str, Any] = self.owner._parameters if self.is_parameter else self.owner._buffers
        before: Tensor | None = table.get(self.name)
        table[self.name] = tensor
        return before


class MetaModules:
    """Modules with tensors on meta; `reset_parameters()` makes them, one module at a time.

    A module that holds such tensors itself is made together with its submodules, these first, for it may have the
    last word on theirs (as `nn.MultiheadAttention` has).

    Args:
        module: the model, before techniques divide it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.entries = [
            Entry(owner, name, f"{path}.{name}" if path else name, tensor, table is owner._parameters)
            for path, owner in module.named_modules(remove_duplicate=False)
            for table in (owner._parameters, owner._buffers)
            for name, tensor in table.items()
            if tensor is not None and tensor.is_meta
        ]
        self._units = [list(_children_first(unit)) for unit in _units(module, {each.owner for each in self.entries})]

    @torch.no_grad()
    def reset(self, device: torch.device) -> Iterator[tuple[list[Entry], Tensor]]:
        """Make the tensors full, on a device. Modules meanwhile may hold shards, and keep what they hold.

        Returns:
            Each tensor with all its places; several for a tied one.

        Raises:
            TypeError: a module leaves one of its tensors without a value.
        """
        made = set[int]()
        for modules in self._units:
            entries = [entry for entry in self.entries if entry.owner in modules]
            values = _reset(modules, entries, device)
            for entry in entries:
                if id(entry.meta) not in made:
                    made.add(id(entry.meta))
                    yield [each for each in self.entries if each.meta is entry.meta], values.pop(id(entry.meta))


def _reset(modules: list[nn.Module], entries: list[Entry], device: torch.device) -> dict[int, Tensor]:
    """The values of tensors on meta, by the `id` of each."""
    empty: dict[int, Tensor] = {}
    for entry in entries:
        value = torch.empty_like(entry.meta, device=device)
        learns = entry.meta.requires_grad
        empty.setdefault(id(entry.meta), nn.Parameter(value, learns) if entry.is_parameter else value)
    before = [entry.swap(empty[id(entry.meta)]) for entry in entries]
    try:
        with _Writes() as writes:
            for module in modules:
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
    finally:
        after = [entry.swap(tensor) for entry, tensor in zip(entries, before, strict=True)]
    unset = {_storage(value) for value in empty.values()} - writes.storages
    found: dict[int, Tensor] = {}
    for entry, tensor in zip(entries, after, strict=True):
        if tensor is None or _storage(tensor) in unset:
            owner = entry.path.rpartition(".")[0] or "the model itself"
            raise TypeError(
                f"{entry.path!r} is on meta, and {owner} ({type(entry.owner).__name__}) has no reset_parameters() "
                "that sets it; give it one that sets every parameter and buffer it holds, or build it in "
                "configure_model() without torch.device('meta')"
            )
        found[id(entry.meta)] = tensor.detach()
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _units(module: nn.Module, owners: set[nn.Module]) -> Iterator[nn.Module]:
    if module in owners:
        yield module
    else:
        for child in module.children():
            yield from _units(child, owners)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


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
        # [parameters]: whether this rank keeps each
        keeps = torch.tensor([bool(at) for at in here])
        kept_by = [torch.empty_like(keeps) for _ in range(host.size())]
        dist.all_gather(kept_by, keeps, group=host)
        keepers = [ranks.nonzero().flatten().tolist() for ranks in torch.stack(kept_by, 1)]  # of each parameter
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
            # what the user built on meta is filled by the modules' own initialisation
            if self._meta.entries:
                share_random_states(host, device)
            for entries, value in self._meta.reset(device):
                kept = [entry for entry in entries if entry.path not in away]
                _fill([Place(*entry[:3]) for entry in kept if entry.is_parameter], value, device, shards)
                for entry in kept:
                    if not entry.is_parameter:
                        entry.owner._buffers[entry.name] = value
            for old, at in self._old:
                known = next((place for place in at if place.path not in away), at[0])
                parameter = old()
                if parameter is not None and parameter is not known.held():
                    follow(parameter, known)


def _with_places(module: nn.Module) -> list[tuple[Any, list[Place]]]:
    """The parameters of a module, each with all its places."""
    found: dict[int, tuple[Any, list[Place]]] = {}
    for place, parameter in places(module).items():
        found.setdefault(id(parameter), (parameter, []))[1].append(place)
    return [*found.values()]


def _gather(shard: DTensor, keepers: list[int]) -> Tensor | None:
    """The whole of a parameter that was born sharded, None on ranks that do not keep it. Collective over all ranks."""
    group, size = shard.device_mesh.get_group(), shard.shape[0]
    if len(keepers) == group.size():
        return whole_tensor(shard)
    rows, length, whole = shard.to_local(), -(-size // group.size()), None
    # [rows of this rank, ...] -> [length, ...]
    rows = torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])  # as many of every rank
    for keeper in keepers:
        if keeper == group.rank():
            # [ranks * length, ...], of which the last rows may be padding
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


def move_whole_tensors(module: nn.Module, device: torch.device) -> None:
    """Moves what is not sharded; shards are where their technique put them."""
    _update_properties(module, device=device)
    for part in module.modules():
        # it has something to move besides parameters and buffers, such as what a metric has counted
        if type(part)._apply is not nn.Module._apply and not any(map(is_sharded, part.parameters())):
            part._apply(partial(Tensor.to, device=device))  # type: ignore[no-untyped-call]
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and parameter.device != device:
            parameter.data = parameter.data.to(device)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[name] = buffer.to(device)


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
