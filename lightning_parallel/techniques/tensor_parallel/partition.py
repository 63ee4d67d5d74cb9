"""The divided model: its modules' new forwards, and where the hidden state is split and joined around its blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.techniques.redirect import Forward, redirect_forward
from lightning_parallel.techniques.shards import forget_leaves
from lightning_parallel.techniques.tensor_parallel.activations import Activations
from lightning_parallel.techniques.tensor_parallel.check import BlockCheck, Finding, RefusedBlockError, skeleton_of
from lightning_parallel.techniques.tensor_parallel.entries import enter_in_parents, hidden_of, replace_hidden
from lightning_parallel.techniques.tensor_parallel.heads import Undo, set_local_sizes
from lightning_parallel.techniques.tensor_parallel.layout import Divided
from lightning_parallel.techniques.tensor_parallel.modules import divided_forward
from lightning_parallel.techniques.tensor_parallel.randomness import draws

log = logging.getLogger(__name__)

BLOCK_STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
LENGTH = "tensor_parallel_length"
"""The argument by which a block learns the length of the whole sequence; a recomputation gets it again."""


class Partition:
    """Leads the forwards of divided modules and blocks through regions, as long as a run lasts.

    Args:
        divided: the modules that are divided.
        blocks: the repeated layers that this rank has, in their order; those that run one after the other together.
        group: the ranks of the axis tp.
        sequence_dim: of the hidden state.
        splits_sequence: whether the sequence is split between regions.
        regathers: whether backward gathers what enters regions again.
    """

    def __init__(
        self,
        divided: list[Divided],
        blocks: list[dict[str, nn.Module]],
        group: dist.ProcessGroup,
        sequence_dim: int,
        splits_sequence: bool,
        regathers: bool = False,
    ) -> None:
        self.group = group
        self.activations = Activations(group, sequence_dim, regathers)
        self._splits = splits_sequence
        self._is_split = False
        self._partial: dict[bool, list[str]] = {True: [], False: []}
        self._undo: list[Undo] = []
        self._handles: list[RemovableHandle] = []
        self._blocks: list[_Block] = []
        outside = Activations(group, sequence_dim)
        checks: dict[str, BlockCheck] = {}
        for run in blocks:
            made = [_Block(*named, divided, checks, group.size(), sequence_dim) for named in run.items()]
            self._surround(made)
            self._blocks += made
        inside = {id(each.module) for block in self._blocks for each in block.divided.values()}
        for each in divided:
            here = self.activations if id(each.module) in inside else outside
            redirect_forward(each.module, partial(divided_forward, each, here))

    @property
    def partial(self) -> list[str]:
        """The names of parameters of whose gradients ranks have summands after the last forward."""
        return self._partial[self._is_split]

    def block_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all blocks as they are now, by the names that `partial` has."""
        return {
            f"{block.name}.{name}": parameter
            for block in self._blocks
            for name, parameter in block.module.named_parameters(remove_duplicate=False)
        }

    def close(self) -> None:
        """Takes back what is not a forward; `restore_forward` does the rest."""
        for handle in self._handles:
            handle.remove()
        for undo in reversed(self._undo):
            undo()
        forget_leaves()

    # ---------------------------------------------------------------- around blocks

    def _surround(self, run: list[_Block]) -> None:
        for block in run:
            first, last = block is run[0], block is run[-1]
            before = partial(self._before_first if first else self._before_other, block)
            self._handles.append(block.module.register_forward_pre_hook(before, with_kwargs=True))
            redirect_forward(block.module, partial(self._running, block, first, last))

    def _before_first(self, block: _Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_split = self._splits and _has_sequence(hidden_of(args, kwargs))
        try:
            self._prepare(block, args, kwargs, self._is_split)
        except RefusedBlockError as refused:
            if not self._is_split:
                raise
            self._splits = self._is_split = False
            self._prepare(block, args, kwargs, False)
            log.warning("The sequence stays whole between regions: %s", refused)

    def _before_other(self, block: _Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        length = self.activations.length
        if length is None:
            self._prepare(block, args, kwargs, False)
            return None
        if True not in block.findings:
            self._prepare(block, *replace_hidden(args, kwargs, partial(self._as_whole, length)), True)
        return args, {**kwargs, LENGTH: length}

    def _as_whole(self, length: int, hidden: Tensor) -> Tensor:
        shape = list(hidden.shape)
        shape[self.activations.sequence_dim] = length
        return torch.empty(shape, dtype=hidden.dtype, device="meta")

    def _prepare(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any], split: bool) -> None:
        if split in block.findings:
            return
        finding = block.findings[split] = block.check.find(args, kwargs, split)
        self._partial[split] += [f"{block.name}.{name}" for name in sorted(finding.partial)]
        if len(block.findings) == 1:
            self._undo += set_local_sizes(block.module, block.divided, self.group.size(), finding.level)
        if finding.entry == "parent":
            enter_in_parents(block.module, block.divided, self.activations)

    def _running(self, block: _Block, first: bool, last: bool, forward: Forward) -> Forward:
        """The forward of a block: the sequence is split before the first one and joined after the last one."""
        activations, drops = self.activations, draws(block.module)

        def run(*args: Any, **kwargs: Any) -> Any:
            activations.length = kwargs.pop(LENGTH, None)
            if first and self._splits and _has_sequence(hidden_of(args, kwargs)):
                args, kwargs = replace_hidden(args, kwargs, activations.split)
            if not (drops and block.module.training):
                return _joined(activations, forward(*args, **kwargs), last)
            with activations.drawing():
                output = forward(*args, **kwargs)
            return _joined(activations, output, last)

        return run


def _has_sequence(hidden: Tensor | None) -> bool:
    return hidden is not None and hidden.dim() == 3


def _joined(activations: Activations, output: Any, last: bool) -> Any:
    activations.forget()
    if not last or activations.length is None:
        return output
    if isinstance(output, tuple | list):
        return type(output)((activations.join(output[0]), *output[1:]))
    return activations.join(output)


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
        self.findings: dict[bool, Finding] = {}
        mine = {each.name.removeprefix(f"{name}."): each for each in divided if each.name.startswith(f"{name}.")}
        self.divided: Mapping[str, Divided] = {k: v for k, v in mine.items() if v.style.kind in BLOCK_STYLES}
        structure = f"{module!r}{[tuple(p.shape) for p in module.parameters()]}"
        if structure not in checks:
            checks[structure] = BlockCheck(name, skeleton_of(module), self.divided, ranks, sequence_dim)
        self.check = checks[structure]
