"""Numbers that a step keeps in attributes and reads again, as a mean of losses by which it weighs the next one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.strategies.hooks.looking import names_read
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.tools.telling import warn

SMALL = 2**10  # elements of a tensor that is compared
ROUNDING = 1e-4


class KeptApart:
    """Tells of numbers that ranks keep apart, each by its own samples, though a step computes with them.

    Args:
        module: the user's module.
        host: all ranks, for messages of the host.
    """

    def __init__(self, module: nn.Module, host: dist.ProcessGroup) -> None:
        self._module, self._host = module, host
        self._before = dict(_numbers(module))
        self._told: set[str] = set()

    def compare(self) -> None:
        """All ranks must call."""
        now = dict(_numbers(self._module))
        changed = {place: value for place, value in now.items() if not _like(value, self._before.get(place))}
        mine = {".".join(filter(None, place)): value for place, value in changed.items() if self._is_read(*place)}
        theirs = gather_objects(mine, self._host)
        names = set.intersection(*(set(each) for each in theirs)) - self._told
        differ = {name for name in names if not all(_like(each[name], theirs[0][name]) for each in theirs)}
        self._told |= differ
        if differ:
            warn(
                f"Each rank keeps a number of its own, made of its own samples, in {', '.join(sorted(differ))} of the "
                "module, and a step reads it again. If the loss depends on it, ranks do not train as one device does: "
                "let it be made of all samples (self.all_gather(value).mean()), or keep it in a buffer"
            )

    def _is_read(self, path: str, name: str) -> bool:
        part = self._module.get_submodule(path)
        return any(name in names_read(part, method, part) for method in ("training_step", "forward"))


def _numbers(module: nn.Module) -> Iterator[tuple[tuple[str, str], tuple[float, ...]]]:
    for path, part in module.named_modules():
        known = vars(LightningModule()) if isinstance(part, LightningModule) else {}
        for name, value in vars(part).items():
            if name not in known and _is_number(value):
                yield (path, name), tuple(torch.as_tensor(value).detach().double().flatten().tolist())


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and not value.is_meta
        return plain and value.is_floating_point() and value.numel() <= SMALL
    return isinstance(value, float)


def _like(one: tuple[float, ...], other: tuple[float, ...] | None) -> bool:
    if other is None or len(one) != len(other):
        return False
    size = max((abs(each) for each in (*one, *other) if math.isfinite(each)), default=0.0)
    near = partial(math.isclose, rel_tol=0.0, abs_tol=ROUNDING * size)  # of infinities: the same one
    return all(near(a, b) or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True))
