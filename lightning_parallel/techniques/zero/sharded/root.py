"""Modules around the user's modules that are passed to `fully_shard`: units around blocks, the root around a step.

`fully_shard` gathers the parameters of a module when its forward starts. It gets these modules instead of the user's:
so the user's modules keep their class, code that reads a weight outside any forward (a tied head, a parameter of the
LightningModule) finds it full during the step, and sharding can be undone.

The units of one `ParamGroup` are gathered together. Outside of the forward of its blocks a group is sharded, so code of
a step that reads a block's weight there (a penalty on weights, a copy of a block, a tied weight) finds a shard. While a
step runs shards have the class `ShardInStep`, through which every use in Python passes. The first function that needs
the values of one gathers its group; from then on the group is full from the beginning of every step to its end, like
the root's parameters. All ranks must read it in the same step, as they must run the same blocks.

| group of blocks | in the forward | in the backward |
|---|---|---|
| usual case | full while its blocks run | full while its blocks run backward; then its gradients are reduced |
| read outside of its blocks | full | full; its gradients are reduced at the end |
| differentiated twice (`create_graph`) | full | full: the graph of its backward reads it, too |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.techniques.divided.step_parameters import LEARN, computing
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.tools.absent import is_in_place
from lightning_parallel.techniques.tools.global_shard import METADATA_OPS, GlobalShard, as_global_shard
from lightning_parallel.techniques.tools.leaves import autograd_leaf, replaced_error
from lightning_parallel.techniques.tools.redirect import Forward
from lightning_parallel.techniques.tools.shards import shard_of
from lightning_parallel.techniques.zero.sharded.fsdp import ParamGroup, ShardedParameter
from lightning_parallel.values import map_tensors, tensors_of

T = TypeVar("T")

METADATA = METADATA_OPS - {"detach", "grad", "backward", "to_local", "redistribute"}  # "grad" is `torch.autograd.grad`
METADATA |= {"__get__", "__set__", "__delete__", "__repr__", "data_ptr", "untyped_storage"}
"""Names of functions that ask about a tensor and do not need its values."""

VALUES = frozenset((Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag))
"""Attributes that read or write the values of a tensor."""


class Unit(nn.Module):
    """Wrapper of a block with the forward that earlier techniques gave it, or a shell around the whole step.

    A shell holds parameters outside of blocks that are sharded over fewer ranks than the root's, e.g. experts.
    """

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.block, self.forward = block, forward


class Root(nn.Module):
    """Module that runs the step; parameters that belong to no unit are full from its beginning to its end.

    Writes to full parameters reach the shards: `fully_shard` frees the gathered memory, and the writes with it, so each
    rank copies its rows back first. It always does: to check for a change would take as long, and some writes bump no
    version counter, e.g. `weight.data.clamp_()`.

    Args:
        model: the user's model.
        unsharded_params: parameters of the model that are not sharded.
    """

    def __init__(self, model: nn.Module, unsharded_params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.model, self.unsharded_params = model, unsharded_params
        self.units, self.shells = nn.ModuleList(), nn.ModuleList()
        self.groups: list[ParamGroup] = []
        self.running = self.in_backward = self._forgets = False
        self.divisions: Sequence[Division] = ()
        """Their `expose_gathered` is called when a group is gathered in the middle of a step."""
        self._shown: list[tuple[Any, Any, Any]] = []

    def attach(self) -> None:
        """Wrap methods of all groups of parameters. Called once, when the groups are complete."""
        self.groups.reverse()  # the root's group was made last, and comes first from here on
        for group in self.groups:
            group.surround("reshard", self._before_dropping)
            if not group.of_root:
                group.surround("pre_backward", self._before_backward)

    @property
    def ever_gathered(self) -> list[ShardedParameter]:
        """The sharded parameters that have been gathered at least once."""
        return [each for group in self.groups for each in group.parameters if each.whole is not None]

    def forward(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the user's step while the root's parameters are full, and shards of units compute as full tensors."""
        self.running = True
        for shell in self.shells:
            run = partial(shell, run)
        shards = [(parameter.shard, parameter) for group in self.groups for parameter in group.parameters]
        try:
            self.gather(of_units=True)
            try:
                for shard, parameter in shards:
                    vars(shard)["sharded"], shard.__class__ = parameter, ShardInStep
                result = run(*args, **kwargs)
                self.write_back_parameters()
                self._require_own_parameters()
                return result
            finally:
                for shard, _ in shards:
                    shard.__class__ = DTensor
                    vars(shard).pop("sharded", None)  # a shard that the user keeps must not keep the model alive
                self.drop(of_units=True)
        except BaseException:
            self.restore_modules()
            raise
        finally:
            self.running = False

    def enter(self, run: Callable[..., Any]) -> Forward:
        """Wrap a forward so that it runs through the root when it is called between steps.

        A forward during backward is a recomputation, in which the parameters are full already.
        """

        def entered(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs) if self.running or self.in_backward else self(run, *args, **kwargs)

        return entered

    # ---------------------------------------------------------------- gathering

    def drop(self, of_units: bool = False) -> None:
        """Free the full parameters of root and shells, or with `of_units` those of units that stay full in steps."""
        for group in self.groups:
            if group.stays_full and group.of_root is not of_units:
                group.drop()

    def gather(self, forget: bool = False, of_units: bool = False) -> None:
        """Gather the parameters that stay full in steps, again if they are full already. Collective over their meshes.

        Args:
            forget: whether to discard writes to the full parameters, e.g. after an optimizer has stepped the shards.
            of_units: whether to gather only those of units, where the root's are full already.
        """
        self._forgets = forget
        try:
            for group in self.groups:
                if group.stays_full and not (of_units and group.of_root):
                    group.gather()
        finally:
            self._forgets = False

    def set_in_modules(self, whole: bool) -> None:
        """Put the full parameters of the root and shells, or their shards, into the modules, if they are gathered."""
        for group in self.groups:
            for parameter in group.parameters if group.of_root and group.is_whole else ():
                parameter.set_in_modules(parameter.whole if whole else parameter.shard)

    def _before_backward(self, group: ParamGroup, gather: Callable[..., None], *args: Any) -> None:
        gather(*args)
        if torch.is_grad_enabled() and self.running:  # `create_graph`: this backward will be differentiated, too
            group.keep()

    def _before_dropping(self, group: ParamGroup, drop: Callable[[], None]) -> None:
        if self.running and not self._forgets:
            self.write_back_parameters(group)
        for parameter in group.parameters if group.is_whole else ():
            parameter.release_shared_memory()
        drop()

    # ---------------------------------------------------------------- what a step does to full parameters

    @torch.no_grad()
    def write_back_parameters(self, *groups: ParamGroup) -> None:
        """Copy the full parameters of `groups` (default: all), and their `requires_grad`, to the shards."""
        self.sync_requires_grad(*groups)
        for group in groups or self.groups:
            pairs = [(each.shard._local_tensor, each.written_rows()) for each in group.parameters if group.is_whole]
            written = [(shard, rows) for shard, rows in pairs if rows is not None]
            if written:
                torch._foreach_copy_([shard for shard, _ in written], [rows for _, rows in written])

    def sync_requires_grad(self, *groups: ParamGroup) -> None:
        """Copy `requires_grad` to shards from full parameters, on which a step may set it, e.g. to freeze a critic."""
        with torch._C.DisableTorchFunctionSubclass():
            for group in groups or self.groups:
                for parameter in group.parameters if group.is_whole else ():
                    if parameter.shard.requires_grad is not parameter.whole.requires_grad:
                        parameter.shard.requires_grad_(parameter.whole.requires_grad)

    def lasting(self, output: T) -> T:
        """Return the output of a step, with copies of tensors whose memory is freed with the gathered parameters.

        Raises:
            ValueError: in training, a tensor is a view of a gathered parameter: on one device it would follow the
                optimizer's step, which a copy does not.
        """
        tensors = [each for each in tensors_of(output) if each.numel() and (each._is_view() or each.grad_fn is None)]
        gathered = [each for group in self.groups if group.is_whole for each in group.parameters] if tensors else []
        # address 0: memory that is freed already
        memory = {0, *(each.elements.untyped_storage().data_ptr() for each in gathered)}
        lost = {id(each): _address(each) for each in tensors if _address(each) in memory}
        if not lost:
            return output
        if torch.is_grad_enabled() or 0 in lost.values():
            (shape, *_) = (tuple(each.shape) for each in tensors if id(each) in lost)
            raise ValueError(
                f"the step returned a view of a parameter (of shape {shape}), but ZeRO 3 keeps only a shard after the "
                "step; return a copy: .clone()"
            )
        result: T = map_tensors(lambda each: each.clone() if id(each) in lost else each, output)
        return result

    # ---------------------------------------------------------------- gradients within a step
    #
    # `fully_shard` leaves gradients on shards, while a step sees full parameters. So between the backward passes of a
    # step the `grad` of a full parameter is the shard's gradient, as a `GlobalShard`, which computes as the full
    # gradient and writes into the shard's memory. If it is set to None, the shard's gradient becomes None, too.

    def expose_gradients(self) -> None:
        """Set `grad` of full parameters to their shards' gradients, after a backward in a step and when it begins."""
        if not self._shown:
            triples = [(each.whole, each.shard, each.shard.grad) for each in self.ever_gathered]
            self._shown = [
                (full, shard, as_global_shard(grad)) for full, shard, grad in triples if isinstance(grad, DTensor)
            ]
            for full, _, gradient in self._shown:
                full.grad = gradient

    def collect_gradients(self) -> bool:
        """Undo `expose_gradients`, before another backward, an optimizer's step, or the end of the step.

        Returns:
            Whether the step set a gradient that no backward computed: it stays on the full parameter until it has been
            averaged over the ranks, as by a backward.
        """
        has_user_set, shown = False, self._shown
        self._shown = []
        for full, shard, before in shown:
            grad = full.grad
            if grad is not before:
                shard.grad = grad if isinstance(grad, GlobalShard) and grad.placements == before.placements else None
                has_user_set = has_user_set or (grad is not None and shard.grad is None)
            if grad is before or shard.grad is not None:
                full.grad = None
        return has_user_set

    # ---------------------------------------------------------------- parameters in the slots of modules

    def _require_own_parameters(self) -> None:
        """Raise ValueError if a step has replaced a parameter in its module: no optimizer would step the new one."""
        for group in reversed(self.groups):  # so that the error names the first one in the model
            slots = [
                (owner, name) for each in group.parameters for owner, name in each.slots if not each.is_in(owner, name)
            ]
            for owner, name in slots:
                path = next(path for path, module in self.model.named_modules() if module is owner)
                raise replaced_error(f"{path}.{name}" if path else name)

    def restore_modules(self) -> None:
        """Put shards and full parameters back in their slots after a failed step, but no full one without memory."""
        dropped: dict[int, Any] = {}
        for group in [group for group in self.groups if group.shards_are_final]:
            for parameter in group.parameters:
                parameter.set_in_modules(parameter.whole if group.is_whole else parameter.shard, everywhere=True)
                if not group.is_whole and parameter.whole is not None:
                    dropped[id(parameter.whole)] = parameter.shard
        # the step may have put a full parameter, which is freed now, in other slots
        for table in [module._parameters for module in self.model.modules()]:
            table.update({name: dropped.get(id(each), each) for name, each in table.items()})


