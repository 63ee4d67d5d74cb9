"""Programs of random operations on whole tensors, and the same on divided ones.

A program is a list of steps, each on tensors that were there or that steps before it made. It is drawn on whole
tensors: what torch refuses there, what becomes infinite or large, and what rounding decides, is left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided import rules  # noqa: F401
from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.divided.tensor import Divided
from tests.techniques.divided.random_operations import KINDS

SHAPES = ((2, 6, 4, 8), (2, 6, 4, 8), (8,), (8, 8), (8, 8), (8,))
"""Of two activations, of what ranks have alike, and of weights and a bias."""
MOST, LARGEST = 4000, 1e3
"""How many elements a tensor may have, and how large they may become."""


@dataclass(frozen=True)
class Step:
    """One operation, on tensors by their numbers, with further arguments."""

    kind: str
    name: str
    tensors: tuple[int, ...]
    further: tuple[Any, ...] = ()

    @property
    def changes(self) -> bool:
        return self.kind.endswith("in place")

    def run(self, pool: list[Any]) -> None:
        made = KINDS[self.kind][0][self.name](*[pool[number] for number in self.tensors], *self.further)
        if not self.changes:
            pool.append(made)


Program = Sequence[Step]


def drawn(length: int, seed: int) -> list[Step]:
    """A program of so many steps."""
    draw, program, pool = random.Random(seed), list[Step](), begun(leaves(seed))
    while len(program) < length:
        step = _step(draw, pool)
        fits = not _overlaps(step, pool)
        try:
            if fits:
                step.run(pool)
                fits = all(map(_fits, pool))
        except Exception:
            fits = False
        if fits:
            program.append(step)
        else:
            pool = run(program, leaves(seed))
    return program


def _step(draw: random.Random, pool: list[Tensor]) -> Step:
    kind = draw.choices(list(KINDS), [often for _, _, often in KINDS.values()])[0]
    operations, count, _ = KINDS[kind]
    numbers = tuple(len(pool) - 1 if draw.random() < 0.4 else draw.randrange(len(pool)) for _ in range(count))
    first = pool[numbers[0]]
    further: tuple[Any, ...] = ()
    if kind == "along":
        further = draw.randrange(-first.dim(), first.dim()) if first.dim() else 0, draw.random() < 0.5
    elif kind == "permute":
        further = (draw.sample(range(first.dim()), first.dim()),)
    elif kind == "reshape":
        further = (_factors(draw, first.numel()),)
    return Step(kind, draw.choice(list(operations)), numbers, further)


def _factors(draw: random.Random, size: int) -> tuple[int, ...]:
    found = []
    while size > 1 and len(found) < 3:
        found.append(draw.choice([each for each in range(2, size + 1) if size % each == 0]))
        size //= found[-1]
    found.append(size)
    draw.shuffle(found)
    return tuple(found)


def _overlaps(step: Step, pool: list[Tensor]) -> bool:
    """Whether a step writes to memory that it reads as another tensor: what that gives, torch leaves open."""
    given = {id(pool[number]): pool[number] for number in step.tensors}.values()
    return step.changes and len({each.untyped_storage().data_ptr() for each in given}) < len(given)


def _fits(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or tensor.numel() > MOST:
        return False
    return not tensor.numel() or float(tensor.detach().abs().max()) < LARGEST  # NaN is not either


def leaves(seed: int, moved: float = 0.0) -> list[Tensor]:
    """What a program begins with; all of it learns."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [(each * (1 + moved)).requires_grad_() for each in found]


def begun(given: Sequence[Any]) -> list[Any]:
    """The tensors that a program may use and change, none of them a leaf."""
    return [each * 1.0 for each in given]


def run(program: Program, given: Sequence[Any]) -> list[Any]:
    """All tensors, after the program."""
    pool = begun(given)
    for step in program:
        step.run(pool)
    return pool


def loss(pool: list[Any]) -> Any:
    """Of all tensors, each element with a weight of its own."""
    weights = [torch.linspace(1, 2, each.numel(), dtype=each.dtype).view(each.shape) for each in pool]
    return sum(
        (each * weight).sum() * (0.3 + 0.1 * k) for k, (each, weight) in enumerate(zip(pool, weights, strict=True))
    )


Found = tuple[list[Tensor], list[Tensor]]
"""The tensors of a program, and the gradients of what it began with."""


def on_one(program: Program, seed: int, moved: float = 0.0) -> Found | None:
    """What one device finds; None where backward is an error, or gradients are not finite."""
    given = leaves(seed, moved)
    pool = run(program, given)
    try:
        loss(pool).backward()
    except RuntimeError:
        return None
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in given]
    return ([each.detach() for each in pool], gradients) if all(map(_finite, gradients)) else None


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def expected(program: Program, seed: int) -> Found | None:
    """What ranks must find; None where it cannot be said, as where rounding decides."""
    found, moved = on_one(program, seed), on_one(program, seed, 1e-12)
    return found if found and moved and not difference(found, moved, 1e-9) else None


def difference(one: Found, other: Found, tolerance: float) -> str:
    """Which tensors or gradients differ, the first of them; nothing if none does."""
    for what, ours, theirs in zip(("tensor", "gradient"), one, other, strict=True):
        for number, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            if mine.shape != yours.shape:
                return f"{what} {number}: shape {tuple(yours.shape)} in place of {tuple(mine.shape)}"
            off = float((mine - yours).abs().max() / (1 + mine.abs().max())) if mine.numel() else 0.0
            if not off <= tolerance:
                return f"{what} {number}: off {off:.1e}"
    return ""


Cut = tuple[int, Elements] | None


def on_ranks(program: Program, seed: int, activations: Cut, columns: Elements) -> Found:
    """What ranks find that divide the activations, if a cut is given, and weights by rows, by columns, and the bias."""
    cuts: list[Cut] = [activations, activations, None, (0, columns), (1, columns), (0, columns)]
    own = [_own(leaf.detach(), cut) for leaf, cut in zip(leaves(seed), cuts, strict=True)]
    given = [each if cut is None else Divided(each, {cut[0]: cut[1]}) for each, cut in zip(own, cuts, strict=True)]
    with FunctionsGetFullTensors():
        pool = run(program, given)
        made = loss(pool)
        (made.whole() if isinstance(made, Divided) else made).backward()
    columns.ranks.viewed.clear()
    wholes = [each.whole() if isinstance(each, Divided) else each for each in pool]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
    found = zip(gradients, cuts, strict=True)
    return [each.detach() for each in wholes], [
        each if cut is None else Divided(each, dict([cut])).whole() for each, cut in found
    ]


def _own(leaf: Tensor, cut: Cut) -> Tensor:
    return (leaf if cut is None else cut[1].take(leaf, cut[0])).clone().requires_grad_()
