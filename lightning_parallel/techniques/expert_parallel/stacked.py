"""Stacked experts over ranks: a module that is called once with tokens, the experts that they chose, and weights.

A call takes one of two ways, the same on all ranks:

| way | when | what it costs |
|---|---|---|
| tokens travel | the call has the form `experts(tokens, indices, weights)` | messages as large as the tokens |
| weights travel | any other call; what a token becomes depends on other tokens | messages as large as the weights |

Whether tokens may travel is not believed: in its first call a module computes both ways and compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.collectives.by_elements import counted, entered, gathered
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.rows import any_of
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.expert_parallel.before import Before, Draws
from lightning_parallel.techniques.expert_parallel.calls import Calls
from lightning_parallel.techniques.expert_parallel.capacity import Capacity
from lightning_parallel.techniques.expert_parallel.outside import stored_of
from lightning_parallel.techniques.expert_parallel.own_experts import OwnExperts
from lightning_parallel.techniques.expert_parallel.routes import Tokens, find_route, own_tokens
from lightning_parallel.techniques.expert_parallel.travel import combine, dispatch
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.redirect import Forward
from lightning_parallel.techniques.tools.telling import warn

EQUAL = 0.02
"""How far results may differ where both ways compute the same, as a part of the largest: rounding is far below."""

ENOUGH = 16
"""How many tokens show whether what becomes of one depends on others."""

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """A call `experts(tokens, indices, weights)`, whatever else it has.

    Attributes:
        arguments: all of them by name, in their order.
        hidden: the names of the tokens, the indices and the weights.
        index: see above.
        weights: see above.
    """

    arguments: Mapping[str, Any]
    hidden: str
    index: str
    weights: str

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three."""
        return self.arguments[self.hidden], self.arguments[self.index], self.arguments[self.weights]

    def on(self, hidden: Tensor, index: Tensor, weights: Tensor) -> dict[str, Any]:
        """The arguments of the same call on other tokens, (tokens, features), (tokens, k), (tokens, k)."""
        before = self.arguments[self.hidden].dim() - 2
        found = {self.hidden: hidden, self.index: index, self.weights: weights}
        return dict(self.arguments) | {name: each[(None,) * before] for name, each in found.items()}


def shows_drops(module: nn.Module) -> bool:
    """Whether a module's class has a `drop_rate`: the share of pairs of a token and an expert that are dropped."""
    return any("drop_rate" in vars(kind) for kind in type(module).__mro__)


