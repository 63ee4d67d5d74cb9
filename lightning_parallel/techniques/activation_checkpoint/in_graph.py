"""What a block writes within a graph: a backward of a graph recomputes from what memory holds then, written or not.

Such a block stays outside of graphs, where recomputations find what the forward found. A count that is only added to,
of which nothing in the block is made, disturbs no recomputation and stays in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

Forward = Callable[..., Any]


def breaking_where_written(forward: Forward) -> Forward:
    """The forward as a compiler reads it, which leaves it out if it computes with what it has written."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        comptime(_leave_out)
        return result

    return run


def _leave_out(context: ComptimeContext) -> None:
    if found := next(read_and_written(context.graph()), None):
        context.graph_break(f"a forward that is recomputed computes with what it writes, from `{_line(found)}` on")


def _line(node: Node) -> str:
    """The line of the user's code that comes to a node first."""
    trace: str = node.meta.get("stack_trace") or node.name
    lines = [line.strip() for line in trace.splitlines()]
    return next(line for line in reversed(lines) if line.strip("^~"))


def read_and_written(graph: Graph) -> Iterator[Node]:
    """Inputs into whose memory a graph writes, and of which it makes more than that.

    Writes count as versions of a tensor, or of a view of it (`tensor.data` has a count of its own). Kernels of norms
    write running statistics that count as none, and that they do not read.
    """
    values = {node: node.meta.get("example_value") for node in graph.nodes}
    changed = {place for value in values.values() for place, version in _versions(value) if version}
    for node in graph.nodes:
        own = {place for place, _ in _versions(values[node])}
        if node.op == "placeholder" and own & changed and any(_makes_of(each, own, values) for each in graph.nodes):
            yield node


def _makes_of(node: Node, memory: set[int], values: dict[Node, Any]) -> bool:
    """Whether a node makes something of this memory, rather than look at or write to it."""
    given = [{place for place, _ in _versions(values[each])} for each in node.all_input_nodes]
    target = given[0] if values[node] is None and given else {place for place, _ in _versions(values[node])}
    return any(each & memory for each in given) and not target <= memory


def _versions(value: Any) -> list[tuple[int, int]]:
    """The memory of each tensor in a value, and how often the tensor was written."""
    tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor) and each.layout == torch.strided]
    return [(each.untyped_storage()._cdata, each._version) for each in tensors]
