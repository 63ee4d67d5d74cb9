"""Analysis of a user's step: where parameters are read, how many FLOPs each position costs, which values bypass blocks.

The step runs on a sample batch with absent parameters (`Absent`: shapes without values), so a model of any size costs
neither memory nor FLOPs. Values that depend only on the batch, such as masks and branches on them, are real. For
positions see `layout`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from lightning_parallel.techniques.tools.redirect import Forward, redirect_call, restore_call
from lightning_parallel.techniques.tools.replaced_parameters import redirect_to, stop_redirect, tied
from lightning_parallel.techniques.tools.shards import copy_user_attributes
from lightning_parallel.techniques.tools.user_warnings import warn
from lightning_parallel.values import add_note, map_tensors, tensors_of

aten = torch.ops.aten


class UnsupportedStepError(BaseException):
    """The step does something that a pipeline cannot run. No `Exception`, so that user code does not catch it."""


class BlocksMissingError(ValueError):
    """A step did not call some of the blocks; `called` are the FQNs of all modules that it called."""

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
                f"if layers are left out at random, as by LayerDrop, set its probability to 0; if {missing[0]} never "
                f"runs, name the others in plan=ParallelPlan(blocks={tuple(ran)!r})"
            )
        else:
            remedy = f"name the others in plan=ParallelPlan(blocks={patterns!r})"
        rule = f"the step ran without the blocks {listed}; a pipeline needs blocks that run in every step"
        super().__init__(f"{rule}: {remedy}, or {UNDIVIDED}")
        self.called = called


@dataclass(frozen=True)
class _Origin:
    """Where a value was computed, and from which values."""

    position: int
    # (call, index of the tensor, position) of the module outputs it depends on; None: it was computed inside a module
    sources: frozenset[tuple[Call, int, int]] | None
    parameters: frozenset[str] = frozenset()  # FQNs of parameters that code between modules read for it


def trace_step(
    model: nn.Module, blocks: Mapping[str, nn.Module], step: Callable[[], Any], device: torch.device
) -> StepTrace:
    """Run a step on a sample batch with absent parameters, and return its analysis.

    The model is not divided yet, and may be on meta; `blocks` are its repeated layers by FQN; the batch is on `device`.

    Raises:
        ValueError: the blocks do not run one after another, each once, or the step calls backward.
        Exception: any error of the step before the end of its last block, with a note.
    """
    tracer = _Tracer(model, blocks, device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        with tracer.attached(), torch.compiler.set_stance("force_eager"):
            try:
                output = step()
                # the caller of the step reads the output, and the next step reads the buffers
                for tensor in (*tensors_of(output), *model.buffers()):
                    if isinstance(tensor, Absent):
                        tracer.read(tensor)
                if any(p.grad is not None for p in model.parameters() if isinstance(p, Absent)):
                    raise UnsupportedStepError(
                        "the step calls backward, but in a pipeline the schedule decides when backward runs; return "
                        f"the loss, or {UNDIVIDED}"
                    )
            except UnsupportedStepError as error:
                raise ValueError(str(error)) from None
            except Exception as error:
                tracer.handle_error(error)
    finally:  # restored only here: leaving `attached` compares buffers to find those that the step wrote to
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer._version or not torch.equal(buffer, value):
                    buffer.copy_(value)
    if not tracer.are_blocks_done:
        raise BlocksMissingError(list(blocks), tracer.found.blocks, list(tracer.found.calls))
    return tracer.found


class _Tracer:
    """Records every operation on absent tensors (as `absent.Tracer`) and every call of a module in a `StepTrace`."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        self._model, self._blocks, self._device = model, dict(blocks), device
        self._modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in self._modules.items()}
        self._above = {above for block in blocks for above in ancestors(block)}
        self._end, self._position, self._depth = 2 * len(blocks), 0, 0
        self.found = StepTrace((), [0.0] * (self._end + 1))
        self._hooked_calls: Counter[str] = Counter()
        self._tied: dict[str, list[str]] = {}
        # FQN of a buffer -> its module's `_buffers`, its key there, the tensor and its version when last compared
        self._buffers: dict[str, tuple[dict[str, Any], str, Tensor, int]] = {}
        self._between: list[weakref.ref[Absent]] = []  # module outputs that code between modules has got
        self._marked: list[Tensor] = []  # outputs of the running block, before its own hooks

    # ---------------------------------------------------------------- modules

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, all parameters are absent, and calls of modules are recorded."""
        hooks = {name: hooks_of(module) for name, module in self._modules.items()}
        with ExitStack() as stack:
            stack.enter_context(self._parameters_absent())
            named = dict(self._model.named_buffers(remove_duplicate=False))
            for name, buffer in named.items():
                owner, _, key = name.rpartition(".")
                self._buffers[name] = self._model.get_submodule(owner)._buffers, key, buffer, buffer._version
            self._stay = list(map(weakref.ref, named.values()))  # so that `absent._absorb` cannot make them absent
            self.found.tied_buffers = tied(named.items())
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
        """Inside, parameters are absent; afterwards modules have their parameters, buffers and submodules again."""
        tables = [t for m in self._modules.values() for t in (m._parameters, m._buffers, m._modules)]
        tables_before = [dict(table) for table in tables]
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        flat_weights = [(m, list(m._flat_weights)) for m in self._modules.values() if isinstance(m, nn.RNNBase)]
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self._tied = {names[0]: names for names in tied(parameters.items())}
        try:
            self._make_absent()
            for name, absent in self._model.named_parameters(remove_duplicate=False):
                redirect_to(parameters[name], absent)  # the user's lists may hold the parameter
            torch.__future__.set_overwrite_module_params_on_conversion(True)  # `module.to` must replace them
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
            now = dict(self._model.named_parameters(remove_duplicate=False))
            self.found.casts = {
                name: now[name].dtype for name, old in dtypes.items() if name in now and now[name].dtype != old
            }
            for table, old in zip(tables, tables_before, strict=True):
                table.clear()
                table.update(old)
            for parameter in parameters.values():
                stop_redirect(parameter)
            for recurrent, weights in flat_weights:
                recurrent._flat_weights = weights

    def _make_absent(self) -> None:
        """Replace all parameters, and buffers on meta, by absent tensors."""
        absents: dict[int, Absent] = {}
        for name, parameter in self._model.named_parameters():  # tied parameters by their first name
            learns = parameter.requires_grad
            absents[id(parameter)] = absent = Absent(parameter, self._device, name, self, None, learns, parameter=True)
            absent.writes = self._wrote_parameter
            copy_user_attributes(absent, parameter)
        for module in self._modules.values():
            for key, p in list(module._parameters.items()):
                if p is not None:
                    setattr(module, key, absents[id(p)])
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:  # the model is not initialized yet
                    what = f"a buffer {key}"
                    module._buffers[key] = Absent(buffer, self._device, what, self, _Origin(0, frozenset()))

    def _on_call(self, module: nn.Module, _: Any) -> None:
        """Pre-hook of all modules: record the call."""
        name = self._names.get(id(module))
        if name is None:
            return
        self.found.calls[name].add(self._position)
        is_watched = self._is_inside and module._forward_hooks and name not in self._blocks
        if self._is_part(module, name):
            self._depth += 1
        if not is_watched:
            return
        # Forward hooks of a module inside a block or part get aliases of its output, whose origin is this call. If code
        # of a later stage reads an alias that a hook stored, that stage receives the output and calls the hooks again.
        outputs: list[Any] = []
        call = name, self._hooked_calls[name]
        self._hooked_calls[name] += 1

        def before_others(_: nn.Module, __: Any, output: Any) -> Any:
            views = map_tensors(lambda tensor: tensor.view_as(tensor) if isinstance(tensor, Absent) else tensor, output)
            outputs.extend((output, views))
            return self._returned(views, call)

        def after_others(_: nn.Module, __: Any, output: Any) -> Any:
            first.remove()
            last.remove()
            return outputs[0] if outputs and output is outputs[1] else output

        first = module.register_forward_hook(before_others, prepend=True)
        last = module.register_forward_hook(after_others)

    def _on_return(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Hook of all modules: set the origin of what blocks and parts return."""
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
        """Return whether this is a module with parameters outside of the blocks, or one inside such a module."""
        if self._position % 2 or name in self._above or name in self._blocks:
            return False
        return self._depth > 0 or any(True for _ in module.parameters())

    def _block(self, name: str, call: Forward) -> Forward:
        """Return the function that replaces `call`, the call of a block: it advances the position."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._position % 2:
                raise UnsupportedStepError(
                    f"the block {name} runs inside the block {self.found.blocks[-1]}; name only one of the two"
                )
            if name in self.found.blocks:
                raise UnsupportedStepError(
                    f"the block {name} runs twice in one step, so it cannot belong to one stage; name layers that run "
                    f"once, as in plan=ParallelPlan(blocks='net.layers.*'); if there are none, {UNDIVIDED}"
                )
            _reject_transforms(name)
            self._note_buffers()
            self.found.blocks += (name,)
            self._position = 2 * len(self.found.blocks) - 1
            output = call(*args, **kwargs)
            if list(map(id, tensors_of(output))) != list(map(id, self._marked)):
                for tensor in self._marked:  # hooks replaced these, so they have become inner values of the block
                    if isinstance(tensor, Absent):
                        tensor.origin = _Origin(self._position, None)
                output = self._returned(output, (name, 0))
            self._marked = []
            self._note_buffers()
            self._position += 1
            return output

        return run

    def _returned(self, output: Any, call: Call) -> Any:
        """Set the origin of the tensors that a module returned. Outputs of blocks become absent, as on later stages."""
        if call[0] in self._blocks:
            output = map_tensors(self._absent, output)
        for number, tensor in enumerate(tensors_of(output)):
            if isinstance(tensor, Absent) and "_is_param" not in vars(tensor):
                self.read(tensor)  # the module may only pass it through, which reads it here
                tensor.origin = _Origin(self._position, frozenset({(call, number, self._position)}))
                self._between.append(weakref.ref(tensor))
        return output

    def _absent(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Absent):
            return Absent(tensor, tensor.device, "a result", self)
        made_before = tensor.origin is not None and tensor.origin.position != self._position
        # a view, so that the block's output and an input that it passes through have different origins
        return tensor.view_as(tensor) if made_before else tensor

    # ---------------------------------------------------------------- operations, see `Tracer`

    def read(self, tensor: Absent, position: int | None = None) -> None:
        """See `Tracer.read`; `position` is where the tensor is read (default: at the current position)."""
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
            for name in origin.parameters:  # each stage runs the code between modules, which computes the value again
                self.found.uses[name].add(position)
        for call, number, made in origin.sources:
            if call[0] in self._blocks:  # the next stage receives its output anyway
                available: tuple[int, ...] = (made, made + 1, made + 2)
            else:  # code after a block may run on the next stage, which needs what hooks in the block stored
                available = (made,) if made % 2 else (made, made + 1)
            if position not in available:
                self.found.skips.add(Skip(call, number, made, position))

    def asked(self, tensor: Absent) -> None:
        """See `Tracer.asked`. Control flow may depend on the value, so all later code between modules reads it."""
        if not self._is_inside:
            for later in range(self._position + self._position % 2, self._end + 1, 2):
                self.read(tensor, later)

    def wrote(self, tensor: Tensor, inputs: Sequence[Absent]) -> None:
        """See `Tracer.wrote`. Code between modules writes to a buffer on every stage, so all need the inputs."""
        for name, (_, _, buffer, _) in self._buffers.items():
            if buffer.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                self._note_written(name)
                for absent in inputs:
                    self.asked(absent)

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
        origins = [t.origin for t in inputs if t.origin is not None]
        names = {name for t in inputs if "_is_param" in vars(t) for name in self._tied.get(t.what, [t.what])}
        parameters = frozenset(names).union(*(t.parameters for t in origins))
        if any(t.sources is None for t in origins):
            return _Origin(self._position, None, parameters)
        return _Origin(self._position, frozenset().union(*(t.sources for t in origins)), parameters)

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """See `Tracer.count`."""
        packet, work = func._overloadpacket, self.found.work
        formula = flop_registry.get(packet)
        with suppress(AssertionError):  # torch 2.11 counts no attention of grouped heads; work is for balance only
            if formula is not None:
                work[self._position] += formula(*args, **kwargs, out_val=result)
            elif packet is aten._scaled_dot_product_flash_attention_for_cpu:
                work[self._position] += sdpa_flop_count(*(t.shape for t in args[:3]))  # type: ignore[no-untyped-call]

    @property
    def _is_inside(self) -> bool:
        """Whether a block or a part is being called."""
        return bool(self._position % 2 or self._depth)

    # ---------------------------------------------------------------- the end

    @property
    def are_blocks_done(self) -> bool:
        """Whether all blocks have returned."""
        return len(self.found.blocks) == len(self._blocks) and not self._position % 2

    def handle_error(self, error: Exception) -> None:
        """Handle an error of the step: raise it, or after the last block assume that the rest reads all live values."""
        if not self.are_blocks_done:
            missing = next((name for name in self._blocks if name not in self.found.blocks), "?")
            place = f"in the block {self.found.blocks[-1]}" if self._position % 2 else f"before the block {missing}"
            add_note(
                error,
                f"This was raised {place}, while the step was analyzed for the pipeline: parameters have shapes there "
                f"but no values. If this code needs values, compute them from the batch alone, or {UNDIVIDED}",
            )
            raise error
        self.found.complete = False
        for tensor in [reference() for reference in self._between]:
            if tensor is not None:
                self.read(tensor, self._end)
        warn(
            f"The code after the last block could not be analyzed without values ({type(error).__name__}: {error}). "
            "The last stage keeps all parameters that are in no block, and it is unknown which parameters in blocks "
            "the loss reads"
        )

    def _note_buffers(self) -> None:
        """Record which buffers were replaced or written to since the last call."""
        for name, (table, key, buffer, version) in self._buffers.items():
            current = table.get(key)
            if current is not None and (current is not buffer or current._version != version):
                self._note_written(name)
                self._buffers[name] = table, key, current, current._version


def ancestors(name: str) -> Iterator[str]:
    """Yield the FQN of every module that contains the named one: "a.b.c" -> "", "a", "a.b"."""
    yield ""
    for end, letter in enumerate(name):
        if letter == ".":
            yield name[:end]


def hooks_of(module: nn.Module) -> frozenset[int]:
    """Return the ids of a module's forward hooks and pre-hooks; a hook that was registered later has a larger id."""
    return frozenset((*module._forward_hooks, *module._forward_pre_hooks))


def _reject_transforms(block: str) -> None:
    """Raise if a block is called inside a `torch.func` transform or a `torch.autograd.Function`."""
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedStepError(
            f"the block {block} runs inside a transform of torch.func, which would have to go through all stages; "
            f"transform only code within one block or after the last one, or {UNDIVIDED}"
        )
    if in_function():
        raise UnsupportedStepError(
            f"the block {block} runs inside a torch.autograd.Function, whose backward would have to go through all "
            "stages; pass use_reentrant=False if that is a checkpoint, else call the block outside of it, or "
            f"{UNDIVIDED}"
        )
