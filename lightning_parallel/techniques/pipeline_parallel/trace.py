"""Analysis of one step of the user's: where its parameters are read, how much work it is, what goes past the blocks.

The step runs with absent parameters (`Absent`), so a model of any size costs neither memory nor arithmetic, while
masks, positions and decisions that depend on the batch alone are real. For positions see `layout`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_parallel.plan.plan import starred
from lightning_parallel.techniques.divided.python_functions import in_function
from lightning_parallel.techniques.pipeline_parallel.layout import Call, Skip, StepTrace
from lightning_parallel.techniques.tools.absent import UNDIVIDED, Absent
from lightning_parallel.techniques.tools.moved import stand_again, stand_for, tied
from lightning_parallel.techniques.tools.redirect import Forward, redirect_call, restore_call
from lightning_parallel.techniques.tools.shards import bear
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import add_note, map_tensors, tensors_of

aten = torch.ops.aten


class UnsupportedStepError(BaseException):
    """The step does what no pipeline can follow. No `Exception`, so that no code of the user's catches it."""


class BlocksMissingError(ValueError):
    """A step ran without some of the blocks; `called` are the FQN of all modules that it called."""

    def __init__(self, blocks: Sequence[str], ran: Sequence[str], called: Sequence[str]) -> None:
        missing = [name for name in blocks if name not in ran]
        listed = f"{', '.join(missing[:3])}{', …' * (len(missing) > 3)}"
        patterns = tuple(dict.fromkeys(map(starred, ran)))
        if not ran:
            remedy = (
                "call them as modules, layer(x) and not layer.forward(x), name others in plan=ParallelPlan(blocks=...)"
            )
        elif set(patterns) & set(map(starred, missing)):
            remedy = (
                f"where layers are left out at random, as LayerDrop does, set its probability to 0; where {missing[0]} "
                f"never runs, name the others in plan=ParallelPlan(blocks={tuple(ran)!r})"
            )
        else:
            remedy = f"name those in plan=ParallelPlan(blocks={patterns!r})"
        rule = f"the step ran without the blocks {listed}; a pipeline needs blocks that run in every step"
        super().__init__(f"{rule}: {remedy}, or {UNDIVIDED}")
        self.called = called


@dataclass(frozen=True)
class _Origin:
    """Where a value was made: the position, the results of modules in it (None: from within one), the parameters."""

    position: int
    sources: frozenset[tuple[Call, int, int]] | None
    parameters: frozenset[str] = frozenset()


