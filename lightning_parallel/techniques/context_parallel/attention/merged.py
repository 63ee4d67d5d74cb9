r"""Attention over all keys, put together of that over some of them by their log-sum-exps.

out = \sum_i exp(l_i - l) out_i      l = log \sum_i exp(l_i)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.collectives.by_elements import require_first_order
from lightning_parallel.techniques.context_parallel.attention.blocks import Block, Piece, Relation
from lightning_parallel.techniques.context_parallel.attention.kernels import Given, How, attend, attend_backward


class Terms(NamedTuple):
    """What attention of all pieces has in common."""

    query: Tensor
    """This rank's, (B, H, own, D)."""
    mask: Tensor | None
    """This rank's rows of it with all columns, broadcast to scores."""
    scale: float | None
    """Of scores."""
    dropout: float
    """Of weights."""


class Merged:
    """The output so far.

    Args:
        terms: this rank's queries, and how they attend.
        value_width: of heads of values.
    """

    def __init__(self, terms: Terms, value_width: int) -> None:
        self.terms = terms
        query = terms.query
        b, h, rows, _ = query.shape
        # Heads beside each other in memory, as torch's attention returns them: models join them next, without a copy.
        self._out = query.new_zeros((b, rows, h, value_width), dtype=wide(query.dtype)).transpose(1, 2)
        self._total = query.new_full(query.shape[:3], -math.inf, dtype=wide(query.dtype))
        self.hows: list[How] = []
        """How each of the pieces was computed, in their order."""

    def add(self, block: Block, keys: Tensor, values: Tensor) -> None:
        """Adds what the queries find at the keys of a block."""
        for piece in block.pieces:
            out, total, how = attend(*_given_of(piece, self.terms, keys, values))
            self.hows.append(how)
            self._merge(piece, out, total)

    def _merge(self, piece: Piece, out: Tensor, total: Tensor) -> None:
        rows = slice(*piece.rows)
        before = self._total[:, :, rows]
        after = torch.logaddexp(before, total)
        base = after.masked_fill(after == -math.inf, 0.0)
        self._out[:, :, rows].mul_((before - base).exp_()[..., None]).add_(out * (total - base).exp_()[..., None])
        before.copy_(after)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output, and for backward the log-sum-exp; a query that met nothing has zeros."""
        return self._out.to(self.terms.query.dtype), self._total.masked_fill_(self._total == -math.inf, 0.0)


class Backward:
    """The gradient of queries so far; that of a block's keys and values is told at once.

    Args:
        gradient: of the output.
        terms: this rank's queries, and how they attend.
        out: over all keys.
        total: the log-sum-exp over all keys.
        hows: how the pieces were computed, which come in the same order.
    """

    def __init__(self, gradient: Tensor, terms: Terms, out: Tensor, total: Tensor, hows: Sequence[How]) -> None:
        self.gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        self.terms, self.out, self.total = terms, out, total
        self.of_query = torch.zeros_like(terms.query, dtype=wide(terms.query.dtype))
        self._hows = iter(hows)

    def add(self, block: Block, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the keys and values of a block, in full precision."""
        of_keys, of_values = (torch.zeros_like(each, dtype=wide(each.dtype)) for each in (keys, values))
        for piece in block.pieces:
            gradient, out, total = (each[:, :, slice(*piece.rows)] for each in (self.gradient, self.out, self.total))
            given, mask = _given_of(piece, self.terms, keys, values)
            found = attend_backward(gradient, given, mask, out, total, next(self._hows))
            self.of_query[:, :, slice(*piece.rows)] += found[0]
            of_keys[:, :, slice(*piece.keys)] += found[1]
            of_values[:, :, slice(*piece.keys)] += found[2]
        return of_keys, of_values


def keep(ctx: Any, merged: Merged, key: Tensor, value: Tensor, numbers: Sequence[Any]) -> Tensor:
    """Leaves what `backward_of` needs in a function of autograd, and returns its output."""
    out, total = merged.result()
    ctx.numbers, ctx.hows = numbers, merged.hows
    ctx.save_for_backward(merged.terms.query, key, value, merged.terms.mask, out, total)
    return out


def backward_of(ctx: Any, gradient: Tensor) -> tuple[Backward, Tensor, Tensor]:
    """The backward pass over what `keep` left, and this rank's keys and values."""
    require_first_order()
    query, key, value, mask, out, total = ctx.saved_tensors
    return Backward(gradient, Terms(query, mask, *ctx.numbers), out, total, ctx.hows), key, value


def _given_of(piece: Piece, terms: Terms, keys: Tensor, values: Tensor) -> tuple[Given, Tensor | None]:
    """What a kernel gets for a piece, and its part of the mask."""
    at = slice(*piece.keys)
    given = Given(
        terms.query[:, :, slice(*piece.rows)], keys[:, :, at], values[:, :, at], None,
        piece.relation == Relation.DIAGONAL, terms.scale, terms.dropout,
    )  # fmt: skip
    if terms.mask is None or piece.relation != Relation.MASKED:
        return given, None
    return given, part_of_mask(terms.mask, piece)


def part_of_mask(mask: Tensor, piece: Piece) -> Tensor:
    """The rows and columns of a mask that rule in a piece; what is broadcast stays so."""
    rows = slice(None) if mask.shape[-2] == 1 else slice(*piece.rows)
    columns = slice(None) if mask.shape[-1] == 1 else slice(*piece.columns)
    return mask[..., rows, columns]


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype sums are kept."""
    return torch.promote_types(dtype, torch.float32)