def entrances(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward users call: the model, its children, and members of its lists of modules.

    Modules without parameters are left out: they have nothing to gather, and the hash of metrics among them changes.
    """
    modules = [model]
    for child in model.children():
        if not any(True for _ in child.parameters()):
            continue
        modules += entrances(child)[1:] if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return modules


def _address(tensor: Tensor) -> int | None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if plain else None


# ---------------------------------------------------------------- shards while a step runs


class ShardInStep(DTensor):
    """Class of a parameter's shard while a step runs; functions that need values compute with the full parameter.

    Attributes:
        sharded: the parameter.
    """

    sharded: ShardedParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, attribute = kwargs or {}, getattr(func, "__self__", None)
        if attribute is Tensor.grad:
            value = args[1] if len(args) > 1 else None
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                # a full gradient that the step sets belongs to the full parameter
                parameter = args[0].standing()
                parameter.grad = shard_of(value, parameter) if isinstance(parameter, DTensor) else value
                return None
            with torch._C.DisableTorchFunctionSubclass():
                gradient = func(*args)
            return gradient if gradient is None else as_global_shard(gradient)
        if func.__name__ in METADATA and attribute not in VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if func in LEARN:  # e.g. from `toggle_optimizer`, which has the optimizer's shards
                full = args[0].sharded.whole
                if full is not None:
                    autograd_leaf(
                        full.requires_grad_(args[0].requires_grad)
                    )  # updates the leaf that autograd uses, too
            return result
        first: Any = args[0].standing() if args and type(args[0]) is cls else None
        is_sharded = isinstance(first, DTensor)  # when gathered still sharded over other axes, e.g. experts
        if is_sharded and attribute is Tensor.data:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first, *args[1:])
        args, kwargs = tree_map_only(cls, cls.full, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        if is_sharded and is_in_place(func.__name__):
            first._local_tensor.copy_(shard_of(args[0].detach(), first)._local_tensor)
        return result

    def standing(self) -> Any:
        """Gather the group, and return what the module then holds for the parameter; it computes as the full tensor."""
        self.sharded.group.keep()
        return computing(self.sharded.whole)

    def full(self) -> Any:
        """Return the full parameter."""
        parameter = self.standing()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def __deepcopy__(self, memo: Any) -> Any:
        full = self.full()
        if isinstance(full, Divided):
            return memo.setdefault(id(self), copy.deepcopy(full, memo))
        return memo.setdefault(id(self), nn.Parameter(full.detach().clone(), full.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)
