"""Whether the gradients of a stage's inputs and of its parameters can be computed one after the other.

A parameter's gradient starts at the operations that read both it and something that depends on the inputs. It can wait
if no way from such an operation, back along what depends on the inputs, leads to another one of the same parameter:
that way would be gone over twice. Nor is a function of autograd that is written in Python, and reads parameters: it may
do anything, such as a backward pass of its own. And operations that read one parameter together read all their
parameters together: torch's second half takes them in groups, and a parameter in two of them would be differentiated
in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge


def halves_are_apart(outputs: Iterable[Tensor], inputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Looks at the graph of one microbatch.

    Args:
        outputs: what the stage returned; each requires gradients.
        inputs: its inputs, leaves.
        parameters: leaves.
    """
    roots = [get_gradient_edge(output).node for output in outputs]
    order = _leaves_first(roots)
    of_inputs = _reaching(order, {_node_of(leaf) for leaf in inputs if leaf.requires_grad})
    wanted = {_node_of(leaf) for leaf in parameters if leaf.requires_grad}
    if any(root not in of_inputs for root in roots if wanted & _below(root)):
        return False
    read = {node: _read(node, of_inputs, wanted) for node in order if node in of_inputs}
    if any(isinstance(node, BackwardCFunction) for node, parameters in read.items() if parameters):
        return False
    return _are_in_groups(read) and not _meets_twice(read)


def _are_in_groups(read: Mapping[Node, frozenset[Node]]) -> bool:
    """Whether any two parameters are read by the same operations, or by none together."""
    readers: dict[Node, set[Node]] = {}
    for node, parameters in read.items():
        for parameter in parameters:
            readers.setdefault(parameter, set()).add(node)
    return all(len({frozenset(readers[each]) for each in parameters}) < 2 for parameters in read.values())


def _meets_twice(own: Mapping[Node, frozenset[Node]]) -> bool:
    """Whether a way back along the inputs passes two operations that read the same parameters."""
    often = _in_several(own.values())
    met: dict[Node, frozenset[Node]] = {}
    for node, read in own.items():
        before = frozenset().union(*(met[next_] for next_ in _next(node) if next_ in met))
        if before & read:
            return True
        met[node] = before | (read & often)
    return False


def _read(node: Node, of_inputs: set[Node], wanted: set[Node]) -> frozenset[Node]:
    sides = [_below(next_) for next_ in _next(node) if next_ not in of_inputs]
    return frozenset().union(*(side & wanted for side in sides))


def _in_several(sets: Iterable[frozenset[Node]]) -> set[Node]:
    once: set[Node] = set()
    twice: set[Node] = set()
    for some in sets:
        twice |= some & once
        once |= some
    return twice


def _reaching(order: Sequence[Node], goals: set[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in order:
        if node in goals or any(next_ in found for next_ in _next(node)):
            found.add(node)
    return found


def _below(root: Node) -> set[Node]:
    return set(_leaves_first([root]))


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


def _node_of(leaf: Tensor) -> Node:
    return get_gradient_edge(leaf).node
