"""Run of one stage: the user's unchanged step, which is left after the stage's last block.

The step calls all blocks. Blocks of earlier stages do not run: the last of them returns the tensors that were received,
the others return absent tensors (`Absent`: shapes without values), except for values that bypass blocks. Parameters of
other stages are absent, so modules outside of the blocks may return absent tensors. Reading an absent value raises.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.pipeline_parallel.layout import Call, StageLayout
from lightning_parallel.techniques.pipeline_parallel.p2p import Unsent
from lightning_parallel.techniques.pipeline_parallel.rng import StageRNG
from lightning_parallel.techniques.pipeline_parallel.trace import ancestors, hooks_of
from lightning_parallel.techniques.tools import stage_tree
from lightning_parallel.techniques.tools.absent import UNDIVIDED, Absent, AbsentError, absent_error
from lightning_parallel.techniques.tools.leaves import autograd_leaf
from lightning_parallel.techniques.tools.means import no_recording
from lightning_parallel.techniques.tools.microbatches import is_same
from lightning_parallel.techniques.tools.redirect import Forward, plain_forwards, redirect_call, restore_call
from lightning_parallel.values import ATOMS, TensorSpec, map_leaves, map_tensors, tensors_of

SENDABLE = (*ATOMS, list, tuple, dict, Enum, torch.dtype, torch.device, TensorSpec, Tensor)
"""Types of leaves in values that bypass blocks that are sent to later stages; other leaves become `Withheld`."""


class StageEndedError(BaseException):
    """Leaves the user's step at the end of a stage. No `Exception`, so that user code does not catch it."""


@dataclass
class StageOutput:
    """Output of a stage."""

    result: Any = None  # return value of its last block
    # call -> its return value, for values that bypass blocks; `Unsent` in place of tensors that no later stage reads
    carried: dict[Call, Any] = field(default_factory=dict)
    # block number -> its return value with `Unsent` in place of all tensors; a block that is missing here returned the
    # same structure as the nearest block before it
    shapes: dict[int, Any] = field(default_factory=dict)


@dataclass
class _ForwardState(StageOutput):
    """Output of the stage that is running, as far as it has been computed, and the state of the run."""

    _: KW_ONLY
    stage: int
    received: Any  # what the last block of the previous stage returned
    position: int = 0  # of the code that runs, see `layout`
    calls: Counter[str] = field(default_factory=Counter)  # FQN of a part or hooked module -> number of calls
    depth: int = 0  # number of parts that are being called
    in_block: bool = False  # whether a block of this stage is being called


Path = tuple[str, str]
"""(FQN of a module, name of an attribute)."""

_Flags = tuple[list[bool], list[Any], list[bool], dict[Path, Any]]
"""`training` of all modules; all parameters, also absent ones; their `requires_grad`; see `Stages._plain`."""


