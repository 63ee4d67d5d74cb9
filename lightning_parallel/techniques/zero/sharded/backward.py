"""Backward passes under ZeRO stage 3: what `fully_shard` leaves out.

It reduces the gradients that a rank has: where ranks use other parameters, their messages do not fit each other. And it
ends a backward pass by hooks on what the forward returned: one that the user runs within the forward (manual
optimization) would never end, its gradients never reach the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_parallel.collectives.functional import all_reduce
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.techniques.zero.sharded.groups import groups_of, is_known, states_of


class ShardedBackward:
    """Watches the backward passes through one root.

    Args:
        root: the module around the step, whose parameters are whole while a step is `running`.
        group: all ranks that see other data.
    """

    def __init__(self, root: Any, group: dist.ProcessGroup) -> None:
        self._root, self._ranks = root, group
        states = list(states_of(root))
        self._state = states[0]
        self._root_groups = [group for each in (root, *root.shells) for group in groups_of(each._get_fsdp_state())]
        self._kinds = {
            id(group): kind for module, kind in root.fewer.items() for group in groups_of(module._get_fsdp_state())
        }
        self._by_group = [(group, list(group.fsdp_params)) for state in states for group in groups_of(state)]
        self._attended: dict[Tensor, RemovableHandle] = {}
        self._used: set[Any] = set()
        self._filled: dict[Any, Tensor | None] = {}
        self._finished = self._ending = self._within_run = self._given = False
        self.synced = True
        for state in states:
            state._root_post_backward_final_callback = partial(self._finish, state._root_post_backward_final_callback)
            for param_group in groups_of(state):
                param_group.post_backward = partial(self._reduce, param_group, param_group.post_backward)

    def run(self, backward: Callable[[], None], given: bool = False) -> None:
        """Runs a backward pass to its end, also where this rank had no gradient for any of the root's parameters.

        Args:
            backward: runs it.
            given: whether it computes nothing, for gradients that a step gave, see `Bucket.begin`.
        """
        self._finished, self._within_run, self._given = False, True, given
        if not self._root.running:
            self._root.reads.gather()
        try:
            backward()
            if self._root.running and not self._finished:
                self._state._root_post_backward_final_callback()
        finally:
            self._within_run = self._given = False
        self._forget_unused()

    def attend(self) -> None:
        """Watches the root's parameters, while they are whole: a gradient within a running step starts its end."""
        for parameter in (p.unsharded_param for group in self._root_groups for p in group.fsdp_params):
            if parameter.requires_grad and parameter not in self._attended:
                self._attended[parameter] = parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def casts(self) -> Iterator[tuple[Tensor, torch.dtype, torch.dtype]]:
        """The sharded parameters that a module cast while they were whole, from what and to what."""
        for p in (p for _, parameters in self._by_group for p in parameters):
            if is_known(p) and p.unsharded_param.dtype != p.sharded_param.dtype:
                yield p.sharded_param, p.sharded_param.dtype, p.unsharded_param.dtype

    def close(self) -> None:
        """Removes the hooks: the garbage collector does not see that a parameter holds them."""
        for handle in self._attended.values():
            handle.remove()
        self._attended.clear()

    def _on_gradient(self, _: Tensor) -> None:
        if self._root.running:
            self._state._register_root_post_backward_final_callback()

    # ---------------------------------------------------------------- parameters that a rank did not use

    def _reduce(self, group: Any, reduce: Callable[[], None], *unused: Any) -> None:
        """Ranks that used a group, and all of them for the root, send all its gradients: zeros for those they lack.

        What a step reads outside of its blocks waits for the end, as more may come for it.
        """
        kept = self._root.reads.keeps(group)
        if kept and not self._ending:
            return
        self._root.reads.gradients.settle()  # `torch.autograd.grad` comes here without `Step.backward`
        learning = [p for p in group.fsdp_params if is_known(p) and p.unsharded_param.requires_grad]
        used = {p for p in learning if p.unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None}
        self._used |= used
        if used or kept or group in self._root_groups:
            for p in learning:
                if p not in used:
                    self._filled.setdefault(p, p.sharded_param.grad)
                    p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)
        if (kind := self._kinds.get(id(group))) is not None:
            for p in used:
                local(p.unsharded_param.grad).mul_(1 / kind.mesh.size() if self._given else kind.scale)
        reduce()

    def _finish(self, finish: Callable[[], None]) -> None:
        if not self._root.running:
            self._end(finish)
            return
        self._end(finish)
        self._root.gather()
        if not self._within_run:  # else `Step.backward` shows them
            self._root.reads.gradients.show()

    def _end(self, finish: Callable[[], None]) -> None:
        self._ending = True
        try:
            finish()
        finally:
            self._ending = False
        self._finished = True
        if not self._within_run:
            self._forget_unused()

    def _forget_unused(self) -> None:
        """A parameter that no rank used keeps the gradient it had, mostly none, or weight decay would move it.

        It asks the ranks, which may be done with what is reduced outside of `fully_shard` at different times within the
        backward pass: so it waits for the end of all of it.
        """
        if not self.synced:
            return
        shared: dict[Any, list[Any]] = {None: []}
        for group, parameters in self._by_group:
            shared.setdefault(self._kinds.get(id(group)), []).extend(parameters)
        somewhere: set[Any] = set()
        for kind, parameters in shared.items():
            ranks = [self._ranks] if kind is None else [kind.mesh.get_group(dim) for dim in range(kind.mesh.ndim)]
            somewhere |= self._used_by_some(parameters, ranks)
        for p, before in self._filled.items():
            if p not in somewhere:
                p.sharded_param.grad = before
        self._used.clear()
        self._filled.clear()

    def _used_by_some(self, parameters: list[Any], ranks: list[dist.ProcessGroup]) -> set[Any]:
        """Those of some parameters that one of the ranks that share them used; each group of ranks is asked in turn."""
        used = torch.tensor([p in self._used for p in parameters], dtype=torch.float32)
        used = used.to(parameters[0].sharded_param.device_mesh.device_type if parameters else "cpu")
        for group in ranks:
            all_reduce(used, group).wait()
        return {p for p, count in zip(parameters, used.tolist(), strict=True) if count > 0}
