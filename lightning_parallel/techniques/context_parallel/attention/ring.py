"""Ring attention: keys and values go round, and meet the queries of every rank.

In step k a rank has the keys and values of the rank k before it. Those of the next step are under way meanwhile. A rank
sends each other one what that one's queries meet, directly, and nothing else; so a step in which two ranks have nothing
to do with each other costs no message. In backward keys and values go round again, and their gradients go back.

Source: H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.circle import Circle
from lightning_parallel.collectives.functional import Pending
from lightning_parallel.collectives.spans import Span
from lightning_parallel.techniques.context_parallel.attention.blocks import Block
from lightning_parallel.techniques.context_parallel.attention.merged import (
    Backward,
    Merged,
    Terms,
    backward_of,
    keep,
    wide,
)
from lightning_parallel.techniques.context_parallel.attention.messages import (
    add,
    cut,
    length_of,
    packed,
    room,
    unpacked,
    with_length,
)


@dataclass(frozen=True)
class Rounds:
    """What one rank does in the steps of a ring.

    Args:
        circle: the ranks.
        blocks: for each step, this rank's queries and the keys that come.
        sent: for each step, the keys that go to the rank k after this one, numbered as this rank has them.
    """

    circle: Circle
    blocks: tuple[Block, ...]
    sent: tuple[tuple[Span, ...], ...]

    def run(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Block, Tensor, Tensor]]:
        """For each step its number, the block, and the keys and values that it needs."""
        kept: dict[tuple[Span, ...], Tensor] = {}
        coming = self._start(1, key, value, kept)
        for step, block in enumerate(self.blocks):
            if step == 0:
                found = [cut(each, block.spans) for each in (key, value)]
            else:
                under_way, message = coming
                under_way.wait()
                found = unpacked(message, with_length((key, value), block.length))
                coming = self._start(step + 1, key, value, kept)
            yield step, block, found[0], found[1]

    def _start(
        self, step: int, key: Tensor, value: Tensor, kept: dict[tuple[Span, ...], Tensor]
    ) -> tuple[Pending, Tensor]:
        if step >= len(self.blocks):
            return Pending(None), key
        spans = self.sent[step]
        if spans not in kept:
            kept[spans] = packed([cut(each, spans) for each in (key, value)])
        message = room(key, with_length((key, value), self.blocks[step].length))
        circle = self.circle
        return circle.exchange({circle.at(step): kept[spans]}, {circle.at(-step): message}), message

    def back(self, step: int, gradients: Sequence[Tensor], own: Sequence[Tensor]) -> Returning:
        """Starts to send the gradients of what came in a step to where it came from."""
        message = packed([each.to(own[0].dtype) for each in gradients])
        spans, circle = self.sent[step], self.circle
        space = room(own[0], with_length(own, length_of(spans)))
        under_way = circle.exchange({circle.at(-step): message}, {circle.at(step): space})
        return Returning(under_way, message, space, spans)


@dataclass(frozen=True)
class Returning:
    """Gradients under way: those that a rank sends, and those of its own keys and values that come."""

    under_way: Pending
    sent: Tensor
    message: Tensor
    spans: tuple[Span, ...]

    def add_to(self, sums: Sequence[Tensor]) -> None:
        """Adds what came to this rank's gradients of keys and values."""
        self.under_way.wait()
        came = unpacked(self.message, with_length(sums, length_of(self.spans)))
        for total, tensor in zip(sums, came, strict=True):
            add(total, self.spans, tensor)


def ring(key: Tensor, value: Tensor, rounds: Rounds, terms: Terms) -> Tensor:
    """This rank's rows of attention.

    Args:
        key: (B, Hkv, own, D).
        value: (B, Hkv, own, Dv).
        rounds: what is done when.
        terms: this rank's queries, and how they attend.
    """
    function: Any = _Ring
    query, mask, *numbers = terms
    out: Tensor = function.apply(query, key, value, mask, rounds, *numbers)
    return out


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rounds: Rounds, *numbers: Any
    ) -> Tensor:
        merged = Merged(Terms(query, mask, *numbers), value.shape[-1])
        for _, block, keys, values in rounds.run(key, value):
            merged.add(block, keys, values)
        ctx.rounds = rounds
        return keep(ctx, merged, key, value, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        backward, key, value = backward_of(ctx, gradient)
        sums = [torch.zeros_like(each, dtype=wide(each.dtype)) for each in (key, value)]
        for each in _returning(ctx.rounds, backward, (key, value), sums):
            each.add_to(sums)
        of_key, of_value = (each.to(key.dtype) for each in sums)
        return backward.of_query.to(backward.terms.query.dtype), of_key, of_value, *[None] * (2 + len(ctx.numbers))


def _returning(
    rounds: Rounds, backward: Backward, own: Sequence[Tensor], sums: Sequence[Tensor]
) -> Iterator[Returning]:
    """Computes all gradients; those of each step are told when the next one's are under way as well."""
    last = None
    for step, block, keys, values in rounds.run(*own):
        found = backward.add(block, keys, values)
        if step == 0:
            for total, tensor in zip(sums, found, strict=True):
                add(total, block.spans, tensor)
            continue
        returning = rounds.back(step, found, own)
        if last is not None:
            yield last
        last = returning
    if last is not None:
        yield last
