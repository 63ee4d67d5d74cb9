"""Tensors of the model that another rank holds: hidden from this rank's tree, with their names and shapes kept.

A hidden parameter or buffer stays a plain attribute of its module, without memory. So modules keep their class, their
children and their hooks, and still answer questions about shapes and dtypes, but whatever walks over parameters sees
only what this rank holds. `shown` puts everything back for a while, `restore` for good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.plan.plan import ELSEWHERE
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


def hide(model: nn.Module, names: Collection[str], make: Make) -> None:
    """Hides parameters and buffers by their FQN; what takes their place as attributes, `make` makes from them."""
    tied = _ties(model)
    made: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for table in ("_parameters", "_buffers"):
            tensors: dict[str, Tensor | None] = getattr(module, table)
            own = [name for name, tensor in tensors.items() if tensor is not None and _full(prefix, name) in names]
            if own:
                _hide_in(module, table, own, lambda t: made.setdefault(id(t), make(t)))
                hidden: _Hidden = vars(module)[KEY]
                hidden.tied.update({name: tied.get(_full(prefix, name), ()) for name in own})


def _hide_in(module: nn.Module, table: str, names: list[str], make: Make) -> None:
    hidden: _Hidden = vars(module).setdefault(KEY, _Hidden())
    tensors: dict[str, Any] = getattr(module, table)
    hidden.order.setdefault(table, list(tensors))
    kept = hidden.parameters if table == "_parameters" else hidden.buffers
    for name in names:
        tensor = tensors.pop(name)
        kept[name] = _twin(tensor)
        vars(module)[name] = make(tensor)


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
    if any(parameter is not None for part in parts for parameter in part._parameters.values()):
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
        vars(module).pop(KEY, None)
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


class StandIn(Tensor):
    """Zeros on a device that take no memory, in place of a tensor that another rank holds.

    What is written to it, or to a view of it, is lost: the rank that holds the tensor writes the same to that.
    """

    @staticmethod
    def __new__(cls, tensor: Tensor, device: torch.device) -> StandIn:  # noqa: D102
        make = cast(Callable[..., StandIn], Tensor._make_wrapper_subclass)
        return make(cls, tensor.shape, dtype=tensor.dtype, device=device)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        zeros = tree_map_only(cls, lambda each: without_memory(each.device)(each), (tuple(args), kwargs or {}))
        if not args or not isinstance(args[0], cls):
            return func(*zeros[0], **zeros[1])
        written = func._schema.arguments[0].alias_info
        if written is not None and written.is_write:
            return args[0]
        result = func(*zeros[0], **zeros[1])
        is_view = func._schema.returns and func._schema.returns[0].alias_info is not None
        return tree_map_only(Tensor, lambda each: cls(each, each.device), result) if is_view else result

    def __deepcopy__(self, memo: Any) -> StandIn:
        made = memo[id(self)] = StandIn(self, self.device)
        vars(made).update(vars(self))  # what it stands for, which is refused where the copy counts
        return made


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
