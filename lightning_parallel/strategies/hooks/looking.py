"""What the code of hooks looks at: the model, gradients, groups of optimizers. It is read, not run."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence, Set
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_PASSES = ("sanity_check", "train", "validation", "test", "predict")
HOOKS = {
    *(f"on_{name}_{when}" for name in _PASSES for when in ("start", "end")),
    *(f"on_{name}_{unit}_{when}" for name in _PASSES for unit in ("epoch", "batch") for when in ("start", "end")),
    *("on_fit_start", "on_fit_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "on_save_checkpoint", "on_load_checkpoint"),
    *("optimizer_zero_grad", "on_validation_model_zero_grad", "lr_scheduler_step"),
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

LIBRARIES = {"lightning", "pytorch_lightning", "torch", "torchmetrics", "lightning_parallel"}

SILENT = {
    *("no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_", "zero_grad"),
    *("on_before_zero_grad", "optimizer_zero_grad", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
}
"""Names with `grad` in them by which nobody asks for the values of one."""

ONE_RANK = {"is_global_zero", "global_rank", "local_rank", "node_rank", "get_rank", "rank", "rank_zero_only"}
"""Names by which code decides on which ranks it runs."""


def asks_for_groups(module: nn.Module) -> bool:
    """Whether the user's own code of a training step may ask for the parameters in groups of optimizers."""
    return _any_code(module, "training_step", module, lambda code: bool(_strings(code) & KEYS))


def asks_for_params(optimizer: Any, method: str) -> bool:
    """Whether a method of the user's optimizer, or one that it calls, may ask for parameters in groups."""
    return _any_code(optimizer, method, optimizer, lambda code: bool(_strings(code) & KEYS))


def looks_at_model(owner: Any, hook: str, module: nn.Module, parts: set[str]) -> bool:
    """Whether the user's own code of a hook may look at the model."""
    own = getattr(unwrap(_function(owner, hook)), "__code__", None)
    given = () if own is None else own.co_varnames[: own.co_argcount]
    name = given[:1] if owner is module else given[2:3]  # of the module: hooks may call it as they like

    def looks(code: CodeType) -> bool:
        names = bool(set().union(*_names(code)) & (ASKS | parts) or _strings(code) & KEYS)
        return names or _hands_on(code, name if code is own else ())

    return _any_code(owner, hook, module, looks)


def names_gradients(owner: Any, hook: str, module: nn.Module, besides: Set[str] = SILENT) -> bool:
    """Whether the user's own code of a hook may look at gradients, by their name; `besides` are names that do not."""

    def looks(code: CodeType) -> bool:
        return "grad" in _strings(code) or any("grad" in name for name in set().union(*_names(code)) - besides)

    return _any_code(owner, hook, module, looks)


def names_read(owner: Any, method: str, module: object) -> set[str]:
    """The attributes that the user's own code of a method reads, of whatever objects."""
    found: set[str] = set()

    def note(code: CodeType) -> bool:
        found.update(_read_in(code))
        return False

    _any_code(owner, method, module, note)
    return found


def _read_in(code: CodeType) -> set[str]:
    parts = [_read_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {value for name, value in _steps(code) if name == "LOAD_ATTR"}
    return own.union(*parts)


def is_of_some_ranks(owner: Any, hook: str, module: nn.Module) -> bool:
    """Whether a hook may run on some ranks only, or do something else there."""
    around = _function(owner, hook)
    while (inner := getattr(around, "__wrapped__", None)) is not None:
        if "rank" in around.__code__.co_name or set().union(*_names(around.__code__)) & ONE_RANK:
            return True
        around = inner
    return _any_code(owner, hook, module, lambda code: bool(set().union(*_names(code)) & ONE_RANK))


def is_users(owner: Any, hook: str) -> bool:
    """Whether a hook is the user's own, which no library brought."""
    run = getattr(owner, hook, None)
    module = getattr(_function(owner, hook), "__module__", None) or ""
    return run is not None and module.partition(".")[0] not in LIBRARIES


def _function(owner: Any, hook: str) -> Any:
    run = getattr(owner, hook, None)
    return getattr(run, "__func__", run)


def _any_code(owner: Any, hook: str, module: object, looks: Callable[[CodeType], bool]) -> bool:
    """Whether that is true of the user's own code of a hook, or of functions of the user's that it names."""
    owners, seen = (type(owner), type(module)), set[CodeType]()

    def any_of(function: Any) -> bool:
        while (inner := getattr(function, "__wrapped__", None)) is not None:
            if looks(function.__code__):
                return True
            function = inner
        if (function.__module__ or "").partition(".")[0] in LIBRARIES or function.__code__ in seen:
            return False
        seen.add(function.__code__)
        if looks(function.__code__):
            return True
        attributes, variables = _names(function.__code__)
        called = [vars(kind).get(name) for name in attributes for owner in owners for kind in owner.__mro__]
        called += [function.__globals__.get(name) for name in variables]
        return any(any_of(other) for other in called if isinstance(other, FunctionType))

    function = unwrap(_function(owner, hook))
    return isinstance(function, FunctionType) and any_of(function)


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The attributes that code names, of whatever objects, and the variables of its file."""
    parts = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    steps = list(_steps(code))
    attributes = {value for name, value in steps if name.endswith(("_ATTR", "_METHOD"))}
    variables = {value for name, value in steps if name in ("LOAD_GLOBAL", "LOAD_NAME")}
    return attributes.union(*(found for found, _ in parts)), variables.union(*(found for _, found in parts))


def _strings(code: CodeType) -> set[str]:
    """The constants of code that are strings."""
    inner = [_strings(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {constant for constant in code.co_consts if isinstance(constant, str)}.union(*inner)


def _hands_on(code: CodeType, named: Sequence[str]) -> bool:
    """Whether the module is used otherwise than for its attributes: called, moved, or given to something else.

    Args:
        code: of a hook, or of a function that it calls.
        named: by which names it has the module, beside those that are usual.
    """
    usual = {"self", "pl_module", "module", "model"}.intersection(code.co_varnames[: code.co_argcount])
    watched = {*named, *usual}
    passed_by = ("PRECALL", "CACHE", "NOP", "COPY", "DUP_TOP")  # `self.count += 1` copies the module to store there
    steps = [(name, value) for name, value in _steps(code) if name not in passed_by]
    return any(
        name.startswith("LOAD_")
        and value in watched
        and before != "__class__"  # `super()` is given the module, and leads to code that is looked at as well
        and (not then.endswith(("_ATTR", "_METHOD")) or of in MOVES)
        for (_, before), (name, value), (then, of) in zip([steps[0], *steps], steps, steps[1:], strict=False)
    )


def _steps(code: CodeType) -> Iterator[tuple[str, Any]]:
    """The instructions of code, each with what it names; one that loads or stores several variables as several."""
    for step in dis.get_instructions(code):
        words = step.opname.split("_")
        if "FAST" in words and isinstance(step.argval, tuple):  # as LOAD_FAST_LOAD_FAST, from Python 3.13 on
            each = len(words) // len(step.argval)
            yield from (("_".join(words[k * each :][:each]), value) for k, value in enumerate(step.argval))
        else:
            yield step.opname, step.argval
