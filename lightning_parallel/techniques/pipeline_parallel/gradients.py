"""The backward of one stage on one microbatch, whole or in two halves.

Gradients are computed without touching the parameters' own `grad`, and so without any hook on them, and summed here
over the microbatches. `HandOver` gives them to the parameters when the strategy runs its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_parallel.collectives.functional import by_kind
from lightning_parallel.techniques.gradients.asked import OWN
from lightning_parallel.techniques.pipeline_parallel.halves import Halves
from lightning_parallel.techniques.step import EarlyReduction
from lightning_parallel.techniques.tools.leaves import leaf_of


@dataclass
class Saved:
    """Inputs and outputs of a stage's forward on a microbatch, kept for its backward.

    Attributes:
        inputs: what was received, as leaves that require gradients.
        outputs: where what was returned came from in the graph, if it depends on parameters or inputs.
    """

    inputs: list[Tensor]
    outputs: list[GradientEdge | None]
    halves: Halves | None = None
    seeds: list[Tensor | None] = field(default_factory=list)
    done: bool = False


def save(inputs: list[Tensor], outputs: Sequence[Tensor]) -> Saved:
    """Keeps what backward needs.

    Args:
        inputs: leaves.
        outputs: floating tensors that the stage returned, in their order.
    """
    return Saved(inputs, [get_gradient_edge(output) if output.requires_grad else None for output in outputs])


class Final:
    """To whom gradients go that will not grow any more.

    Args:
        early: who may want them.
        alone: parameters that one stage uses, on this rank only; those of others are summed before they are final.
        toggled: tells whether the step has frozen parameters, or let some learn: only when it is over it is known which
            have a gradient.
    """

    def __init__(
        self,
        early: Sequence[EarlyReduction] = (),
        alone: Collection[nn.Parameter] = (),
        toggled: Callable[[], bool] = bool,
    ) -> None:
        self._early, self._alone, self._toggled = early, alone, toggled

    def taker(self, parameter: nn.Parameter) -> EarlyReduction | None:
        """Who wants the gradient of a parameter now; None: it is handed over in backward."""
        if parameter not in self._alone or self._toggled():
            return None
        return next((each for each in self._early if each.wants(parameter)), None)

    def give(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """Gives away what a batch has for a parameter; returns whether somebody took it."""
        taker = self.taker(parameter)
        if taker is None or (gradient is not None and gradient.is_sparse):
            return False
        if gradient is None:
            taker.lacks(parameter)
        else:
            taker.take(parameter, gradient)
        return True

    def multiply(self, factor: Tensor) -> None:
        """In backward: by what all that was taken is to be multiplied."""
        for each in self._early:
            each.multiply(factor.item())


class Gradients:
    """The gradients of some parameters, summed over microbatches: of what a rank computes with, see `leaf_of`.

    Args:
        parameters: as the model holds them during this step; which of them learn, the step may decide.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # to ask a parameter waits for the rows that are on their way
            self.parameters = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        self._leaves: list[Any] = [leaf_of(parameter) for parameter in self.parameters]
        self.sums: list[Tensor | None] = [None] * len(self.parameters)
        self._taken: set[int] = set()
        self._apart: bool | None = None  # whether the halves can be computed apart, as the first microbatch shows

    def take(self) -> list[Tensor | None]:
        """The sums, which are the caller's from here on: autograd copies gradients that somebody else holds too."""
        taken, self.sums = self.sums, [None] * len(self.parameters)
        return taken

    def full(self, saved: Saved, seeds: Sequence[Tensor | None], final: Final | None = None) -> list[Tensor | None]:
        """Full backward; returns the gradients of the stage's inputs.

        Args:
            saved: of the microbatch's forward.
            seeds: the gradients of its outputs.
            final: who takes gradients as they arrive, in the stage's last backward.
        """
        outputs, given = _with_seeds(saved, seeds)
        if not outputs:
            return [None] * len(saved.inputs)
        wanted = [*saved.inputs, *self._places()]
        with self._set_aside(), self._giving(final, outputs):
            made = torch.autograd.grad(outputs, wanted, given, allow_unused=True) if wanted else ()
        of_inputs: list[Tensor | None] = list(made[: len(saved.inputs)])
        of_parameters = made[len(saved.inputs) :]
        self._add(of_parameters, [*given, *of_inputs])
        return of_inputs

    def of_inputs(self, saved: Saved, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The first half: gradients of the stage's inputs only.

        A first stage has none: its second half does it all. Where the halves share work, it is all done now.
        """
        if not saved.inputs:
            saved.seeds = list(seeds)
            return []
        outputs, given = _with_seeds(saved, seeds)
        if not outputs:
            saved.outputs = []
            return [None] * len(saved.inputs)
        halves = Halves(outputs, saved.inputs, self._places())
        if self._apart is None:
            self._apart = halves.are_apart
        if not self._apart:
            saved.done = True
            return self.full(saved, seeds)
        saved.halves, saved.outputs = halves, []
        with self._set_aside():
            return halves.of_inputs(given)

    def of_weights(self, saved: Saved, final: Final | None = None) -> None:
        """The second half: gradients of the parameters. See `full`."""
        if saved.done:
            return
        if not saved.inputs:
            self.full(saved, saved.seeds, final)
        elif saved.halves is not None:
            came = saved.halves.came
            with self._set_aside():
                made = saved.halves.of_parameters()
            self._add(made, came)  # which may be what is under way to the stage before

    def give(self, final: Final) -> None:
        """After the last backward: gives away what did not go as it arrived."""
        for index, parameter in enumerate(self.parameters):
            if index not in self._taken and parameter.requires_grad and final.give(parameter, self.sums[index]):
                self.sums[index] = None
                self._taken.add(index)

    def _places(self) -> list[Any]:
        """The leaves, or of those that do not learn now where they come into graphs.

        A step may have let them learn for its time alone; between two stages the model is as the step found it. While a
        backward runs it stays so, for what recomputes in it reads whether parameters learn.
        """
        places: list[Any] = []
        for leaf in self._leaves:
            learns = leaf.requires_grad
            places.append(leaf if learns else get_gradient_edge(leaf.requires_grad_(True)))
            if not learns:
                leaf.requires_grad_(False)
        return places

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Inside, leaves have no gradients and no hooks, which run when the sums are handed over, and would twice.

        What leaves have afterwards is added to the sums: functions of autograd leave it there that run a backward pass
        within their own, as those of reversible layers do.
        """
        before: list[Tensor | None] = []
        hooked: list[tuple[Any, dict[int, Any]]] = []
        for leaf in self._leaves:  # in loops: each microbatch would pay for functions of Python's
            before.append(OWN.__get__(leaf))
            OWN.__set__(leaf, None)
            for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
                if hooks:
                    hooked.append((hooks, dict(hooks)))
                    hooks.clear()
        made: list[Tensor | None] = []
        try:
            yield
        finally:
            came = False
            for leaf, gradient in zip(self._leaves, before, strict=True):
                made.append(own := OWN.__get__(leaf))
                came = came or own is not None
                OWN.__set__(leaf, gradient)
            for hooks, kept in hooked:
                hooks.update(kept)
        if came:
            self._add(made, [])

    @contextmanager
    def _giving(self, final: Final | None, outputs: Sequence[GradientEdge]) -> Iterator[None]:
        """Inside, gradients of a backward from outputs go as they arrive, with the sums of those before.

        A function of autograd may run a backward of its own within it, to parameters too: what arrives there is no
        gradient of theirs yet.
        """
        handles: list[RemovableHandle] = []
        own: list[int] = []
        if final is not None:
            handles += [
                node.register_prehook(lambda *_: own.append(torch._C._current_graph_task_id()))
                for node in {output.node for output in outputs}
            ]
        for index, (parameter, leaf) in enumerate(zip(self.parameters, self._leaves, strict=True)):
            if final is not None and leaf.requires_grad and final.taker(parameter) is not None:
                handles.append(leaf.register_hook(partial(self._give_one, final, own, index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _give_one(self, final: Final, own: Sequence[int], index: int, gradient: Tensor) -> None:
        if torch._C._current_graph_task_id() not in own[:1]:
            return
        before = self.sums[index]
        if not gradient.is_sparse and final.give(
            self.parameters[index], gradient if before is None else before.add_(gradient)
        ):
            self.sums[index] = None
            self._taken.add(index)

    def _add(self, made: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
        grown: list[Tensor] = []
        more: list[Tensor] = []
        shared = {tensor.data_ptr() for tensor in others if tensor is not None}
        for index, gradient in enumerate(made):
            sum_ = self.sums[index]
            if gradient is None or index in self._taken:
                continue
            if sum_ is None:
                self.sums[index] = _owned(gradient, shared)
            elif gradient.is_sparse or sum_.is_sparse:
                self.sums[index] = sum_ + gradient
            else:
                grown.append(sum_)
                more.append(gradient)
        if grown:
            torch._foreach_add_(grown, more)


def _owned(gradient: Tensor, shared: set[int]) -> Tensor:
    """The gradient in memory of its own, to which more can be added in place."""
    if gradient.is_sparse:
        return gradient
    alone = gradient.is_contiguous() and gradient.data_ptr() not in shared
    shared.add(gradient.data_ptr())
    return gradient if alone else gradient.clone(memory_format=torch.contiguous_format)


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


class HandOver(torch.autograd.Function):
    """A loss whose backward gives parameters gradients that were computed before, times the gradient that comes in.

    Lightning sets gradients to zero between the step and its backward, and divides and scales the loss on the way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        gradients: list[Tensor | None],
        expected: float,
        final: Final,
        _: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """See `torch.autograd.Function`."""
        ctx.gradients, ctx.expected, ctx.final = gradients, expected, final
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        """See `torch.autograd.Function`."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a pipeline's step were handed over already; run its backward once")
        factor = incoming[0] / ctx.expected
        ctx.final.multiply(factor)
        dense = [gradient for gradient in gradients if gradient is not None and not gradient.is_sparse]
        for same in by_kind(dense):
            kind = same[0].dtype  # of half precision, a tensor would be rounded, for which a device is waited for
            torch._foreach_mul_(same, factor.to(kind) if kind.itemsize >= 4 else factor.item())
        return None, None, None, None, None, *gradients
