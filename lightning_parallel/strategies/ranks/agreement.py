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


def run_or_raise_on_all(act: Callable[..., T], what: str, group: dist.ProcessGroup, *args: Any) -> T:
    """Run a function on all ranks and return its result; where it raises on one rank, raise on all. Collective.

    Args:
        act: the function. It must not communicate.
        what: it does, for messages: "rank 1 could not ...".
        group: whose ranks all call.
        args: of the function.
    """
    try:
        result, failure = act(*args), None
    except Exception as error:
        failure = error
    # all ranks come here, whether they raised or not
    errors = gather_objects("" if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(errors):
        if theirs:
            raise RuntimeError(f"rank {rank} could not {what}: {theirs}")
    return result


def describe(batch: Any) -> str:
    """The structure of a batch: its containers, and the type, dtype and dimensions of what they hold.

    Of lists that may have an item for each sample, as of file names or targets, it has neither the length nor what one
    item has and another one has not: a rank's part of the last batch may be smaller.
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} tensor with {batch.dim()} dimensions"
    kind = type(batch).__name__
    if isinstance(batch, ATOMS) or not (children := children_of(batch)):
        return kind
    if isinstance(batch, (list, tuple)) and all(isinstance(child, ATOMS) for child in children):
        return f"{kind} of values"
    # "dict of {'ids': int64 tensor with 2 dimensions, 'name': list of values}"
    parts, kinds = list(map(describe, children)), {type(child) for child in children}
    if not isinstance(batch, (list, tuple)):
        keys: Any = batch if isinstance(batch, Mapping) else field_names(batch.__class__)
        return f"{kind} of {{{', '.join(f'{key!r}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
    if len(kinds) == 1 and Tensor not in kinds:
        return f"{kind} of {kinds.pop().__name__}s"
    return f"{kind} of {parts[0] if len({*parts}) == 1 else '[' + ', '.join(parts) + ']'}"


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
    """Raise on every rank, naming ranks and values, unless all values are equal."""
    by_value: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(str(rank))
    if len(by_value) > 1:
        listed = "; ".join(f"rank{'s' * (len(n) > 1)} {', '.join(n)}: {value}" for value, n in by_value.items())
        raise ValueError(f"{what} must be the same on every rank, but they differ ({listed}); {remedy}")
