"""The divided model: its modules' new forwards, and where the hidden state is split and joined around its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.techniques.redirect import redirect_forward
from lightning_parallel.techniques.shards import forget_leaves
from lightning_parallel.techniques.tensor_parallel.activations import Activations
from lightning_parallel.techniques.tensor_parallel.check import BlockCheck, Finding, skeleton_of
from lightning_parallel.techniques.tensor_parallel.entries import enter_in_parents, hidden_of, replace_hidden
from lightning_parallel.techniques.tensor_parallel.heads import Undo, set_local_sizes
from lightning_parallel.techniques.tensor_parallel.layout import Divided
from lightning_parallel.techniques.tensor_parallel.modules import divided_forward
from lightning_parallel.techniques.tensor_parallel.randomness import draws

BLOCK_STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")


class Partition:
    """Leads the forwards of divided modules and blocks through regions, as long as a run lasts.

    Args:
        divided: the modules that are divided.
        blocks: the repeated layers that this rank has, in their order; runs of neighbours in the model together.
        group: the ranks of the axis tp.
        sequence_dim: of the hidden state.
        splits_sequence: whether the sequence is split between regions.
    """

    def __init__(
        self,
        divided: list[Divided],
        blocks: list[dict[str, nn.Module]],
        group: dist.ProcessGroup,
        sequence_dim: int,
        splits_sequence: bool,
    ) -> None:
        self.group = group
        self.activations = Activations(group, sequence_dim)
        self._splits = splits_sequence
        self._partial: dict[bool, list[str]] = {True: [], False: []}
        self._last_length: int | None = None
        self._undo: list[Undo] = []
        self._handles: list[RemovableHandle] = []
        self._blocks: list[_Block] = []
        checks: dict[str, BlockCheck] = {}
        for run in blocks:
            self._hook(
                [_Block(name, module, divided, checks, group.size(), sequence_dim) for name, module in run.items()]
            )
        for each in divided:
            redirect_forward(each.module, partial(divided_forward, each, self.activations))

    @property
    def partial(self) -> list[str]:
        """The names of parameters of whose gradients ranks have summands after the last forward."""
        return self._partial[self._last_length is not None]

    def block_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all blocks as they are now, by the names that `partial` has."""
        return {
            f"{block.name}.{name}": parameter
            for block in self._blocks
            for name, parameter in block.module.named_parameters(remove_duplicate=False)
        }

    # ---------------------------------------------------------------- a step

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the forward of a step."""
        try:
            yield
        finally:
            self._rest()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around backward, within which blocks may run again."""
        before, self.activations.length = self.activations.length, self._last_length
        try:
            yield
        finally:
            self._rest()
            self.activations.length = before

    def _rest(self) -> None:
        self.activations.length = None
        self.activations.forget()
        self.activations.draw_alike()

    def close(self) -> None:
        """Takes back what is not a forward; `restore_forward` does the rest."""
        for handle in self._handles:
            handle.remove()
        for undo in reversed(self._undo):
            undo()
        forget_leaves()

    # ---------------------------------------------------------------- around blocks

    def _hook(self, blocks: list[_Block]) -> None:
        self._blocks += blocks
        first, last = blocks[0], blocks[-1]
        register = first.module.register_forward_pre_hook
        self._handles.append(register(self._before(first), with_kwargs=True))
        for block in blocks[1:]:
            block.handle = block.module.register_forward_pre_hook(self._prepares(block), with_kwargs=True)
            self._handles.append(block.handle)
        # before the hook with which a stage of a pipeline ends
        self._handles.append(last.module.register_forward_hook(self._after, prepend=True))

    def _before(self, block: _Block) -> Any:
        drops = draws(block.module)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = hidden_of(args, kwargs)
            split = self._splits and hidden is not None and hidden.dim() == 3
            self._prepare(block, args, kwargs, split)
            self._last_length = None
            if not split or hidden is None:
                self.activations.drops = drops and module.training
                return None
            inputs = replace_hidden(args, kwargs, self.activations.split)
            self._last_length = self.activations.length
            if drops and module.training:
                self.activations.draw_own(hidden.device)
            return inputs

        return hook

    def _prepares(self, block: _Block) -> Any:
        """Prepares a block before its first forward, and is gone."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            length, dim = self.activations.length, self.activations.sequence_dim

            def whole(hidden: Tensor) -> Tensor:
                shape = list(hidden.shape)
                shape[dim] = shape[dim] if length is None else length
                return torch.empty(shape, dtype=hidden.dtype, device="meta")

            self._prepare(block, *replace_hidden(args, kwargs, whole), length is not None)

        return hook

    def _prepare(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any], split: bool) -> None:
        if split in block.findings:
            return
        finding = block.findings[split] = block.check.find(args, kwargs, split)
        self._partial[split] += [f"{block.name}.{name}" for name in sorted(finding.partial)]
        if len(block.findings) == 1:
            self._undo += set_local_sizes(block.module, block.divided, self.group.size(), finding.level)
        if finding.entry == "parent":
            enter_in_parents(block.module, block.divided, self.activations)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.activations.length is None:
            return None
        self.activations.draw_alike()
        if isinstance(output, tuple | list):
            return type(output)((self.activations.join(output[0]), *output[1:]))
        return self.activations.join(output)


class _Block:
    """A block, its divided modules by their names in it, and what was found out about it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        divided: list[Divided],
        checks: dict[str, BlockCheck],
        ranks: int,
        sequence_dim: int,
    ) -> None:
        self.name, self.module = name, module
        self.handle: RemovableHandle | None = None
        self.findings: dict[bool, Finding] = {}
        mine = {each.name.removeprefix(f"{name}."): each for each in divided if each.name.startswith(f"{name}.")}
        self.divided: Mapping[str, Divided] = {k: v for k, v in mine.items() if v.style.kind in BLOCK_STYLES}
        structure = f"{module!r}{[tuple(p.shape) for p in module.parameters()]}"
        if structure not in checks:
            checks[structure] = BlockCheck(name, skeleton_of(module), self.divided, ranks, sequence_dim)
        self.check = checks[structure]
