"""Backward of a stage on a microbatch: full, or split into input gradients and weight gradients.

Gradients are computed without touching `parameter.grad` or running hooks of parameters, and are summed here over
microbatches. `ApplyPrecomputedGrads` passes the sums to the parameters when Lightning calls backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.collectives.functional import group_by_dtype_and_device
from lightning_parallel.techniques.pipeline_parallel.split_backward import SplitBackward
from lightning_parallel.techniques.tools.leaves import autograd_leaf


@dataclass
class Saved:
    """Inputs and outputs of a stage's forward on a microbatch, stored for its backward."""

    inputs: list[Tensor]  # leaves that require gradients
    # edges of the outputs in the autograd graph; None for an output that depends on no parameter and no input
    outputs: list[GradientEdge | None]
    halves: SplitBackward | None = None  # set between the input gradients (I) and the weight gradients (W)
    seeds: Sequence[Tensor | None] = ()  # gradients of the outputs, stored by the first stage between I and W


def save(inputs: list[Tensor], outputs: Sequence[Tensor]) -> Saved:
    """Return what backward needs; `inputs` are leaves, `outputs` the floating-point tensors that a stage returned."""
    return Saved(inputs, [get_gradient_edge(output) if output.requires_grad else None for output in outputs])


class Gradients:
    """Gradients of parameters, summed over microbatches. They belong to the leaves of `autograd_leaf`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        # floating-point parameters, as the model holds them in this step; the step decides which require gradients
        self._parameters = parameters
        self._leaves: list[Any] = [autograd_leaf(parameter) for parameter in parameters.values()]
        self.sums: list[Tensor | None] = [None] * len(parameters)
        self._apart: bool | None = None  # whether backward can be split; decided by the first microbatch

    def take(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield name, leaf and sum of each parameter that requires gradients.

        Forget the sums: autograd would copy gradients that are referenced here.
        """
        sums, self.sums = self.sums, [None] * len(self._leaves)
        with torch._C.DisableTorchFunctionSubclass():  # does not wait for shards that are being gathered
            required = [parameter.requires_grad for parameter in self._parameters.values()]
        return compress(zip(self._parameters, self._leaves, sums, strict=True), required)

    def full(self, saved: Saved, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the full backward from `seeds`, the gradients of the outputs; return the gradients of the inputs."""
        outputs, output_grads = _with_seeds(saved, seeds)
        if not outputs:
            return [None] * len(saved.inputs)
        targets = [*saved.inputs, *self._places()]
        with self._set_aside():
            gradients = torch.autograd.grad(outputs, targets, output_grads, allow_unused=True) if targets else ()
        of_inputs: list[Tensor | None] = list(gradients[: len(saved.inputs)])
        self._add(gradients[len(saved.inputs) :], [*output_grads, *of_inputs])
        return of_inputs

    def of_inputs(self, saved: Saved, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute only the gradients of the stage's inputs (I).

        The first stage has no inputs: `of_weights` runs its full backward. If the backward cannot be split, it is run
        in full here, and `of_weights` does nothing.
        """
        if not saved.inputs:
            saved.seeds = seeds
            return []
        outputs, output_grads = _with_seeds(saved, seeds)
        if not outputs:
            return [None] * len(saved.inputs)
        halves = SplitBackward(outputs, saved.inputs, self._places())
        if self._apart is None:
            self._apart = halves.can_split
        if not self._apart:
            return self.full(saved, seeds)
        saved.halves, saved.outputs = halves, []
        with self._set_aside():
            return halves.of_inputs(output_grads)

    def of_weights(self, saved: Saved) -> None:
        """Compute the gradients of the parameters (W), if `of_inputs` has not done so."""
        if not saved.inputs:
            self.full(saved, saved.seeds)
        elif saved.halves is not None:
            with self._set_aside():
                gradients, shared = saved.halves.of_parameters()
            self._add(gradients, shared)  # `shared` may still be sent to the previous stage

    def _places(self) -> list[Any]:
        """Return what autograd differentiates: leaves, or the gradient edges of leaves that do not require gradients.

        The step may set `requires_grad` only temporarily: it is reset after each stage. It stays reset during backward,
        because recomputation (activation checkpointing) reads it, so such leaves are replaced by edges here.
        """
        edges: list[Any] = []
        for leaf in self._leaves:
            if leaf.requires_grad:
                edges.append(leaf)
            else:
                edges.append(get_gradient_edge(leaf.requires_grad_(True)))
                leaf.requires_grad_(False)
        return edges

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Remove `grad` and hooks of the leaves inside the context; hooks run later, when the sums are applied.

        Gradients that leaves have at the end are added to the sums: an autograd function whose backward calls
        `torch.autograd.backward`, as those of reversible layers do, accumulates them there.
        """
        previous = [leaf.grad for leaf in self._leaves]
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
            accumulated = [leaf.grad for leaf in self._leaves]
            for leaf, gradient in zip(self._leaves, previous, strict=True):
                leaf.grad = gradient
            for hooks, saved in hooked:
                hooks.update(saved)
        if any(gradient is not None for gradient in accumulated):
            self._add(accumulated, [])

    def _add(self, made: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
        """Add gradients to the sums in place; the first one of a parameter is cloned if `others` share its memory."""
        pairs: list[tuple[Tensor, Tensor]] = []
        shared = {tensor.data_ptr() for tensor in others if tensor is not None}
        for index, gradient in enumerate(made):
            total = self.sums[index]
            if gradient is None:
                continue
            if total is None:
                address = 0 if gradient.is_sparse else gradient.data_ptr()
                is_exclusive = gradient.is_sparse or (gradient.is_contiguous() and address not in shared)
                self.sums[index] = gradient if is_exclusive else gradient.clone(memory_format=torch.contiguous_format)
                shared.add(address)
            elif gradient.is_sparse or total.is_sparse:
                self.sums[index] = total + gradient
            else:
                pairs.append((total, gradient))
        if pairs:
            torch._foreach_add_(*map(list, zip(*pairs, strict=True)))


def _with_seeds(saved: Saved, seeds: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
    pairs = [(o, s) for o, s in zip(saved.outputs, seeds, strict=True) if o is not None and s is not None]
    return [output for output, _ in pairs], [seed for _, seed in pairs]


class ConnectToLeaf(torch.autograd.Function):
    """Make a received tensor depend on a leaf of its shape, so that it is no leaf and blocks may change it in place."""

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
    """Return the loss; its backward gives parameters precomputed gradients, times `incoming gradient / expected`.

    They cannot be written to `grad` earlier: Lightning zeroes gradients between the step and its backward, and it
    scales the loss (gradient accumulation, mixed precision). `expected` is the scale that the gradients contain.
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
            raise RuntimeError("the gradients of a pipeline's step were applied already; run its backward once")
        factor = incoming[0] / ctx.expected
        dense = [gradient for gradient in gradients if gradient is not None and not gradient.is_sparse]
        for tensors in group_by_dtype_and_device(dense):
            dtype = tensors[0].dtype  # a half-precision tensor would round the factor; item() waits for the device
            torch._foreach_mul_(tensors, factor.to(dtype) if dtype.itemsize >= 4 else factor.item())
        return None, None, None, None, *gradients
