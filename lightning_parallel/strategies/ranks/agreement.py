"""Agreement between ranks: a mistake on one is an error on all, and never a wait."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.values import ATOMS, children_of, field_names

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """The values of all ranks of the group, in their order."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def run_or_raise_on_all(act: Callable[[], T], what: str, group: dist.ProcessGroup) -> T:
    """Run a function on all ranks and return its result; where it raises on one rank, raise on all. Collective.

    Args:
        act: the function. It must not communicate.
        what: it does, for messages: "rank 1 could not ...".
        group: whose ranks all call.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:
        failure = error
    said = gather_objects("" if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(said):
        if theirs:
            raise RuntimeError(f"rank {rank} could not {what}: {theirs}")
    return result  # type: ignore[no-any-return]


def describe(batch: Any) -> str:
    """The structure of a batch: its containers, and the type, dtype and dimensions of what they hold.

    Of lists that may have an item for each sample, as of file names or targets, neither the length is told nor what one
    item has and another one has not: a rank's part of the last batch may be smaller.
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} tensor with {batch.dim()} dimensions"
    if isinstance(batch, ATOMS) or not (children := children_of(batch)):
        return type(batch).__name__
    parts = list(map(describe, children))
    if isinstance(batch, (list, tuple)):
        kinds = {type(child).__name__ for child in children}
        if all(isinstance(child, ATOMS) for child in children):
            held = "values"
        elif len({*parts}) == 1 and isinstance(children[0], Tensor):
            held = parts[0]
        else:
            held = f"{kinds.pop()}s" if len(kinds) == 1 and Tensor.__name__ not in kinds else f"[{', '.join(parts)}]"
        return f"{type(batch).__name__} of {held}"
    keys: Any = batch if isinstance(batch, Mapping) else field_names(batch.__class__)
    return (
        f"{type(batch).__name__} of {{{', '.join(f'{key!r}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
    )


def described(value: object) -> str:
    """Like `repr`, and the same in every process: there the members of a set come in another order."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{described(key)}: {described(member)}' for key, member in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(described, value))})"
    if is_dataclass(value):
        return f"{type(value).__name__}{described([getattr(value, field.name) for field in fields(value)])}"
    return repr(value)


def fingerprint_model(module: nn.Module) -> str:
    """A short name for the parameters' names, shapes and dtypes."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in module.named_parameters()]
    return f"{len(lines)} parameters, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}"


def require_same(what: str, values: Sequence[object], remedy: str) -> None:
    """Raises on every rank, naming ranks and values, unless all values are equal."""
    if len(set(map(str, values))) == 1:
        return
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(rank)
    listed = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {v}" for v, ranks in by_value.items()
    )
    raise ValueError(f"{what} must be the same on every rank, but they differ ({listed}); {remedy}")
