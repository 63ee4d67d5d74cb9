"""Checks that ranks agree: an error on one rank raises on all ranks, instead of making the others wait."""

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
    """Return the values of all ranks, in the order of ranks. Collective over `group`; values are pickled."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def run_or_raise_on_all(act: Callable[..., T], what: str, group: dist.ProcessGroup, *args: Any) -> T:
    """Run a function on all ranks and return its result; if it raises on any rank, raise on all. Collective.

    Args:
        act: the function. It must not communicate.
        what: what the function does, to complete the error "rank 1 could not ...".
        group: process group whose ranks all call this.
        args: arguments of the function.
    """
    try:
        result, failure = act(*args), None
    except Exception as error:
        failure = error
    # all ranks come here, whether they raised or not
    errors = gather_objects("" if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, error_text in enumerate(errors):
        if error_text:
            raise RuntimeError(f"rank {rank} could not {what}: {error_text}")
    return result


def describe(batch: Any) -> str:
    """Describe the structure of a batch: its containers, with type, dtype and number of dimensions of their values.

    Lists may have one item per sample, e.g. file names or targets, and a rank may have fewer samples of the last batch
    than others: so neither the length of a list nor differences between its items are part of the description.
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
    """Return a `repr` that is the same in every process: plain `repr` orders the members of a set differently."""
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
    """Return the number of parameters and a hash of their names, shapes and dtypes."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in module.named_parameters()]
    return f"{len(lines)} parameters, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}"


def require_same(what: str, values: Sequence[object], remedy: str) -> None:
    """Raise, naming ranks and values, unless the values of all ranks, in their order, are equal. Needs no message."""
    by_value: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(str(rank))
    if len(by_value) > 1:
        listed = "; ".join(f"rank{'s' * (len(n) > 1)} {', '.join(n)}: {value}" for value, n in by_value.items())
        raise ValueError(f"{what} must be the same on all ranks, but they differ ({listed}); {remedy}")
