"""Access to the parameters that `fully_shard` manages. Only this file uses its private fields, which torch may change.

`fully_shard` holds a shard and a full (unsharded) tensor of every parameter. It puts one or the other into the module,
gathers and frees the parameters of modules that were sharded together, and reduces their gradients when their backward
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel.collectives.spans import bounds
from lightning_parallel.techniques.divided.step_parameters import part_class
from lightning_parallel.techniques.tools.shards import copy_user_attributes, local, local_tensor_of

if TYPE_CHECKING:
    from lightning_parallel.techniques.zero.sharded.root import Root


class ShardedParameter:
    """One parameter: its shard, the full parameter while it is gathered, and the slots of modules that refer to it.

    Args:
        param: the `FSDPParam` of the parameter.
        group: the group of parameters that are gathered together with this one.
    """

    def __init__(self, param: Any, group: ParamGroup) -> None:
        self._param, self.group = param, group
        info = param._module_info
        names = (info.param_name, *info.shared_param_names)
        self.slots: list[tuple[nn.Module, str]] = list(zip((info.module, *info.shared_modules), names, strict=True))
        param._setattr_on_modules, param.init_unsharded_param = self.set_in_modules, self._make_whole
        self._memory: Any = None

    @property
    def shard(self) -> Any:
        """This rank's shard, a DTensor; optimizers step it."""
        return self._param.sharded_param

    @property
    def whole(self) -> Any:
        """The full parameter, always the same object, without memory while not gathered; None before the first time."""
        return vars(self._param).get("_unsharded_param")

    @property
    def elements(self) -> Tensor:
        """The full parameter as a plain tensor; its local shard if tensor or expert parallelism shards it, too."""
        return local_tensor_of(self.whole).detach()

    def is_in(self, module: nn.Module, name: str) -> bool:
        """Return whether a slot holds this parameter; within `torch.func.functional_call` it holds something else."""
        tensor = module._parameters.get(name)
        return tensor is not None and (tensor is self.shard or tensor is self.whole)

    def set_in_modules(self, tensor: Any, everywhere: bool = False) -> None:
        """Put the full parameter or the shard into the slots; those that a step reassigned only if `everywhere`."""
        for module, name in self.slots:
            if self.group.root.running and not everywhere and not self.is_in(module, name):
                continue
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = tensor
            else:  # e.g. `nn.LSTM`, which also keeps a list of its weights
                setattr(module, name, tensor)

    def _make_whole(self) -> None:
        """Create the full parameter as `fully_shard` does, which keeps it from then on; copy the user's attributes."""
        param = self._param
        del vars(param)["init_unsharded_param"]
        param.init_unsharded_param()
        copy_user_attributes(self.whole, self.shard)
        if (step_class := part_class(self.whole)) is not None:  # always this class: user code only sees it in steps
            self.whole.__class__ = step_class
        self._memory = self.elements

    def written_rows(self) -> Tensor | None:
        """Return this rank's rows of the full parameter, as the step left them; None if a module cast it (refused)."""
        elements, memory, info = self.elements, self._memory, self._param.mesh_info
        if elements.dtype != memory.dtype:
            return None
        dim = self._param.fsdp_placement.dim
        start, _ = bounds(elements.size(dim), info.shard_mesh_size, info.shard_mesh_rank)
        if elements.data_ptr() != memory.data_ptr():  # after `weight.data = normalized(weight)`
            # back to the gathered memory; the parameter may stay gathered, and has not changed for autograd
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(memory):
                memory.copy_(elements)
            local(self.whole).data = memory
        rows: Tensor = memory.narrow(dim, start, self.shard._local_tensor.size(dim))
        return rows

    def release_shared_memory(self) -> None:
        """Move to new memory if a NumPy array shares the present one, which torch then could not free."""
        (gathered,) = self._param.all_gather_outputs
        if gathered.is_cpu and not gathered.untyped_storage().resizable():
            elements, memory = self.elements, gathered.clone()
            gathered.data = memory
            local(self.whole).data = memory.as_strided(elements.size(), elements.stride())
            self._memory = self.elements


class ParamGroup:
    """Modules that were passed to `fully_shard` together, and their parameters.

    Args:
        modules: the modules.
        stays_full: whether their parameters are full from the beginning of every step to its end.
        mesh: the ranks over which the parameters are sharded, and replicated with hybrid sharding.
        scale: factor of gradients before they are summed, if fewer ranks hold them than the root's; else None.
        root: the root that runs the step.
    """

    def __init__(
        self, modules: Sequence[Any], stays_full: bool, mesh: DeviceMesh, scale: float | None, root: Root
    ) -> None:
        self.modules, self.stays_full, self.mesh, self.scale, self.root = modules, stays_full, mesh, scale, root
        self.of_root = stays_full
        """Whether the modules surround the step (root or shell), so that `fully_shard` gathers them in its forward."""

        self.state = state = modules[0]._get_fsdp_state()
        several = "_fsdp_param_groups" in vars(state)  # torch 2.13
        self._groups = [
            each for each in (state._fsdp_param_groups if several else [state._fsdp_param_group]) if each is not None
        ]
        self.parameters = [ShardedParameter(param, self) for group in self._groups for param in group.fsdp_params]

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered."""
        return any(group.is_unsharded for group in self._groups)

    @property
    def shards_are_final(self) -> bool:
        """Whether the shards are final: in the first step `fully_shard` still takes those that it finds in modules."""
        return all(group._reset_sharded_params for group in self._groups)

    def surround(self, method: str, around: Callable[..., None]) -> None:
        """Replace a method of `fully_shard`'s parameter groups by `around(self, method, ...)`."""
        for group in self._groups:
            setattr(group, method, partial(around, self, getattr(group, method)))

    def wrap_backward_end(self, around: Callable[[Callable[[], None]], None]) -> None:
        """Replace what `fully_shard` does at the end of a backward pass by `around(end)`."""
        self.state._root_post_backward_final_callback = partial(around, self.state._root_post_backward_final_callback)

    def end_backward(self) -> None:
        """Run the end of a backward pass by hand, where no hook of `fully_shard` has scheduled it."""
        self.state._root_post_backward_final_callback()

    def drop(self) -> None:
        """Free the full parameters, if they are gathered."""
        for module in self.modules:
            module.set_reshard_after_forward(True, recurse=False)  # else `reshard` does nothing after a failed forward
            module.reshard()
            module.set_reshard_after_forward(not self.stays_full, recurse=False)

    def gather(self) -> None:
        """Gather the parameters, again if they are full already. Collective over `mesh`."""
        self.drop()
        self._unshard()

    def keep(self) -> None:
        """Gather the parameters, and let them be full during all steps from now on. Collective over `mesh`."""
        if not self.stays_full:
            self.stays_full = True
            self._unshard()
            for division in self.root.divisions:
                division.expose_gathered()

    def _unshard(self) -> None:
        for module in self.modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()


def remove_hooks_of_state_dicts(root: nn.Module) -> None:
    """Remove `fully_shard`'s state-dict hooks from the user's modules, whose state dicts are handled without it."""
    for module in root.modules():
        for hooks in (
            module._state_dict_pre_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        ):
            for key, hook in list(hooks.items()):
                origin = getattr(getattr(hook, "hook", hook), "__module__", "")
                if str(origin).startswith("torch.distributed.fsdp"):
                    del hooks[key]
