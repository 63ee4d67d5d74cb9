"""Compiled blocks that take, return and hold `Divided` tensors: how a graph gets them, and what a graph cannot do.

A graph takes and returns plain tensors, the local shards. Their sharding is passed beside them as a mark, which is a
constant of the graph: the cuts of a `Divided` tensor, or None for any other value.

One graph serves all backward passes, so it leaves the gradients of parameters to be reduced at the end of the step.
A step that reads such a gradient before its end would get a partial one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
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

from lightning_parallel.collectives.derived_cache import is_in_checkpoint, is_recomputed
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.divided.alignment import as_divided
from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.divided.step_parameters import Part, computing
from lightning_parallel.techniques.divided.table import KEPT
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, local_part
from lightning_parallel.techniques.tools.redirect import Forward, default_dtype, redirect_forward
from lightning_parallel.techniques.tools.user_warnings import log
from lightning_parallel.values import are_same, flatten_value, unflatten_value

Place = tuple[int, str, Any]
"""A sharded parameter: index of the parameter table (of a module), name in it, and the parameter or its mark."""

Slot = tuple[dict[str, Any], str]
"""The place of a parameter: a parameter table, and the name in it."""

OPTIONS = ("use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug", "early_stop")
"""Keyword options of `torch.utils.checkpoint.checkpoint`; all other keyword arguments are those of the forward."""


def inside(block: Any, word: str, own: list[Any], marks: list[Any], form: Any, places: list[Place]) -> Any:
    """Run a block's forward inside a graph, with plain tensors in and out: the function that the compiler traces.

    Args:
        block: the `CompiledForward`; the marks of the outputs are left in its `told`.
        word: identifies the values of all further arguments but the tensors.
        own: the input leaves, with local shards in place of `Divided` tensors.
        marks: of the input leaves.
        form: the tree spec of the input.
        places: of the sharded parameters, with their marks.
    """
    assert word  # reads the word, so that the graph has a guard on it
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
    """Call a forward with `Divided` tensors; return the leaves of its output, and their tree spec.

    Args:
        forward: takes, returns, and finds in the slots, tensors that may be `Divided`.
        own: the leaves of its input, then the parameters of the slots, with local shards in place of `Divided` tensors.
        marks: of all of these.
        form: the tree spec of the input.
        slots: of the sharded parameters; their former content is restored afterwards.
    """
    leaves = [as_divided(*each) for each in zip(own, marks, strict=True)]
    inputs, parameters = leaves[: len(own) - len(slots)], leaves[len(own) - len(slots) :]
    args, kwargs = unflatten_value(inputs, form)
    before = [table[name] for table, name in slots]
    for (table, name), parameter in zip(slots, parameters, strict=True):
        table[name] = parameter
    output = forward(*args, **kwargs)
    # Evaluated while a graph is traced, never when it runs: lists and dicts of its arguments were rebuilt for it.
    if not are_same((args, kwargs), unflatten_value(inputs, form)):
        torch._dynamo.graph_break(msg="it changes a list or dict argument, but graphs get copies of these")
    for (table, name), parameter in zip(slots, before, strict=True):
        table[name] = parameter
    for ranks in ranks_of(marks):
        ranks.last_in_graph = None  # a tensor that entered in here must not be used outside
    return tree_flatten(output)


def _recomputed(slots: list[Slot], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run a checkpoint inside a graph; like the graph, it takes and returns plain tensors.

    Args:
        slots: of the sharded parameters.
        forward: takes, returns, and finds in the slots, tensors that may be `Divided`.
        args: arguments of the forward.
        kwargs: keyword arguments of the forward, and options of `torch.utils.checkpoint.checkpoint`.
    """
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    leaves, form = tree_flatten((args, kwargs))
    leaves += [table[name] for table, name in slots]
    own, marks = list(map(local_part, leaves)), list(map(mark_of, leaves))
    output_spec: list[Any] = []

    def run() -> list[Any]:
        returned, output_form = _computed(forward, own, marks, form, slots)
        tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in returned]
        output_spec.extend((output_form, others, map(mark_of, tensors)))
        return list(map(local_part, tensors))  # torch allows no other output of a checkpoint

    def run_in_mode() -> list[Any]:
        with InGraph(slots):  # a function called by a mode runs without that mode
            return writes_outside(run)

    tensors = map(as_divided, checkpoint(run_in_mode, **options), output_spec[2])
    return tree_unflatten([next(tensors) if other is None else other[0] for other in output_spec[1]], output_spec[0])