def trace_step(
    model: nn.Module, blocks: Mapping[str, nn.Module], step: Callable[[], Any], device: torch.device
) -> StepTrace:
    """Run a step on a sample batch with absent parameters, and note what it does.

    The model is whole, perhaps on meta; `blocks` are its repeated layers by FQN; the batch is on `device`.

    Raises:
        ValueError: the blocks do not run one after the other, each once.
        Exception: what the step raised before its last block, with a note.
    """
    tracer = _Tracer(model, blocks, device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        with tracer.attached(), torch.compiler.set_stance("force_eager"):
            try:
                output = step()
                # its caller reads the output, and the next step reads the buffers
                for tensor in (*tensors_of(output), *model.buffers()):
                    if isinstance(tensor, Absent):
                        tracer.read(tensor)
                if any(each.grad is not None for each in model.parameters() if isinstance(each, Absent)):
                    raise UnsupportedStepError(
                        "the step calls backward, but in a pipeline the schedule decides when backward runs; return "
                        f"the loss, or {UNDIVIDED}"
                    )
            except UnsupportedStepError as error:
                raise ValueError(str(error)) from None
            except Exception as error:
                tracer.broke_off(error)
    finally:  # not before the tracer has looked which of them the step wrote
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer._version or not torch.equal(buffer, value):
                    buffer.copy_(value)
    if not tracer.is_behind_blocks:
        raise BlocksMissingError(list(blocks), tracer.found.blocks, list(tracer.found.calls))
    return tracer.found


class _Tracer:
    """Hears of every operation on absent tensors, and of every call of a module."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        self._model, self._blocks, self._device = model, dict(blocks), device
        self._modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in self._modules.items()}
        self._above = {above for block in blocks for above in ancestors(block)}
        self._end, self._position, self._depth = 2 * len(blocks), 0, 0
        self.found = StepTrace((), [0.0] * (self._end + 1))
        self._hooked_calls: Counter[str] = Counter()
        self._tied: dict[str, list[str]] = {}
        # by FQN the table of each buffer, its name there, and what stood there with which version
        self._buffers: dict[str, tuple[dict[str, Any], str, Tensor, int]] = {}
        self._between: list[weakref.ref[Absent]] = []  # what code between modules has had in its hands
        self._marked: list[Tensor] = []  # the results of the block that runs, before its own hooks

    # ---------------------------------------------------------------- modules

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, all parameters are absent, and modules tell when they are called."""
        hooks = {name: hooks_of(module) for name, module in self._modules.items()}
        with ExitStack() as stack:
            stack.enter_context(self._parameters_absent())
            named = dict(self._model.named_buffers(remove_duplicate=False))
            for name, buffer in named.items():
                owner, _, key = name.rpartition(".")
                self._buffers[name] = self._model.get_submodule(owner)._buffers, key, buffer, buffer._version
            self._stay = list(map(weakref.ref, named.values()))  # no absent tensor takes the place of one, see `Absent`
            self.found.same_buffers = tied(named.items())
            stack.callback(register_module_forward_pre_hook(self._on_call).remove)
            stack.callback(register_module_forward_hook(self._on_return, always_call=True).remove)
            for name, block in self._blocks.items():
                redirect_call(block, self._block, name)
                stack.callback(restore_call, block)
            yield
            self._note_buffers()
        self.found.hooked = {name for name, before in hooks.items() if hooks_of(self._modules[name]) - before}

    @contextmanager
    def _parameters_absent(self) -> Iterator[None]:
        """Afterwards modules have the parameters, buffers and parts that they had."""
        tables = [t for m in self._modules.values() for t in (m._parameters, m._buffers, m._modules)]
        before = [dict(table) for table in tables]
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        flat = [(m, list(m._flat_weights)) for m in self._modules.values() if isinstance(m, nn.RNNBase)]
        given = dict(self._model.named_parameters(remove_duplicate=False))
        dtypes = {name: parameter.dtype for name, parameter in given.items()}
        self._tied = {names[0]: names for names in tied(given.items())}
        self._make_absent()
        for name, absent in self._model.named_parameters(remove_duplicate=False):
            stand_for(given[name], absent)  # lists of the user's may hold it
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # `module.to` puts others in their place
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
            now = dict(self._model.named_parameters(remove_duplicate=False))
            self.found.casts = {
                name: now[name].dtype for name, old in dtypes.items() if name in now and now[name].dtype != old
            }
            for table, old in zip(tables, before, strict=True):
                table.clear()
                table.update(old)
            for parameter in given.values():
                stand_again(parameter)
            for recurrent, weights in flat:
                recurrent._flat_weights = weights

    def _make_absent(self) -> None:
        """Puts absent tensors in the place of parameters."""
        made: dict[int, Absent] = {}
        for name, parameter in self._model.named_parameters():  # each by its first name
            learns = parameter.requires_grad
            made[id(parameter)] = absent = Absent(parameter, self._device, name, self, None, learns, parameter=True)
            absent.writes = self._wrote_parameter
            bear(absent, parameter)
        for module in self._modules.values():
            for key, own in list(module._parameters.items()):
                if own is not None:
                    setattr(module, key, made[id(own)])
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:  # of a model that is not built yet
                    what = f"a buffer {key}"
                    module._buffers[key] = Absent(buffer, self._device, what, self, _Origin(0, frozenset()))

    def _on_call(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        self.found.calls[name].add(self._position)
        is_watched = self._is_inside and module._forward_hooks and name not in self._blocks
        if self._is_part(module, name):
            self._depth += 1
        if not is_watched:
            return
        # Hooks of a module within a block or a part get tensors of their own. What they keep is the only way out that
        # stages can follow: a later stage gets it, and calls the hooks again.
        given: list[Any] = []
        call = name, self._hooked_calls[name]
        self._hooked_calls[name] += 1

        def before_others(_: nn.Module, __: Any, output: Any) -> Any:
            kept = map_tensors(lambda tensor: tensor.view_as(tensor) if isinstance(tensor, Absent) else tensor, output)
            given.extend((output, kept))
            return self._returned(kept, call)

        def after_others(_: nn.Module, __: Any, output: Any) -> Any:
            first.remove()
            last.remove()
            return given[0] if given and output is given[1] else output

        first = module.register_forward_hook(before_others, prepend=True)
        last = module.register_forward_hook(after_others)

    def _on_return(self, module: nn.Module, _: Any, output: Any) -> Any:
        name = self._names.get(id(module))
        if name in self._blocks and self._position % 2 and name == self.found.blocks[-1]:
            output = self._returned(output, (name, 0))
            self._marked = list(tensors_of(output))
            return output
        if name is None or not self._is_part(module, name):
            return output
        self._depth -= 1
        if self._depth:
            return output
        self.found.parts[name] += 1
        return self._returned(output, (name, self.found.parts[name] - 1))

    def _is_part(self, module: nn.Module, name: str) -> bool:
        """Whether this is a module beside the blocks that has parameters, or one within such a module."""
        if self._position % 2 or name in self._above or name in self._blocks:
            return False
        return self._depth > 0 or any(True for _ in module.parameters())

    def _block(self, name: str, call: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._position % 2:
                raise UnsupportedStepError(
                    f"the block {name} runs inside the block {self.found.blocks[-1]}; name one of the two only"
                )
            if name in self.found.blocks:
                raise UnsupportedStepError(
                    f"the block {name} runs twice in one step, so it cannot belong to one stage; name layers that run "
                    f"once, as in plan=ParallelPlan(blocks='net.layers.*'); where there are none, {UNDIVIDED}"
                )
            _require_usual_gradients(name)
            self._note_buffers()
            self.found.blocks += (name,)
            self._position = 2 * len(self.found.blocks) - 1
            output = call(*args, **kwargs)
            if list(map(id, tensors_of(output))) != list(map(id, self._marked)):
                for tensor in self._marked:  # hooks of the block got these, and made something else of them
                    if isinstance(tensor, Absent):
                        tensor.origin = _Origin(self._position, None)
                output = self._returned(output, (name, 0))
            self._marked = []
            self._note_buffers()
            self._position += 1
            return output

        return run

    def _returned(self, output: Any, call: Call) -> Any:
        """Gives the tensors that a module returned their origin. Those of a block are absent for later stages."""
        if call[0] in self._blocks:
            output = map_tensors(self._absent, output)
        for number, tensor in enumerate(tensors_of(output)):
            if isinstance(tensor, Absent) and "_is_param" not in vars(tensor):
                self.read(tensor)  # it may have come from elsewhere, and only pass through
                tensor.origin = _Origin(self._position, frozenset({(call, number, self._position)}))
                self._between.append(weakref.ref(tensor))
        return output

    def _absent(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Absent):
            return Absent(tensor, tensor.device, "a result", self)
        made_before = tensor.origin is not None and tensor.origin.position != self._position
        # what a block hands on is another tensor for who has kept the one that it was given
        return tensor.view_as(tensor) if made_before else tensor

    # ---------------------------------------------------------------- operations, see `Tracer`

    def read(self, tensor: Absent, position: int | None = None) -> None:
        """See `Tracer.read`; `position` is where it is read, if not here."""
        position = self._position if position is None else position
        if "_is_param" in vars(tensor):
            for name in self._tied.get(tensor.what, [tensor.what]):
                self.found.uses[name].add(position)
            return
        origin: _Origin | None = tensor.origin
        if origin is None or origin.position == position:
            return
        if origin.sources is None:
            self.found.inner.add((origin.position, position))
            return
        if position != origin.position + 1 or origin.position % 2:
            for name in origin.parameters:  # code between modules makes the value again
                self.found.uses[name].add(position)
        for call, number, made in origin.sources:
            if call[0] in self._blocks:  # its result is what the next stage receives
                at_hand: tuple[int, ...] = (made, made + 1, made + 2)
            else:  # code behind a block, in which a module kept something by a hook, may run on the next stage
                at_hand = (made,) if made % 2 else (made, made + 1)
            if position not in at_hand:
                self.found.skips.add(Skip(call, number, made, position))

    def asked(self, tensor: Absent) -> None:
        """A value that Python gets may go anywhere: it is used wherever the step goes from here."""
        if not self._is_inside:
            for later in range(self._position + self._position % 2, self._end + 1, 2):
                self.read(tensor, later)

    def wrote(self, tensor: Tensor, inputs: Sequence[Absent]) -> None:
        """See `Tracer.wrote`. Code between modules changes a buffer on every stage: all need the inputs."""
        for name, (_, _, buffer, _) in self._buffers.items():
            if buffer.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                self._note_written(name)
                for each in inputs:
                    self.asked(each)

    def _wrote_parameter(self, name: str) -> None:
        self.found.written_parameters.add((name, self._position))

    def _note_written(self, name: str) -> None:
        self.found.written.add(name)
        if self._is_inside:
            self.found.written_inside.add((name, self._position))

    def origin(self, inputs: Sequence[Absent]) -> Any:
        """See `Tracer.origin`."""
        if self._is_inside:
            return _Origin(self._position, None)
        origins = [each.origin for each in inputs if each.origin is not None]
        names = {
            name for each in inputs if "_is_param" in vars(each) for name in self._tied.get(each.what, [each.what])
        }
        parameters = frozenset(names).union(*(each.parameters for each in origins))
        if any(each.sources is None for each in origins):
            return _Origin(self._position, None, parameters)
        return _Origin(self._position, frozenset().union(*(each.sources for each in origins)), parameters)

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """See `Tracer.count`."""
        packet = func._overloadpacket
        formula = flop_registry.get(packet)
        if formula is not None:
            self.found.work[self._position] += formula(*args, **kwargs, out_val=result)
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu:
            self.found.work[self._position] += sdpa_flop_count(*(each.shape for each in args[:3]))  # type: ignore[no-untyped-call]

    @property
    def _is_inside(self) -> bool:
        """Whether this is the code of a block or a part, which one stage runs."""
        return bool(self._position % 2 or self._depth)

    # ---------------------------------------------------------------- the end

    @property
    def is_behind_blocks(self) -> bool:
        """Whether all blocks have run."""
        return len(self.found.blocks) == len(self._blocks) and not self._position % 2

    def broke_off(self, error: Exception) -> None:
        """The step raised. Behind the last block, what is still there may be used in what is left of the step."""
        if not self.is_behind_blocks:
            missing = next((name for name in self._blocks if name not in self.found.blocks), "?")
            place = f"in the block {self.found.blocks[-1]}" if self._position % 2 else f"before the block {missing}"
            add_note(
                error,
                f"This was raised {place}, while the step was analyzed before it runs in a pipeline: parameters have "
                "shapes there but no values. If this place needs values, compute them from the batch alone, or "
                f"{UNDIVIDED}",
            )
            raise error
        self.found.complete = False
        for tensor in [reference() for reference in self._between]:
            if tensor is not None:
                self.read(tensor, self._end)
        warn(
            f"What follows the last block could not be analyzed without values ({type(error).__name__}: {error}): the "
            "last stage keeps all parameters that are in no block, and what the loss reads of parameters in blocks is "
            "not known"
        )

    def _note_buffers(self) -> None:
        """Notes which buffers changed since the last time."""
        for name, (table, key, buffer, version) in self._buffers.items():
            now = table.get(key)
            if now is not None and (now is not buffer or now._version != version):
                self._note_written(name)
                self._buffers[name] = table, key, now, now._version


def ancestors(name: str) -> Iterator[str]:
    """Yield the FQN of every module that contains the named one: "a.b.c" -> "", "a", "a.b"."""
    yield ""
    for end, letter in enumerate(name):
        if letter == ".":
            yield name[:end]


def hooks_of(module: nn.Module) -> frozenset[int]:
    """The numbers of a module's forward hooks; later ones have larger numbers."""
    return frozenset((*module._forward_hooks, *module._forward_pre_hooks))


def _require_usual_gradients(block: str) -> None:
    """Refuses a block that is called where gradients do not come the usual way."""
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedStepError(
            f"the block {block} runs inside a transform of torch.func, which would have to go through all stages; "
            f"transform what lies inside one block or follows the last one, or {UNDIVIDED}"
        )
    if in_function():
        raise UnsupportedStepError(
            f"the block {block} runs inside a torch.autograd.Function, whose backward would have to go through all "
            "stages; if that is a checkpoint, checkpoint it with use_reentrant=False, or else call it outside, or "
            f"{UNDIVIDED}"
        )
