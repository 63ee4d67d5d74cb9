"""The backward of a stage on a microbatch in two halves: gradients of its inputs now, those of its parameters later.

A parameter's gradient starts at the operations that read both the parameter and something that depends on the inputs.
The first half keeps the gradients that come in there; the second half starts from them. The halves can be apart
if no path along the inputs leads from such an operation to another one of the same parameter, if none of them is a
function of autograd that is written in Python, and if any two parameters are read by the same operations or by none
together.

Source: P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024. The halves of `torch.distributed.pipelining` (2.11)
refuse inputs that nothing depends on, and add up gradients of several results of one operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Halves:
    """The halves of one microbatch's backward from the outputs of a stage to its inputs and parameters, leaves."""

    def __init__(
        self, outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor | GradientEdge]
    ) -> None:
        self._outputs, self._inputs = outputs, inputs
        order = _leaves_first([output.node for output in outputs])
        leaves = [leaf if isinstance(leaf, GradientEdge) else get_gradient_edge(leaf) for leaf in parameters]
        self._wanted = {leaf.node: k for k, leaf in enumerate(leaves)}
        of_inputs = {get_gradient_edge(leaf).node for leaf in inputs}  # those that depend on inputs
        for node in order:  # leaves come first
            if not of_inputs.isdisjoint(_next(node)):
                of_inputs.add(node)
        #: by each operation that depends on inputs: the parameters that it reads
        self._read: dict[Node, frozenset[Node]] = {}
        for node in order:
            if node in of_inputs:
                others = _leaves_first(each for each in _next(node) if each not in of_inputs)
                self._read[node] = frozenset(self._wanted.keys() & others)
        self._came: dict[Node, Sequence[Tensor | None]] = {}

    @property
    def are_apart(self) -> bool:
        """Whether one can be computed after the other."""
        roots = [output.node for output in self._outputs if output.node not in self._read]
        if self._wanted.keys() & _leaves_first(roots):
            return False
        if any(isinstance(node, BackwardCFunction) for node, parameters in self._read.items() if parameters):
            return False
        readers: defaultdict[Node, set[Node]] = defaultdict(set)
        for node, parameters in self._read.items():
            for parameter in parameters:
                readers[parameter].add(node)
        # any two parameters are read by the same operations, or by none together
        in_groups = all(len({frozenset(readers[each]) for each in some}) < 2 for some in self._read.values())
        if not in_groups:
            return False
        # no path along the inputs may pass two operations that read the same parameters
        often = {parameter for parameter, nodes in readers.items() if len(nodes) > 1}
        met: dict[Node, frozenset[Node]] = {}
        for node, read in self._read.items():
            before = frozenset().union(*(met[next_] for next_ in _next(node) if next_ in met))
            if before & read:
                return False
            met[node] = before | (read & often)
        return True

    def of_inputs(self, seeds: Sequence[Tensor]) -> list[Tensor | None]:
        """The first half: gradients of the inputs, of those of the outputs."""
        reading = [node for node, parameters in self._read.items() if parameters]
        self._read = {node: self._read[node] for node in reading}
        handles = [node.register_prehook(partial(self._came.__setitem__, node)) for node in reading]
        try:
            outputs, self._outputs = self._outputs, ()
            made = torch.autograd.grad(outputs, self._inputs, seeds, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return list(made)

    def of_parameters(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The second half: gradients of the parameters, in their order, and those with which this half began."""
        groups: dict[frozenset[Node], list[Node]] = {}
        for node in self._came:
            groups.setdefault(self._read[node], []).append(node)
        found: list[Tensor | None] = [None] * (1 + max(self._wanted.values(), default=-1))
        for parameters, nodes in groups.items():
            came = [(GradientEdge(node, k), each) for node in nodes for k, each in enumerate(self._came[node])]
            came = [(edge, each) for edge, each in came if each is not None]
            if not came:  # a function of autograd returned None
                continue
            edges, seeds = zip(*came, strict=True)
            wanted = [GradientEdge(node, 0) for node in parameters]
            made = torch.autograd.grad(edges, wanted, seeds, allow_unused=True)
            for node, gradient in zip(parameters, made, strict=True):
                found[self._wanted[node]] = gradient
        return found, [gradient for gradients in self._came.values() for gradient in gradients]


def _leaves_first(roots: Iterable[Node]) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, finished = waiting.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(next_, False) for next_ in _next(node) if next_ not in seen]
    return order


def _next(node: Node) -> list[Node]:
    return [next_ for next_, _ in node.next_functions if next_ is not None]