OF_THE_WORD = re.compile(r"(L\[')?(marks|form|places)\b|(L\[')?block('\])?\.told\b")
"""Guards on arguments that the word identifies."""

OF_PROGRAMS = re.compile(
    r"G\['(?!__|___unnamed_scope)|G\['__(builtins_dict|subclass__Traced|import_lightning_parallel_|"
    r"import_torch_dot_(utils_dot__pytree|distributed_dot_|_dynamo_dot_))|__import__\('torch'\)\.utils\._pytree\."
)
"""Guards on globals of this project, and of torch's own tracing and communication code."""


def needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Return which guards a graph keeps: values that cannot change while the word is the same need no guard.

    These are two of three guards, of some five hundred for a block. Guards on caches of derived elements are kept: a
    graph traced while an entry was missing computes it at each call, and is replaced once the entry exists.
    """
    return [
        guard.guard_type in ("DICT_CONTAINS", "DICT_NOT_CONTAINS")
        if OF_THE_WORD.match(guard.name)
        else OF_PROGRAMS.search(guard.name) is None
        for guard in guards
    ]


class InGraph(TorchFunctionMode):
    """Mode that dispatches to rules in place of the compiler, which misses `Divided` tensors in tuples: `cat((a, b))`.

    Args:
        slots: of the sharded parameters, for checkpoints.
    """

    def __init__(self, slots: list[Slot]) -> None:
        super().__init__()
        self._slots = slots

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func is checkpoint:
            return _recomputed(self._slots, *args, **(kwargs or {}))
        for each in (*args, *(kwargs or {}).values()):  # no generator, no tree of one leaf: compilers trace each
            if isinstance(each, Divided) or (
                isinstance(each, (list, tuple, dict)) and any(isinstance(leaf, Divided) for leaf in tree_leaves(each))
            ):
                return Divided.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def mark_of(leaf: Any) -> Any:
    """Return the mark of a leaf: the cuts of a `Divided` tensor, or None."""
    return leaf.cuts if isinstance(leaf, Divided) else None


def hashable(mark: Any) -> Any:
    """Return a hashable key of a mark by its values, as graphs create new `Elements`."""
    if mark is None:
        return None
    return tuple([(dim, elements.ranks, elements.size, elements.runs) for dim, elements in mark.items()])


def ranks_of(marks: list[Any]) -> list[Ranks]:
    """Return the rank groups that shard the tensors with these marks."""
    return [elements.ranks for mark in marks if mark is not None for elements in mark.values()]


# ---------------------------------------------------------------- backward passes that graphs do not support


def watch(outputs: Sequence[Any], ranks: Sequence[Ranks], parameters: Sequence[Tensor | None]) -> None:
    """Hook the outputs of a graph: a backward pass that would return partial gradients raises RuntimeError there.

    Args:
        outputs: outputs of the graph; only plain tensors are watched.
        ranks: the rank groups that shard inputs or outputs.
        parameters: of the compiled module; None for an empty entry.
    """

    def check(gradients: Any) -> None:
        if all(each.reduces_later for each in ranks) or all(each.averages is None for each in ranks):
            return
        for each in parameters:
            if each is None or not each.requires_grad:
                continue
            try:  # if this backward pass accumulates the gradient, and does not return it, the step averages it later
                torch._C._will_engine_execute_node(get_gradient_edge(local_part(computing(each))).node)
            except RuntimeError:  # torch raises it for inputs of `torch.autograd.grad`
                raise RuntimeError(
                    "a backward pass within the step asks for gradients of parameters in a compiled block, but ranks "
                    "have partial ones until the step ends; use self.manual_backward(loss) instead of "
                    "loss.backward(), leave out the loss that needs torch.autograd.grad, or leave out Compile"
                ) from None

    for node in {each.grad_fn for each in outputs if isinstance(each, Tensor)}:
        if node is not None:
            node.register_prehook(check)


# ---------------------------------------------------------------- calls of graphs


class Call(NamedTuple):
    """Static description of a compiled call's inputs; cached, so that equal calls get the same object.

    Attributes:
        word: identifies the other attributes; the only one that the graph has a guard on.
        marks: of the input leaves.
        form: the tree spec of the input.
        places: of the sharded parameters, with their marks.
        ranks: the rank groups that shard any of these.
    """

    word: str
    marks: list[Any]
    form: Any
    places: list[Place]
    ranks: list[Ranks]


class Graphs:
    """Graphs that the compiled forwards of a run share, as blocks of the same kind do.

    The shardings and the tree spec of a call's input are passed to a graph as one string, the word: its guard replaces
    the guards on everything that a compiler reads of them.

    Args:
        compiled: compiles a function that takes and returns plain tensors: `torch.compile`.
        mesh: the mesh of all ranks.
    """

    def __init__(self, compiled: Callable[..., Forward], mesh: ParallelMesh) -> None:
        self.compiled, self._mesh = compiled, mesh
        self._warned: set[str] = set()
        # Isolated: torch counts recompilations, and looks graphs up, by the function that it traced.
        options: dict[str, Any] = {"fullgraph": True, "guard_filter": needed_guards}
        if "isolate_recompiles" in signature(torch.compile).parameters:  # not in torch 2.11
            options["isolate_recompiles"] = True
        self.inside = compiled(inside, **options)
        # Forwards in checkpoints outside of graphs get static graphs, for their own shapes and numbers: a forward
        # and its recomputation must run the same graph, and torch would take any of several that fit.
        self.inside_static = compiled(inside, dynamic=False, **options)
        self._calls: dict[Any, Call] = {}
        self._words: dict[Any, str] = {}

    def warn_once(self, message: str) -> None:
        """Log a warning once, on one rank of the stage, as many blocks of the same kind report the same."""
        if message not in self._warned:
            self._warned.add(message)
            if self._mesh.is_first_of_stage:
                log.warning(message)

    def call(self, leaves: list[Any], form: Any, divided: list[Place], looks: tuple[Any, ...]) -> Call:
        """Return the description of a call with these leaves, tree spec, sharded parameters and their forms."""
        content = str(form) if isinstance(form, TreeSpec) else form
        key = content, looks, *[each.form if isinstance(each, Wrapper) else None for each in leaves]
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= KEPT:
                self._calls.clear()
            marks = list(map(mark_of, leaves))
            places = [(number, name, mark_of(computing(each))) for number, name, each in divided]
            content = content, *map(hashable, marks), *[(number, name, hashable(mark)) for number, name, mark in places]
            word = self._words.setdefault(content, str(len(self._words)))  # lengths that are not sharded are no part
            ranks = list(dict.fromkeys(ranks_of([*marks, *[mark for _, _, mark in places]])))
            call = self._calls[key] = Call(word, marks, form, places, ranks)
        return call


class CompiledForward:
    """Compiled forward that takes, returns, and finds in the module's parameters, `Divided` tensors.

    With `Divided` tensors the forward is one graph or runs eagerly: code behind a graph break would get the traced form
    of the tensors. Where it runs eagerly, as where attention sends messages along a sharded sequence, its submodules,
    such as the feed-forward of a block, are compiled instead.

    Args:
        module: the module of the forward.
        forward: takes and returns `Divided` tensors.
        graphs: shared with the other modules of the run.
        must_compile: whether a forward that does not become one graph is an error.
    """

    def __init__(self, module: nn.Module, forward: Forward, graphs: Graphs, must_compile: bool) -> None:
        self.forward, self._module, self._graphs, self._must_compile = forward, module, graphs, must_compile
        self.tables: list[dict[str, Any]] = [part._parameters for part in module.modules()]
        self.told: list[Any] = []
        """The marks of the graph's last outputs."""
        self._held: list[Tensor | None] = []
        """The content of all parameter tables at the last call, in their order; None for an empty entry."""
        self._divided: list[Place] = []
        """The sharded ones of these parameters."""
        self._looks: tuple[Any, ...] = ()
        """For each of them the index of its table, its name and its form."""
        self._plain, self._plain_static = graphs.compiled(forward), graphs.compiled(forward, dynamic=False)
        self._eager = False
        self._dtype = torch.get_default_dtype()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on local shards."""
        if is_recomputed():  # by the user's checkpoint: Lightning sets the default dtype in the forward only
            with default_dtype(self._dtype):
                return self._run(*args, **kwargs)
        self._dtype = torch.get_default_dtype()
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        parameters = list(chain.from_iterable(map(dict.values, self.tables)))
        if len(parameters) != len(self._held) or not all(map(is_, parameters, self._held)):
            self._held = parameters
            self._divided = [(number, name, each) for number, table in enumerate(self.tables)
                             for name, each in table.items() if type(each) is Part]  # fmt: skip
            self._looks = tuple((number, name, computing(each).form) for number, name, each in self._divided)
        leaves, form = flatten_value((args, kwargs))
        if not self._divided and not any(isinstance(leaf, Divided) for leaf in leaves):
            plain = self._plain_static if is_in_checkpoint() else self._plain
            with FunctionsGetFullTensors.compiling():
                return plain(*args, **kwargs)
        if self._eager:
            return self.forward(*args, **kwargs)
        graph = self._graphs.inside_static if is_in_checkpoint() else self._graphs.inside
        call = self._graphs.call(leaves, form, self._divided, self._looks)
        try:
            output = self._in_graph(graph, call, leaves)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # no part of the forward has run yet
            if self._must_compile:
                raise
            self._tell(error)
            return self.forward(*args, **kwargs)
        leaves, form = flatten_value(output)
        watch(leaves, call.ranks, self._held)
        return unflatten_value(list(map(as_divided, leaves, self.told)), form)

    def _in_graph(self, graph: Forward, call: Call, leaves: list[Any]) -> Any:
        """Run the graph, with local shards in place of sharded parameters: compilers read all that a module has."""
        own, divided = list(map(local_part, leaves)), self._divided
        try:
            for number, name, each in divided:
                self.tables[number][name] = computing(each).own
            with FunctionsGetFullTensors.compiling():
                return graph(self, call.word, own, call.marks, call.form, call.places)
        finally:
            for number, name, each in divided:
                self.tables[number][name] = each

    def _tell(self, error: Exception) -> None:
        """Warn once why the block runs eagerly: for this length, or from now on."""
        name = type(self._module).__name__
        if isinstance(error, FailOnRecompileLimitHit):  # the same on all ranks: each got a length without a graph
            self._graphs.warn_once(
                f"{name} was compiled as often as torch allows (torch._dynamo.config.recompile_limit = "
                f"{torch._dynamo.config.recompile_limit}) and runs uncompiled for other lengths; pad batches to a few "
                "lengths, or raise the limit"
            )
            return
        self._eager = True
        lines, marks = str(error).strip().splitlines(), ("Message: ", "break with message ")  # of deliberate breaks
        reasons = [line.partition(mark)[2] for line in lines for mark in marks if mark in line]
        self._graphs.warn_once(
            f"{name} runs uncompiled, only its submodules are compiled: with divided tensors, it must be a single "
            f"graph, but torch.compile says: {reasons[0] if reasons else lines[0]}"
        )
        for part in _parts(self._module):
            redirect_forward(part, CompiledForward, part, graphs=self._graphs, must_compile=False)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the submodules that have submodules themselves: a graph of a single linear layer is not worth compiling."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # these have no forward
            yield from _parts(child)
        elif any(True for _ in child.children()):
            yield child
