"""The divided model: its modules' new forwards, and where the hidden state is split and joined around its blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_parallel.techniques.tensor_parallel.activations import Activations
from lightning_parallel.techniques.tensor_parallel.check.check import (
    BlockCheck,
    Finding,
    RefusedBlockError,
    learning_of,
    without,
)
from lightning_parallel.techniques.tensor_parallel.check.skeleton import skeleton_of
from lightning_parallel.techniques.tensor_parallel.entries import enter_in_parents, hidden_of, replace_hidden
from lightning_parallel.techniques.tensor_parallel.heads import Undo, set_local_sizes
from lightning_parallel.techniques.tensor_parallel.layout import Divided, parent_of
from lightning_parallel.techniques.tensor_parallel.modules import divided_forward
from lightning_parallel.techniques.tensor_parallel.randomness import draws
from lightning_parallel.techniques.tensor_parallel.whole.hidden import DividedHidden, on_split, whole_hidden
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward

log = logging.getLogger(__name__)

BLOCK_STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
WHOLE = "The sequence stays whole between regions"
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
        overlaps: whether products overlap with the collectives of a split sequence.
    """

    def __init__(
        self,
        divided: list[Divided],
        blocks: list[dict[str, nn.Module]],
        group: dist.ProcessGroup,
        sequence_dim: int,
        splits_sequence: bool,
        regathers: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.group = group
        self.activations = Activations(group, sequence_dim, regathers, overlaps)
        self._splits = splits_sequence
        self._undo: list[Undo] = [_without_fused_layers()]
        self._handles: list[RemovableHandle] = []
        self._blocks: list[_Block] = []
        self._warned: set[str] = set()
        outside = Activations(group, sequence_dim)
        checks: dict[str, BlockCheck] = {}
        for run in blocks:
            made = [_Block(*named, divided, checks, group.size(), sequence_dim) for named in run.items()]
            self._surround(made)
            self._blocks += made
        inside: set[int] = set()
        for block in self._blocks:
            for name, each in block.divided.items():
                here = partial(divided_forward, each, self.activations, region=parent_of(name))
                redirect_forward(each.module, here)
                inside.add(id(each.module))
            enter_in_parents(block.module, block.divided, self.activations)
        for each in divided:
            if id(each.module) not in inside:
                redirect_forward(each.module, partial(divided_forward, each, outside))

    @property
    def partial(self) -> list[str]:
        """The names of parameters of whose gradients ranks have summands after the last forward."""
        return [name for block in self._blocks for name in block.partial]

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
        for undo in (*self._undo, *(undo for block in self._blocks for undo in reversed(block.undo))):
            undo()

    # ---------------------------------------------------------------- around blocks

    def _surround(self, run: list[_Block]) -> None:
        for block in run:
            last = block is run[-1]
            before = partial(self._before, block)
            self._handles.append(block.module.register_forward_pre_hook(before, with_kwargs=True))
            if not last:
                after = partial(self._after, block)
                self._handles.append(block.module.register_forward_hook(after, prepend=True))
            redirect_forward(block.module, partial(self._running, block, last))

    def _before(self, block: _Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_of(args, kwargs)
        if not self._is_to_be_split(block, hidden):
            args, kwargs = whole_hidden(args, kwargs)
            self._prepare(block, args, kwargs, False)
            return args, kwargs
        if not isinstance(hidden, DividedHidden) or hidden.own is None:
            args, kwargs = whole_hidden(args, kwargs)
            return (args, kwargs) if self._can_split(block, args, kwargs) else self._before(block, _, args, kwargs)
        as_one = replace_hidden(args, kwargs, lambda _: torch.empty(hidden.shape, dtype=hidden.dtype, device="meta"))
        if not self._can_split(block, *whole_hidden(*as_one)):
            return self._before(block, _, args, kwargs)
        args, kwargs = whole_hidden(*replace_hidden(args, kwargs, lambda _: hidden.part()))
        return args, {**kwargs, LENGTH: hidden.length}

    def _is_to_be_split(self, block: _Block, hidden: Tensor | None) -> bool:
        if not (self._splits and block.splits and hidden is not None and hidden.dim() == 3):
            return False
        watched = block.watched()
        if watched:
            self._warn(f"{WHOLE}: a hook on {watched} looks at what it returns")
        return not watched

    def _can_split(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            self._prepare(block, args, kwargs, True)
        except RefusedBlockError as refused:
            block.splits = False
            self._prepare(block, args, kwargs, False)
            self._warn(f"{WHOLE}: {refused}")
        return block.splits

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning(reason)

    def _prepare(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any], split: bool) -> None:
        block.is_split = split
        key = split, learning_of(args, kwargs)
        if key not in block.findings:
            found = block.findings[key] = block.check.find(args, kwargs, split)
            if found.reason is not None:
                self._warn(found.reason)
        self._run_as(block, block.findings[key])

    def _run_as(self, block: _Block, finding: Finding) -> None:
        """Gives the block the sizes with which it runs as was found."""
        before, block.finding = block.finding, finding
        sizes = finding.level, finding.mode.gathered
        if before is not None and sizes == (before.level, before.mode.gathered):
            return
        for undo in reversed(block.undo):
            undo()
        here = without(block.divided, finding.mode.gathered)
        block.undo = set_local_sizes(block.module, here, self.group.size(), finding.level)

    def _running(self, block: _Block, last: bool, forward: Forward) -> Forward:
        """The forward of a block: a whole sequence is split before it, and joined after the last one."""
        activations, drops = self.activations, draws(block.module)

        def run(*args: Any, **kwargs: Any) -> Any:
            finding = block.finding
            assert finding is not None
            activations.begin_block(kwargs.pop(LENGTH, None), finding.mode, hidden_of(args, kwargs))
            if activations.length is None and block.is_split:
                args, kwargs = replace_hidden(args, kwargs, activations.split)
                activations.begin_block(activations.length, finding.mode, hidden_of(args, kwargs))
            with activations.drawing() if drops and block.module.training else nullcontext():
                output = self._attended(forward(*args, **kwargs))
            activations.forget()
            if not last or activations.length is None:
                return output
            joined = on_split(output, finding.outputs, activations.join)
            activations.length = None
            return joined

        return run

    def _attended(self, output: Any) -> Any:
        """What a block returns; the block may recompute in backward what it likes."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self.activations.resume_in_backward(leaf)
        return output

    def _after(self, block: _Block, _: nn.Module, inputs: Any, output: Any) -> Any:
        length, self.activations.length = self.activations.length, None
        if length is None:
            return None
        assert block.finding is not None
        dim, group = self.activations.sequence_dim, self.group
        return on_split(output, block.finding.outputs, lambda own: DividedHidden.along_dim(own, dim, length, group))


def _without_fused_layers() -> Undo:
    """In evaluation torch's own encoder layers hand their parameters to one kernel, which would take them for whole."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


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
        self.findings: dict[tuple[bool, frozenset[int]], Finding] = {}
        self.finding: Finding | None = None  # of the last forward
        self.undo: list[Undo] = []
        self.splits, self.is_split = True, False
        self._parts = [(own, part) for own, part in module.named_modules() if own]
        mine = {each.name.removeprefix(f"{name}."): each for each in divided if each.name.startswith(f"{name}.")}
        self.divided: Mapping[str, Divided] = {k: v for k, v in mine.items() if v.style.kind in BLOCK_STYLES}
        structure = f"{module!r}{[tuple(p.shape) for p in module.parameters()]}"
        if structure not in checks:
            checks[structure] = BlockCheck(name, skeleton_of(module), self.divided, ranks, sequence_dim)
        self.check = checks[structure]

    @property
    def partial(self) -> list[str]:
        """The names of parameters of whose gradients ranks have summands after its last forward."""
        found = self.finding
        return [f"{self.name}.{name}" for name in sorted(found.partial)] if found else []

    def watched(self) -> str:
        """The first module in it that a hook looks at, if any: what it sees must not be a part of a sequence."""
        return next((f"{self.name}.{own}" for own, part in self._parts if part._forward_hooks), "")