class Stages:
    """Runs the stages of one rank; in `tree`, parameters of other stages are absent tensors."""

    def __init__(self, model: nn.Module, layout: StageLayout, device: torch.device, tree: stage_tree.StageTree) -> None:
        self.layout, self._device, self._tree = layout, device, tree
        self._stance = "default"
        self._now: _ForwardState | None = None
        self._last = layout.stages - 1
        self.draws = StageRNG(model, device)
        self._buffers = list(map(weakref.ref, model.buffers()))  # so that `absent._absorb` cannot make them absent
        self._modules = dict(model.named_modules())
        containers = {name for block in layout.trace.blocks for name in ancestors(block) if name}
        self._above = {name: self._modules[name].__dict__ for name in sorted(containers)}
        # on the last stage: attributes of modules that contain blocks, as the step changed them in this batch
        self.attributes: dict[Path, Any] = {}
        for number, name in enumerate(layout.trace.blocks):
            redirect_call(self._modules[name], self._block, number)
        for name in layout.trace.parts:
            redirect_call(self._modules[name], self._part, name, self._modules[name])
        #: name (in messages) of a parameter of other stages -> first stage that holds it
        self._first = {absent.what: min(layout.stages_of(fqn), default=0) for fqn, absent in tree.absent.items()}
        self._hooked: dict[str, list[Call]] = {}  # block or part -> carried calls of hooked modules in it
        outer, self._handles = (*layout.trace.blocks, *layout.trace.parts), list[RemovableHandle]()
        for name, number in sorted(layout.carried, key=itemgetter(1)):
            if name in outer:
                continue
            self._hooked.setdefault(next(fqn for fqn in outer if name.startswith(f"{fqn}.")), []).append((name, number))
            if number == 0:
                hook = partial(self._store_hooked, name)
                self._handles.append(self._modules[name].register_forward_hook(hook, prepend=True))

    def close(self) -> None:
        """Remove everything that was attached to the modules."""
        for handle in self._handles:
            handle.remove()
        for name in (*self.layout.trace.blocks, *self.layout.trace.parts):
            restore_call(self._modules[name])

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, run compiled blocks eagerly (no compilation for unusual shapes); all microbatches draw the same."""
        self._stance, self.draws.alike = "force_eager", True
        try:
            yield
        finally:
            self._stance, self.draws.alike = "default", False

    def run(self, stage: int, received: Any, step: Callable[[Any], Any], samples: Any, microbatch: int) -> Any:
        """Run the user's step on `samples` for one stage; `received` is the output of the previous stage.

        Returns:
            The step's output on the last stage, else a `StageOutput`.

        Raises:
            RuntimeError: the step reads a value that only another stage has, does not run all blocks in their order, or
                changes `training`, `requires_grad` or parameters.
        """
        inputs = received if stage else StageOutput()
        carried, shapes = dict(inputs.carried), dict(inputs.shapes)
        now = self._now = _ForwardState(None, carried, shapes, stage=stage, received=inputs.result)
        flags, first_new_hook = self._flags(), RemovableHandle.next_id
        self.draws.begin_microbatch(microbatch)
        self._tree.written.clear()
        try:
            with torch.compiler.set_stance("force_eager"):  # compiled code would bypass `Means` and `Absent`
                output = step(samples)
        except StageEndedError:
            self._leave(flags, first_new_hook)
            carried = {call: v for call, v in now.carried.items() if self.layout.carried[call].last > stage}
            return StageOutput(now.result, carried, now.shapes)
        except StopIteration as error:  # Lightning would end the epoch on this rank only
            raise RuntimeError(
                f"the step raised StopIteration on stage {stage}: a next() found nothing, e.g. as other stages have "
                f"the parameters; use a tensor that the step has, or {UNDIVIDED}"
            ) from error
        finally:
            self._now = None
        if stage < self._last:
            raise RuntimeError(
                f"the step ended before block {self._block_at(now.position)} was called, though the analyzed step "
                "called it; a pipeline needs steps that run all blocks; to skip a batch, run them and return the loss "
                "times zero"
            )
        absent = next((tensor for tensor in tensors_of(output) if isinstance(tensor, Absent)), None)
        if absent is not None:
            raise absent_error(absent.what, "is in the output of the step")
        modes, _, requires_grad, attributes = self._flags()
        written = self._tree.written
        if modes != flags[0] or requires_grad != flags[2] or written:
            what = f"the values of {min(written)}" if written else "modes or requires_grad"
            raise RuntimeError(
                f"the step changes {what}, for good or until after the blocks, but in a pipeline only the last stage "
                "runs a step to its end; change them in hooks, such as on_train_batch_start and on_train_batch_end or "
                f"on_validation_start and on_validation_end, or {UNDIVIDED}"
            )
        self.attributes |= changed(attributes, flags[3])
        self.draws.end_microbatch()
        return output

    # ---------------------------------------------------------------- the end of a step

    def _flags(self) -> _Flags:
        """Return the state of the model that a step may change and must restore."""
        with torch._C.DisableTorchFunctionSubclass():  # does not wait for shards that are being gathered
            parameters = [p for m in self._modules.values() for p in m._parameters.values() if p is not None]
            requires_grad = [p.requires_grad for p in parameters]
        return [m.training for m in self._modules.values()], parameters, requires_grad, self._plain()

    def _plain(self) -> dict[Path, Any]:
        """Return the attributes of modules that contain blocks, if they are plain values: a step may set one."""
        types = (bool, int, float, str, type(None))
        return {(n, k): v for n, d in self._above.items() for k, v in d.items() if type(v) in types and k != "training"}

    def set_attributes(self, attributes: Mapping[Path, Any]) -> None:
        """Set attributes as the step changed them on the last stage."""
        for (name, key), value in attributes.items():
            self._above[name][key] = value

    def _leave(self, before: _Flags, since: int) -> None:
        """Undo what the step would have reverted after its blocks: modes, `requires_grad`, plain attributes, hooks."""
        modes, parameters, flags, attributes = before
        for module, trains in zip(self._modules.values(), modes, strict=True):
            if module.training != trains:
                module.training = trains
        toggled = [(p, flag) for p, flag in zip(parameters, flags, strict=True) if p.requires_grad != flag]
        for parameter, flag in toggled:
            parameter.requires_grad = flag
            if not isinstance(parameter, Absent):
                autograd_leaf(parameter)  # sets requires_grad of the leaf, too
        self.set_attributes(changed(attributes, self._plain()))
        for name, module in self._modules.items() if RemovableHandle.next_id > since else ():
            for key in hooks_of(module) if name not in self.layout.trace.hooked else ():
                if key >= since:
                    module._forward_hooks.pop(key, None)
                    module._forward_pre_hooks.pop(key, None)

    # ---------------------------------------------------------------- blocks and parts

    def _block(self, number: int, call: Forward) -> Forward:
        """Return the function that replaces `call`, the call of a block: on its stage it runs, on later ones not."""
        stage, name = self.layout.stage_at(2 * number + 1), self.layout.trace.blocks[number]
        next_stage = self.layout.stage_at(2 * number + 3)

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None:  # recomputation during backward, or a call outside of steps
                return call(*args, **kwargs)
            if now.position != 2 * number:
                raise RuntimeError(
                    f"block {name} was called where the analyzed step called {self._block_at(now.position)}; a "
                    "pipeline needs blocks that run in one order"
                )
            now.position = 2 * number + 2
            if self._tree.written:
                self._require_run(stage)
            if stage < now.stage:  # return received tensors if there are any, else absent ones
                if stage < next_stage == now.stage:
                    output = now.received
                elif (name, 0) in now.carried:
                    output = self._carried(now, (name, 0))
                else:
                    nearest = max(known for known in now.shapes if known <= number)
                    output = self._absent(now.shapes[nearest], name)
                self._call_hooks(now, name, args, kwargs, output)
                return output
            now.in_block, rng_states = True, self.draws.depart(number)
            try:  # means that blocks compute are not recorded as parts of the step's loss
                with no_recording(), FunctionsGetFullTensors.blocks(self._stance):
                    now.result = call(*args, **kwargs)
            finally:
                now.in_block = False
                self.draws.restore_states(rng_states)
            self._store_block(now, number, name)
            if next_stage > stage:  # leave here: code after the block might change the result in place
                self._require_run(stage)  # for parameters that the block's hooks wrote to
                raise StageEndedError
            return now.result

        return run

    def _require_run(self, stage: int) -> None:
        """Raise if code of this stage wrote to a parameter that an earlier stage holds, which does not run the code."""
        missed = sorted(what for what in self._tree.written if self._first[what] < stage)
        self._tree.written.clear()
        if missed:
            raise RuntimeError(
                f"the step changes the values of {', '.join(missed)} after the blocks of the stage that has them, "
                "which does not run this code; change them in hooks, such as on_train_batch_start and "
                f"on_train_batch_end, or {UNDIVIDED}"
            )

    def _block_at(self, position: int) -> str:
        blocks = self.layout.trace.blocks
        return blocks[min(position // 2, len(blocks) - 1)]

    def _store_block(self, now: _ForwardState, number: int, name: str) -> None:
        """Store what later stages need of a block that ran: its structure, and its tensors if they bypass blocks."""
        absent = next((tensor for tensor in tensors_of(now.result) if isinstance(tensor, Absent)), None)
        if absent is not None:
            raise absent_error(absent.what, f"is used by block {name} on stage {now.stage}")
        if (name, 0) in self.layout.carried:
            self._keep(now, (name, 0), now.result)
        if now.stage < self._last:
            shapes = map_tensors(Unsent.of, now.result)
            if not is_same(now.shapes.get(max(now.shapes, default=0)), shapes):
                now.shapes[number] = shapes

    def _part(self, name: str, part: nn.Module, call: Forward) -> Forward:
        """Return the function that replaces `call`, the call of a part; on later stages, it may run without values."""

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None or now.in_block or now.depth:  # called inside a block or another part
                return call(*args, **kwargs)
            key = (name, now.calls[name])
            now.calls[name] += 1
            if key in now.carried:
                output = self._carried(now, key)
                self._call_hooks(now, name, args, kwargs, output)
                return output
            is_remote = self.layout.stage_at(now.position) < now.stage
            now.depth += 1
            rng_states = self.draws.depart(crc32(repr(key).encode()))
            try:
                with _on_absent_tensors(part) if is_remote else nullcontext():
                    output = call(*args, **kwargs)
            finally:
                now.depth -= 1
                self.draws.restore_states(rng_states)
            if is_remote:
                self._call_hooks(now, name, args, kwargs, output)
            elif key in self.layout.carried:
                self._keep(now, key, output)
            return output

        return run

    def _store_hooked(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Forward hook of a hooked module in a block or part: store its output if later stages read it."""
        now = self._now
        if now is not None and (now.in_block or now.depth):
            call = name, now.calls[name]
            now.calls[name] += 1
            if call in self.layout.carried and call not in now.carried:
                self._keep(now, call, output)

    def _call_hooks(self, now: _ForwardState, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Call forward hooks of a remote block or part, and of modules in it, because hooks may store what they get.

        Their return values are ignored: they took effect on the stage that ran the module.
        """
        calls, written = list[tuple[nn.Module, Any, Any, Any]](), set(self._tree.written)
        for call in self._hooked.get(name, ()):
            if call in now.carried:
                calls.append((self._modules[call[0]], (), {}, self._carried(now, call)))
        for module, its_args, its_kwargs, result in (*calls, (self._modules[name], args, kwargs, output)):
            if not module._forward_hooks:
                continue
            versions = [tensor._version for tensor in tensors_of(result)]
            for number, hook in list(module._forward_hooks.items()):
                takes_kwargs = number in module._forward_hooks_with_kwargs
                hook_args = (its_args, its_kwargs, result) if takes_kwargs else (its_args, result)
                with suppress(AbsentError):  # the hook reads values: it could do so where the module ran
                    hook(module, *hook_args)
            if versions != [tensor._version for tensor in tensors_of(result)]:
                raise RuntimeError(
                    f"a forward hook of {type(module).__name__} changes the output in place, and other stages call the "
                    "hook again; return the changed tensor"
                )
        self._tree.written &= written  # writes of hooks took effect where the module ran

    # ---------------------------------------------------------------- values that bypass blocks

    def _keep(self, now: _ForwardState, call: Call, output: Any) -> None:
        """Store a copy of the tensors that later stages read: code after the call may change them in place."""
        wanted, number = self.layout.carried[call].numbers, count()
        copies = map_tensors(lambda t: t.clone() if next(number) in wanted else Unsent.of(t), output)
        now.carried[call] = map_leaves(lambda leaf: leaf if isinstance(leaf, SENDABLE) else Withheld(leaf), copies)

    def _carried(self, now: _ForwardState, call: Call) -> Any:
        """Return the output of a call on an earlier stage, with absent tensors in place of those that nobody reads."""
        is_sent_on = self.layout.carried[call].last > now.stage
        value = now.carried[call]
        # a clone if it is sent on: code of this stage may change it in place
        return self._absent(map_tensors(Tensor.clone, value) if is_sent_on else value, call[0])

    def _absent(self, value: Any, module: str) -> Any:
        """Return the output of a module with absent tensors in place of `Unsent`."""
        grad_enabled = torch.is_grad_enabled()

        def absent(leaf: Any) -> Any:
            if not isinstance(leaf, Unsent):
                return leaf
            differentiable = grad_enabled and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            what = f"what {module} returned"
            result = Absent(leaf.empty("meta"), self._device, what, learns=differentiable)
            return result.clone() if differentiable else result  # a copy is no leaf, so code may write into it

        return map_leaves(absent, value)


def changed(new: Mapping[Path, Any], old: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return the entries of `new` that have another value in `old`."""
    return {path: value for path, value in new.items() if path in old and value is not old[path]}


class Withheld:
    """Stands for an object that is not sent to later stages, e.g. a key-value cache; reading its attributes raises."""

    def __init__(self, value: object) -> None:
        self._kind = type(value).__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AbsentError(
            f"{name} of a {self._kind} is used on another stage than the one that made it, but objects that may hold "
            "tensors are not sent; return these tensors from the module (for Hugging Face models, leave out the "
            "cache: use_cache=False)"
        )


@contextmanager
def _on_absent_tensors(module: nn.Module) -> Iterator[None]:
    """Let a module of another stage run on absent tensors: without techniques, recorded means and hooks."""
    tables: list[dict[Any, Any]] = []
    for submodule in module.modules():
        if submodule._forward_hooks or submodule._forward_pre_hooks:
            tables += [submodule._forward_hooks, submodule._forward_pre_hooks]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        with no_recording(), plain_forwards(module):
            yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)
