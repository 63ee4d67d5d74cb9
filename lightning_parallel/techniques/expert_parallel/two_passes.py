"""A module that runs twice: once to see what it calls with what, and again with the results.

| pass | an expert that is called | other modules that are called | the lines in between |
|---|---|---|---|
| first | keeps its input, gives zeros | compute | compute on copies of the arguments |
| second | gives its result | give what they gave; behind an expert compute again | compute again |

What was first computed of zeros is taken back before the second pass: random numbers, buffers, attributes of modules.
So it is exact for whatever follows experts; an expert whose input depends on the result of another is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.expert_parallel.before import Before, Draws
from lightning_parallel.techniques.tools.redirect import Forward

DIMENSIONS = 6
"""How many dimensions the rows of an expert's input may have."""


@dataclass(frozen=True)
class Given:
    """A call of another module than an expert.

    Attributes:
        part: it.
        result: what it returned.
        versions: of the result.
        before: what lay on the module.
        drawn: the random states before and after.
    """

    part: nn.Module
    result: Any
    versions: list[int]
    before: Before
    drawn: tuple[Draws, Draws]


class FirstPass:
    """What is called in the first pass."""

    def __init__(
        self, experts: Sequence[nn.Module], others: Sequence[nn.Module], zeros: Callable[[Tensor], Tensor]
    ) -> None:
        self._experts, self._zeros = experts, zeros
        self.inputs: list[tuple[int, Tensor]] = []
        """The calls of experts: their numbers, and what they got."""
        self.given: list[Given] = []
        """The calls of others."""
        self.independent: int | None = None
        """How many calls of others came before the first of an expert; None: no expert was called."""
        self.others = others
        self._within = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls are kept."""
        forwards = {part: _refuse for expert in self._experts for part in expert.modules()}
        forwards |= {expert: self._expert(number) for number, expert in enumerate(self._experts)}
        forwards |= {part: self._other(part, part.forward) for part in self.others}
        with _forwards(forwards):
            yield

    def take_back(self, independent: int) -> None:
        """Undoes what others left on themselves from a call on, which the second pass computes again."""
        for given in reversed(self.given[independent:]):
            given.before.restore()
        del self.given[independent:]

    def _expert(self, number: int) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            inputs, *rest = *args, *kwargs.values()
            if rest or not isinstance(inputs, Tensor) or not 1 < inputs.dim() <= DIMENSIONS + 1:
                raise ValueError(
                    "under expert parallel experts of a list get one argument, their tokens, (tokens, features); this "
                    f"call has {[type(each).__name__ for each in (inputs, *rest)]}; let experts find the rest"
                )
            inputs = inputs.whole("experts") if isinstance(inputs, Divided) else inputs
            if self.independent is None:
                self.independent = len(self.given)
            self.inputs.append((number, inputs.view_as(inputs)))
            return self._zeros(inputs)

        return forward

    def _other(self, part: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return original(*args, **kwargs)
            before, random = Before(list(part.modules())), Draws.now()
            self._within = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._within = False
            self.given.append(Given(part, result, _versions(result), before, (random, Draws.now())))
            return result

        return forward


class SecondPass:
    """The same calls once more, with their results."""

    def __init__(self, name: str, experts: Sequence[nn.Module], first: FirstPass, results: Sequence[Tensor]) -> None:
        self._name, self._experts, self._others = name, experts, first.others
        self._results = deque(zip(first.inputs, results, strict=True))
        self._given = deque(first.given)
        self._far: list[Tensor] = []
        self._within = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls give what they gave, and experts their results."""
        forwards = {expert: self._expert(number) for number, expert in enumerate(self._experts)}
        forwards |= {part: self._other(part, part.forward) for part in self._others}
        with _forwards(forwards):
            yield

    def _expert(self, number: int) -> Forward:
        def forward(inputs: Tensor) -> Tensor:
            inputs = inputs.whole("experts") if isinstance(inputs, Divided) else inputs
            if not self._results or (self._results[0][0][0], self._results[0][0][1].shape) != (number, inputs.shape):
                raise self._differs()
            (_, before), result = self._results.popleft()
            self._far.append(_far(before.detach(), inputs.detach()))
            return result if torch.is_grad_enabled() else result.detach()

        return lambda *args, **kwargs: forward(*args, *kwargs.values())

    def _other(self, part: nn.Module, original: Forward) -> Forward:
        def computed(*args: Any, **kwargs: Any) -> Any:
            self._within = True
            try:
                return original(*args, **kwargs)
            finally:
                self._within = False

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return original(*args, **kwargs)
            if not self._given:
                return computed(*args, **kwargs)
            given = self._given.popleft()
            if given.part is not part:
                raise self._differs()
            if given.versions == _versions(given.result):
                given.drawn[1].restore()
                return given.result
            given.drawn[0].restore()
            given.before.restore()
            return computed(*args, **kwargs)  # the first pass went on to change its result in place

        return forward

    def require_end(self) -> None:
        """Raises RuntimeError unless all calls were repeated, with what they got before."""
        if self._results or self._given or (self._far and bool(torch.stack(self._far).any())):
            raise self._differs()

    def _differs(self) -> RuntimeError:
        return RuntimeError(
            f"the module around the experts of {self._name} runs twice under expert parallel, once to see which tokens "
            "go where, and its second run called other modules, or with other tokens; let it decide by its input, its "
            "parameters and torch's random numbers alone, and no expert's input by the result of another; or call the "
            "experts by one module with stacked weights"
        )


def _far(before: Tensor, now: Tensor) -> Tensor:
    """Whether an expert got something else, by more than rounding."""
    if not before.numel():
        return torch.zeros((), dtype=torch.bool, device=before.device)
    rounding = 16 * torch.finfo(before.dtype).eps if before.is_floating_point() else 0
    return ((before - now).abs() > rounding * before.abs().amax()).any()


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "under expert parallel an expert of a list is called as a whole, for other ranks have its weights; this "
        "call is of a module within one; let the expert's own forward call it"
    )


@contextmanager
def _forwards(forwards: dict[nn.Module, Forward]) -> Iterator[None]:
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, kept in before.items():
            if kept is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = kept


def copied(value: Any) -> Any:
    """The arguments, which the first pass may change in place."""
    return tree_map_only(Tensor, lambda each: each.clone(), value)


def _versions(value: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.is_inference()]
