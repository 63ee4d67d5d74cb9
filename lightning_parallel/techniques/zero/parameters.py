"""ZeRO stage 3: parameters, gradients and optimizer states sharded, on PyTorch's `fully_shard`.

`fully_shard` gathers the parameters of a module when its forward starts. Here two kinds of modules are given to it, and
neither is the user's own: a unit for some blocks, and one root around the whole step. So the user's modules keep their
class, code that reads a weight outside any forward (a tied head, a parameter of the LightningModule) finds it whole
during the step, and everything can be taken back.
Source: S. Rajbhandari et al., ZeRO, SC 2020; Y. Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightning_parallel.collectives.functional import uses_exchange
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.techniques.gradients.asked import Given
from lightning_parallel.techniques.step import Run, Step, WrappedStep
from lightning_parallel.techniques.tools.holders import copied_axes
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward
from lightning_parallel.techniques.tools.shards import divides, dtensor_of, has_no_rows
from lightning_parallel.techniques.zero.backward import ShardedBackward
from lightning_parallel.techniques.zero.casts import refuse_casts
from lightning_parallel.techniques.zero.gradients import StepsGradients
from lightning_parallel.techniques.zero.groups import OwnAllGather, OwnReduceScatter, shards_of, states_of
from lightning_parallel.techniques.zero.learning import Learning
from lightning_parallel.techniques.zero.reads import OutsideReads
from lightning_parallel.techniques.zero.writes import StepsWrites

T = TypeVar("T")

UNIT_BYTES = 16 * 2**20
"""Blocks are gathered together until a unit has this size: smaller messages cost more in hooks than they save."""


class Unit(nn.Module):
    """One block, with the forward that techniques before sharding gave it."""

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.block = block
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block on whole parameters."""
        return self._forward(*args, **kwargs)


class Shell(nn.Module):
    """The whole step once more, for parameters that other ranks share than those that share the root's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of the user's while these parameters are whole."""
        return run(*args, **kwargs)


