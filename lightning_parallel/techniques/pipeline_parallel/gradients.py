"""The backward of one stage on one microbatch, whole or in two halves.

Gradients are computed without touching the parameters' own `grad`, and so without any hook on them, and summed here
over the microbatches. `ApplyPrecomputedGrads` gives them to the parameters when the strategy runs its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.collectives.functional import by_kind
from lightning_parallel.techniques.pipeline_parallel.halves import Halves
from lightning_parallel.techniques.tools.leaves import leaf_of


@dataclass
class Saved:
    """Inputs and outputs of a stage's forward on a microbatch, kept for its backward."""

    inputs: list[Tensor]  # leaves that require gradients
    # the places of outputs in the graph; None for one that depends on no parameter and no input
    outputs: list[GradientEdge | None]
    halves: Halves | None = None  # between the two halves of a backward
    seeds: Sequence[Tensor | None] = ()  # the gradients of outputs, kept by a first stage for its second half


def save(inputs: list[Tensor], outputs: Sequence[Tensor]) -> Saved:
    """Keeps what backward needs: leaves, and the floating tensors that a stage returned."""
    return Saved(inputs, [get_gradient_edge(output) if output.requires_grad else None for output in outputs])


class Gradients:
    """The gradients of some parameters, summed over microbatches: of what a rank computes with, see `leaf_of`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # floating ones, as the model holds them during this step; the step decides which of them learn
        self.parameters = parameters
        self._leaves: list[Any] = [leaf_of(parameter) for parameter in parameters]
        self.sums: list[Tensor | None] = [None] * len(self.parameters)
        self._apart: bool | None = None  # whether the halves can be computed apart, as the first microbatch shows

    def take(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor | None]]:
        """Each parameter, its leaf and its sum, which is the caller's: autograd copies gradients that others hold."""
        taken, self.sums = self.sums, [None] * len(self.parameters)
        return zip(self.parameters, self._leaves, taken, strict=True)

    def full(self, saved: Saved, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Full backward from the gradients of a microbatch's outputs; returns those of its inputs."""
        outputs, given = _with_seeds(saved, seeds)
        if not outputs:
            return [None] * len(saved.inputs)
        wanted = [*saved.inputs, *self._places()]
        with self._set_aside():
            made = torch.autograd.grad(outputs, wanted, given, allow_unused=True) if wanted else ()
        of_inputs: list[Tensor | None] = list(made[: len(saved.inputs)])
        self._add(made[len(saved.inputs) :], [*given, *of_inputs])
        return of_inputs

    def of_inputs(self, saved: Saved, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The first half: gradients of the stage's inputs only.

        A first stage has none: its second half does it all. Where the halves share work, it is all done now.
        """
        if not saved.inputs:
            saved.seeds = seeds
            return []
        outputs, given = _with_seeds(saved, seeds)
        if not outputs:
            return [None] * len(saved.inputs)
        halves = Halves(outputs, saved.inputs, self._places())
        if self._apart is None:
            self._apart = halves.are_apart
        if not self._apart:
            return self.full(saved, seeds)
        saved.halves, saved.outputs = halves, []
        with self._set_aside():
            return halves.of_inputs(given)

    def of_weights(self, saved: Saved) -> None:
        """The second half: gradients of the parameters, if the first one has not computed them."""
        if not saved.inputs:
            self.full(saved, saved.seeds)
        elif saved.halves is not None:
            with self._set_aside():
                made, came = saved.halves.of_parameters()
            self._add(made, came)  # some of which may be on their way to the stage before

    def _places(self) -> list[Any]:
        """The leaves, or of those that do not learn now where they come into graphs.

        A step may have let them learn for its time alone; between two stages the model is as the step found it. While a
        backward runs it stays so, for what recomputes in it reads whether parameters learn.
        """
        places: list[Any] = []
        for leaf in self._leaves:
            if leaf.requires_grad:
                places.append(leaf)
            else:
                places.append(get_gradient_edge(leaf.requires_grad_(True)))
                leaf.requires_grad_(False)
        return places

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Inside, leaves have no gradients and no hooks, which run when the sums are applied, and would twice.

        Gradients that leaves have afterwards are added to the sums: functions of autograd leave them there that run a
        backward pass within their own, as those of reversible layers do.
        """
        before = [leaf.grad for leaf in self._leaves]
        hooked: list[tuple[Any, dict[int, Any]]] = []
        for leaf in self._leaves:
            leaf.grad = None
            for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
                if hooks:
                    hooked.append((hooks, dict(hooks)))
                    hooks.clear()
        try:
            yield
        finally:
            made = [leaf.grad for leaf in self._leaves]
            for leaf, gradient in zip(self._leaves, before, strict=True):
                leaf.grad = gradient
            for hooks, kept in hooked:
                hooks.update(kept)
        if any(gradient is not None for gradient in made):
            self._add(made, [])

    def _add(self, made: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
        """Adds gradients to the sums, in place; a first one that shares memory with `others` is cloned."""
        grown: list[tuple[Tensor, Tensor]] = []
        shared = {tensor.data_ptr() for tensor in others if tensor is not None}
        for index, gradient in enumerate(made):
            before = self.sums[index]
            if gradient is None:
                continue
            if before is None:
                place = 0 if gradient.is_sparse else gradient.data_ptr()
                alone = gradient.is_sparse or (gradient.is_contiguous() and place not in shared)
                self.sums[index] = gradient if alone else gradient.clone(memory_format=torch.contiguous_format)
                shared.add(place)
            elif gradient.is_sparse or before.is_sparse:
                self.sums[index] = before + gradient
            else:
                grown.append((before, gradient))
        if grown:
            torch._foreach_add_(*map(list, zip(*grown, strict=True)))


def _with_seeds(saved: Saved, seeds: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
    pairs = [(o, s) for o, s in zip(saved.outputs, seeds, strict=True) if o is not None and s is not None]
    return [output for output, _ in pairs], [seed for _, seed in pairs]


class Enter(torch.autograd.Function):
    """Lets a tensor that was received depend on a leaf of its shape; the block may then change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: Tensor) -> Tensor:
        """See `torch.autograd.Function`."""
        ctx.mark_dirty(received)
        return received

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        """See `torch.autograd.Function`."""
        return incoming[0], None


class ApplyPrecomputedGrads(torch.autograd.Function):
    """A loss whose backward gives parameters gradients that were computed before, times the gradient that comes in.

    Lightning sets gradients to zero between the step and its backward, and divides and scales the loss on the way.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: list[Tensor | None], expected: float, _: Tensor, *parameters: Tensor
    ) -> Tensor:
        """See `torch.autograd.Function`."""
        ctx.gradients, ctx.expected = gradients, expected
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        """See `torch.autograd.Function`."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a pipeline's step were handed over already; run its backward once")
        factor = incoming[0] / ctx.expected
        dense = [gradient for gradient in gradients if gradient is not None and not gradient.is_sparse]
        for same in by_kind(dense):
            kind = same[0].dtype  # of half precision, a tensor would be rounded, for which a device is waited for
            torch._foreach_mul_(same, factor.to(kind) if kind.itemsize >= 4 else factor.item())
        return None, None, None, None, *gradients
