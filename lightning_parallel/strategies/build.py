"""Build a model that no rank holds in full: parameters are sharded as modules register them, or start on meta."""

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
from lightning_parallel.techniques.tools import stage_tree
from lightning_parallel.techniques.tools.global_shard import GlobalShard, gather_full
from lightning_parallel.techniques.tools.replaced_parameters import Place, current, places, replace_by
from lightning_parallel.techniques.tools.shards import (
    as_shard,
    copy_user_attributes,
    full_tensor_of,
    is_sharded,
    shard_of,
    sharded_parameter,
)

BORN = "all_ranks"
"""Name of the mesh axis, all ranks, over which parameters are sharded while the model is built."""

CONVERSIONS = frozenset(("detach", "to", "type", "double", "float", "half", "bfloat16"))
"""Functions whose results `nn.Module.to` and its variants turn into parameters, which keep the user's attributes."""


class BuildShard(GlobalShard):
    """Shard of a parameter while the model is built: its `.data` may get another shape or dtype.

    Resizing token embeddings does so. During training, a `GlobalShard` refuses it.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `GlobalShard`; also accept `.data` of another shape or dtype."""
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            shard, value = args
            if (shard.shape, shard.dtype) != (value.shape, value.dtype):
                full = gather_full(value) if isinstance(value, DTensor) else value
                part: Any = sharded_parameter(nn.Parameter(full.detach()), shard.device_mesh, shard.placements)
                with torch._C.DisableTorchFunctionSubclass():
                    func(shard, part)
                shard._local_tensor, shard._spec = part._local_tensor, part._spec
                return None
        result = super().__torch_function__(func, types, args, kwargs)
        if func.__name__ in CONVERSIONS and isinstance(result, GlobalShard) and result is not args[0]:
            result.__class__ = BuildShard  # `nn.Parameter(x)` requires that `x.detach()` has the class of `x`
            copy_user_attributes(result, args[0])
        return result


