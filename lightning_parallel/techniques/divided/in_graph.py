"""What a compiler reads of a block with divided tensors, and what a graph cannot do.

A graph gets and returns plain tensors: a rank's own elements. Which elements they are is told beside them, by a mark,
and is a constant of the graph. A mark is the cuts of a divided tensor, or None.

A graph is the same for all backward passes, so it leaves gradients of parameters to be reduced when the step ends.
A step that asks for one in between would get a summand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import (
    _disable_side_effect_safety_checks_for_current_subtracer as writes_outside,
)
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.parts import computing
from lightning_parallel.techniques.divided.tensor import Divided, local_part
from lightning_parallel.techniques.tools.redirect import Forward
from lightning_parallel.values import are_same, put_together

Place = tuple[int, str, Any]
"""Where a parameter is that looks whole: the number of a table, its name there, and its mark."""

Slot = tuple[dict[str, Any], str]
"""The same: a table, and the name there."""

OPTIONS = ("use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug", "early_stop")
"""Of `torch.utils.checkpoint.checkpoint`; what else it is given by name is the forward's."""


def inside(block: Any, word: str, own: list[Any], marks: list[Any], form: Any, places: list[Place]) -> Any:
    """What the compiler reads: plain tensors come in and go out.

    Args:
        block: the `CompiledForward`; the marks of what goes out are left in it.
        word: stands for all that follows but the tensors.
        own: a rank's own elements of what comes in.
        marks: of these.
        form: of what comes in.
        places: of parameters that look whole.
    """
    assert word  # the graph asks for it
    tables, told = block.tables, block.told
    slots = [(tables[number], name) for number, name, _ in places]
    with InGraph(slots):
        plain = [table[name] for table, name in slots]
        returned, form = _computed(
            block.forward, [*own, *plain], [*marks, *[mark for _, _, mark in places]], form, slots
        )
        for ranks in ranks_of([*marks, *[mark for _, _, mark in places]]):
            ranks.draws_in_graph = 0
        told.clear()
        told += list(map(mark_of, returned))
        return tree_unflatten(list(map(local_part, returned)), form)


def _computed(forward: Forward, own: list[Any], marks: list[Any], form: Any, slots: list[Slot]) -> Any:
    """The leaves of what a forward returns, and their form; what is divided is made anew for it.

    Args:
        forward: takes, returns, and finds in the slots, what may be divided.
        own: a rank's own elements of what it gets, and then of what is in the slots.
        marks: of these.
        form: of what it gets.
        slots: where parameters are that look whole; they have afterwards what they had before.
    """
    leaves = [made(*each) for each in zip(own, marks, strict=True)]
    given, parameters = leaves[: len(own) - len(slots)], leaves[len(own) - len(slots) :]
    args, kwargs = put_together(given, form)
    before = [table[name] for table, name in slots]
    _put(slots, parameters)
    output = forward(*args, **kwargs)
    _refuse_writes((args, kwargs), given, form)
    _put(slots, before)
    for ranks in ranks_of(marks):
        ranks.last_in_graph = None  # nothing that entered here is used behind it
    return tree_flatten(output)


def _recomputed(slots: list[Slot], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """What a checkpoint in a graph returns. It gets and returns plain tensors, as the graph does.

    Args:
        slots: where parameters are that look whole.
        forward: takes, returns, and finds in the slots, what may be divided.
        args: what it gets.
        kwargs: the same by name, and options of `torch.utils.checkpoint.checkpoint`.
    """
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    leaves, form = tree_flatten((args, kwargs))
    leaves += [table[name] for table, name in slots]
    own, marks = list(map(local_part, leaves)), list(map(mark_of, leaves))
    told: list[Any] = []

    def run() -> list[Any]:
        returned, shape = _computed(forward, own, marks, form, slots)
        tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in returned]
        told.extend((shape, others, map(mark_of, tensors)))
        return list(map(local_part, tensors))  # torch lets a checkpoint return nothing else

    def within() -> list[Any]:
        with InGraph(slots):  # what a mode calls is without it
            return writes_outside(run)

    tensors = map(made, checkpoint(within, **options), told[2])
    return tree_unflatten([next(tensors) if other is None else other[0] for other in told[1]], told[0])


def _put(slots: list[Slot], parameters: list[Any]) -> None:
    for (table, name), parameter in zip(slots, parameters, strict=True):
        table[name] = parameter


