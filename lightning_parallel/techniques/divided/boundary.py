"""Divided tensors on their way into and out of what a compiler reads, see `in_graph`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._pytree import TreeSpec

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.made_of import is_in_checkpoint, is_recomputed
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.in_graph import (
    Place,
    asked_of_blocks,
    hashable,
    inside,
    made,
    mark_of,
    ranks_of,
    watch,
)
from lightning_parallel.techniques.divided.parts import Part, computing
from lightning_parallel.techniques.divided.table import KEPT
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, local_part
from lightning_parallel.techniques.tools.redirect import (
    default_dtype,
    redirect_forward,
)
from lightning_parallel.techniques.tools.telling import warn_of_stage
from lightning_parallel.values import put_together, taken_apart

Forward = Callable[..., Any]

Slot = tuple[int, str, Any]
"""Where a divided parameter is: the number of a table of parameters, and its name there."""


class BlockParameters(NamedTuple):
    """What the tables of a block's parameters had when they were read.

    Attributes:
        all: that stood there, in the order of the tables; None where there is none.
        divided: those that ranks have divided, or have alike and use for different elements.
        looks: their places and forms.
    """

    all: list[Tensor | None]
    divided: list[Slot]
    looks: tuple[Any, ...]

    def are(self, now: list[Tensor | None]) -> bool:
        """Whether these still stand there."""
        return len(now) == len(self.all) and all(map(is_, now, self.all))


def _parameters(tables: list[dict[str, Any]], now: list[Tensor | None]) -> BlockParameters:
    divided = [(number, name, each) for number, table in enumerate(tables) for name, each in table.items()
               if type(each) is Part]  # fmt: skip
    return BlockParameters(now, divided, tuple((number, name, computing(each).form) for number, name, each in divided))


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
        self.inside = compiled(inside, fullgraph=True, asks_for=asked_of_blocks, isolate_recompiles=True)
        self._calls: dict[Any, Call] = {}
        self._words: dict[Any, str] = {}

    @cached_property
    def static(self) -> Graphs:
        """Those for forwards in a checkpoint that no graph contains: each is for its shapes and numbers alone.

        A forward and its recomputation must run the same graph, and of several that would do torch takes any.
        """
        static = Graphs(partial(self.compiled, dynamic=False), self._mesh)
        static._warned = self._warned
        return static

    def warn_once(self, message: str) -> None:
        """Logs a warning on one rank of a stage, which many blocks of a kind have in common."""
        if message not in self._warned:
            self._warned.add(message)
            warn_of_stage(message, self._mesh)

    def call(self, leaves: list[Any], form: Any, parameters: BlockParameters) -> Call:
        """What a graph is told of these leaves in this form, and of these parameters."""
        spelled = str(form) if isinstance(form, TreeSpec) else form
        looks = [each.form if isinstance(each, Wrapper) else None for each in leaves]
        key = spelled, parameters.looks, *looks
        known = self._calls.get(key)
        if known is None:
            if len(self._calls) >= KEPT:
                self._calls.clear()
            known = self._calls[key] = self._new(spelled, form, leaves, parameters.divided)
        return known

    def _new(self, spelled: Any, form: Any, leaves: list[Any], divided: list[Slot]) -> Call:
        marks = list(map(mark_of, leaves))
        places = [(number, name, mark_of(computing(each))) for number, name, each in divided]
        key = spelled, *map(hashable, marks), *[(number, name, hashable(mark)) for number, name, mark in places]
        word = self._words.setdefault(key, str(len(self._words)))  # lengths of sequences are none of it
        ranks = list(dict.fromkeys(ranks_of([*marks, *[mark for _, _, mark in places]])))
        return Call(word, marks, form, places, ranks)


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
        self._found = BlockParameters([], [], ())
        self._plain, self._plain_static = (each.compiled(forward) for each in (graphs, graphs.static))
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
        now = list(chain.from_iterable(map(dict.values, self.tables)))
        if not self._found.are(now):
            self._found = _parameters(self.tables, now)
        parameters = self._found
        leaves, form = taken_apart((args, kwargs))
        if not parameters.divided and not any(isinstance(leaf, Divided) for leaf in leaves):
            plain = self._plain_static if is_in_checkpoint() else self._plain
            with FunctionsGetWholes.compiling():
                return plain(*args, **kwargs)
        if self._eager:
            return self.forward(*args, **kwargs)
        graphs = self._graphs.static if is_in_checkpoint() else self._graphs
        call = graphs.call(leaves, form, parameters)
        try:
            output = self._in_graph(graphs, call, leaves, parameters.divided)
        except TorchDynamoException as error:  # nothing of the forward has run yet
            self._give_up(error)
            return self.forward(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self._go_without()
            return self.forward(*args, **kwargs)
        leaves, form = taken_apart(output)
        watch(leaves, call.ranks, parameters.all)
        return put_together(list(map(made, leaves, self.told)), form)

    def _in_graph(self, graphs: Graphs, call: Call, leaves: list[Any], divided: list[Slot]) -> Any:
        """Runs the graph. Meanwhile divided parameters are own elements: compilers look at all that a module has."""
        own = list(map(local_part, leaves))
        try:
            for number, name, each in divided:
                self.tables[number][name] = computing(each).own
            with FunctionsGetWholes.compiling():
                return graphs.inside(self, call.word, own, call.marks, call.form, call.places)
        finally:
            for number, name, each in divided:
                self.tables[number][name] = each

    def _go_without(self) -> None:
        """Tells once that a length or a mode came for which there is no graph; ranks are alike in that."""
        if self._must_compile:
            raise
        self._graphs.warn_once(
            f"{type(self._module).__name__} was compiled as often as torch allows "
            f"(torch._dynamo.config.recompile_limit = {torch._dynamo.config.recompile_limit}), and runs as it is for "
            "other lengths: pad batches to a few lengths, or raise the limit"
        )

    def _give_up(self, error: TorchDynamoException) -> None:
        if self._must_compile:
            raise error
        self._eager = True
        self._graphs.warn_once(
            f"{type(self._module).__name__} runs as it is, and only its parts are compiled: with tensors that ranks "
            f"have divided it is one graph or none, and torch.compile says: {_said(error)}"
        )
        for part in _parts(self._module):
            redirect_forward(part, lambda forward, part=part: CompiledForward(part, forward, self._graphs, False))  # type: ignore[misc]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules within that have parts of their own: a graph of a single map is worth nothing."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # these have no forward
            yield from _parts(child)
        elif any(True for _ in child.children()):
            yield child


def _said(error: TorchDynamoException) -> str:
    """The message of a break on purpose, else the first line."""
    lines = str(error).strip().splitlines()
    said = [line.partition(mark)[2] for line in lines for mark in ("Message: ", "break with message ") if mark in line]
    return said[0] if said else lines[0]
