"""What a step writes to whole parameters reaches the shards: weights that are clipped, normalised or copied in a step.

`fully_shard` drops what it gathered, with all that was written to it. So before shards take the place of wholes, a
rank copies its rows back. To ask whether there is a change would take as long, and code can write without leaving a
trace, as `weight.data.clamp_()` does. Where wholes have a lower precision only elements that differ are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.techniques.zero.sharded.groups import groups_of, is_known
from lightning_parallel.values import map_tensors, tensors_of

T = TypeVar("T")


class StepsWrites:
    """Watches over wholes while a step runs.

    Args:
        states: of `fully_shard`, all of one model.
        root: tells by `running` whether a step runs, and has the `tables`.
    """

    def __init__(self, states: Iterable[Any], root: Any) -> None:
        self._groups = [group for state in states for group in groups_of(state)]
        self._root, self._forgets, self._tables = root, False, root.tables
        self._memory: dict[int, Tensor] = {}
        """Where wholes lie, by the `id` of parameters as `fully_shard` has them."""
        for group in self._groups:
            group.wait_for_unshard = partial(self._after_gathering, group, group.wait_for_unshard)
            group.reshard = partial(self._before_dropping, group, group.reshard)

    def keep(self) -> None:
        """Writes all wholes to the shards."""
        for group in self._groups:
            if group.is_unsharded:
                self._keep(group)

    def end(self) -> None:
        """As a step ends: writes all wholes, and raises for what is left in the place of parameters."""
        self.keep()
        self._tables.require_own()

    def with_copies(self, output: T) -> T:
        """What a step returns, with copies of what lies in the memory of wholes, which is about to go."""
        memory = self._memory_of_wholes()
        made: T = map_tensors(lambda each: each.clone() if _address(each) in memory else each, output)
        return made

    def refuse_views(self, output: Any) -> None:
        """After a step: what it returned must have memory, also when backward is over.

        Raises:
            ValueError: it is a view of a parameter that was gathered.
        """
        views = [each for each in tensors_of(output) if each.numel() and (each._is_view() or each.grad_fn is None)]
        memory = {0, *self._memory_of_wholes()} if views else set()
        lost = [each for each in views if _address(each) in memory]
        if lost:
            raise ValueError(
                f"the step returned a view of a parameter (of shape {tuple(lost[0].shape)}), of which ZeRO 3 keeps a "
                "part once the step is over; return a copy: .clone()"
            )

    def _memory_of_wholes(self) -> set[int]:
        wholes = (_elements(each) for group in self._groups if group.is_unsharded for each in group.fsdp_params)
        return {whole.untyped_storage().data_ptr() for whole in wholes}

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """Inside, wholes are dropped as they are: an optimizer has stepped the shards."""
        self._forgets = True
        try:
            yield
        finally:
            self._forgets = False

    def change(self, shards: Iterable[Tensor]) -> None:
        """Wholes of shards that were stepped count as changed, which `fully_shard` hides where it gathers them anew."""
        stepped = set(map(id, shards))
        parameters = (parameter for group in self._groups for parameter in group.fsdp_params)
        changed = [each for each in parameters if id(each.sharded_param) in stepped and is_known(each)]
        increment_version(map(_elements, changed))

    def _after_gathering(self, group: Any, wait: Callable[[], None]) -> None:
        with self._tables.others_stay(group) if self._root.running else nullcontext():
            wait()
        for parameter in group.fsdp_params:
            if id(parameter) not in self._memory and is_known(parameter):
                self._memory[id(parameter)] = _elements(parameter)

    def _before_dropping(self, group: Any, drop: Callable[[], None]) -> None:
        if self._root.running and not self._forgets and group.is_unsharded:
            self._keep(group)
        if group.is_unsharded and group.device.type == "cpu":
            for parameter in group.fsdp_params:
                self._part_from_others(parameter)
        with self._tables.others_stay(group) if self._root.running else nullcontext():
            drop()

    def _part_from_others(self, parameter: Any) -> None:
        """Memory that something else holds, too, as an array of NumPy does, is left to it: torch would not free it."""
        (gathered,) = parameter.all_gather_outputs
        if not gathered.untyped_storage().resizable():
            whole, memory = _elements(parameter), gathered.clone()
            gathered.data = memory
            local(parameter.unsharded_param).data = memory.as_strided(whole.size(), whole.stride())
            self._memory[id(parameter)] = _elements(parameter)

    @torch.no_grad()
    def _keep(self, group: Any) -> None:
        kept: list[Tensor] = []
        written: list[Tensor] = []
        for parameter in group.fsdp_params:
            whole, shard = _elements(parameter), parameter.sharded_param._local_tensor
            if whole.dtype != self._memory[id(parameter)].dtype:  # it was cast, which is refused, see `refuse_casts`
                continue
            rows = _rows(parameter, whole, shard)
            if whole.dtype == shard.dtype:
                kept.append(shard)
                written.append(rows)
            else:
                shard.copy_(torch.where(rows == shard.to(rows), shard.to(rows.device), rows.to(shard.dtype)))
            self._put_back(parameter, whole)
        if kept:
            torch._foreach_copy_(kept, written)

    def _put_back(self, parameter: Any, whole: Tensor) -> None:
        """Code may have given a parameter other memory, as in `weight.data = normalised(weight)`."""
        memory = self._memory[id(parameter)]
        if whole.data_ptr() != memory.data_ptr():
            # it may stay whole, and has not changed for what backward computes from it
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(memory):
                memory.copy_(whole)
            local(parameter.unsharded_param).data = memory


def _address(tensor: Tensor) -> int | None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if plain else None


def _elements(parameter: Any) -> Tensor:
    """What a rank has of a gathered parameter."""
    gathered: Any = parameter.unsharded_param
    elements: Tensor = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
    return elements.detach()


def _rows(parameter: Any, whole: Tensor, shard: Tensor) -> Tensor:
    """This rank's rows of a whole."""
    dim, info = parameter.fsdp_placement.dim, parameter.mesh_info
    each = -(-whole.size(dim) // info.shard_mesh_size)
    start = min(each * info.shard_mesh_rank, whole.size(dim))
    return whole.narrow(dim, start, shard.size(dim))
