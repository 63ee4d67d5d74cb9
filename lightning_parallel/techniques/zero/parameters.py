"""ZeRO stage 3: parameters, gradients and optimizer states sharded, on PyTorch's `fully_shard`.

`fully_shard` gathers the parameters of a module when its forward starts. Here two kinds of modules are given to it, and
neither is the user's own: a unit for some blocks, and one root around the whole step. So the user's modules keep their
class, code that reads a weight outside any forward (a tied head, a parameter of the LightningModule) finds it whole
during the step, and everything can be taken back.
Source: S. Rajbhandari et al., ZeRO, SC 2020; Y. Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import all_gather, reduce_scatter, uses_exchange
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.techniques.step import Run, Step, WrappedStep
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward
from lightning_parallel.techniques.tools.shards import has_no_rows
from lightning_parallel.techniques.zero.backward import ShardedBackward
from lightning_parallel.techniques.zero.casts import refuse_casts

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


class Root(nn.Module):
    """The whole step: what belongs to no unit is whole from its beginning to its end."""

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        super().__init__()
        self.model = model
        self.units = nn.ModuleList(units)
        self.running = False
        self.in_backward = False
        self.before_forward_of: Callable[[nn.Module], None] = _nothing

    def forward(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of the user's while the root's parameters are whole."""
        self.running = True
        try:
            return run(*args, **kwargs)
        finally:
            self.running = False

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


def _nothing(_: nn.Module) -> None:
    pass


def shard_parameters(model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, offload: bool) -> Root:
    """Shards every parameter that can be, and returns the root through which steps must run.

    Raises:
        TypeError: an embedding that makes sparse gradients.
    """
    _refuse_sparse_gradients(model)
    left_whole = set(unshardable(model))
    # A pipeline runs its blocks many times in a step: there they are gathered once, with the root.
    blocks = list(plan.find_blocks(model).values()) if mesh.sizes["pp"] == 1 else []
    groups = _groups_of_blocks(blocks)
    units = [[_wrap(block) for block in group] for group in groups]
    root = Root(model, (unit for group in units for unit in group))
    in_units = {parameter for group in groups for block in group for parameter in block.parameters()}
    for group in units:
        _fully_shard(group, mesh, offload, ignored=left_whole)
    for module in _entrances(model):
        redirect_forward(module, partial(root.enter, module))
    sharded_now = {parameter for unit in root.units for parameter in unit.parameters()}
    _fully_shard([root], mesh, offload, ignored=left_whole | in_units | sharded_now)
    return root


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


def unshardable(model: nn.Module) -> list[nn.Parameter]:
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


def _fully_shard(modules: list[Any], mesh: ParallelMesh, offload: bool, ignored: set[nn.Parameter]) -> None:
    target = modules if len(modules) > 1 else modules[0]
    policy = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if offload else OffloadPolicy()
    fully_shard(
        target,
        mesh=mesh.sharded_and_replicated,
        reshard_after_forward=True,
        offload_policy=policy,
        ignored_params=ignored,
    )
    for module in modules:
        if uses_exchange(mesh.fsdp.get_group()):
            module.set_custom_all_gather(_AllGather())
            module.set_custom_reduce_scatter(_ReduceScatter())


class _AllGather(AllGather):
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather(output_tensor, input_tensor, group).wait()


class _ReduceScatter(ReduceScatter):
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


class ShardedParametersStep(WrappedStep):
    """Runs every step through the root, so that parameters are whole while the user's code can see them."""

    def __init__(self, inner: Step, root: Any, mesh: ParallelMesh) -> None:
        super().__init__(inner)
        self._root = root
        self._backward = ShardedBackward(root, mesh.loss.get_group())
        self._flags = _RequiresGrad(root)
        root.before_forward_of = self._flags.agree

    def forward(self, run: Run[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""

        def whole(*args: Any, **kwargs: Any) -> T:
            self._flags.agree(self._root)
            self._backward.attend()
            output = self.inner.forward(run, *args, **kwargs)
            self._flags.agree(self._root)
            return output

        result: T = self._root(whole, *args, **kwargs)
        refuse_casts(self._root.model, self._backward.casts())
        return result

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`. Inside a step (manual optimization) the root's parameters stay whole."""
        self._root.in_backward = True
        try:
            self._backward.run(lambda: self.inner.backward(run))
        finally:
            self._root.in_backward = False

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

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.after_optimizer_step`. Inside a step, what is whole now is out of date."""
        if self._root.running:
            self._flags.agree(self._root)
            self._root.reshard()
            self._root.unshard()
        self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """See `Step.close`."""
        self._backward.close()
        _remove_hooks_of_state_dicts(self._root)
        self.inner.close()


def _remove_hooks_of_state_dicts(root: nn.Module) -> None:
    """Takes hooks of `fully_shard` off the user's modules: they keep shards alive, and fail where a whole is loaded."""
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


class _RequiresGrad:
    """Keeps the whole parameters of a running step frozen exactly when the sharded ones are, and the other way round.

    `fully_shard` looks at that when it gathers. Within a step, `toggle_optimizer` freezes what the optimizer holds, the
    shards; a user who writes `self.critic.requires_grad_(False)` there freezes the whole ones.
    """

    def __init__(self, root: Root) -> None:
        # by identity: the hash of a metric changes with its state
        self._slots = {id(module): _sharded_slots(module) for module in (root, *_entrances(root.model))}
        self._agreed: dict[Tensor, bool] = {}

    def agree(self, module: nn.Module) -> None:
        """The whole and the sharded parameters under a module become as the one of the two that changed."""
        for owner, name, shard in self._slots[id(module)]:
            whole, agreed = owner._parameters[name], self._agreed.get(shard, shard.requires_grad)
            if whole is not None and whole.requires_grad != shard.requires_grad:
                wanted = whole.requires_grad if shard.requires_grad == agreed else shard.requires_grad
                whole.requires_grad_(wanted)
                shard.requires_grad_(wanted)
            self._agreed[shard] = shard.requires_grad


def _sharded_slots(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
