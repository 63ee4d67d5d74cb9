"""Runs a step of the user's for its shapes, and records where its parts run and what goes past the blocks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from lightning_parallel.techniques.observed import refusals
from lightning_parallel.techniques.observed.buffers import BufferUses, frozen
from lightning_parallel.techniques.observed.given import GivenTensors
from lightning_parallel.techniques.observed.hooked import WatchedHooks, owner_of_part
from lightning_parallel.techniques.observed.kept import tensors_kept
from lightning_parallel.techniques.observed.known import KnownTensors
from lightning_parallel.techniques.observed.positions import Call, Made, SkipTensor, Source, Traversal, ancestors
from lightning_parallel.techniques.observed.refusals import UNDIVIDED, BlocksMissingError
from lightning_parallel.techniques.observed.repeatable import Operations, Repeatable, operation
from lightning_parallel.techniques.observed.shapes import ShapesOnly, Watch, mark_of, mark_tensors
from lightning_parallel.techniques.tools.redirect import Forward, redirect_call, restore_call
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import has_numbers, tensors_of


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
        ValueError: the blocks do not run one after the other, each once, or the step takes gradients past them.
        RuntimeError: the step could not be followed up to its last block.
    """
    recorder = _Recorder(model, blocks)
    with (
        torch.no_grad(),
        tensors_kept(model) as casts,
        recorder.attached(),
        ShapesOnly(model.parameters(), device, recorder),
    ):
        try:
            recorder.end(run())
        except Unexpected as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            recorder.stop(error)
        recorder.require_repeatable()
    return replace(recorder.traversal(), casts=casts)


class Unexpected(BaseException):
    """The step does what no pipeline can follow, or what it may not do anywhere."""


