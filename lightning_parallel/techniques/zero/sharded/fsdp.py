"""The parameters that `fully_shard` keeps, and all of its private fields that are used, which torch may change.

`fully_shard` holds a shard and a whole tensor of every parameter. It puts one or the other into the module, gathers
and drops the parameters of modules that were sharded together, and reduces gradients at the end of their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.spans import bounds
from lightning_parallel.techniques.divided.parts import part_class
from lightning_parallel.techniques.tools.shards import bear, local

if TYPE_CHECKING:
    from lightning_parallel.techniques.zero.sharded.root import Root


class ShardedParameter:
    """One parameter: its shard, its whole tensor while that is gathered, and the places where modules have it.

    Args:
        param: what `fully_shard` keeps of it.
        group: the parameters that are gathered together with it.
    """

    def __init__(self, param: Any, group: ParamGroup) -> None:
        self._param, self.group = param, group
        info = param._module_info
        names = (info.param_name, *info.shared_param_names)
        self.slots: list[tuple[nn.Module, str]] = list(zip((info.module, *info.shared_modules), names, strict=True))
        param._setattr_on_modules, param.init_unsharded_param = self.put_in_modules, self._make_whole
        self._memory: Any = None

    @property
    def shard(self) -> Any:
        """The DTensor that this rank keeps, which optimizers step."""
        return self._param.sharded_param

    @property
    def whole(self) -> Any:
        """The whole parameter, always the same object, without memory while it is not gathered; None before that."""
        return vars(self._param).get("_unsharded_param")

    @property
    def has_gradient(self) -> bool:
        """Whether backward passes that are not reduced yet gave the whole a gradient."""
        return self.whole.grad is not None or self._param.unsharded_accumulated_grad is not None

    @property
    def elements(self) -> Tensor:
        """What this rank has of the whole; of one that tensor parallel divides, its part."""
        whole = self.whole
        elements: Tensor = whole._local_tensor if isinstance(whole, DTensor) else whole
        return elements.detach()

    def is_in(self, module: nn.Module, name: str) -> bool:
        """Whether a place has it, and nothing else, as within `torch.func.functional_call`."""
        tensor = module._parameters.get(name)
        return tensor is not None and (tensor is self.shard or tensor is self.whole)

    def put_in_modules(self, tensor: Any, everywhere: bool = False) -> None:
        """Let modules have the whole or the shard; what a step has put in its place stays, unless `everywhere`."""
        for module, name in self.slots:
            if self.group.root.running and not everywhere and not self.is_in(module, name):
                continue
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = tensor
            else:  # `nn.LSTM` keeps a list of its weights besides
                setattr(module, name, tensor)

    def _make_whole(self) -> None:
        """Make the whole as `fully_shard` does, which keeps it from the first time on, with the user's attributes."""
        param = self._param
        del vars(param)["init_unsharded_param"]
        param.init_unsharded_param()
        bear(self.whole, self.shard)
        if (kind := part_class(self.whole)) is not None:  # user code sees it within steps only
            self.whole.__class__ = kind
        self._memory = self.elements

    def written_rows(self) -> Tensor | None:
        """This rank's rows of the whole, as the step has written them; None if a module cast it, which is refused."""
        whole, memory, info = self.elements, self._memory, self._param.mesh_info
        if whole.dtype != memory.dtype:
            return None
        dim = self._param.fsdp_placement.dim
        start, _ = bounds(whole.size(dim), info.shard_mesh_size, info.shard_mesh_rank)
        if whole.data_ptr() != memory.data_ptr():  # by `weight.data = normalized(weight)`
            # the whole may stay, and has not changed for what backward computes from it
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(memory):
                memory.copy_(whole)
            local(self.whole).data = memory
        rows: Tensor = memory.narrow(dim, start, self.shard._local_tensor.size(dim))
        return rows

    def leave_memory_to_others(self) -> None:
        """Move to other memory if an array of NumPy uses this one, too: torch could not free it."""
        (gathered,) = self._param.all_gather_outputs
        if gathered.is_cpu and not gathered.untyped_storage().resizable():
            whole, memory = self.elements, gathered.clone()
            gathered.data = memory
            local(self.whole).data = memory.as_strided(whole.size(), whole.stride())
            self._memory = self.elements


class ParamGroup:
    """Modules that were given to `fully_shard` together, and their parameters.

    Args:
        modules: these.
        stays_whole: whether their parameters are whole from the beginning of every step to its end.
        mesh: the ranks that share the parameters.
        scale: by what gradients are multiplied before they are summed, where fewer ranks share them than the root's.
        root: the whole step, of which they are a part.
    """

    def __init__(
        self, modules: Sequence[Any], stays_whole: bool, mesh: DeviceMesh, scale: float | None, root: Root
    ) -> None:
        self.modules, self.stays_whole, self.mesh, self.scale, self.root = modules, stays_whole, mesh, scale, root
        self.of_root = stays_whole
        """Whether they surround the whole step, so that they are gathered by its forward."""

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
    def has_begun(self) -> bool:
        """Whether the shards are final: in its first step `fully_shard` takes those that it finds in modules."""
        return all(group._reset_sharded_params for group in self._groups)

    def surround(self, method: str, around: Callable[..., None]) -> None:
        """Call `around(group, method, ...)` in place of a method of `fully_shard`'s groups of parameters."""
        for group in self._groups:
            setattr(group, method, partial(around, self, getattr(group, method)))

    def surround_end(self, around: Callable[[Callable[[], None]], None]) -> None:
        """Call `around(end)` in place of what `fully_shard` does at the end of a backward pass."""
        self.state._root_post_backward_final_callback = partial(around, self.state._root_post_backward_final_callback)

    def end_backward(self) -> None:
        """End a backward pass in which `fully_shard` did not begin."""
        self.state._root_post_backward_final_callback()

    def drop(self) -> None:
        """Drop the whole parameters, where they are gathered."""
        for module in self.modules:
            module.set_reshard_after_forward(True, recurse=False)  # else nothing is done where a forward has failed
            module.reshard()
            module.set_reshard_after_forward(not self.stays_whole, recurse=False)

    def gather(self) -> None:
        """Gather the parameters, anew where they are whole already."""
        self.drop()
        self._unshard()

    def keep(self) -> None:
        """Let the parameters be whole in steps from now on."""
        if not self.stays_whole:
            self.stays_whole = True
            self._unshard()
            for division in self.root.divisions:
                division.show()

    def _unshard(self) -> None:
        for module in self.modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()


def remove_hooks_of_state_dicts(root: nn.Module) -> None:
    """Take hooks of `fully_shard` off the user's modules: states are made, loaded and copied as if they were alone."""
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