def _refuse_writes(arguments: Any, leaves: list[Any], form: Any) -> None:
    """Gives up a graph that changed a list or a dict of its arguments: these were put together for it."""
    if not are_same(arguments, put_together(leaves, form)):  # asked while a graph is read, and never when it runs
        torch._dynamo.graph_break(msg="it changes a list or a dict that it is given, of which graphs get copies")


OF_THE_WORD = re.compile(r"(L\[')?(marks|form|places)\b|(L\[')?block('\])?\.told\b")
"""What graphs read of arguments that have one word alike."""

OF_PROGRAMS = re.compile(
    r"G\['(?!__|___unnamed_scope)|G\['__(builtins_dict|subclass__Traced|import_lightning_parallel_|"
    r"import_torch_dot_(utils_dot__pytree|distributed_dot_|_dynamo_dot_))|__import__\('torch'\)\.utils\._pytree\."
)
"""What graphs read of this file, of this project, and of how torch itself reads programs and sends messages."""


def asked_of_blocks(guards: Sequence[Any]) -> list[bool]:
    """Which conditions a graph keeps: what cannot change as long as the word is the same it need not ask at every call.

    They are two of three, some five hundred for a block. What elements have become in other shapes is remembered with
    them: a graph that found it missing makes it at each call, so it is asked for, and another graph takes its place.
    """
    return [
        guard.guard_type in ("DICT_CONTAINS", "DICT_NOT_CONTAINS")
        if OF_THE_WORD.match(guard.name)
        else OF_PROGRAMS.search(guard.name) is None
        for guard in guards
    ]


class InGraph(TorchFunctionMode):
    """Asks for rules in place of compilers, which do not look for divided tensors in tuples: `torch.cat((a, b))`.

    Args:
        slots: where parameters are that look whole, for checkpoints.
    """

    def __init__(self, slots: list[Slot] | None = None) -> None:
        super().__init__()
        self._slots = slots or []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func is checkpoint:
            return _recomputed(self._slots, *args, **(kwargs or {}))
        if _holds_divided(args) or (kwargs and _holds_divided(kwargs.values())):
            return Divided.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _holds_divided(values: Any) -> bool:
    for each in values:  # no generator, and no tree of what is none: compilers read each step of them
        if isinstance(each, Divided):
            return True
        if isinstance(each, (list, tuple, dict)) and any(isinstance(leaf, Divided) for leaf in tree_leaves(each)):
            return True
    return False


def mark_of(leaf: Any) -> Any:
    """What a graph is told of a tensor beside its own elements."""
    return leaf.cuts if isinstance(leaf, Divided) else None


def hashable(mark: Any) -> Any:
    """A mark by its value: graphs make elements anew."""
    if mark is None:
        return None
    return tuple([(dim, elements.ranks, elements.size, elements.runs) for dim, elements in mark.items()])


def ranks_of(marks: list[Any]) -> list[Ranks]:
    """The groups that divide what has these marks."""
    return [elements.ranks for mark in marks if mark is not None for elements in mark.values()]


def made(own: Any, mark: Any) -> Any:
    """The divided tensor of these own elements and this mark."""
    return own if mark is None else Divided(own, mark)


# ---------------------------------------------------------------- what a graph cannot do


def watch(outputs: Sequence[Any], ranks: Sequence[Ranks], parameters: Sequence[Tensor | None]) -> None:
    """Watches what a graph returned: a backward pass that would give summands for gradients raises RuntimeError there.

    Args:
        outputs: plain tensors; what is none is left alone.
        ranks: that divide what comes in or goes out.
        parameters: of the module that is a graph, as it held them; None where it has none.
    """
    check = partial(_check, ranks, parameters)
    nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor)}
    for node in nodes:
        if node is not None:
            node.register_prehook(check)


def _check(ranks: Sequence[Ranks], parameters: Sequence[Tensor | None], gradients: Any) -> None:
    if all(each.reduces_later for each in ranks):
        return
    if all(each.averages is None for each in ranks):
        return
    learning = [each for each in parameters if each is not None and each.requires_grad]
    if any(map(_gets_a_summand, learning)):
        raise RuntimeError(
            "a backward pass of the step's own asks for gradients of parameters in a compiled block, of which "
            "ranks have summands until the step ends; use self.manual_backward(loss) in place of "
            "loss.backward(), leave out the loss that needs torch.autograd.grad, or leave out Compile"
        )


def _gets_a_summand(parameter: Tensor) -> bool:
    """Whether the backward pass that runs returns the gradient: where it adds it, the step makes it a mean."""
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(local_part(computing(parameter))).node)
    except RuntimeError:  # torch does not say so of what `torch.autograd.grad` was asked for
        return True
    return False