class _Recorder(Watch):
    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._model, self._blocks = model, dict(blocks)
        self._names: dict[int, list[str]] = {}  # tied parameters have several
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._kept_alive = list(model.modules())  # a block may replace modules, and new ones take the ids of freed ones
        self._known, self._buffers = KnownTensors(self._names), BufferUses(model)
        self._arguments = GivenTensors(self._names, self._known)
        self._end, self._position = 2 * len(blocks), 0
        self._given: set[int] = set()  # ids of the tensors that the block which runs was given
        self._order: list[str] = []
        self._uses: dict[str, set[int]] = {}
        self._calls: dict[str, set[int]] = {}
        self._work = [0.0] * (self._end + 1)
        self._skip_tensors: dict[tuple[Made, int], SkipTensor] = {}
        self._parts: Counter[str] = Counter()  # and how often each was called
        self._shapes: dict[Call, dict[int, tuple[int, ...]]] = {}
        self._depth, self._asked = 0, False  # within parts; for a value, within the module that runs
        self._required: dict[int, tuple[int, Tensor]] = {}
        self._between: list[weakref.ref[Tensor]] = []  # what code between modules has had in its hands
        self._repeatable: dict[str, Repeatable] = {}
        self._complete, self._over = True, False  # the step; of repeated calls nothing but their operations is noted
        self._operations: Operations = []
        self._hooks = WatchedHooks(model, self._taken, self._returned_by_hooks)
        self._whole = {name for block in blocks for name in ancestors(block)}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the blocks and all modules tell when they run."""
        with ExitStack() as stack:
            stack.callback(self._hooks.close)
            stack.callback(register_module_forward_pre_hook(self._on_call).remove)
            stack.callback(register_module_forward_hook(self._on_return, always_call=True).remove)
            for name, block in self._blocks.items():
                redirect_call(block, lambda call, name=name: self._watched(name, call))  # type: ignore[misc]
                stack.callback(restore_call, block)
            yield

    def _on_call(self, module: nn.Module, _: Any) -> None:
        if self._over:
            return
        name = self._module_names.get(id(module))
        if name is not None:
            self._calls.setdefault(name, set()).add(self._position)
        is_part = self._is_part(module)
        self._asked = self._asked and not (is_part and self._depth == 0)
        if name is not None and is_part and self._depth == 0:
            self._hooks.enter(owner_of_part(name, self._parts[name]))
        self._depth += is_part
        self._leave_part()
        if name is not None:
            self._hooks.watch(module, name)

    def _leave_part(self) -> None:
        """A module between parts and blocks runs on every stage, and so do its hooks."""
        if self._depth == 0 and self._position % 2 == 0:
            self._hooks.leave()

    def _taken(self, call: Call, number: int, shape: torch.Size) -> Made:
        """The mark of what a hook gets."""
        self._shapes.setdefault(call, {})[number] = tuple(shape)
        return Made(self._position, sources=frozenset({Source(call, self._position, number)}))

    def _on_return(self, module: nn.Module, _: Any, output: Any) -> Any:
        if self._over:
            return output
        if not self._is_part(module):
            self._leave_part()
            return output
        self._depth -= 1
        if self._depth:
            return output
        name = self._module_names[id(module)]
        self._parts[name] += 1
        return self._note_returned(output, Made(self._position), (name, self._parts[name] - 1))

    def _returned_by_hooks(self, name: str, output: Any) -> Any:
        """What a part returns is what its hooks make of it; what modules within one return, stays there."""
        if self._depth or self._position % 2:
            return output
        return self._note_returned(output, Made(self._position), (name, self._parts[name] - 1))

    def _is_part(self, module: nn.Module) -> bool:
        """Whether this is, or is within, a module beside the blocks that has parameters."""
        name = self._module_names.get(id(module))
        beside = name is not None and name not in self._whole and self._position % 2 == 0
        return beside and any(True for _ in module.parameters())

    def _watched(self, name: str, call: Forward) -> Forward:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._require_order(name)
            self._order.append(name)
            self._position, self._asked = 2 * len(self._order) - 1, False
            self._given = set(map(id, tensors_of((args, kwargs))))
            self._repeatable[name] = Repeatable(call, args, kwargs)
            self._hooks.enter(name)
            args, kwargs = self._arguments.enter(args, kwargs, self._position)
            output = call(*args, **kwargs)
            self._arguments.leave()
            self._hooks.leave()
            output = self._note_returned(output, Made(self._position, returned=True), (name, 0))
            self._position += 1
            return output

        return watched

    def _require_order(self, name: str) -> None:
        if self._position % 2:
            raise Unexpected(f"the block {name} runs inside the block {self._order[-1]}; name one of the two only")
        if name in self._order:
            raise Unexpected(refusals.runs_twice(name))
        if said := refusals.runs_within(name):
            raise Unexpected(said)

    def _note_returned(self, output: Any, made: Made, call: Call) -> Any:
        def mark(number: int) -> Made:
            return replace(made, sources=frozenset({Source(call, made.position, number)}))

        self._shapes[call] = {number: tuple(tensor.shape) for number, tensor in enumerate(tensors_of(output))}
        output = self._known.returned(output, mark)
        mark_tensors(output, mark)
        self._between += map(weakref.ref, tensors_of(output))
        if (self._asked or made.returned) and has_numbers(output):  # they may go where nobody sees them
            for later in range(made.position + 2, self._end + 1):
                self._note_skip(mark(-1), later, "a number")
        self._asked = False
        return output

    # ---------------------------------------------------------------- what the operations tell

    def touched(self, inputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """See `Watch.touched`. Code between modules runs again on all later stages."""
        if not self._over:
            later = () if self._is_inside else range(self._position, self._end + 1)
            self._buffers.touched(inputs, written, self._position, later)

    def read(self, tensor: Tensor) -> None:
        """See `Watch.read`."""
        if not self._over:
            self._read_at(tensor, self._position)

    def _read_at(self, tensor: Tensor, position: int, by_hook: bool = False) -> None:
        tensor = self._arguments.original(tensor, position)
        made = self._known.made(tensor)
        if made is not None and (original := self._hooks.original(tensor)) is not None:  # it must be there, too
            self._read_at(original, made.position, by_hook=True)
        for name in self._names.get(id(tensor), ()):
            self._uses.setdefault(name, set()).add(position)
        if made is not None and id(tensor) not in self._names:
            in_hand = position % 2 == 0 or by_hook or self._hooks.running or id(tensor) in self._given
            made = made if in_hand or not made.returned else replace(made, sources=None)  # a block may have kept it
            self._note_skip(made, position, f"a tensor of shape {tuple(tensor.shape)}")

    def _note_skip(self, made: Made, used: int, what: str) -> None:
        if not made.is_at_hand(used):
            self._skip_tensors.setdefault((made, used), SkipTensor(made, used, what))

    def known(self, inputs: Sequence[Tensor], result: Any, asked: bool) -> None:
        """See `Watch.known`."""
        returned = [] if self._over else self._known.among(inputs)
        for tensor in returned:
            self._read_at(tensor, self._position)
            if asked:
                self.asked(tensor)
        if returned and not self._is_inside:
            marks = [self._known.made(tensor) for tensor in returned]
            self._known.note(result, self._between_modules(marks, frozenset()))

    def asked(self, tensor: Tensor) -> None:
        """A value that leaves for Python may go anywhere: it is used wherever the step goes from here."""
        if self._is_inside or self._over:
            self._asked = True
            return
        for later in range(self._position + self._position % 2, self._end + 1, 2):
            self._read_at(tensor, later)

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor]) -> Made:
        """See `Watch.made`."""
        if self._over:
            first = func._overloadpacket is torch.ops.aten.copy_  # which does not read it
            self._operations.append(operation(func, args, kwargs, filter(self._is_known, inputs[first:])))
            return Made(self._position)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._work[self._position] += count(*args, **kwargs, out_val=result)
        returned = self._known.among(inputs)
        for tensor in returned:
            self._read_at(tensor, self._position)
        if self._is_inside:
            return Made(self._position)
        self._between += map(weakref.ref, tensors_of(result))
        read = {name for tensor in inputs for name in self._names.get(id(tensor), ())}
        made = self._between_modules(map(self._known.made, inputs), frozenset(read))
        if returned:
            self._known.note(result, made)
        return made

    def _between_modules(self, of: Iterable[Made | None], read: frozenset[str]) -> Made:
        marks = [mark for mark in of if mark is not None]
        parameters = read.union(*(mark.parameters for mark in marks))
        if any(mark.sources is None for mark in marks):
            return Made(self._position, parameters=parameters)
        return Made(self._position, False, frozenset().union(*(mark.sources or () for mark in marks)), parameters)

    @property
    def _is_inside(self) -> bool:
        """Whether this is the code of a block or a part. That of hooks is called again where it is needed."""
        return not self._hooks.running and bool(self._position % 2 or self._depth)

    def _is_known(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and id(tensor) not in self._names and mark_of(tensor) is None

    # ---------------------------------------------------------------- gradients within the step

    def required(self, tensor: Tensor) -> None:
        """See `Watch.required`."""
        self._required.setdefault(id(tensor), (self._position, tensor))  # the tensor, so that its id stays its own

    def differentiated(self, tensors: Sequence[Tensor] | None) -> None:
        """Gradients within a step must not come back through other stages, which have gone on or are yet to come."""
        if self._over:
            return
        if tensors is None:
            raise Unexpected(
                "the step calls backward, but in a pipeline the schedule decides when backward runs; return the loss, "
                f"or {UNDIVIDED}"
            )
        in_block, after = self._position % 2 == 1, self._position == self._end
        past = [tensor for tensor in tensors if not self._begins_here(tensor)]
        if (past or not (in_block or after)) and tensors:
            raise Unexpected(
                f"the step takes gradients to a tensor of shape {tuple((past or tensors)[0].shape)}, which would have "
                "to come back through other stages; a pipeline takes gradients within a step inside one block only, "
                f"or to what the last block returned: {UNDIVIDED}"
            )

    def _begins_here(self, tensor: Tensor) -> bool:
        """Whether all that depends on a tensor so far lies where the step is now."""
        if id(tensor) in self._names:
            return all(self._uses.get(name, set()) <= {self._position} for name in self._names[id(tensor)])
        made = mark_of(self._arguments.original(tensor, self._position))
        if made is not None:
            return bool(made.is_at_hand(self._position))
        return self._required.get(id(tensor), (0, tensor))[0] == self._position

    # ---------------------------------------------------------------- blocks once more

    def require_repeatable(self) -> None:
        """Raises for blocks that do something else in every call; asked after the step, which may count its calls.

        Raises:
            ValueError: names the block.
        """
        self._over = True
        self._buffers.end()
        for name in self._order if self._has_run_all else ():
            try:
                with self._hooks.silent():
                    alike = self._repeatable.pop(name).settles(self._noted)
            except Exception as error:
                alike = True
                warn(
                    f"Whether the block {name} does the same in every call could not be checked: called again with the "
                    f"same input, it failed ({type(error).__name__}: {error}). A pipeline calls it once for each "
                    "microbatch, on one of its ranks: it must not depend on what earlier calls or other blocks left"
                )
            if not alike:
                raise ValueError(refusals.unlike_before(name))

    def _noted(self, run: Callable[[], Any]) -> Operations:
        self._operations = []
        run()
        return list(self._operations)

    # ---------------------------------------------------------------- the result

    def end(self, output: Any) -> None:
        """The step has returned: its caller reads what it returned, and the next step what this one left."""
        for tensor in (*tensors_of(output), *self._buffers.left(self._is_in_one)):
            self.read(tensor)

    def stop(self, error: Exception) -> None:
        """The step could not be followed further: whatever is still there may be used in what is left of it.

        Raises:
            RuntimeError: not all blocks have run.
        """
        if not self._has_run_all:
            missing = next((name for name in self._blocks if name not in self._order), "?")
            place = f"in the block {self._order[-1]}" if self._position % 2 else f"before the block {missing}"
            raise RuntimeError(refusals.failed(place, error)) from error
        self._complete = False
        for tensor in [reference() for reference in self._between]:
            made = None if tensor is None else self._known.made(tensor)
            if tensor is not None and made is not None and made.sources is not None:
                self._note_skip(made, self._end, f"a tensor of shape {tuple(tensor.shape)}")
        warn(
            f"What follows the last block could not be followed without values ({type(error).__name__}: {error}): the "
            "last stage keeps all parameters that are in no block, and nothing is known of what the loss reads of "
            "parameters in blocks"
        )

    @property
    def _has_run_all(self) -> bool:
        return len(self._order) == len(self._blocks) and self._position % 2 == 0

    def traversal(self) -> Traversal:
        """What was seen.

        Raises:
            BlocksMissingError: the step came to its end without some of the blocks.
        """
        if not self._has_run_all:
            raise BlocksMissingError(self._blocks, self._order, self._calls)
        return Traversal(
            tuple(self._order),
            frozen(self._uses),
            frozen(self._calls),
            tuple(self._work),
            tuple(self._skip_tensors.values()),
            tuple(self._parts),
            self._complete,
            tuple(self._hooks.modules),
            self._hooks.lasting,
            shapes=self._shapes,
            buffers=self._buffers.seen(),
        )

    def _is_in_one(self, name: str) -> bool:
        """Whether something lies in a block or a part."""
        return any(each in self._parts or each in self._blocks for each in ancestors(name))
