"""Tensors of the model that another rank holds: hidden from this rank's tree, with their names and shapes kept.

A hidden parameter or buffer stays a plain attribute of its module, without memory. So modules keep their class, their
children and their hooks, and still answer questions about shapes and dtypes, but whatever walks over parameters sees
only what this rank holds. `shown` puts everything back for a while, `restore` for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_parallel.plan.plan import ELSEWHERE
from lightning_parallel.techniques.tools.absent import Absent, Writes
from lightning_parallel.techniques.tools.shards import bear

Make = Callable[[Tensor], Tensor]
KEY = "_lightning_parallel_hidden"
SHARED = "_lightning_parallel_shared"


@dataclass
class _Hidden:
    """The tensors that one module hides, and the order in which it had all."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=dict)
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module hides nothing: it has what was there when it was made."""
        return _Hidden, ()


def hide(model: nn.Module, names: Mapping[str, str], device: torch.device) -> Writes:
    """Hide parameters and buffers; absent tensors take their place as attributes of their modules.

    Returns:
        What hears of code that writes to them.

    Args:
        model: whole.
        names: FQN -> the name in messages.
        device: where their values would be.
    """
    tied, writes = _ties(model), Writes()
    made: dict[int, Absent] = {}
    for prefix, module in model.named_modules():
        for table in ("_parameters", "_buffers"):
            tensors: dict[str, Tensor | None] = getattr(module, table)
            own = [name for name, tensor in tensors.items() if tensor is not None and _full(prefix, name) in names]
            if own:
                for name in own:
                    tensor, what = cast(Tensor, tensors[name]), names[_full(prefix, name)]
                    is_parameter = table == "_parameters"
                    if id(tensor) not in made:
                        learns = is_parameter and tensor.requires_grad
                        made[id(tensor)] = Absent(tensor, device, what, learns=learns, parameter=is_parameter)
                        made[id(tensor)].writes = writes if is_parameter else None
                _hide_in(module, table, own, lambda t: made[id(t)])
                hidden: _Hidden = vars(module)[KEY]
                hidden.tied.update({name: tied.get(_full(prefix, name), ()) for name in own})
    return writes


def _hide_in(module: nn.Module, table: str, names: list[str], make: Make) -> None:
    hidden: _Hidden = vars(module).setdefault(KEY, _Hidden())
    tensors: dict[str, Any] = getattr(module, table)
    hidden.order.setdefault(table, list(tensors))
    kept = hidden.parameters if table == "_parameters" else hidden.buffers
    for name in names:
        tensor = tensors.pop(name)
        kept[name] = _twin(tensor)
        vars(module)[name] = make(tensor)
    _renew_weights(module)


def _renew_weights(module: nn.Module) -> None:
    """Recurrent layers keep a list of their weights."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _twin(tensor: Tensor) -> Tensor:
    meta = tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return meta
    made = nn.Parameter(meta.detach(), tensor.requires_grad)
    bear(made, tensor)
    return made


def put_in_place(model: nn.Module, parameter: nn.Parameter, made: nn.Parameter) -> None:
    """Puts another parameter into all places of one."""
    bear(made, parameter)
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is parameter:
                module._parameters[name] = made


def _ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(same) for same in names.values() if len(same) > 1 for name in same}


def mark_emptied(model: nn.Module) -> None:
    """Marks what other ranks run: patterns of the plan no longer find modules of which nothing is left on this one."""
    for module in model.modules():
        if is_elsewhere(module):
            for part in module.modules():
                vars(part)[ELSEWHERE] = True


def is_elsewhere(module: nn.Module) -> bool:
    """Whether other ranks hold all its parameters."""
    parts = list(module.modules())  # not its `parameters`, which in a step answer for those elsewhere
    if any(
        parameter is not None and not isinstance(parameter, Absent)
        for part in parts
        for parameter in part._parameters.values()
    ):
        return False
    return any(vars(part).get(KEY, _Hidden()).parameters for part in parts)


def mark_shared(model: nn.Module, is_shared: Callable[[str], bool]) -> None:
    """Marks the parameters of which ranks that run other layers have copies; asks for each by its FQN."""
    for name, parameter in model.named_parameters():
        if is_shared(name):
            vars(parameter)[SHARED] = True


def is_shared(parameter: Tensor) -> bool:
    """Whether ranks that run other layers have copies of it."""
    return SHARED in vars(parameter)


def hidden_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The hidden parameters and buffers by FQN, on meta."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        hidden: _Hidden = vars(module).get(KEY, _Hidden())
        found.update({_full(prefix, name): t for name, t in {**hidden.parameters, **hidden.buffers}.items()})
    return found


