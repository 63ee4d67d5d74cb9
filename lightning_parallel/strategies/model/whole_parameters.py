"""Parameters as one device has them, for hooks that look at the model: averages of weights, norms, samples of text.

A hook of the module or of a callback looks at the model if its code names a part of it, asks for parameters, be it in
the groups of an optimizer, or hands the module on. Around such a hook every rank has all parameters and calls the model
as one device does; what the hook writes stays. Hooks that do not look cost nothing.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.model.foreign_hooks import Places
from lightning_parallel.strategies.model.shown_gradient import ShownGradient
from lightning_parallel.strategies.model.shown_groups import wholes_in_groups
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.gradients.groups import Pair
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.redirect import plain_calls, plain_forwards
from lightning_parallel.techniques.tools.shards import shard_of, whole_tensor

_PASSES = ("sanity_check", "train", "validation", "test", "predict")
HOOKS = {
    *(f"on_{name}_{when}" for name in _PASSES for when in ("start", "end")),
    *(f"on_{name}_{unit}_{when}" for name in _PASSES for unit in ("epoch", "batch") for when in ("start", "end")),
    *("on_fit_start", "on_fit_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "on_save_checkpoint", "on_load_checkpoint"),
}
"""What Lightning calls on all ranks alike."""

ASKS = {
    *("parameters", "named_parameters", "get_parameter", "state_dict", "load_state_dict", "buffers", "named_buffers"),
    *("modules", "named_modules", "children", "named_children", "get_submodule", "_parameters", "forward"),
    "lightning_module",
}
"""Names by which a model is asked for its tensors, or run."""

KEYS = {"params"}
"""Strings by which a group of an optimizer is asked for them."""

MOVES = {"to", "cpu", "cuda", "type", "half", "float", "double", "bfloat16", "apply"}
"""Methods of a module that act on its tensors; tensors have them too."""

LIBRARIES = {"lightning", "torch", "torchmetrics", "lightning_parallel"}


class WholeParameters:
    """Shows the whole model, for the time of a run, to the hooks that look at it.

    Args:
        divided: the module.
        callbacks: all that have hooks too.
        host: all ranks, for messages of the host.
    """

    def __init__(self, divided: DividedModel, callbacks: Iterable[Callback], host: dist.ProcessGroup) -> None:
        self._divided, self._host = divided, host
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._inside = False
        if not divided.in_parts:
            return
        module = divided.module
        with divided.shown():
            parts = {name.partition(".")[0] for name, _ in module.named_parameters()}
        parts |= divided.beside.attributes
        if divided.pipeline.ranks > 1 and _looks(module, "optimizer_step", module, parts):
            raise ValueError(
                f"{type(module).__name__}.optimizer_step looks at the model, but while it runs a rank of a pipeline "
                "has the parameters of its stage only; look at gradients in on_before_optimizer_step and at weights in "
                "on_train_batch_end, which find all of them on every rank"
            )
        owners: list[Any] = [module, *callbacks]
        found = [
            (k, hook) for k, owner in enumerate(owners) for hook in sorted(HOOKS) if _looks(owner, hook, module, parts)
        ]
        wanted = set().union(*gather_objects(found, host))
        for number, hook in sorted(wanted):
            self._wrap(owners[number], hook)

    def close(self) -> None:
        """Gives hooks back as they were."""
        for owner, hook, own in reversed(self._wrapped):
            vars(owner).pop(hook)
            if own is not None:
                vars(owner)[hook] = own
        self._wrapped.clear()

    def _wrap(self, owner: Any, hook: str) -> None:
        run = getattr(owner, hook)

        @functools.wraps(run)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.shown(f"{type(owner).__name__}.{hook}"):
                return run(*args, **kwargs)

        self._wrapped.append((owner, hook, vars(owner).get(hook)))
        vars(owner)[hook] = wrapped

    # ---------------------------------------------------------------- the whole model

    @contextmanager
    def shown(self, reader: str) -> Iterator[None]:
        """Inside, this rank has the whole model; all ranks must come.

        Args:
            reader: for whom, in messages.
        """
        if self._inside:
            yield
            return
        self._inside, module = True, self._divided.module
        try:
            self._require_room(reader)
            arrived = self._arrived()
            with ExitStack() as around:
                around.enter_context(self._divided.shown())
                around.enter_context(_filled(module, arrived))
                pairs = around.enter_context(_undivided(module))
                around.enter_context(self._divided.represented(pairs))
                around.enter_context(self._divided.beside.shown())
                around.enter_context(wholes_in_groups(lambda: module.trainer.optimizers, pairs))
                around.enter_context(plain_forwards(module))
                around.enter_context(plain_calls(module))
                places = Places(module, [made for _, made in pairs])
                yield
                places.refuse_changes(reader)
        finally:
            self._inside = False

    def _arrived(self) -> dict[str, Tensor]:
        """The tensors that other stages hold, as they arrived here."""
        pipeline = self._divided.pipeline
        if pipeline.ranks == 1:
            return {}
        with elsewhere.unshown(self._divided.module):
            held = _tensors(self._divided.module)
            whole = {name: (whole_tensor(tensor.detach()), None) for name, tensor in held.items()}
            return {name: tensor for name, (tensor, _) in pipeline.shared(whole).items() if name not in held}

    def _require_room(self, reader: str) -> None:
        """Raises on all ranks if one of them has no room for what it does not hold."""
        device = self._divided.mesh.device
        if device.type != "cuda":
            return
        with self._divided.shown():
            needed = sum(p.numel() * p.element_size() for p in self._divided.module.parameters())
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if not all(gather_objects(free > needed, self._host)):
            raise RuntimeError(
                f"{reader} looks at parameters, of which each rank has a part only; the whole model of "
                f"{needed / 2**30:.1f} GiB does not fit on every device; look at them in a checkpoint, or in a hook "
                "that runs less often, with more memory left"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**named, **dict(module.named_buffers(remove_duplicate=False))}


@contextmanager
def _filled(module: nn.Module, arrived: dict[str, Tensor]) -> Iterator[None]:
    """Inside, tensors without memory have these values, and buffers that a step made on another stage are there."""
    tensors = _tensors(module)
    before = {name: tensors[name].data for name in arrived if name in tensors}
    made = {name: _table_of(module, name) for name in arrived if name not in tensors}
    for name, value in arrived.items():
        if name in tensors:
            tensors[name].data = value
        else:
            made[name][name.rpartition(".")[2]] = value
    try:
        yield
    finally:
        for name, data in before.items():
            tensors[name].data = data
        for name, table in made.items():
            table[name.rpartition(".")[2]] = None


def _table_of(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    return module.get_submodule(name.rpartition(".")[0])._buffers


@contextmanager
def _undivided(module: nn.Module) -> Iterator[list[Pair]]:
    """Inside, whole parameters stand for those of which ranks hold parts, as it yields; what is written stays."""
    places = [(part, name, tensor) for part in module.modules() for name, tensor in part._parameters.items()]
    divided: list[Any] = [place for place in places if isinstance(place[2], DTensor)]
    whole: dict[int, tuple[DTensor, nn.Parameter]] = {}
    for part, name, tensor in divided:
        if id(tensor) not in whole:
            whole[id(tensor)] = tensor, _whole(tensor)
        part._parameters[name] = whole[id(tensor)][1]
    try:
        yield [*whole.values()]
    finally:
        for part, name, tensor in divided:
            part._parameters[name] = tensor
        for tensor, made in whole.values():
            _take_over(tensor, made)


def _whole(tensor: Any) -> nn.Parameter:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # this is no read of the step's own
        made = nn.Parameter(whole_tensor(tensor.detach()).clone(), tensor.requires_grad)
        if isinstance(tensor.grad, ShownGradient):
            made.grad = tensor.grad  # one for both: the optimizer has the divided parameter
        elif tensor.grad is not None:
            made.grad = whole_tensor(tensor.grad).to(made)
    return made


@torch.no_grad()
def _take_over(tensor: Any, made: nn.Parameter) -> None:
    own = tensor._local_tensor
    if not made._version:  # it was read only, or written by `.data`: a backward that is to come may use the old one
        own = own.data
    own.copy_(shard_of(made.detach(), tensor).to_local())
    tensor.requires_grad_(made.requires_grad)
    if made.grad is None or made.grad is tensor.grad:
        tensor.grad = made.grad
    elif isinstance(tensor.grad, ShownGradient):
        tensor.grad = ShownGradient.of(shard_of(made.grad.detach(), tensor.grad.divided))
    elif isinstance(tensor.grad, DTensor):
        tensor.grad._local_tensor.copy_(shard_of(made.grad.detach(), tensor.grad).to_local())


# ---------------------------------------------------------------- which hooks look


def asks_for_groups(module: nn.Module) -> bool:
    """Whether the user's own code of a training step may ask for the parameters in groups of optimizers."""
    return _any_code(module, "training_step", module, lambda code: bool(_strings(code) & KEYS))


