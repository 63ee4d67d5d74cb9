"""What one forward of the model shows: in which order its parts run, which parameters each uses, how much work it is.

Positions count along the blocks: 0 is before the first one, 2k+1 inside block k, 2k+2 after block k and before the
next, and 2n after the last. Between two positions a pipeline may cut the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from lightning_parallel.techniques.observed.repeatable import Operations, Repeatable, operation
from lightning_parallel.techniques.observed.shapes import ShapesOnly, mark_of, mark_tensors
from lightning_parallel.techniques.tools.redirect import Forward, redirect_call, restore_call

Call = tuple[str, int]
"""The FQN of a block, or of a part beside the blocks, and how many calls of it were before."""


@dataclass(frozen=True)
class Source:
    """A tensor that a module returned.

    Attributes:
        call: from which.
        position: where that was.
        number: of the tensor, among those that were returned.
    """

    call: Call
    position: int
    number: int


@dataclass(frozen=True)
class Made:
    """Where a value was made, and from what.

    Attributes:
        position: where.
        returned: whether it is what a block returned.
        sources: what modules returned, from which the code between them makes it again; None for a value from
            within a module.
        parameters: FQN of the parameters that this code reads.
    """

    position: int
    returned: bool = False
    sources: frozenset[Source] | None = None
    parameters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SkipTensor:
    """A value made at one position and used at a later one, past what the blocks hand on to each other."""

    made: Made
    used: int
    what: str


@dataclass(frozen=True)
class Traversal:
    """What was seen.

    Attributes:
        blocks: the FQN of the blocks in the order in which they ran.
        uses: FQN of a parameter -> the positions at which it is used.
        calls: FQN of a module -> the positions at which it is called.
        work: FLOPs at each position.
        skip_tensors: values that go past the blocks.
        parts: FQN of the outermost modules beside the blocks that have parameters and are called.
        direct: FQN of the parameters in none of these and in no block, which the code between modules reads.
    """

    blocks: tuple[str, ...]
    uses: Mapping[str, frozenset[int]]
    calls: Mapping[str, frozenset[int]]
    work: tuple[float, ...]
    skip_tensors: tuple[SkipTensor, ...]
    parts: tuple[str, ...] = ()
    direct: frozenset[str] = frozenset()

    @property
    def end(self) -> int:
        """The position after the last block."""
        return 2 * len(self.blocks)


def traverse(
    model: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[], Any], device: torch.device
) -> Traversal:
    """Runs a step of the user's on a sample batch for its shapes, and notes what happens.

    Args:
        model: whole; its parameters may be on meta.
        blocks: the repeated layers by FQN.
        run: runs the step.
        device: where the batch is.

    Raises:
        ValueError: the blocks do not run one after the other, each once.
        RuntimeError: the step could not be followed up to its last block.
    """
    recorder = _Recorder(model, blocks)
    shapes = ShapesOnly(model.parameters(), device, recorder.read, recorder.made)
    with torch.no_grad(), buffers_kept(model), recorder.attached(), shapes:
        try:
            run()
        except _Unexpected as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            recorder.require_end(error)
    recorder.require_end(None)
    return recorder.traversal()


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers hold what they held: a step may count in them."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


class _Unexpected(BaseException):
    """The blocks ran in a way that no pipeline can follow."""


class _Recorder:
    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._model, self._blocks = model, dict(blocks)
        self._names: dict[int, list[str]] = {}  # tied parameters have several
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._position = 0
        self._order: list[str] = []
        self._uses: dict[str, set[int]] = {}
        self._calls: dict[str, set[int]] = {}
        self._work = [0.0] * (2 * len(blocks) + 1)
        self._skip_tensors: dict[tuple[Made, int], SkipTensor] = {}
        self._parts: dict[str, int] = {}  # and how often each was called
        self._depth = 0  # within parts
        self._operations: Operations = []
        self._whole = {name for block in blocks for name in _ancestors(block)}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the blocks and all modules tell when they run."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._on_call).remove)
            stack.callback(register_module_forward_hook(self._on_return, always_call=True).remove)
            for name, block in self._blocks.items():
                redirect_call(block, lambda call, name=name: self._watched(name, call))  # type: ignore[misc]
                stack.callback(restore_call, block)
            yield

    def _on_call(self, module: nn.Module, _: Any) -> None:
        name = self._module_names.get(id(module))
        if name is not None:
            self._calls.setdefault(name, set()).add(self._position)
        self._depth += self._is_part(module)

    def _on_return(self, module: nn.Module, _: Any, output: Any) -> None:
        if not self._is_part(module):
            return
        self._depth -= 1
        if self._depth == 0:
            name = self._module_names[id(module)]
            before = self._parts.get(name, 0)
            self._parts[name] = before + 1
            _mark_returned(output, Made(self._position), (name, before))

    def _is_part(self, module: nn.Module) -> bool:
        """Whether this is, or is within, a module beside the blocks that has parameters."""
        name = self._module_names.get(id(module))
        if name is None or name in self._whole or self._position % 2:
            return False
        return any(True for _ in module.parameters())

    def _watched(self, name: str, call: Forward) -> Forward:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._position % 2:
                raise _Unexpected(f"the block {name} runs inside the block {self._order[-1]}; name one of the two only")
            if name in self._order:
                raise _Unexpected(
                    f"the block {name} runs twice in one step, so it cannot belong to one stage; "
                    "name layers that run once"
                )
            self._order.append(name)
            self._position = 2 * len(self._order) - 1
            repeatable = Repeatable(call, args, kwargs)
            self._operations = []
            output = call(*args, **kwargs)
            self._require_alike(name, repeatable)
            _mark_returned(output, Made(self._position, returned=True), (name, 0))
            self._position += 1
            return output

        return watched

    def _require_alike(self, name: str, repeatable: Repeatable) -> None:
        work = list(self._work)
        if not repeatable.settles(list(self._operations), self._noted):
            raise _Unexpected(
                f"the block {name}, called again with the same input, does something else: it depends on Python state "
                "that blocks or calls share, such as a counter, and a pipeline runs them on several ranks, once for "
                "each microbatch; hand such values from block to block as arguments, or fix them in __init__"
            )
        self._work = work

    def _noted(self, run: Callable[[], Any]) -> Operations:
        self._operations = []
        run()
        return list(self._operations)

    # ---------------------------------------------------------------- what the operations tell

    def read(self, tensor: Tensor) -> None:
        """An operation reads a tensor that depends on a parameter."""
        if id(tensor) in self._names:
            for name in self._names[id(tensor)]:
                self._uses.setdefault(name, set()).add(self._position)
            return
        made = mark_of(tensor)
        if made is not None and not _at_hand(made, self._position):
            key = (made, self._position)
            self._skip_tensors.setdefault(key, SkipTensor(*key, f"a tensor of shape {tuple(tensor.shape)}"))

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor]) -> Made:
        """An operation made a result."""
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._work[self._position] += count(*args, **kwargs, out_val=result)
        if self._position % 2:
            self._operations.append(operation(func, args, kwargs, filter(self._is_known, inputs)))
        if self._position % 2 or self._depth:
            return Made(self._position)
        marks = [mark for mark in map(mark_of, inputs) if mark is not None]
        read = {name for tensor in inputs for name in self._names.get(id(tensor), ())}
        parameters = frozenset(read.union(*(mark.parameters for mark in marks)))
        if any(mark.sources is None for mark in marks):
            return Made(self._position, parameters=parameters)
        return Made(self._position, False, frozenset().union(*(mark.sources for mark in marks)), parameters)

    def _is_known(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and id(tensor) not in self._names and mark_of(tensor) is None

    # ---------------------------------------------------------------- the result

    def require_end(self, error: Exception | None) -> None:
        """Raises unless all blocks have run to their end."""
        if len(self._order) == len(self._blocks) and self._position % 2 == 0:
            return
        missing = [name for name in self._blocks if name not in self._order]
        place = f"in the block {self._order[-1]}" if self._position % 2 else f"before the block {(missing or ['?'])[0]}"
        if error is None:
            raise ValueError(
                f"the step ran without the blocks {', '.join(missing[:3])}{', …' * (len(missing) > 3)}; "
                "a pipeline needs blocks that run in every step: name those in plan=ParallelPlan(blocks=...)"
            )
        raise RuntimeError(
            f"the order of the model's parts is found by one step in which parameters have shapes but no values, and "
            f"that failed {place}: {type(error).__name__}: {error}"
        ) from error

    def traversal(self) -> Traversal:
        """What was seen."""
        return Traversal(
            tuple(self._order),
            {name: frozenset(positions) for name, positions in self._uses.items()},
            {name: frozenset(positions) for name, positions in self._calls.items()},
            tuple(self._work),
            tuple(self._skip_tensors.values()),
            tuple(self._parts),
            frozenset(name for name, _ in self._model.named_parameters() if not self._is_within(name)),
        )

    def _is_within(self, parameter: str) -> bool:
        """Whether it belongs to a block or to a part beside the blocks."""
        return any(name in self._parts or name in self._blocks for name in _ancestors(parameter))


def _mark_returned(output: Any, made: Made, call: Call) -> None:
    def mark(number: int) -> Made:
        return replace(made, sources=frozenset({Source(call, made.position, number)}))

    mark_tensors(output, mark)


def _ancestors(name: str) -> Iterator[str]:
    """The FQN of everything in which something lies."""
    yield ""
    for end, letter in enumerate(name):
        if letter == ".":
            yield name[:end]


def _at_hand(made: Made, position: int) -> bool:
    """Whether a value is still there wherever the model may be cut between its making and its use."""
    if made.position == position:
        return True
    if made.returned:
        return position in (made.position + 1, made.position + 2)
    return made.position % 2 == 0 and position == made.position + 1
