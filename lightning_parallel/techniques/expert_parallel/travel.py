"""Tokens travel to the ranks of their experts and back: dispatch and combine, each the gradient of the other.

Source: D. Lepikhin et al., GShard, ICLR 2021 (all_to_all); DeepSeek-V3, 2024 (a token goes to each rank once).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.by_elements import require_first_order
from lightning_parallel.collectives.functional import Pending
from lightning_parallel.collectives.rows import exchanged, start_exchange
from lightning_parallel.techniques.expert_parallel.routes import Route

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that travel as bits of a weight, by its bytes."""


def dispatch(tokens: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
    """What comes to this rank: tokens (rows, features), their experts here and their weights (rows, k).

    Args:
        tokens: (tokens, features).
        weights: of the experts that each chose, (tokens, k).
        route: their way.
    """
    arrived: tuple[Tensor, Tensor, Tensor] = _Dispatch.apply(tokens, weights, route)  # type: ignore[no-untyped-call]
    return arrived


def combine(rows: Tensor, tokens: int, route: Route, meanwhile: Callable[[], None]) -> Tensor:
    """Sums for each token what came back from the ranks of its experts, (tokens, features). ⇄ `dispatch`.

    Args:
        rows: what experts made of the rows that came, (rows, features).
        tokens: how many there are on this rank.
        route: their way.
        meanwhile: computes something while rows are under way; so does its backward.
    """
    trip = _Trip(route, tokens)
    under_way = _Depart.apply(rows, trip)  # type: ignore[no-untyped-call]
    meanwhile()
    result: Tensor = _Arrive.apply(under_way, trip)  # type: ignore[no-untyped-call]
    return result


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        ctx.route, ctx.tokens = route, len(tokens)
        whole = BITS[weights.element_size()]
        bits = route.chosen.to(whole).view(weights.dtype)
        sent = [tokens[route.token], weights[route.token], bits]
        rows, arrived, chosen = _sent(sent, route.sent, route.received, route)
        places = chosen.contiguous().view(whole).long()
        ctx.mark_non_differentiable(places)
        return rows, arrived, places

    @staticmethod
    def backward(ctx: Any, rows: Tensor, weights: Tensor, _: Any) -> Any:
        require_first_order()
        route: Route = ctx.route
        back = _sent([rows, weights], route.received, route.sent, route)
        return *(_summed(each, route.token, ctx.tokens) for each in back), None


def _sent(parts: list[Tensor], sent: Any, received: Any, route: Route) -> list[Tensor]:
    """Sends several values of each row, those of one dtype in one message."""
    made: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        same = [place for place, part in enumerate(parts) if part.dtype == dtype]
        widths = [parts[place].shape[1] for place in same]
        message = torch.cat([parts[place] for place in same], 1)
        arrived = exchanged(message, sent, received, route.group)
        made.update(zip(same, torch.split(arrived, widths, 1), strict=True))
    return [made[place] for place in range(len(parts))]


def _summed(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
    return rows.new_zeros(tokens, *rows.shape[1:]).index_add_(0, token, rows)


class _Trip:
    """A way home from experts, between its departure and its arrival; in backward the other way round."""

    def __init__(self, route: Route, tokens: int) -> None:
        self.route, self.tokens = route, tokens
        self._arriving: Tensor | None = None
        self._under_way = Pending(None)

    def start(self, rows: Tensor, home: bool) -> Tensor:
        """Starts to send rows; returns what will be there after `arrived`."""
        ends = (self.route.received, self.route.sent) if home else (self.route.sent, self.route.received)
        self._arriving, self._under_way = start_exchange(rows, *ends, self.route.group)
        if torch.is_anomaly_enabled():  # which reads what has not arrived yet
            self._under_way.wait()
        return self._arriving

    def arrived(self) -> Tensor:
        """The rows, once they are there."""
        assert self._arriving is not None
        self._under_way.wait()
        arrived, self._arriving, self._under_way = self._arriving, None, Pending(None)
        return arrived


class _Depart(Function):
    """The start of a way home. What it returns stands for rows under way: only `_Arrive` may read it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.start(rows, home=True)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.trip.arrived(), None


class _Arrive(Function):
    """Its end. In backward gradients depart here, and arrive when `_Depart` is reached."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        arrived = trip.arrived()
        ctx.save_for_backward(arrived[:0])  # a recomputation stops early behind this, where nothing is under way
        return _summed(arrived, trip.route.token, trip.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return ctx.trip.start(gradient[ctx.trip.route.token], home=False), None
