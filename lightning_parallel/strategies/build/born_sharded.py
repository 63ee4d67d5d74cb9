"""Parameters that are shards from their birth: `configure_model` builds a model that no rank ever has whole.

While it runs, every parameter becomes a shard over all ranks when a module registers it, so a rank has one whole
parameter at a time. Initialisation runs on shards, which compute as the whole: ranks draw alike from the random state
of rank 0, as one process draws, and each keeps its rows. `place` later moves each parameter to where the plan wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_parallel.strategies.data.randomness import RankRandomness
from lightning_parallel.techniques.tools.global_shard import GlobalShard, whole_of
from lightning_parallel.techniques.tools.moved import current, follow
from lightning_parallel.techniques.tools.shards import bear, parameter_part

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

    Args:
        world: all ranks, for tensors on the device.
        host: all ranks, for messages of the host.
        device: this rank's.
    """
    if world.size() == 1:
        yield
        return
    mesh, own = DeviceMesh.from_group(world, device.type, mesh_dim_names=(BORN,)), RankRandomness.now(device)

    def register(module: nn.Module, name: str, parameter: Any) -> Any:
        parameter = current(parameter)
        if type(parameter) is not nn.Parameter or parameter.is_meta or not parameter.dim() or not parameter.numel():
            return parameter  # a class of the user's, or of a lazy module's, stays as it is
        made: Any = parameter_part(parameter, mesh, [Shard(0)])
        made.__class__ = BornShard
        follow(parameter, made)
        return made

    share_random_states(host, device)
    handle, shared = register_module_parameter_registration_hook(register), RankRandomness.now(device)
    try:
        yield
    finally:
        handle.remove()
        now = RankRandomness.now(device)
        states = [each.device_state for each in (shared, now) if each.device_state is not None]
        if shared.host.equals(now.host) and all(map(torch.equal, states[:1], states[1:])):
            own.restore(device)  # the model is there already, and nothing was drawn


def is_born(tensor: object) -> bool:
    """Whether a tensor is a shard over all ranks, as `configure_model` made it."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == (BORN,)


def share_random_states(host: dist.ProcessGroup, device: torch.device) -> None:
    """Let all ranks draw as rank 0 will. Collective over `host`, all ranks."""
    states = [RankRandomness.now(device)]
    dist.broadcast_object_list(states, src=dist.get_global_rank(host, 0), group=host)
    states[0].restore(device)