class Root(nn.Module):
    """The whole step: what belongs to no unit is whole from its beginning to its end.

    Args:
        model: the user's.
        left_whole: parameters of it that are not sharded.
    """

    def __init__(self, model: nn.Module, left_whole: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.model, self.left_whole = model, left_whole
        self.units, self.shells = nn.ModuleList(), nn.ModuleList()
        self.fewer: dict[nn.Module, Kind] = {}
        """The modules whose parameters fewer ranks share than the root's."""
        self.reads: OutsideReads
        self.running = False
        self.in_backward = False
        self.before_forward_of: Callable[[nn.Module], None] = _nothing
        self.before_end: Callable[[], None] = _nothing

    def forward(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of the user's while the root's parameters are whole."""
        self.running = True
        for shell in self.shells:
            run = partial(shell, run)
        try:
            with self.reads.watching():
                result = run(*args, **kwargs)
                self.before_end()
                return result
        finally:
            self.running = False

    def gather(self) -> None:
        """Makes whole what belongs to no unit or is read outside of it, anew where it is whole already."""
        for module in (self, *self.shells):
            module.reshard()
            module.unshard()
        self.reads.gather()

    def enter(self, module: nn.Module, run: Callable[..., Any]) -> Forward:
        """`run`, entering the root first when no step is running: for a forward called between steps.

        A forward during backward is a recomputation: there the parameters are whole too.
        """

        def entered(*args: Any, **kwargs: Any) -> Any:
            if not self.running and not self.in_backward:
                return self(run, *args, **kwargs)
            if self.running:
                self.before_forward_of(module)
            return run(*args, **kwargs)

        return entered


def _nothing(*_: nn.Module) -> None:
    pass


def shard_parameters(model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, offload: bool) -> Root:
    """Shards every parameter that can be, and returns the root through which steps must run.

    Raises:
        TypeError: an embedding that makes sparse gradients.
    """
    _refuse_sparse_gradients(model)
    left_whole = _unshardable(model)  # afterwards some ranks have no rows of what others have
    kinds = _kinds_of_parameters(model, mesh, set(left_whole))
    # A pipeline runs its blocks many times in a step: there they are gathered once, with the root.
    blocks = list(plan.find_blocks(model).values()) if mesh.sizes["pp"] == 1 else []
    groups = _groups_of_blocks(blocks)
    root, together = Root(model, left_whole), []
    for kind in kinds:
        for group in groups:
            units = [_wrap(block) for block in group if any(p in kind.parameters for p in block.parameters())]
            root.units.extend(units)
            together.append(kind.shard(units, root, offload))
    for module in _entrances(model):
        redirect_forward(module, partial(root.enter, module))
    ordinary, *others = kinds
    for kind in others:
        root.shells.append(shell := Shell(model))
        kind.shard([shell], root, offload)
    ordinary.shard([root], root, offload)
    gradients = StepsGradients(partial(shards_of, root))
    root.reads = OutsideReads([each for each in together if each], [root, *root.shells], gradients)
    _remove_hooks_of_state_dicts(root)
    return root


@dataclass(frozen=True, eq=False)
class Kind:
    """Parameters that the same ranks share.

    Attributes:
        mesh: these ranks, (shards) or (replicas, shards).
        scale: by what gradients are multiplied before they are summed, where that is not one over their number.
        parameters: those of them that are not sharded yet.
    """

    mesh: DeviceMesh
    scale: float | None
    parameters: set[nn.Parameter]

    def shard(self, modules: list[Any], root: Root, offload: bool) -> list[Any]:
        """Gives modules to `fully_shard`, all together, with those of their parameters that are of this kind.

        Returns:
            Those that have some.
        """
        mine = [module for module in modules if self.scale is None or self._has_some(module)]
        if not mine:
            return []
        policy = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu") if offload else OffloadPolicy()
        fully_shard(
            mine if len(mine) > 1 else mine[0],
            mesh=self.mesh,
            reshard_after_forward=True,
            offload_policy=policy,
            ignored_params={parameter for parameter in root.model.parameters() if parameter not in self.parameters},
        )
        for module in mine:
            if uses_exchange(self.mesh.get_group(self.mesh.ndim - 1)):
                module.set_custom_all_gather(OwnAllGather())
                module.set_custom_reduce_scatter(OwnReduceScatter())
            if self.scale is not None:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # what divides within a sum, NCCL alone has
        if self.scale is not None:
            root.fewer.update(dict.fromkeys(mine, self))
        return mine

    def _has_some(self, module: nn.Module) -> bool:
        return any(parameter in self.parameters for parameter in module.parameters())


def _kinds_of_parameters(model: nn.Module, mesh: ParallelMesh, left_whole: Collection[nn.Parameter]) -> list[Kind]:
    """First those that all ranks share, then those that fewer do, as experts."""
    ordinary = Kind(mesh.sharded_and_replicated, None, set())
    fewer: dict[DeviceMesh, Kind] = {}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in left_whole:
                continue
            ranks = copied_axes(parameter)
            if ranks is None:
                ordinary.parameters.add(parameter)
                continue
            if parameter not in made:
                made[parameter] = _without_copies(parameter)
                made[made[parameter]] = made[parameter]
                fewer.setdefault(ranks, Kind(ranks, 1 / mesh.loss.size(), set())).parameters.add(made[parameter])
            module._parameters[name] = made[parameter]
    return [ordinary, *fewer.values()]


def _without_copies(parameter: Any) -> nn.Parameter:
    """The same part on the axes that divide it alone; `fully_shard` adds those along which it is copied."""
    names = parameter.device_mesh.mesh_dim_names or ()
    kept = [(name, place) for name, place in zip(names, parameter.placements, strict=True) if divides(place)]
    own = parameter.device_mesh[tuple(name for name, _ in kept)]
    part = dtensor_of(parameter._local_tensor, own, [place for _, place in kept], parameter.shape, parameter.stride())
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    vars(made).update({name: value for name, value in vars(parameter).items() if name != "_leaf"})
    return made


def _entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward users call: the model, its children, and members of its lists of modules.

    Those without parameters have nothing to gather; metrics among them cannot be looked up, as their hash changes.
    """
    found = [model]
    for child in model.children():
        if not any(True for _ in child.parameters()):
            continue
        found += _entrances(child)[1:] if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def _refuse_sparse_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(f"sparse gradients ({name}, made with sparse=True) cannot be sharded; use sparse=False")


def _unshardable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that `fully_shard` refuses: those without rows, and those that are not of the model's main dtype."""
    parameters = list(model.parameters())
    bytes_of: dict[torch.dtype, int] = {}
    for parameter in parameters:
        bytes_of[parameter.dtype] = bytes_of.get(parameter.dtype, 0) + parameter.numel()
    main = max(bytes_of, key=lambda dtype: bytes_of[dtype], default=None)
    return [parameter for parameter in parameters if has_no_rows(parameter) or parameter.dtype != main]


def _wrap(block: nn.Module) -> Unit:
    unit = Unit(block, block.forward)
    redirect_forward(block, lambda _: unit)
    return unit


def _groups_of_blocks(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    count = min(len(blocks), sum(sizes) // UNIT_BYTES)
    if count < 2:
        return []
    groups: list[list[nn.Module]] = [[] for _ in range(count)]
    before = 0
    for block, size in zip(blocks, sizes, strict=True):
        groups[min(count - 1, before * count // sum(sizes))].append(block)
        before += size
    return [group for group in groups if group]


class ShardedParametersStep(WrappedStep):
    """Runs every step through the root, so that parameters are whole while the user's code can see them."""

    def __init__(self, inner: Step, root: Any, mesh: ParallelMesh) -> None:
        super().__init__(inner)
        self._root = root
        self._backward = ShardedBackward(root, mesh.loss.get_group())
        self._flags = Learning({id(module): module for module in (root, *_entrances(root.model))})
        self._given = Given()
        self._began = False
        self._writes, self._gradients = StepsWrites(states_of(root), root), root.reads.gradients
        root.before_forward_of, root.before_end = self._flags.agree, self._writes.keep

    def forward(self, run: Run[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""

        def whole(*args: Any, **kwargs: Any) -> T:
            if not self._began:  # `fully_shard` puts more of them there when the root first runs
                _remove_hooks_of_state_dicts(self._root)
                self._began = True
            self._flags.agree(self._root)
            self._backward.attend()
            output = self.inner.forward(run, *args, **kwargs)
            self._flags.agree(self._root)
            return output

        try:
            result: T = self._root(whole, *args, **kwargs)
        finally:
            self._gradients.hide()
        refuse_casts(self._root.model, self._backward.casts())
        return result

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`. Inside a step (manual optimization) the root's parameters stay whole."""
        if self._root.running:
            self._flags.agree(self._root)  # what was frozen when it was used may learn by now
        self._root.in_backward = True
        self._gradients.hide()
        try:
            self._backward.run(lambda: self.inner.backward(run))
        finally:
            self._root.in_backward = False
        self._given.stepped = set()
        if self._root.running:
            self._gradients.show()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """See `Step.unsynced`. Gradients are sharded after every pass; replicas meet only in the last one."""
        self._root.set_requires_all_reduce(False)
        self._backward.synced = False
        try:
            with super().unsynced():
                yield
        finally:
            self._root.set_requires_all_reduce(True)
            self._backward.synced = True

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`: the end of a backward reduces what wholes have for `grad`."""
        if (self._gradients.settle() or self._given.among(parameters)) and self._root.running:
            self.backward(_nothing)
        self._given.step(parameters)
        self.inner.average_given(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`. Inside a step, what is whole now is newer than its shards."""
        if self._root.running:
            self._writes.keep()
            self._gradients.settle()
        self.inner.before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.after_optimizer_step`. Inside a step, what is whole now is out of date."""
        if self._root.running:
            self._flags.agree(self._root)
            with self._writes.forgotten():
                self._root.gather()
        self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """See `Step.close`."""
        self._backward.close()
        self.inner.close()


def _remove_hooks_of_state_dicts(root: nn.Module) -> None:
    """Takes hooks of `fully_shard` off the user's modules: states are made, loaded and copied as if they were alone."""
    for module in root.modules():
        kinds: tuple[dict[int, Any], ...] = (
            module._state_dict_pre_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        )
        for hooks in kinds:
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(getattr(hook, "hook", hook))]:
                del hooks[key]


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
