"""A module that runs twice: once to see what it calls with what, and again with the results.

| pass | an expert that is called | other modules that are called | the lines in between |
|---|---|---|---|
| first | keeps its input, gives zeros | compute | compute on copies of the arguments |
| second | gives its result | give what they gave | compute again, with the same random numbers |

Only the lines between calls run twice: what they left on the module is taken back before the second pass.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools.redirect import Forward

DIMENSIONS = 6
"""How many dimensions the rows of an expert's input may have."""


class FirstPass:
    """What is called in the first pass."""

    def __init__(
        self, experts: Sequence[nn.Module], others: Sequence[nn.Module], zeros: Callable[[Tensor], Tensor]
    ) -> None:
        self._experts, self._others, self._zeros = experts, others, zeros
        self.inputs: list[tuple[int, Tensor]] = []
        """The calls of experts: their numbers, and what they got."""
        self.given: list[tuple[nn.Module, Any, list[int], Any]] = []
        """The calls of others: their results, the versions of these, and the random state after them."""
        self.others = others
        self._within = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls are kept."""
        forwards = {expert: self._expert(number) for number, expert in enumerate(self._experts)}
        forwards |= {part: self._other(part, part.forward) for part in self._others}
        with _forwards(forwards):
            yield

    def _expert(self, number: int) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            inputs, *rest = *args, *kwargs.values()
            if rest or not isinstance(inputs, Tensor) or not 1 < inputs.dim() <= DIMENSIONS + 1:
                raise ValueError(
                    "under expert parallel experts of a list get one argument, their tokens, (tokens, features); this "
                    f"call has {[type(each).__name__ for each in (inputs, *rest)]}; let experts find the rest"
                )
            inputs = inputs.whole("experts") if isinstance(inputs, Divided) else inputs
            self.inputs.append((number, inputs.view_as(inputs)))
            return self._zeros(inputs)

        return forward

    def _other(self, part: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return original(*args, **kwargs)
            self._within = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._within = False
            self.given.append((part, result, _versions(result), random_state()))
            return result

        return forward


class SecondPass:
    """The same calls once more, with their results."""

    def __init__(self, name: str, experts: Sequence[nn.Module], first: FirstPass, results: Sequence[Tensor]) -> None:
        self._name, self._experts, self._first = name, experts, first
        numbered = zip(first.inputs, results, strict=True)
        self._results = deque((number, inputs.shape, result) for (number, inputs), result in numbered)
        self._given = deque(first.given)
        self._within = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls give what they gave, and experts their results."""
        forwards = {expert: self._expert(number) for number, expert in enumerate(self._experts)}
        forwards |= {part: self._other(part, part.forward) for part in self._first.others}
        with _forwards(forwards):
            yield

    def _expert(self, number: int) -> Forward:
        def forward(inputs: Tensor) -> Tensor:
            if not self._results or self._results[0][:2] != (number, inputs.shape):
                raise self._differs()
            return self._results.popleft()[2]

        return lambda *args, **kwargs: forward(*args, *kwargs.values())

    def _other(self, part: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return original(*args, **kwargs)
            if not self._given or self._given[0][0] is not part:
                raise self._differs()
            _, result, versions, random = self._given.popleft()
            set_random_state(random)
            if versions == _versions(result):
                return result
            self._within = True  # the first pass went on to change it in place
            try:
                return original(*args, **kwargs)
            finally:
                self._within = False

        return forward

    def require_end(self) -> None:
        """Raises RuntimeError unless all calls were repeated."""
        if self._results or self._given:
            raise self._differs()

    def _differs(self) -> RuntimeError:
        return RuntimeError(
            f"the module around the experts of {self._name} runs twice under expert parallel, once to see which tokens "
            "go where, and its second run called other modules, or with other tokens; let it decide by its input, its "
            "parameters and torch's random numbers alone, or call the experts by one module with stacked weights"
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


@contextmanager
def undone(owner: nn.Module, others: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards the random state, the owner's attributes and buffers are as before; buffers of what it called stay."""
    random = random_state()
    attributes = {name: copy.copy(value) if isinstance(value, (list, dict, deque)) else value
                  for name, value in vars(owner).items() if not name.startswith("_")}  # fmt: skip
    buffers = {name: (buffer, buffer.clone()) for name, buffer in owner._buffers.items() if buffer is not None}
    yield
    vars(owner).update({name: value for name, value in attributes.items() if name != "forward"})
    for name in [name for name in vars(owner) if not name.startswith("_") and name not in attributes]:
        del vars(owner)[name]
    for name, (buffer, value) in buffers.items():
        with torch.no_grad():
            buffer.copy_(value)
        owner._buffers[name] = buffer
    set_random_state(random)


def copied(value: Any) -> Any:
    """The arguments, which the first pass may change in place."""
    return tree_map_only(Tensor, lambda each: each.clone(), value)


def _versions(value: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def random_state() -> tuple[Tensor, Tensor | None]:
    """The states of the generators of the host and of this rank's device."""
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), on_device


def set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    """Draws on from states as they were."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