class StackedExperts:
    """Leads the calls of one module of stacked experts over the ranks that hold them.

    Args:
        name: its FQN.
        module: it; its stacked parameters are divided.
        count: how many experts it has.
        calls: of the ranks that hold different experts.
        alike: see `own_tokens`.
        capacity: how many tokens an expert takes.
        whole: the same where ranks that share sequences did not divide the tokens: it counts them once.
        once: whether a token goes to a rank once, or once for each expert that it chose there.
        meanwhile: computes something while what experts made is under way.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        count: int,
        calls: Calls,
        alike: Ranks | None,
        capacity: Capacity,
        whole: Capacity,
        once: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        self._meanwhile = meanwhile
        self._name, self._module, self._alike, self._once = name, module, alike, once
        self._group, self._capacity, self._whole = calls.group, capacity, whole
        self._calls, self._number = calls, calls.number(name)
        self._ranks = Ranks(self._group, "ep")
        tables: list[dict[str, Any]] = [vars(part)["_parameters"] for part in module.modules()]
        self._slots = [(table, own) for table in tables for own, parameter in table.items() if parameter is not None]
        self._count, self._own = count, count // self._group.size()
        self._shows_drops = shows_drops(module)
        self._travels: bool | None = None
        """Whether tokens may travel; None until the first call has shown it."""

    def wrap(self, forward: Forward) -> Forward:
        """The forward of the module."""
        signature = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._calls.refuse_transforms(self._number)
            call = self._recognised(signature, args, kwargs)
            if call is None or self._travels is False:
                return self._by_weights(forward, args, kwargs, call is None)
            tokens = own_tokens(*call.tensors(), self._alike)
            if self._travels is None or self._capacity.factor is not None:
                self._calls.meet(self._number, tokens.hidden.device)
            if self._travels is None:
                self._travels = self._compare(forward, call, tokens)
                return run(*args, **kwargs)
            capacity = self._capacity if tokens.summands > 1 else self._whole
            return tokens.back(self._by_tokens(forward, call, tokens, capacity))

        return cast(Any, torch.compiler.disable)(run)  # type: ignore[no-any-return]  # data decide how much is sent

    # ---------------------------------------------------------------- tokens travel

    def _recognised(self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        arguments = signature.bind(*args, **kwargs).arguments
        if any(signature.parameters[name].kind in VARIABLE for name in arguments):
            return None
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        if len(tensors) != 3 or sum(isinstance(leaf, Tensor) for leaf in tree_leaves(arguments)) != 3:
            return None
        numbers = [name for name, value in tensors.items() if not value.is_floating_point()]
        if len(numbers) != 1 or any(value.dim() < 2 or value.dtype == torch.bool for value in tensors.values()):
            return None
        hidden, *rest = [name for name in tensors if name not in numbers]
        chosen, shape = tensors[numbers[0]].shape, tensors[hidden].shape
        if tensors[rest[0]].shape != chosen or chosen[:-1] != shape[:-1]:
            return None
        return Call(arguments, hidden, numbers[0], rest[0])

    def _by_tokens(self, forward: Forward, call: Call, tokens: Tokens, capacity: Capacity) -> Tensor:
        hidden, index, weights = tokens.hidden, tokens.index.detach(), tokens.weights
        k = index.shape[1]
        if capacity.factor is not None:
            index, dropped = capacity.limited(index, self._count)
            if self._shows_drops:
                self._module.__setattr__("drop_rate", dropped)
        if not self._once:
            hidden = hidden.repeat_interleave(k, 0)
            index, weights = index.reshape(-1, 1), weights.reshape(-1, 1)
        route = find_route(index, self._count, self._calls, self._number)
        rows, arrived, chosen = dispatch(hidden, weights, route)
        pair, slot = torch.nonzero_static(chosen >= 0, size=route.pairs).unbind(1)
        first = self._group.rank() * self._own
        made = self._computed(
            forward, call, rows[pair], chosen[pair, slot, None] + first, arrived[pair, slot, None], tokens.summands
        )
        summed = made.new_zeros(len(rows), made.shape[-1]).index_add_(0, pair, made)
        result = combine(summed, len(hidden), route, self._meanwhile)
        return result if self._once else result.view(-1, k, result.shape[-1]).sum(1)

    def _computed(
        self, forward: Forward, call: Call, rows: Tensor, index: Tensor, weights: Tensor, summands: int
    ) -> Tensor:
        """What own experts make of pairs of a token and an expert; of no pair at all, so that they have gradients."""
        none = len(rows) == 0
        if none:  # one of zeros, behind them: backward must reach what this rank sent, too
            rows, weights = F.pad(rows, (0, 0, 0, 1)), F.pad(weights, (0, 0, 0, 1))
            index = index.new_full((1, 1), self._group.rank() * self._own)
        first = self._group.rank() * self._own

        def rows_of_own(own: Tensor) -> Tensor:
            return OwnExperts(own if summands == 1 else counted(own, summands), first, self._count)

        with self._shown(rows_of_own, self._of_own_tokens(summands)):
            made: Tensor = forward(**call.on(rows, index, weights))
        made = made.reshape(-1, made.shape[-1])
        return made[:0] if none else made

    # ---------------------------------------------------------------- weights travel

    def _by_weights(self, forward: Forward, args: Any, kwargs: Any, unknown: bool) -> Any:
        """Every rank computes its own call with all experts."""
        if self._capacity.factor is not None:
            raise ValueError(self._no_capacity(unknown))
        self._calls.meet(self._number, self._slots[0][0][self._slots[0][1]].device)
        if unknown and self._travels is not False:
            self._travels = False
            warn(
                f"{self._name} is not called as experts(tokens, indices, weights), (tokens, features), (tokens, k) and "
                "(tokens, k), so expert parallel gathers its weights for each call, which costs messages as large as "
                "they are; give its forward these arguments, and tokens travel"
            )
        args, kwargs = tree_map_only(Divided, lambda each: each.whole("experts"), (tuple(args), dict(kwargs)))
        share = 1.0 if self._alike is None else 1 / self._alike.count
        with self._shown(lambda own: self._all(counted(own, share))):
            return forward(*args, **kwargs)

    def _no_capacity(self, unknown: bool) -> str:
        reason = (
            "is not called as experts(tokens, indices, weights), (tokens, features), (tokens, k) and (tokens, k)"
            if unknown
            else "makes of a token what depends on other tokens of the batch"
        )
        return (
            f"capacity_factor={self._capacity.factor} drops tokens on their way to experts, but none travel to those "
            f"of {self._name}, which {reason}; give its forward this form, and compute each token by itself, or leave "
            "capacity_factor out"
        )

    def _all(self, own: Tensor) -> Tensor:
        return gathered(own, 0, self._ranks.chunks(self._count))

    # ---------------------------------------------------------------- parameters

    def _of_own_tokens(self, summands: int) -> Callable[[Tensor], Tensor]:
        """A parameter of which each rank computes a summand of the gradient, for tokens that others do not have."""

        def shown(parameter: Tensor) -> Tensor:
            made = parameter if self._alike is None else entered(parameter, self._alike)
            return made if summands == 1 else counted(made, summands)

        return shown

    @contextmanager
    def _shown(
        self, divided: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor] = lambda parameter: parameter
    ) -> Iterator[None]:
        """Inside, tables of parameters hold what is shown of this rank's rows, and of what it has whole."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        for table, own in self._slots:
            before.append((table, own, table[own]))
            kept = stored_of(table[own])
            table[own] = divided(leaf_of(kept)) if isinstance(kept, DTensor) else whole(kept)
        try:
            yield
        finally:
            for table, own, kept in before:
                table[own] = kept

    # ---------------------------------------------------------------- the first call

    @torch.no_grad()
    def _compare(self, forward: Forward, call: Call, tokens: Tokens) -> bool:
        """Whether both ways give the same; without dropout, for the two would draw other numbers."""
        parts = list(self._module.modules())
        before, random = Before(parts), Draws.now()
        for part in parts:
            part.training = False
        try:
            same = self._alone(forward, call, tokens) and self._travel_well(forward, call, tokens)
        finally:
            before.restore()
            random.restore()
        if not same:
            warn(
                f"what {self._name} returns is not, for each token, the sum of what its experts make of this token "
                "alone, so expert parallel gathers its weights for each call, which costs messages as large as they "
                "are; compute each token and expert by itself, and tokens travel"
            )
        return same

    def _alone(self, forward: Forward, call: Call, tokens: Tokens) -> bool:
        """Whether on all ranks pairs of a token and an expert may be computed one by one, in another order."""
        hidden, index, weights = _enough(tokens, self._count)
        crowded = torch.arange(index.shape[1], device=index.device).expand_as(index).to(index.dtype) % self._count
        with self._shown(self._all):
            try:
                alone = all(self._sums(forward, call, hidden, each, weights) for each in (index, crowded))
            except Exception:  # a form that it does not take, as where it takes a mask
                alone = False
        return not any_of(not alone, self._capacity.group, hidden.device)

    def _sums(self, forward: Forward, call: Call, hidden: Tensor, index: Tensor, weights: Tensor) -> bool:
        expected = forward(**call.on(hidden, index, weights))
        pair, slot = ((index >= 0) & (index < self._count)).nonzero().flip(0).unbind(1)
        made = forward(**call.on(hidden[pair], index[pair, slot, None], weights[pair, slot, None]))
        found = expected.new_zeros(len(hidden), made.shape[-1])
        found.index_add_(0, pair, made.view(len(pair), -1))
        return _close(expected.view_as(found), found)

    def _travel_well(self, forward: Forward, call: Call, tokens: Tokens) -> bool:
        """Whether on all ranks own experts give the same where tokens travel."""
        with self._shown(self._all):
            expected: Tensor = forward(**call.on(tokens.hidden, tokens.index, tokens.weights))
        found = self._by_tokens(forward, call, tokens, Capacity(None, self._group)).view_as(expected)
        return not any_of(not _close(expected, found), self._capacity.group, tokens.hidden.device)


def _close(expected: Tensor, found: Tensor) -> bool:
    scale = expected.abs().amax() if expected.numel() else expected.new_zeros(())
    return not bool(((found - expected).abs() > EQUAL * scale).any())


def _enough(tokens: Tokens, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a call, with further ones where they are too few to show whether they are mixed."""
    missing, width, k = max(0, ENOUGH - len(tokens.hidden)), tokens.hidden.shape[1], tokens.index.shape[1]
    further = torch.arange(missing * width, device=tokens.hidden.device).view(missing, width)
    chosen = torch.arange(missing * k, device=tokens.hidden.device).view(missing, k)
    return (
        torch.cat([tokens.hidden, further.to(tokens.hidden.dtype).sin()]),
        torch.cat([tokens.index, (chosen % experts).to(tokens.index.dtype)]),
        torch.cat([tokens.weights, (chosen.to(tokens.weights.dtype).cos() + 2) / 3]),
    )