@contextmanager
def shard_on_registration(world: dist.ProcessGroup, host: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Context in which parameters are sharded over all ranks as modules register them. Collective over all ranks.

    A rank holds one full parameter at a time. Initialization runs on the shards, which compute as full tensors: all
    ranks draw the same numbers, from the random state of rank 0, as one process would, and each keeps its rows.
    `ParameterMove` later moves each parameter to the ranks that hold it after the model is divided.

    Args:
        world: process group of all ranks, for tensors on the device.
        host: process group of all ranks, for messages on the CPU.
        device: device of this rank.
    """
    if world.size() == 1:
        yield
        return
    mesh, before = DeviceMesh.from_group(world, device.type, mesh_dim_names=(BORN,)), RandomState.now(device=device)

    def register(module: nn.Module, name: str, parameter: Any) -> Any:
        parameter = current(parameter)
        if type(parameter) is not nn.Parameter or parameter.is_meta or not parameter.dim() or not parameter.numel():
            return parameter  # classes of the user or of lazy modules, meta tensors and scalars stay as they are
        shard: Any = sharded_parameter(parameter, mesh, [Shard(0)])
        shard.__class__ = BuildShard
        replace_by(parameter, shard)
        return shard

    share_random_states(host, device)
    handle, shared_state = register_module_parameter_registration_hook(register), RandomState.now(device=device)
    try:
        yield
    finally:
        handle.remove()
        if shared_state.equals(RandomState.now(device=device)):
            # nothing was drawn, as the model was built before: ranks keep their own random states
            before.restore(device=device)


def is_build_shard(tensor: object) -> bool:
    """Return whether a tensor is a shard over all ranks, as `shard_on_registration` makes them in `configure_model`."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == (BORN,)


def share_random_states(host: dist.ProcessGroup, device: torch.device) -> None:
    """Set the random states of all ranks to those of rank 0. Collective over `host`, all ranks."""
    states = [RandomState.now(device=device)]
    dist.broadcast_object_list(states, src=dist.get_global_rank(host, 0), group=host)
    states[0].restore(device=device)


class _Writes(TorchDispatchMode):
    """Records which storages the operations inside write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formal = kwargs or {}, func._schema.arguments
        actual = [*zip(formal, args, strict=False), *((arg, kwargs.get(arg.name)) for arg in formal)]
        written = [value for arg, value in actual if arg.alias_info is not None and arg.alias_info.is_write]
        self.storages.update(_storage(leaf) for leaf in tree_leaves(written) if isinstance(leaf, Tensor))
        return func(*args, **kwargs)


class Entry(NamedTuple):
    """A tensor on meta, and the module and name under which it is registered; `path` is its FQN."""

    owner: nn.Module
    name: str
    path: str
    meta: Tensor
    is_parameter: bool

    def swap(self, tensor: Tensor | None) -> Tensor | None:
        """Register another tensor under this name, and return the one that was registered."""
        table: dict[str, Any] = self.owner._parameters if self.is_parameter else self.owner._buffers
        before: Tensor | None = table.get(self.name)
        table[self.name] = tensor
        return before


class MetaModules:
    """Materializes tensors on meta by the `reset_parameters()` of their modules, one unit of modules at a time.

    A unit is a module that holds meta tensors itself, with all its submodules. These are reset first, because the
    outer module may overwrite their values (as `nn.MultiheadAttention` does).

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
        self._units = [list(_children_first(unit)) for unit in _units(module, {entry.owner for entry in self.entries})]

    @torch.no_grad()
    def reset(self, device: torch.device) -> Iterator[tuple[list[Entry], Tensor]]:
        """Materialize each full tensor on `device`. What the modules hold by now, perhaps shards, stays registered.

        Yields:
            All entries of a tensor (several for a tied one), and its value.

        Raises:
            TypeError: `reset_parameters()` of a module does not set one of its tensors.
        """
        done = set[int]()
        for modules in self._units:
            entries = [entry for entry in self.entries if entry.owner in modules]
            values = _reset(modules, entries, device)
            for entry in entries:
                if id(entry.meta) not in done:
                    done.add(id(entry.meta))
                    yield [each for each in self.entries if each.meta is entry.meta], values.pop(id(entry.meta))


def _reset(modules: list[nn.Module], entries: list[Entry], device: torch.device) -> dict[int, Tensor]:
    """Run `reset_parameters()` of modules on empty tensors; return their values by the `id` of the meta tensor."""
    empty: dict[int, Tensor] = {}
    for entry in entries:
        value = torch.empty_like(entry.meta, device=device)
        requires_grad = entry.meta.requires_grad
        empty.setdefault(id(entry.meta), nn.Parameter(value, requires_grad) if entry.is_parameter else value)
    originals = [entry.swap(empty[id(entry.meta)]) for entry in entries]
    try:
        with _Writes() as writes:
            for module in modules:
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
    finally:
        results = [entry.swap(tensor) for entry, tensor in zip(entries, originals, strict=True)]
    unset = {_storage(value) for value in empty.values()} - writes.storages
    values: dict[int, Tensor] = {}
    for entry, tensor in zip(entries, results, strict=True):
        if tensor is None or _storage(tensor) in unset:
            owner = entry.path.rpartition(".")[0] or "the model itself"
            raise TypeError(
                f"{entry.path!r} is on meta, and {owner} ({type(entry.owner).__name__}) has no reset_parameters() "
                "that sets it; give it one that sets every parameter and buffer it holds, or build it in "
                "configure_model() without torch.device('meta')"
            )
        values[id(entry.meta)] = tensor.detach()
    return values


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _units(module: nn.Module, owners: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the topmost modules that are in `owners`."""
    if module in owners:
        yield module
    else:
        for child in module.children():
            yield from _units(child, owners)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


class ParameterMove:
    """Moves parameters from the ranks that built them to the ranks that hold them after the model is divided.

    Its constructor replaces parameters that are sharded over all ranks by meta parameters, on which techniques divide
    the model. `finish` then gathers one parameter at a time, and each rank keeps the shard that techniques gave it.

    Args:
        module: the user's module, about to be divided.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._meta = module, MetaModules(module)
        self._born = list[tuple[DTensor, list[Place]]]()
        #: the parameters before the division, to which user code may still hold references
        self._old = list[tuple[weakref.ref[Any], list[Place]]]()
        for parameter, at in _with_places(module):
            if is_build_shard(parameter):
                shape, stride = parameter.shape, parameter.stride()
                meta = nn.Parameter(
                    torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta"), parameter.requires_grad
                )
                copy_user_attributes(meta, parameter)
                self._born.append((as_shard(parameter._local_tensor, parameter), at))
                replace_by(parameter, at[0])
                for place in at:
                    place.put(meta)
            self._old.append((weakref.ref(parameter), at))

    @torch.no_grad()
    def finish(self, device: torch.device, shards: torch.device, host: dist.ProcessGroup) -> None:
        """Materialize what this rank holds after the division, one parameter at a time. Collective over all ranks.

        Args:
            device: device of this rank.
            shards: device of the shards: `device`, or the CPU where a technique offloads them.
            host: process group of all ranks, for messages on the CPU.
        """
        tree = stage_tree.tree_of(self._module)
        remote = set[str]() if tree is None else set(tree.remote)
        local_places = [[place for place in at if place.path not in remote] for _, at in self._born]
        # [number of parameters], bool: whether this rank keeps any of each
        keeps = torch.tensor([bool(at) for at in local_places])
        kept_by = [torch.empty_like(keeps) for _ in range(host.size())]
        dist.all_gather(kept_by, keeps, group=host)
        keepers = [ranks.nonzero().flatten().tolist() for ranks in torch.stack(kept_by, 1)]  # by parameter: ranks
        # A stage of a pipeline holds adjacent layers. In the order of the model it would hold all its parameters while
        # most shards of other stages' are not freed yet, so one parameter of each stage is gathered in turn.
        length = -(-len(local_places) // host.size())
        order = [i for k in range(length) for i in range(k, len(local_places), length)]
        pending = dict(enumerate(shard for shard, _ in self._born))
        self._born.clear()
        with nullcontext() if tree is None else tree.whole():
            for i in order:
                full = _gather(pending.pop(i), keepers[i])
                if full is not None:
                    _fill(local_places[i], full, device, shards)
                del full  # free the full parameter before the next one is allocated
            # what the user built on meta gets its values from `reset_parameters` of its modules
            if self._meta.entries:
                share_random_states(host, device)
            for entries, value in self._meta.reset(device):
                local = [entry for entry in entries if entry.path not in remote]
                _fill([Place(*entry[:3]) for entry in local if entry.is_parameter], value, device, shards)
                for entry in local:
                    if not entry.is_parameter:
                        entry.owner._buffers[entry.name] = value
            for old, at in self._old:
                target = next((place for place in at if place.path not in remote), at[0])
                parameter = old()
                if parameter is not None and parameter is not target.held():
                    replace_by(parameter, target)


def _with_places(module: nn.Module) -> list[tuple[Any, list[Place]]]:
    """Return the parameters of a module, each with all its places: a tied one has several."""
    by_id: dict[int, tuple[Any, list[Place]]] = {}
    for place, parameter in places(module).items():
        by_id.setdefault(id(parameter), (parameter, []))[1].append(place)
    return [*by_id.values()]


def _gather(shard: DTensor, keepers: list[int]) -> Tensor | None:
    """Gather a full parameter on the ranks `keepers`; return None on all others. Collective over all ranks."""
    group, size = shard.device_mesh.get_group(), shard.shape[0]
    if len(keepers) == group.size():
        return full_tensor_of(shard)
    rows, length, full = shard.to_local(), -(-size // group.size()), None
    # [rows of this rank, ...] -> [length, ...]
    rows = torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])  # every rank sends equally many
    for keeper in keepers:
        if keeper == group.rank():
            # [ranks * length, ...]; the last rows may be padding
            gathered = rows.new_empty(group.size() * length, *rows.shape[1:])
            dist.gather(rows, [*torch.split(gathered, length)], group=group, group_dst=keeper)
            full = gathered[:size]
        else:
            dist.gather(rows, group=group, group_dst=keeper)
    return full


def _fill(at: list[Place], whole: Tensor, device: torch.device, shards: torch.device) -> None:
    """Replace the meta parameters at these places, several if tied, by real ones with this rank's shard of `whole`."""
    parameters: dict[int, nn.Parameter] = {}
    value: Tensor
    for place in at:
        meta = place.held()
        if id(meta) not in parameters:
            if isinstance(meta, DTensor):
                local = torch.empty_like(meta.to_local(), device=shards)
                shard = value = as_shard(local, meta)
                local.copy_(shard_of(whole.to(meta.dtype), shard).to_local())
            elif not parameters and (whole.device, whole.dtype, whole.stride()) == (device, meta.dtype, meta.stride()):
                # a view, without the padding of `_gather`, would keep the padding in memory
                value = whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
            else:
                value = torch.empty_like(meta, device=device).copy_(whole)
            parameters[id(meta)] = nn.Parameter(value, meta.requires_grad)
            copy_user_attributes(parameters[id(meta)], meta)
        place.put(parameters[id(meta)])


def move_unsharded_tensors(module: nn.Module, device: torch.device) -> None:
    """Move all tensors that are not sharded to `device`; techniques have placed the shards."""
    _update_properties(module, device=device)
    for part in module.modules():
        # a class that overrides `_apply` moves more than parameters and buffers, such as the states of a metric
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
def restore_full_parameters(module: nn.Module) -> None:
    """Replace the sharded parameters of the user's module by full ones on the CPU. Collective over all ranks."""
    for parameter, at in _with_places(module):
        if isinstance(parameter, DTensor):
            full = nn.Parameter(full_tensor_of(parameter).cpu(), requires_grad=parameter.requires_grad)
            copy_user_attributes(full, parameter)
            for place in at:
                place.put(full)
            replace_by(parameter, at[0], keeps_shard=True)
