"""Stages of a model: the user's own step runs on each of them, and leaves it after the stage's last block.

A block of an earlier stage returns what was received, or absent tensors (`Absent`). The parameters of other stages are
absent, so modules beside the blocks return absent tensors where their parameters are elsewhere. Whatever reads a value
that is not here raises.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.pipeline_parallel.layout import Call, StageLayout
from lightning_parallel.techniques.pipeline_parallel.p2p import Unsent
from lightning_parallel.techniques.pipeline_parallel.rng import StageRNG
from lightning_parallel.techniques.pipeline_parallel.trace import ancestors, hooks_of
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.absent import UNDIVIDED, Absent, AbsentError, refusal
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.means import WATCHING, unwatched
from lightning_parallel.techniques.tools.microbatches import is_same
from lightning_parallel.techniques.tools.redirect import Forward, plain_forwards, redirect_call, restore_call
from lightning_parallel.values import ATOMS, TensorSpec, map_leaves, map_tensors, tensors_of

PLAIN = (*ATOMS, list, tuple, dict, Enum, torch.dtype, torch.device, TensorSpec, Tensor)
"""Leaves of results that are sent to other stages."""


class StageEndedError(BaseException):
    """Leaves the user's step at the end of a stage. No `Exception`, so that no code of the user's catches it."""


@dataclass
class StageOutput:
    """Output of a stage."""

    result: Any = None  # what its last block returned
    # what goes past the blocks, by the call that returned it; `Unsent` in place of tensors nobody will read
    carried: dict[Call, Any] = field(default_factory=dict)
    # the structure that a block returned, with `Unsent` for its tensors. A block without an entry returned the same as
    # the nearest one before it
    shapes: dict[int, Any] = field(default_factory=dict)


@dataclass
class _ForwardState:
    """State of the stage that runs."""

    stage: int
    received: StageOutput
    carried: dict[Call, Any]
    shapes: dict[int, Any]
    position: int = 0
    result: Any = None
    calls: Counter[str] = field(default_factory=Counter)
    depth: int = 0  # within parts
    in_block: bool = False  # one that this stage has


Path = tuple[str, str]
"""The FQN of a module, and one of its attributes."""

_Flags = tuple[list[bool], list[Any], list[bool], dict[Path, Any]]
"""Modes of all modules; all parameters, absent ones too, and whether each learns; see `Stages._plain`."""


class Stages:
    """The stages of one rank; `tree` has absent tensors where other stages have parameters."""

    def __init__(self, model: nn.Module, layout: StageLayout, device: torch.device, tree: elsewhere.StageTree) -> None:
        self.layout, self._device, self._tree = layout, device, tree
        self._stance = "default"
        self._now: _ForwardState | None = None
        self._last = layout.stages - 1
        self.draws = StageRNG(model, device)
        self._buffers = list(map(weakref.ref, model.buffers()))  # no absent tensor takes the place of one, see `Absent`
        self._modules = dict(model.named_modules())
        self._list = list(self._modules.values())
        above = {name for block in layout.trace.blocks for name in ancestors(block) if name}
        self._above = {name: self._modules[name].__dict__ for name in sorted(above)}
        # plain attributes of modules with blocks in them that the step changed, on the last stage
        self.attributes: dict[Path, Any] = {}
        for number, name in enumerate(layout.trace.blocks):
            redirect_call(self._modules[name], self._block, number)
        for name in layout.trace.parts:
            redirect_call(self._modules[name], self._part, name, self._modules[name])
        #: by what messages call a parameter of other stages, the first of the stages that have it
        self._first = {each.what: min(layout.stages_of(fqn), default=0) for fqn, each in tree.absent.items()}
        self._hooked: dict[str, list[Call]] = {}  # by block or part, the carried calls of hooked modules in it
        outer, self._handles = (*layout.trace.blocks, *layout.trace.parts), list[RemovableHandle]()
        for name, number in sorted(layout.carried, key=itemgetter(1)):
            if name in outer:
                continue
            self._hooked.setdefault(next(each for each in outer if name.startswith(f"{each}.")), []).append(
                (name, number)
            )
            if number == 0:
                hook = partial(self._keep_hooked, name)
                self._handles.append(self._modules[name].register_forward_hook(hook, prepend=True))

    def close(self) -> None:
        """Gives the modules their own calls back."""
        for handle in self._handles:
            handle.remove()
        for name in (*self.layout.trace.blocks, *self.layout.trace.parts):
            restore_call(self._modules[name])

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, compiled blocks are not compiled for the shapes that they get, and all microbatches draw the same."""
        self._stance, self.draws.alike = "force_eager", True
        try:
            yield
        finally:
            self._stance, self.draws.alike = "default", False

    def run(self, stage: int, received: Any, step: Callable[[Any], Any], samples: Any, microbatch: int = 0) -> Any:
        """Run the user's step on these samples for one stage.

        `received` is the output of the stage before. Returns what the step returned, or `StageOutput` if there is a
        stage after this one.

        Raises:
            RuntimeError: the step needs a value that another stage has, does not run all blocks in their order, or
                leaves modes or `requires_grad` changed.
        """
        given = received if stage else StageOutput()
        now = self._now = _ForwardState(stage, given, dict(given.carried), dict(given.shapes))
        flags, since = self._flags(), RemovableHandle.next_id
        self.draws.begin_microbatch(microbatch)
        self._tree.written.clear()
        try:
            with torch.compiler.set_stance("force_eager"):  # losses and absent tensors are not seen in compiled code
                output = step(samples)
        except StageEndedError:
            self._leave(flags, since)
            going_on = {call: v for call, v in now.carried.items() if self.layout.carried[call].last > stage}
            return StageOutput(now.result, going_on, now.shapes)
        except StopIteration as error:  # Lightning would take it for the end of the data, on this rank alone
            raise RuntimeError(
                f"the step raised StopIteration on stage {stage}; a next() in it found nothing, as among parameters "
                f"that other stages have: ask a tensor that the step has, or {UNDIVIDED}"
            ) from error
        finally:
            self._now = None
        if stage < self._last:
            raise RuntimeError(
                f"the step ended before block {self._block_at(now.position)} was called, though the analyzed step "
                "called it; a pipeline needs steps that run all blocks; to skip a batch, run them and return the loss "
                "times zero"
            )
        absent = next((each for each in tensors_of(output) if isinstance(each, Absent)), None)
        if absent is not None:
            raise refusal(absent.what, "is in what the step returns")
        modes, _, learn, plain = self._flags()
        written, what = self._tree.written, "modes or requires_grad"
        if modes != flags[0] or learn != flags[2] or written:
            what = f"the values of {min(written)}" if written else what
            written.clear()
            raise RuntimeError(
                f"{what} are changed in a step, to stay so or to be put back behind the blocks, but in a pipeline only "
                "the last stage runs a step to its end: do it in hooks, as on_train_batch_start and on_train_batch_end "
                f"or on_validation_start and on_validation_end, or {UNDIVIDED}"
            )
        self.attributes |= changed(plain, flags[3])
        self.draws.end_microbatch()
        return output

    # ---------------------------------------------------------------- the end of a step

    def _flags(self) -> _Flags:
        with torch._C.DisableTorchFunctionSubclass():  # rows that arrive are not waited for
            every = [p for m in self._list for p in m._parameters.values() if p is not None]
            learn = [p.requires_grad for p in every]
        return [m.training for m in self._list], every, learn, self._plain()

    def _plain(self) -> dict[Path, Any]:
        """Plain attributes of modules with blocks in them: a step may set one for its forward."""
        kinds = (bool, int, float, str, type(None))
        return {
            (n, k): v for n, own in self._above.items() for k, v in own.items() if type(v) in kinds and k != "training"
        }

    def set_attributes(self, attributes: Mapping[Path, Any]) -> None:
        """Sets what the step left changed on the last stage."""
        for (name, key), value in attributes.items():
            self._above[name][key] = value

    def _leave(self, before: _Flags, since: int) -> None:
        """Undoes what the step would have put back behind its blocks: modes, flags, and hooks of its own."""
        modes, every, learn, plain = before
        for module, trains in zip(self._list, modes, strict=True):
            if module.training != trains:
                module.training = trains
        toggled = [(p, learns) for p, learns in zip(every, learn, strict=True) if p.requires_grad != learns]
        for parameter, learns in toggled:
            parameter.requires_grad = learns
            if not isinstance(parameter, Absent):
                leaf_of(parameter)  # which learns as the parameter does
        self.set_attributes({path: plain[path] for path in changed(plain, self._plain())})
        for name, module in self._modules.items() if RemovableHandle.next_id > since else ():
            for key in hooks_of(module) if name not in self.layout.trace.hooked else ():
                if key >= since:
                    module._forward_hooks.pop(key, None)
                    module._forward_pre_hooks.pop(key, None)

    # ---------------------------------------------------------------- the model's parts

    def _block(self, number: int, call: Forward) -> Forward:
        mine, name = self.layout.stage_at(2 * number + 1), self.layout.trace.blocks[number]
        following = self.layout.stage_at(2 * number + 3)

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None:  # a recomputation during a backward, or the user's own call
                return call(*args, **kwargs)
            if now.position != 2 * number:
                raise RuntimeError(
                    f"block {name} was called where the analyzed step called {self._block_at(now.position)}; a "
                    "pipeline needs blocks that run in one order"
                )
            now.position = 2 * number + 2
            if self._tree.written:
                self._require_run(mine)
            if mine < now.stage:  # it returns tensors that were sent on, and absent ones
                if mine < following == now.stage:
                    output = now.received.result
                elif (name, 0) in now.carried:
                    output = self._carried(now, (name, 0))
                else:
                    nearest = max(known for known in now.shapes if known <= number)
                    output = self._absent(now.shapes[nearest], name)
                self._call_hooks(now, name, args, kwargs, output)
                return output
            now.in_block, drawn, watching = True, self.draws.depart(number), WATCHING.set(None)
            try:  # losses in blocks are none of the step's
                with FunctionsGetWholes.blocks(self._stance):
                    now.result = call(*args, **kwargs)
            finally:
                WATCHING.reset(watching)
            now.in_block = False
            self.draws.come_back(drawn)
            self._keep_block(now, number, name)
            if following > mine:  # at once: what follows may change the result in place
                self._require_run(mine)  # of what its hooks wrote
                raise StageEndedError
            return now.result

        return run

    def _require_run(self, stage: int) -> None:
        """Requires code on a stage to have written to parameters only that this stage and later ones have."""
        missed = sorted(what for what in self._tree.written if self._first[what] < stage)
        self._tree.written.clear()
        if missed:
            raise RuntimeError(
                f"the values of {', '.join(missed)} are changed in a step, behind the blocks of a stage that has them "
                "and does not run this code: do it in hooks, as on_train_batch_start and on_train_batch_end, or "
                f"{UNDIVIDED}"
            )

    def _block_at(self, position: int) -> str:
        blocks = self.layout.trace.blocks
        return blocks[min(position // 2, len(blocks) - 1)]

    def _keep_block(self, now: _ForwardState, number: int, name: str) -> None:
        absent = next((each for each in tensors_of(now.result) if isinstance(each, Absent)), None)
        if absent is not None:
            raise refusal(absent.what, f"is used by block {name} on stage {now.stage}")
        if (name, 0) in self.layout.carried:
            self._keep(now, (name, 0), now.result)
        if now.stage < self._last:
            shapes = map_tensors(Unsent.of, now.result)
            if not is_same(now.shapes.get(max(now.shapes, default=0)), shapes):
                now.shapes[number] = shapes

    def _part(self, name: str, part: nn.Module, call: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if now is None or now.in_block or now.depth:  # of which it is a part, too
                return call(*args, **kwargs)
            this = (name, now.calls[name])
            now.calls[name] += 1
            if this in now.carried:
                output = self._carried(now, this)
                self._call_hooks(now, name, args, kwargs, output)
                return output
            elsewhere_now = self.layout.stage_at(now.position) < now.stage
            now.depth += 1
            drawn = self.draws.depart(crc32(repr(this).encode()))
            try:
                with _absorbing(part) if elsewhere_now else nullcontext():
                    output = call(*args, **kwargs)
            finally:
                now.depth -= 1
                self.draws.come_back(drawn)
            if elsewhere_now:
                self._call_hooks(now, name, args, kwargs, output)
            elif this in self.layout.carried:
                self._keep(now, this, output)
            return output

        return run

    def _keep_hooked(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        now = self._now
        if now is not None and (now.in_block or now.depth):
            call = name, now.calls[name]
            now.calls[name] += 1
            if call in self.layout.carried and call not in now.carried:
                self._keep(now, call, output)

    def _call_hooks(self, now: _ForwardState, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Calls forward hooks of a block or a part of another stage, and of modules in it, for what they keep.

        What they returned went to the module where it ran.
        """
        calls, written = list[tuple[nn.Module, Any, Any, Any]](), set(self._tree.written)
        for call in self._hooked.get(name, ()):
            if call in now.carried:
                calls.append((self._modules[call[0]], (), {}, self._carried(now, call)))
        for module, its_args, its_kwargs, made in (*calls, (self._modules[name], args, kwargs, output)):
            if not module._forward_hooks:
                continue
            versions = [tensor._version for tensor in tensors_of(made)]
            for number, hook in list(module._forward_hooks.items()):
                takes_kwargs = number in module._forward_hooks_with_kwargs
                given = (its_args, its_kwargs, made) if takes_kwargs else (its_args, made)
                with suppress(AbsentError):  # it reads values, as it did where the module ran
                    hook(module, *given)
            if versions != [tensor._version for tensor in tensors_of(made)]:
                raise RuntimeError(
                    f"a forward hook of {type(module).__name__} changes its output in place, and other stages call it "
                    "again; let it return the changed tensor"
                )
        self._tree.written &= written  # what hooks write, they have written where the module ran

    # ---------------------------------------------------------------- what goes past the blocks

    def _keep(self, now: _ForwardState, call: Call, output: Any) -> None:
        """Keeps what later stages will use, as it is now: what follows may change it in place."""
        wanted, number = self.layout.carried[call].numbers, count()
        kept = map_tensors(lambda t: t.clone() if next(number) in wanted else Unsent.of(t), output)
        now.carried[call] = map_leaves(lambda leaf: leaf if isinstance(leaf, PLAIN) else Withheld(leaf), kept)

    def _carried(self, now: _ForwardState, call: Call) -> Any:
        """What a module returned on an earlier stage, with absent tensors for what nobody will use."""
        goes_on = self.layout.carried[call].last > now.stage
        value = now.carried[call]
        return self._absent(map_tensors(Tensor.clone, value) if goes_on else value, call[0])

    def _absent(self, value: Any, module: str) -> Any:
        learns = torch.is_grad_enabled()

        def absent(leaf: Any) -> Any:
            if not isinstance(leaf, Unsent):
                return leaf
            differentiable = learns and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            what = f"what {module} returned"
            made = Absent(leaf.empty("meta"), self._device, what, learns=differentiable)
            return made.clone() if differentiable else made  # no leaf: code may write into what a block returned

        return map_leaves(absent, value)


def changed(new: Mapping[Path, Any], old: Mapping[Path, Any]) -> dict[Path, Any]:
    """The values that are not those of `old`."""
    return {path: value for path, value in new.items() if path in old and value is not old[path]}


class Withheld:
    """An object that is not sent to other stages, as a cache of keys and values; it may be looked at nowhere else."""

    def __init__(self, value: object) -> None:
        self._kind = type(value).__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AbsentError(
            f"{name} of a {self._kind} is used on another stage than the one that made it, where no object goes that "
            "may hold tensors; return these tensors from the module (of Hugging Face models, a cache is left out by "
            "use_cache=False)"
        )


@contextmanager
def _absorbing(module: nn.Module) -> Iterator[None]:
    """Inside, a module of another stage runs on absent tensors: no techniques, recorded means or hooks."""
    tables: list[dict[Any, Any]] = []
    for each in module.modules():
        if each._forward_hooks or each._forward_pre_hooks:
            tables += [each._forward_hooks, each._forward_pre_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        with unwatched(), plain_forwards(module):
            yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)
