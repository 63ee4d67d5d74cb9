"""What one forward of the model shows: in which order its parts run, which parameters each uses, how much work it is.

Positions count along the blocks: 0 is before the first one, 2k+1 inside block k, 2k+2 after block k and before the
next, and 2n after the last. Between two positions a pipeline may cut the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from lightning_parallel.techniques.pipeline_parallel.shapes_only import ShapesOnly, mark_of, mark_tensors
from lightning_parallel.techniques.redirect import Forward, redirect_call, restore_call


@dataclass(frozen=True)
class Made:
    """Where a value was made, and whether it is what a block returned."""

    position: int
    returned: bool = False


@dataclass(frozen=True)
class Crossing:
    """A value made at one position and used at a later one, past what the blocks hand on to each other."""

    made: int
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
        crossings: values that go past the blocks.
        parts: FQN of the outermost modules beside the blocks that have parameters and are called.
        direct: FQN of the parameters in none of these and in no block, which the code between modules reads.
    """

    blocks: tuple[str, ...]
    uses: Mapping[str, frozenset[int]]
    calls: Mapping[str, frozenset[int]]
    work: tuple[float, ...]
    crossings: tuple[Crossing, ...]
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
        device: where the model will run.

    Raises:
        ValueError: the blocks do not run one after the other, each once.
        RuntimeError: the step could not be followed up to its last block.
    """
    recorder = _Recorder(model, blocks)
    shapes = ShapesOnly(model.parameters(), device, recorder.read, recorder.made)
    with torch.no_grad(), _buffers_kept(model), recorder.attached(), shapes:
        try:
            run()
        except _Unexpected as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            recorder.require_end(error)
    recorder.require_end(None)
    return recorder.traversal()


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
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
        self._crossings: dict[tuple[int, int], Crossing] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the blocks and all modules tell when they run."""
        with ExitStack() as stack:
            handle = register_module_forward_pre_hook(self._on_call)
            stack.callback(handle.remove)
            for name, block in self._blocks.items():
                redirect_call(block, lambda call, name=name: self._watched(name, call))  # type: ignore[misc]
                stack.callback(restore_call, block)
            yield

    def _on_call(self, module: nn.Module, _: Any) -> None:
        name = self._module_names.get(id(module))
        if name is not None:
            self._calls.setdefault(name, set()).add(self._position)

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
            output = call(*args, **kwargs)
            mark_tensors(output, Made(self._position, returned=True))
            self._position += 1
            return output

        return watched

    # ---------------------------------------------------------------- what the operations tell

    def read(self, tensor: Tensor) -> None:
        """An operation reads a tensor that depends on a parameter."""
        if id(tensor) in self._names:
            for name in self._names[id(tensor)]:
                self._uses.setdefault(name, set()).add(self._position)
            return
        made = mark_of(tensor)
        if made is not None and not _at_hand(made, self._position):
            key = (made.position, self._position)
            self._crossings.setdefault(key, Crossing(*key, f"a tensor of shape {tuple(tensor.shape)}"))

    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> Made:
        """An operation made a result."""
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._work[self._position] += count(*args, **kwargs, out_val=result)
        return Made(self._position)

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
            tuple(self._crossings.values()),
            *self._parts(),
        )

    def _parts(self) -> tuple[tuple[str, ...], frozenset[str]]:
        modules: list[str] = []
        direct: set[str] = set()
        self._descend(self._model, "", modules, direct)
        return tuple(modules), frozenset(direct)

    def _descend(self, module: nn.Module, name: str, parts: list[str], direct: set[str]) -> None:
        direct.update(_join(name, own) for own, _ in module.named_parameters(recurse=False))
        for child_name, child in module.named_children():
            full = _join(name, child_name)
            if full in self._blocks or not any(True for _ in child.parameters()):
                continue
            if full in self._calls and not any(block.startswith(f"{full}.") for block in self._blocks):
                parts.append(full)
            else:
                self._descend(child, full, parts, direct)


def _at_hand(made: Made, position: int) -> bool:
    """Whether a value is still there wherever the model may be cut between its making and its use."""
    if made.position == position:
        return True
    if made.returned:
        return position in (made.position + 1, made.position + 2)
    return made.position % 2 == 0 and position == made.position + 1


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
