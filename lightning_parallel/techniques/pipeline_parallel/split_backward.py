"""Backward of a stage on a microbatch, split into gradients of its inputs (first) and of its parameters (later).

Call an operation a reader if it reads a parameter and depends on the stage's inputs, as `x @ weight` does. The first
half stores the incoming gradients of all readers; the second half starts from them. A backward can be split if no path
in the graph of the inputs leads from one reader of a parameter to another one, no reader is a
`torch.autograd.Function` written in Python, any two parameters have the same readers or none in common, and no output
depends on parameters alone.

Source: P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024. The split of `torch.distributed.pipelining` (2.11)
refuses inputs that nothing depends on, and adds up gradients of several results of one operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """Split backward of one microbatch, from the outputs of a stage to the leaves: its inputs and parameters."""

    def __init__(
        self, outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor | GradientEdge]
    ) -> None:
        self._outputs, self._inputs = outputs, inputs
        order = _leaves_first([output.node for output in outputs])
        leaves = [leaf if isinstance(leaf, GradientEdge) else get_gradient_edge(leaf) for leaf in parameters]
        self._wanted = {leaf.node: k for k, leaf in enumerate(leaves)}
        dependent = {get_gradient_edge(leaf).node for leaf in inputs}  # nodes that depend on inputs
        for node in order:  # leaves first, so the operands of a node have been visited before it
            if not dependent.isdisjoint(_next(node)):
                dependent.add(node)
        #: operation that depends on inputs -> the parameters that it reads
        self._read: dict[Node, frozenset[Node]] = {}
        for node in order:
            if node in dependent:
                independent = _leaves_first(next_ for next_ in _next(node) if next_ not in dependent)
                self._read[node] = frozenset(self._wanted.keys() & independent)
        self._came: dict[Node, Sequence[Tensor | None]] = {}

    @property
    def can_split(self) -> bool:
        """True if the gradients of parameters can be computed after those of inputs; see the module's conditions."""
        roots = [output.node for output in self._outputs if output.node not in self._read]
        if self._wanted.keys() & _leaves_first(roots):
            return False
        if any(isinstance(node, BackwardCFunction) for node, parameters in self._read.items() if parameters):
            return False
        readers: defaultdict[Node, set[Node]] = defaultdict(set)
        for node, parameters in self._read.items():
            for parameter in parameters:
                readers[parameter].add(node)
        # any two parameters have the same readers, or no reader in common
        same_readers = all(len({frozenset(readers[p]) for p in read}) < 2 for read in self._read.values())
        if not same_readers:
            return False
        # no path in the graph of the inputs passes two readers of the same parameter
        multiply_read = {parameter for parameter, nodes in readers.items() if len(nodes) > 1}
        read_before: dict[Node, frozenset[Node]] = {}
        for node, read in self._read.items():
            on_paths = frozenset().union(*(read_before[next_] for next_ in _next(node) if next_ in read_before))
            if on_paths & read:
                return False
            read_before[node] = on_paths | (read & multiply_read)
        return True

    def of_inputs(self, seeds: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the first half: return the gradients of the inputs; `seeds` are the gradients of the outputs."""
        reading = [node for node, parameters in self._read.items() if parameters]
        self._read = {node: self._read[node] for node in reading}
        handles = [node.register_prehook(partial(self._came.__setitem__, node)) for node in reading]
        try:
            outputs, self._outputs = self._outputs, ()
            gradients = torch.autograd.grad(outputs, self._inputs, seeds, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return list(gradients)

    def of_parameters(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run the second half: return the gradients of the parameters, in order, and the stored incoming gradients."""
        groups: dict[frozenset[Node], list[Node]] = {}
        for node in self._came:
            groups.setdefault(self._read[node], []).append(node)
        result: list[Tensor | None] = [None] * (1 + max(self._wanted.values(), default=-1))
        for parameters, nodes in groups.items():
            starts = [(GradientEdge(node, k), seed) for node in nodes for k, seed in enumerate(self._came[node])]
            starts = [(edge, seed) for edge, seed in starts if seed is not None]
            if not starts:  # an autograd function returned None
                continue
            edges, seeds = zip(*starts, strict=True)
            wanted = [GradientEdge(node, 0) for node in parameters]
            grads = torch.autograd.grad(edges, wanted, seeds, allow_unused=True)
            for node, gradient in zip(parameters, grads, strict=True):
                result[self._wanted[node]] = gradient
        return result, [gradient for gradients in self._came.values() for gradient in gradients]


def _leaves_first(roots: Iterable[Node]) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(next_, False) for next_ in _next(node) if next_ not in seen]
    return order


def _next(node: Node) -> list[Node]:
    return [next_ for next_, _ in node.next_functions if next_ is not None]