@contextmanager
def shown(model: nn.Module, make: Make, made: dict[str, Tensor] | None = None) -> Iterator[None]:
    """Inside the tree is whole: `make` makes what stands for hidden tensors, except those tied to one that is held.

    What was `made` before stands for the same parameter again; whether it learns is remembered.
    """
    if any(_shown_tables(module) for module in model.modules()):
        yield
        return
    attributes = _put_back(model, make, {} if made is None else made)
    try:
        yield
    finally:
        for module, values in attributes:
            _remember_who_learns(module)
            for table in ("_parameters", "_buffers"):
                for name in values:
                    getattr(module, table).pop(name, None)
            vars(module).update(values)


@contextmanager
def absent_in_place(model: nn.Module) -> Iterator[None]:
    """Inside, absent parameters are in the tables of their modules: code that asks for all parameters gets them too."""
    put: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        hidden: _Hidden | None = vars(module).get(KEY)
        if hidden is not None and hidden.parameters:
            table, attributes = module._parameters, vars(module)
            put.append((table, dict(table)))
            table.update({name: attributes[name] for name in hidden.parameters if name in attributes})
            _reorder(module, hidden)
    try:
        yield
    finally:
        for table, before in put:
            now = dict(table)
            table.clear()
            table.update({name: now.get(name, tensor) for name, tensor in before.items()})


@contextmanager
def unshown(model: nn.Module) -> Iterator[None]:
    """Inside the tree has what this rank holds, also where somebody is being shown the whole."""
    tables = [table for module in model.modules() for table in _shown_tables(module)]
    before = [dict(table) for table, _ in tables]
    for table, names in tables:
        for name in names:
            del table[name]
    try:
        yield
    finally:
        for (table, names), whole in zip(tables, before, strict=True):
            now = dict(table)
            table.clear()
            table.update({name: tensor if name in names else now.get(name, tensor) for name, tensor in whole.items()})


def _shown_tables(module: nn.Module) -> list[tuple[dict[str, Any], list[str]]]:
    """The module's tables in which hidden tensors are at the moment, with their names."""
    hidden: _Hidden = vars(module).get(KEY, _Hidden())
    tables = ((module._parameters, hidden.parameters), (module._buffers, hidden.buffers))
    found = [(table, [name for name in kept if name in table]) for table, kept in tables]
    return [(table, names) for table, names in found if names]


def restore(model: nn.Module, make: Make) -> dict[str, Tensor]:
    """Puts the hidden tensors back for good, as `make` makes them, and returns those that were made by their FQN."""
    names = list(hidden_tensors(model))
    _put_back(model, make, {})
    for module in model.modules():
        if vars(module).pop(KEY, None) is not None:
            _renew_weights(module)
        vars(module).pop(ELSEWHERE, None)
    for parameter in model.parameters():
        vars(parameter).pop(SHARED, None)
    everything = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: everything[name] for name in names}


def _remember_who_learns(module: nn.Module) -> None:
    for name, twin in vars(module)[KEY].parameters.items():
        shown = module._parameters.get(name)
        if shown is not None:
            twin.requires_grad_(shown.requires_grad)


def _put_back(model: nn.Module, make: Make, made: dict[str, Tensor]) -> list[tuple[nn.Module, dict[str, Any]]]:
    held = dict(model.named_parameters(remove_duplicate=False))
    taken: list[tuple[nn.Module, dict[str, Any]]] = []
    for prefix, module in model.named_modules():
        hidden: _Hidden | None = vars(module).get(KEY)
        if hidden is None:
            continue
        attributes = {name: vars(module).pop(name) for name in (*hidden.parameters, *hidden.buffers)}
        taken.append((module, attributes))
        for name, twin in hidden.parameters.items():
            module._parameters[name] = _stand_in(_full(prefix, name), twin, hidden.tied[name], held, made, make)
        for name, twin in hidden.buffers.items():
            module._buffers[name] = make(twin)
        _reorder(module, hidden)
    return taken


def _stand_in(
    name: str, twin: Tensor, tied: tuple[str, ...], held: dict[str, Any], made: dict[str, Tensor], make: Make
) -> Tensor:
    for other in tied:
        if other in held:
            same: Tensor = held[other]
            return same
    key = tied[0] if tied else name
    if key not in made:
        tensor = make(twin)
        made[key] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, twin.requires_grad)
        bear(made[key], twin)
    return made[key]


def _reorder(module: nn.Module, hidden: _Hidden) -> None:
    for table, order in hidden.order.items():
        tensors: dict[str, Any] = getattr(module, table)
        known = {name: tensors.pop(name) for name in order if name in tensors}
        later = dict(tensors)
        tensors.clear()
        tensors.update({**known, **later})


def without_memory(device: torch.device) -> Make:
    """Makes tensors of zeros that have a shape and a device, but the memory of one element."""
    return lambda tensor: torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
