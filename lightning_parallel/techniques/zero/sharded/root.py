"""The modules that `fully_shard` is given, around the user's.

It gathers the parameters of a module when its forward starts. Here two kinds of modules are given to it, and neither is
the user's own: a unit for some blocks, and one root around the whole step. So the user's modules keep their class, code
that reads a weight outside any forward (a tied head, a parameter of the LightningModule) finds it whole during the
step, and everything can be taken back.

Between the forwards of its blocks a unit is sharded, so code of the step's own that reads a weight of a block outside
of that block (a penalty on weights, a copy of a block, a tied weight) finds a shard. While a step runs shards have the
class `ShardInStep`, which every use of them in Python passes through. The first function that needs values of one
gathers its unit; from then on the unit is whole from the beginning of every step to its end, as is what belongs to no
unit. All ranks must read in the same step, as they must run the same blocks.

| a unit | in a forward | in a backward |
|---|---|---|
| as a rule | whole while its blocks run | whole while its blocks go back; then its gradients are reduced |
| read outside of its blocks | whole | whole; its gradients are reduced at the end |
| differentiated twice (`create_graph`) | whole | whole: the graph of its backward reads it, too |
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

from lightning_parallel.techniques.divided.parts import computing
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.tools.absent import is_in_place
from lightning_parallel.techniques.tools.global_shard import ABOUT, GlobalShard, global_of
from lightning_parallel.techniques.tools.leaves import leaf_of, taken_out
from lightning_parallel.techniques.tools.redirect import Forward
from lightning_parallel.techniques.tools.shards import shard_of
from lightning_parallel.techniques.zero.sharded.fsdp import ParamGroup, ShardedParameter
from lightning_parallel.values import map_tensors, tensors_of

T = TypeVar("T")

METADATA = ABOUT - {"detach", "grad", "backward", "to_local", "redistribute"}  # "grad" is of `torch.autograd`
METADATA |= {"__get__", "__set__", "__delete__", "__repr__", "data_ptr", "untyped_storage"}
"""Functions that ask about a tensor, and need not its values."""

VALUES = frozenset((Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag))
"""Attributes by which its values are read or written."""

LEARN = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]


class Unit(nn.Module):
    """A block, with the forward that techniques before sharding gave it; or a shell: the model, around a whole step.

    Shells are for parameters that other ranks share than those that share the root's.
    """

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.block, self.forward = block, forward


class Root(nn.Module):
    """The whole step: what belongs to no unit is whole from its beginning to its end.

    What a step writes to whole parameters reaches the shards: `fully_shard` drops what it gathered, with all that was
    written to it, so a rank copies its rows back before. To ask whether there is a change would take as long, and code
    can write without leaving a trace, as `weight.data.clamp_()` does.

    Args:
        model: the user's.
        left_whole: parameters of it that are not sharded.
    """

    def __init__(self, model: nn.Module, left_whole: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.model, self.left_whole = model, left_whole
        self.units, self.shells = nn.ModuleList(), nn.ModuleList()
        self.groups: list[ParamGroup] = []
        self.running = self.in_backward = self._forgets = False
        self.divisions: Sequence[Division] = ()
        """Those that show what looks whole for what was gathered within a step, see `Division.show`."""
        self._shown: list[tuple[Any, Any, Any]] = []

    def attach(self) -> None:
        """Follow the groups of parameters, when all are there."""
        self.groups.reverse()  # the root's own was made last
        for group in self.groups:
            group.surround("reshard", self._before_dropping)
            if not group.of_root:
                group.surround("pre_backward", self._before_backward)

    @property
    def parameters_known(self) -> list[ShardedParameter]:
        """The sharded parameters that were ever whole."""
        return [each for group in self.groups for each in group.parameters if each.whole is not None]

    def forward(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of the user's while the root's parameters are whole, and shards compute as the whole."""
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
                self.keep_writes()
                self._require_own_parameters()
                return result
            finally:
                for shard, _ in shards:
                    shard.__class__ = DTensor
                    vars(shard).pop("sharded", None)  # a user who keeps a shard must not keep the model
                self.drop(of_units=True)
        except BaseException:
            self.restore_modules()
            raise
        finally:
            self.running = False

    def enter(self, run: Callable[..., Any]) -> Forward:
        """`run`, entering the root first when no step is running: for a forward called between steps.

        A forward during backward is a recomputation: there the parameters are whole too.
        """

        def entered(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs) if self.running or self.in_backward else self(run, *args, **kwargs)

        return entered

    # ---------------------------------------------------------------- gathering

    def drop(self, of_units: bool = False) -> None:
        """Makes shards of what belongs to no unit, where it is whole; or of what stays whole in units."""
        for group in self.groups:
            if group.stays_whole and group.of_root is not of_units:
                group.drop()

    def gather(self, forget: bool = False, of_units: bool = False) -> None:
        """Makes whole what stays whole in steps, anew where it is whole already.

        Args:
            forget: whether what was written to the wholes is lost, as where an optimizer has stepped the shards.
            of_units: whether only what is of units is gathered, as the root's is whole already.
        """
        self._forgets = forget
        try:
            for group in self.groups:
                if group.stays_whole and not (of_units and group.of_root):
                    group.gather()
        finally:
            self._forgets = False

    def put_in_modules(self, whole: bool) -> None:
        """Lets modules have the wholes, or the shards, of what belongs to no unit and is gathered."""
        for group in self.groups:
            for each in group.parameters if group.of_root and group.is_whole else ():
                each.put_in_modules(each.whole if whole else each.shard)

    def _before_backward(self, group: ParamGroup, gather: Callable[..., None], *args: Any) -> None:
        gather(*args)
        if torch.is_grad_enabled() and self.running:  # `create_graph`: what it computes is differentiated again
            group.keep()

    def _before_dropping(self, group: ParamGroup, drop: Callable[[], None]) -> None:
        if self.running and not self._forgets:
            self.keep_writes(group)
        for parameter in group.parameters if group.is_whole else ():
            parameter.leave_memory_to_others()
        drop()

    # ---------------------------------------------------------------- what a step does to whole parameters

    @torch.no_grad()
    def keep_writes(self, *groups: ParamGroup) -> None:
        """Write wholes to the shards, which learn as these do; all of them unless groups are given."""
        self.learn_as_wholes(*groups)
        for group in groups or self.groups:
            rows = [(each.shard._local_tensor, each.written_rows()) for each in group.parameters if group.is_whole]
            written = [(shard, own) for shard, own in rows if own is not None]
            if written:
                torch._foreach_copy_([shard for shard, _ in written], [own for _, own in written])

    def learn_as_wholes(self, *groups: ParamGroup) -> None:
        """Freeze shards, or let them learn, as the wholes do, which `self.critic.requires_grad_(False)` meets."""
        with torch._C.DisableTorchFunctionSubclass():
            for group in groups or self.groups:
                for each in group.parameters if group.is_whole else ():
                    if each.shard.requires_grad is not each.whole.requires_grad:
                        each.shard.requires_grad_(each.whole.requires_grad)

    def lasting(self, output: T) -> T:
        """What a step returns, so that it has memory when the parameters are dropped.

        Raises:
            ValueError: it is a view of a parameter that was gathered, in training: on one device it would follow the
                optimizer's step, as a copy does not.
        """
        tensors = [each for each in tensors_of(output) if each.numel() and (each._is_view() or each.grad_fn is None)]
        gathered = [each for group in self.groups if group.is_whole for each in group.parameters] if tensors else []
        memory = {0, *(each.elements.untyped_storage().data_ptr() for each in gathered)}
        lost = {id(each): _address(each) for each in tensors if _address(each) in memory}
        if not lost:
            return output
        if torch.is_grad_enabled() or 0 in lost.values():
            (shape, *_) = (tuple(each.shape) for each in tensors if id(each) in lost)
            raise ValueError(
                f"the step returned a view of a parameter (of shape {shape}), of which ZeRO 3 keeps a "
                "part once the step is over; return a copy: .clone()"
            )
        made: T = map_tensors(lambda each: each.clone() if id(each) in lost else each, output)
        return made

    # ---------------------------------------------------------------- gradients within a step
    #
    # `fully_shard` leaves gradients on shards, while a step sees whole parameters. So between the backward passes of a
    # step a whole parameter has the shard's gradient for its `grad`, as a `GlobalShard`, which computes as the whole
    # and writes into the shard's memory. If it is set to None, the shard has none either.

    def show_gradients(self) -> None:
        """A backward within a step is over, or a step begins."""
        if not self._shown:
            found = [(each.whole, each.shard, each.shard.grad) for each in self.parameters_known]
            self._shown = [(whole, shard, global_of(it)) for whole, shard, it in found if isinstance(it, DTensor)]
            for whole, _, gradient in self._shown:
                whole.grad = gradient

    def settle_gradients(self) -> bool:
        """Take gradients off the wholes, before another backward, an optimizer's step, or the end of the step.

        Returns:
            Whether the step gave one that no backward computed: it stays on the whole, until it is made a mean over
            the ranks, as by a backward.
        """
        given, shown = False, self._shown
        self._shown = []
        for whole, shard, before in shown:
            now = whole.grad
            if now is not before:
                shard.grad = now if isinstance(now, GlobalShard) and now.placements == before.placements else None
                given = given or (now is not None and shard.grad is None)
            if now is before or shard.grad is not None:
                whole.grad = None
        return given

    # ---------------------------------------------------------------- what stands in modules

    def _require_own_parameters(self) -> None:
        """Raise where something else is left in the place of a parameter as a step ends: no optimizer would know it."""
        for group in reversed(self.groups):  # the first of the model is named
            slots = [
                (owner, name) for each in group.parameters for owner, name in each.slots if not each.is_in(owner, name)
            ]
            for owner, name in slots:
                path = next(path for path, module in self.model.named_modules() if module is owner)
                raise taken_out(f"{path}.{name}" if path else name)

    def restore_modules(self) -> None:
        """After a step that failed: shards and wholes stand in their places, and no whole without memory elsewhere."""
        dropped: dict[int, Any] = {}
        for group in [group for group in self.groups if group.has_begun]:
            for parameter in group.parameters:
                parameter.put_in_modules(parameter.whole if group.is_whole else parameter.shard, everywhere=True)
                if not group.is_whole and parameter.whole is not None:
                    dropped[id(parameter.whole)] = parameter.shard
        for table in [module._parameters for module in self.model.modules()]:
            table.update({name: dropped.get(id(each), each) for name, each in table.items()})


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward users call: the model, its children, and members of its lists of modules.

    Those without parameters have nothing to gather; metrics among them cannot be looked up, as their hash changes.
    """
    found = [model]
    for child in model.children():
        if not any(True for _ in child.parameters()):
            continue
        found += entrances(child)[1:] if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def _address(tensor: Tensor) -> int | None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if plain else None


# ---------------------------------------------------------------- shards while a step runs


class ShardInStep(DTensor):
    """The class of a sharded parameter while a step runs.

    Attributes:
        sharded: the parameter.
    """

    sharded: ShardedParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, attribute = kwargs or {}, getattr(func, "__self__", None)
        if attribute is Tensor.grad:
            given = args[1] if len(args) > 1 else None
            if isinstance(given, Tensor) and not isinstance(given, DTensor):
                # a whole gradient that a step gives belongs to the whole parameter
                standing = args[0].standing()
                standing.grad = shard_of(given, standing) if isinstance(standing, DTensor) else given
                return None
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args)
            return found if found is None else global_of(found)
        if func.__name__ in METADATA and attribute not in VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if func in LEARN:  # as `toggle_optimizer` does, which has shards
                whole = args[0].sharded.whole
                if whole is not None:
                    leaf_of(whole.requires_grad_(args[0].requires_grad))  # what autograd has for it learns alike
            return result
        first: Any = args[0].standing() if args and type(args[0]) is cls else None
        divided = isinstance(first, DTensor)  # as experts are
        if divided and attribute is Tensor.data:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first, *args[1:])
        args, kwargs = tree_map_only(cls, cls.full, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        if divided and is_in_place(func.__name__):
            first._local_tensor.copy_(shard_of(args[0].detach(), first)._local_tensor)
        return result

    def standing(self) -> Any:
        """What code sees for the parameter where its unit is whole: the whole, or what computes as the whole."""
        self.sharded.group.keep()
        return computing(self.sharded.whole)

    def full(self) -> Any:
        """The whole parameter."""
        standing = self.standing()
        return standing.full_tensor() if isinstance(standing, DTensor) else standing

    def __deepcopy__(self, memo: Any) -> Any:
        full = self.full()
        if isinstance(full, Divided):
            return memo.setdefault(id(self), copy.deepcopy(full, memo))
        return memo.setdefault(id(self), nn.Parameter(full.detach().clone(), full.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)