def _looks(owner: Any, hook: str, module: nn.Module, parts: set[str]) -> bool:
    """Whether the user's own code of a hook may look at the model."""

    def looks(code: CodeType) -> bool:
        return bool(set().union(*_names(code)) & (ASKS | parts) or _strings(code) & KEYS) or _hands_on(code)

    return _any_code(owner, hook, module, looks)


def _any_code(owner: Any, hook: str, module: nn.Module, looks: Callable[[CodeType], bool]) -> bool:
    """Whether that is true of the user's own code of a hook, or of functions of the user's that it names."""
    run = getattr(owner, hook, None)
    owners, seen = (type(owner), type(module)), set[CodeType]()

    def any_of(function: Any) -> bool:
        function = getattr(function, "__wrapped__", function)
        if (function.__module__ or "").partition(".")[0] in LIBRARIES or function.__code__ in seen:
            return False
        seen.add(function.__code__)
        if looks(function.__code__):
            return True
        attributes, variables = _names(function.__code__)
        called = [vars(kind).get(name) for name in attributes for owner in owners for kind in owner.__mro__]
        called += [function.__globals__.get(name) for name in variables]
        return any(any_of(other) for other in called if isinstance(other, FunctionType))

    function = getattr(run, "__func__", run)
    return isinstance(function, FunctionType) and any_of(function)


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The attributes that code names, of whatever objects, and the variables of its file."""
    parts = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    steps = list(dis.get_instructions(code))
    attributes = {step.argval for step in steps if step.opname.endswith(("_ATTR", "_METHOD"))}
    variables = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return attributes.union(*(found for found, _ in parts)), variables.union(*(found for _, found in parts))


def _strings(code: CodeType) -> set[str]:
    """The constants of code that are strings."""
    inner = [_strings(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {constant for constant in code.co_consts if isinstance(constant, str)}.union(*inner)


def _hands_on(code: CodeType) -> bool:
    """Whether the module is used otherwise than for its attributes: called, moved, or given to something else."""
    watched = {
        name for name in code.co_varnames[: code.co_argcount] if name in ("self", "pl_module", "module", "model")
    }
    passed_by = ("PRECALL", "CACHE", "NOP", "COPY", "DUP_TOP")  # `self.count += 1` copies the module to store there
    steps = [step for step in dis.get_instructions(code) if step.opname not in passed_by]
    return any(
        step.opname.startswith("LOAD_")
        and step.argval in watched
        and before.argval != "__class__"  # `super()` is given the module, and leads to code that is looked at as well
        and (not following.opname.endswith(("_ATTR", "_METHOD")) or following.argval in MOVES)
        for before, step, following in zip([steps[0], *steps], steps, steps[1:], strict=False)
    )
