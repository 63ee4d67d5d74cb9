"""What a compiler reads of a block with divided tensors, and what a graph cannot do.

A graph gets and returns plain tensors: a rank's own elements. Which elements they are is told beside them, by a mark,
and is a constant of the graph. A mark is the cuts of a divided tensor, or None.

A graph is the same for all backward passes, so it leaves gradients of parameters to be reduced when the step ends.
A step that asks for one in between would get a summand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as writes_outside
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.made_of import is_in_checkpoint, is_recomputed
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.meeting import as_divided
from lightning_parallel.techniques.divided.parts import Part, computing
from lightning_parallel.techniques.divided.table import KEPT
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, local_part
from lightning_parallel.techniques.tools.redirect import Forward, default_dtype, redirect_forward
from lightning_parallel.techniques.tools.telling import warn_of_stage
from lightning_parallel.values import are_same, put_together, taken_apart

Place = tuple[int, str, Any]
"""Where a divided parameter is: the number of a table of parameters, its name there, and itself, or its mark."""

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
    all_marks = [*marks, *[mark for _, _, mark in places]]
    with InGraph(slots):
        plain = [table[name] for table, name in slots]
        returned, form = _computed(block.forward, [*own, *plain], all_marks, form, slots)
        for ranks in ranks_of(all_marks):
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
    leaves = [as_divided(*each) for each in zip(own, marks, strict=True)]
    given, parameters = leaves[: len(own) - len(slots)], leaves[len(own) - len(slots) :]
    args, kwargs = put_together(given, form)
    before = [table[name] for table, name in slots]
    for (table, name), parameter in zip(slots, parameters, strict=True):
        table[name] = parameter
    output = forward(*args, **kwargs)
    # Asked while a graph is read, and never when it runs: a list or a dict of its arguments was put together for it.
    if not are_same((args, kwargs), put_together(given, form)):
        torch._dynamo.graph_break(msg="it changes a list or a dict that it is given, of which graphs get copies")
    for (table, name), parameter in zip(slots, before, strict=True):
        table[name] = parameter
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

    tensors = map(as_divided, checkpoint(within, **options), told[2])
    return tree_unflatten([next(tensors) if other is None else other[0] for other in told[1]], told[0])


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
        for each in (*args, *(kwargs or {}).values()):  # no generator, and no tree of what is none: compilers read each
            if isinstance(each, Divided) or (
                isinstance(each, (list, tuple, dict)) and any(isinstance(leaf, Divided) for leaf in tree_leaves(each))
            ):
                return Divided.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


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


# ---------------------------------------------------------------- what a graph cannot do


def watch(outputs: Sequence[Any], ranks: Sequence[Ranks], parameters: Sequence[Tensor | None]) -> None:
    """Watches what a graph returned: a backward pass that would give summands for gradients raises RuntimeError there.

    Args:
        outputs: plain tensors; what is none is left alone.
        ranks: that divide what comes in or goes out.
        parameters: of the module that is a graph, as it held them; None where it has none.
    """

    def check(gradients: Any) -> None:
        if all(each.reduces_later for each in ranks) or all(each.averages is None for each in ranks):
            return
        for each in parameters:
            if each is None or not each.requires_grad:
                continue
            try:  # where the pass that runs adds the gradient, and does not return it, the step makes it a mean
                torch._C._will_engine_execute_node(get_gradient_edge(local_part(computing(each))).node)
            except RuntimeError:  # torch does not say so of what `torch.autograd.grad` was asked for
                raise RuntimeError(
                    "a backward pass of the step's own asks for gradients of parameters in a compiled block, of which "
                    "ranks have summands until the step ends; use self.manual_backward(loss) in place of "
                    "loss.backward(), leave out the loss that needs torch.autograd.grad, or leave out Compile"
                ) from None

    for node in {each.grad_fn for each in outputs if isinstance(each, Tensor)}:
        if node is not None:
            node.register_prehook(check)


# ---------------------------------------------------------------- on their way into a graph and out of it


class Call(NamedTuple):
    """What a graph is told of the tensors that it is called with; the same object for all calls that get such.

    Attributes:
        word: stands for all of it, and is the one thing that the graph asks for.
        marks: of what comes in, one by one.
        form: of what comes in.
        places: of the parameters that look whole.
        ranks: the groups that divide any of it.
    """

    word: str
    marks: list[Any]
    form: Any
    places: list[Place]
    ranks: list[Ranks]


class Graphs:
    """What the compiled forwards of a run share: graphs, which blocks of a kind have in common.

    Which elements ranks have of what comes in, and in which form it comes, is told to a graph by one word: it need not
    ask again for all that a compiler has read of these.

    Args:
        compiled: what makes a compiled function of one that takes and returns plain tensors: `torch.compile`.
        mesh: all ranks.
    """

    def __init__(self, compiled: Callable[..., Forward], mesh: ParallelMesh) -> None:
        self.compiled, self._mesh = compiled, mesh
        self._warned: set[str] = set()
        # Isolated: torch counts recompilations, and looks for graphs, by the function that it has read.
        options = {"fullgraph": True, "asks_for": asked_of_blocks, "isolate_recompiles": True}
        self.inside = compiled(inside, **options)
        # Of forwards in a checkpoint that no graph contains each is for its shapes and numbers alone: a forward and its
        # recomputation must run the same graph, and of several that would do torch takes any.
        self.inside_static = compiled(inside, dynamic=False, **options)
        self._calls: dict[Any, Call] = {}
        self._words: dict[Any, str] = {}

    def warn_once(self, message: str) -> None:
        """Logs a warning on one rank of a stage, which many blocks of a kind have in common."""
        if message not in self._warned:
            self._warned.add(message)
            warn_of_stage(message, self._mesh)

    def call(self, leaves: list[Any], form: Any, divided: list[Place], looks: tuple[Any, ...]) -> Call:
        """What a graph is told of these leaves in this form, and of these parameters that look so."""
        spelled = str(form) if isinstance(form, TreeSpec) else form
        key = spelled, looks, *[each.form if isinstance(each, Wrapper) else None for each in leaves]
        known = self._calls.get(key)
        if known is None:
            if len(self._calls) >= KEPT:
                self._calls.clear()
            marks = list(map(mark_of, leaves))
            places = [(number, name, mark_of(computing(each))) for number, name, each in divided]
            spelled = spelled, *map(hashable, marks), *[(number, name, hashable(mark)) for number, name, mark in places]
            word = self._words.setdefault(spelled, str(len(self._words)))  # lengths of sequences are none of it
            ranks = list(dict.fromkeys(ranks_of([*marks, *[mark for _, _, mark in places]])))
            known = self._calls[key] = Call(word, marks, form, places, ranks)
        return known


class CompiledForward:
    """A compiled forward that takes, returns, and finds in the module's parameters, tensors that ranks have divided.

    With divided tensors it is one graph or runs as it is: behind a break, code would meet them in the form of graphs.
    Where it runs as it is, as where attention sends messages along a divided sequence, its parts are compiled, such as
    the feed-forward of a block.

    Args:
        module: whose forward it is.
        forward: takes and returns divided tensors.
        graphs: what it shares with other modules of the run.
        must_compile: whether a forward that does not become one graph is an error.
    """

    def __init__(self, module: nn.Module, forward: Forward, graphs: Graphs, must_compile: bool) -> None:
        self.forward, self._module, self._graphs, self._must_compile = forward, module, graphs, must_compile
        self.tables: list[dict[str, Any]] = [part._parameters for part in module.modules()]
        self.told: list[Any] = []
        """The marks of what the graph returned."""
        self._held: list[Tensor | None] = []
        """What stood in the tables of parameters when they were read, in their order; None where there is none."""
        self._divided: list[Place] = []
        """Of these, what ranks have divided, or have alike and use for different elements."""
        self._looks: tuple[Any, ...] = ()
        """The places and forms of the divided ones."""
        self._plain, self._plain_static = graphs.compiled(forward), graphs.compiled(forward, dynamic=False)
        self._eager = False
        self._dtype = torch.get_default_dtype()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph on a rank's own elements."""
        if is_recomputed():  # by the user's checkpoint: Lightning sets a dtype for forwards alone
            with default_dtype(self._dtype):
                return self._run(*args, **kwargs)
        self._dtype = torch.get_default_dtype()
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        held = list(chain.from_iterable(map(dict.values, self.tables)))
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._held = held
            self._divided = [(number, name, each) for number, table in enumerate(self.tables)
                             for name, each in table.items() if type(each) is Part]  # fmt: skip
            self._looks = tuple((number, name, computing(each).form) for number, name, each in self._divided)
        leaves, form = taken_apart((args, kwargs))
        if not self._divided and not any(isinstance(leaf, Divided) for leaf in leaves):
            plain = self._plain_static if is_in_checkpoint() else self._plain
            with FunctionsGetWholes.compiling():
                return plain(*args, **kwargs)
        if self._eager:
            return self.forward(*args, **kwargs)
        graph = self._graphs.inside_static if is_in_checkpoint() else self._graphs.inside
        call = self._graphs.call(leaves, form, self._divided, self._looks)
        try:
            output = self._in_graph(graph, call, leaves)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # nothing of the forward has run yet
            if self._must_compile:
                raise
            self._tell(error)
            return self.forward(*args, **kwargs)
        leaves, form = taken_apart(output)
        watch(leaves, call.ranks, self._held)
        return put_together(list(map(as_divided, leaves, self.told)), form)

    def _in_graph(self, graph: Forward, call: Call, leaves: list[Any]) -> Any:
        """Runs the graph. Meanwhile divided parameters are own elements: compilers look at all that a module has."""
        own, divided = list(map(local_part, leaves)), self._divided
        try:
            for number, name, each in divided:
                self.tables[number][name] = computing(each).own
            with FunctionsGetWholes.compiling():
                return graph(self, call.word, own, call.marks, call.form, call.places)
        finally:
            for number, name, each in divided:
                self.tables[number][name] = each

    def _tell(self, error: Exception) -> None:
        """Tells once why the block runs as it is, for this length or from now on."""
        name = type(self._module).__name__
        if isinstance(error, FailOnRecompileLimitHit):  # ranks are alike in that a length came without a graph
            self._graphs.warn_once(
                f"{name} was compiled as often as torch allows "
                f"(torch._dynamo.config.recompile_limit = {torch._dynamo.config.recompile_limit}), and runs as it is "
                "for other lengths: pad batches to a few lengths, or raise the limit"
            )
            return
        self._eager = True
        lines, marks = str(error).strip().splitlines(), ("Message: ", "break with message ")  # of a break on purpose
        said = [line.partition(mark)[2] for line in lines for mark in marks if mark in line]
        self._graphs.warn_once(
            f"{name} runs as it is, and only its parts are compiled: with tensors that ranks have divided it is one "
            f"graph or none, and torch.compile says: {said[0] if said else lines[0]}"
        )
        for part in _parts(self._module):
            redirect_forward(part, CompiledForward, part, graphs=self._graphs, must_compile=False)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules within that have parts of their own: a graph of a single map is worth nothing."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # these have no forward
            yield from _parts(child)
        elif any(True for _ in child.children()):
            yield child
