"""What is called for attention where ranks have divided queries, keys and values along the sequence.

`ContextAttention` is what the rule of divided tensors finds as `ranks.attention`:

    ContextAttention ──► chosen: which method
      ├ ring          _Ring: keys and values go round                                    (ring.py)
      ├ ulysses       to_heads → torch's attention → to_positions                        (ulysses.py)
      ├ hybrid        to_heads among a team → _Ring of teams → to_positions
      ├ all_gather    _AllGather: keys and values of all                                 (all_gather.py)
      └ masks that learn: keys and values of all, and torch's attention

`blocks.py` says which queries meet which keys, `masks.py` what masks leave of that, `kernels.py` computes.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.circle import Circle
from lightning_parallel.collectives.elements import KEPT, Elements, Ranks
from lightning_parallel.collectives.made_of import Made
from lightning_parallel.techniques.context_parallel.attention.all_gather import all_gather, all_gather_plain
from lightning_parallel.techniques.context_parallel.attention.blocks import (
    Block,
    block_of_one,
    block_of_whole,
    causal,
    full,
)
from lightning_parallel.techniques.context_parallel.attention.choice import METHODS, Choice, chosen
from lightning_parallel.techniques.context_parallel.attention.layout import Layout, layout_of
from lightning_parallel.techniques.context_parallel.attention.masks import tables_of_all, tile_of, tiled
from lightning_parallel.techniques.context_parallel.attention.merged import Terms
from lightning_parallel.techniques.context_parallel.attention.ring import Rounds, ring
from lightning_parallel.techniques.context_parallel.attention.ulysses import (
    own_heads,
    rows_of_all,
    to_heads,
    to_positions,
)

log = logging.getLogger(__name__)

MANY = 16
"""Runs of one rank above which rectangles of runs are too small to be worth it."""


class Asked(NamedTuple):
    """What attention is asked for, with four dimensions."""

    query: Tensor  # (B, H, own, D)
    key: Tensor  # (B, Hkv, own, D)
    value: Tensor  # (B, Hkv, own, Dv)
    elements: Elements
    mask: Tensor | None  # broadcasts to (B, H, own, T)
    made: Made  # of the mask
    has_rows: bool  # of the mask: whether positions differ in it
    is_causal: bool
    scale: float | None
    dropout: float


class ContextAttention:
    """Attention over a divided sequence.

    Args:
        method: "ring", "ulysses", "all_gather", "hybrid", or "auto" for the one that sends least.

    Raises:
        ValueError: another method.
    """

    def __init__(self, method: str = "auto") -> None:
        if method not in METHODS:
            raise ValueError(f"method={method!r} is none of {', '.join(map(repr, METHODS))}")
        self.method = method
        self._layouts: dict[Any, Layout] = {}
        self._told: set[Choice] = set()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        elements: Elements,
        *,
        mask: Tensor | None = None,
        made: Made | None = None,
        has_rows: bool = True,
        is_causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Any:
        """See `SequenceAttention`."""
        if torch.compiler.is_dynamo_compiling() or not elements.disjoint:
            return NotImplemented
        lead = query.shape[:-2]
        made = Made() if made is None else made
        query, key, value = map(_as_autocast, (query, key, value))
        if mask is not None and not mask.requires_grad:
            mask = made.get(("autocast", _autocast_dtype(mask)), partial(_as_autocast, mask))
        elif mask is not None:
            mask = _as_autocast(mask)
        if not query.dtype == key.dtype == value.dtype:
            return NotImplemented
        if not math.prod(lead):  # other ranks have all the heads; backward must reach all three on every rank
            return query @ query.new_zeros(query.shape[-1], value.shape[-1]) + key.sum() + value.sum()
        mask = _with_four(mask, lead)
        query, key, value = (each.reshape(math.prod(each.shape[:-3]), *each.shape[-3:]) for each in (query, key, value))
        asked = Asked(query, key, value, elements, mask, made, has_rows, is_causal, scale, dropout)
        return self._attend(asked).reshape(*lead, elements.length, value.shape[-1])

    def chosen(self, elements: Elements, heads: int, key_heads: int, **kwargs: bool) -> Choice:
        """The method for so many heads, and why: see `choice.chosen`."""
        return chosen(self.method, elements, heads, key_heads, lambda team: self._layout(elements, team), **kwargs)

    def _attend(self, asked: Asked) -> Tensor:
        has_rows = asked.mask is not None and asked.has_rows
        heads, key_heads = asked.query.shape[1], asked.key.shape[1]
        choice = self.chosen(asked.elements, heads, key_heads, is_causal=asked.is_causal, has_rows=has_rows)
        self._tell(choice, asked.elements.ranks)
        learned = asked.mask is not None and asked.mask.requires_grad and torch.is_grad_enabled()
        if learned:
            return _plain(asked)
        layout = self._layout(asked.elements, choice.team)
        if choice.method == "ulysses":
            return _by_heads(asked, layout)
        if choice.method == "all_gather" or any(len(runs) > MANY for runs in layout.runs):
            return _gathering(asked)
        return _going_round(asked, layout)

    def _layout(self, elements: Elements, team: int) -> Layout:
        key = elements.ranks, elements.runs, team
        if key not in self._layouts:
            if len(self._layouts) > KEPT:
                self._layouts.clear()
            self._layouts[key] = layout_of(elements, team)
        return self._layouts[key]

    def _tell(self, choice: Choice, ranks: Ranks) -> None:
        if choice not in self._told and ranks.rank == 0:
            log.info("Attention over %s ranks by %s: %s", ranks.count, choice.method, choice.reason)
        self._told.add(choice)


# ---------------------------------------------------------------- the methods


def _going_round(asked: Asked, layout: Layout) -> Tensor:
    query, key, value, elements, mask, *_ = asked
    swaps = len(layout.team.circle) > 1
    if swaps:
        query, key, value = to_heads(query, key, value, layout.team)
        mask = _mask_of_team(asked, layout)
    rounds: Rounds | None
    if mask is None:
        rounds = layout.rounds(causal if asked.is_causal else full)
    else:
        rounds = asked.made.get(("rounds", mask.dtype, layout.all_runs), lambda: rounds_of_mask(mask, layout, elements))
    if rounds is None:
        return _plain(asked)
    out = ring(key, value, rounds, Terms(query, mask, asked.scale, asked.dropout))
    return to_positions(out, layout.team) if swaps else out


def rounds_of_mask(mask: Tensor, layout: Layout, elements: Elements) -> Rounds | None:
    """What this rank does in a ring, by what all ranks see in their rows of a mask; None as in `tables_of_all`."""
    layout = layout.tiled()
    keys = [run for runs in layout.runs for run in runs]
    tables = tables_of_all(mask, layout.all_runs, keys, _everyone(elements.ranks))
    return None if tables is None else layout.rounds_of(tables)


def _by_heads(asked: Asked, layout: Layout) -> Tensor:
    query, key, value = to_heads(asked.query, asked.key, asked.value, layout.team)
    out = F.scaled_dot_product_attention(
        query, key, value, _mask_of_team(asked, layout), asked.dropout, asked.is_causal,
        scale=asked.scale, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return to_positions(out, layout.team)


def _gathering(asked: Asked) -> Tensor:
    query, key, value, elements, mask, *_ = asked
    block: Block | None
    if any(len(runs) > MANY for runs in elements.runs):
        mask = _causal_rows(elements, query.device) if asked.is_causal else mask
        block = block_of_one(elements.length, elements.size, mask is not None)
    elif mask is None:
        keys = sorted(run for runs in elements.runs for run in runs)
        block = block_of_whole(elements.own, keys, (causal if asked.is_causal else full)(elements.own, keys))
    else:
        block = asked.made.get(("block", mask.dtype, elements.runs), lambda: _masked_block(mask, elements))
    if block is None:
        return _plain(asked)
    return all_gather(key, value, elements, block, Terms(query, mask, asked.scale, asked.dropout))


def _masked_block(mask: Tensor, elements: Elements) -> Block | None:
    runs = [tiled(each, tile_of(elements.runs)) for each in elements.runs]
    keys = sorted(run for each in runs for run in each)
    tables = tables_of_all(mask, runs, keys, _everyone(elements.ranks))
    return None if tables is None else block_of_whole(runs[elements.ranks.rank], keys, tables[elements.ranks.rank])


def _plain(asked: Asked) -> Tensor:
    query, key, value, elements, mask, _, _, is_causal, scale, dropout = asked
    mask = _causal_rows(elements, query.device) if is_causal else mask
    return all_gather_plain(query, key, value, elements, mask, scale, dropout)


# ---------------------------------------------------------------- what they are asked for


def _as_autocast(tensor: Tensor) -> Tensor:
    """What torch's attention would compute with under autocast."""
    dtype = _autocast_dtype(tensor)
    return tensor if dtype is None else tensor.to(dtype)


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    is_turned = tensor.is_floating_point() and tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_turned else None


def _with_four(mask: Tensor | None, lead: torch.Size) -> Tensor | None:
    """A mask of four dimensions.

    Args:
        mask: that broadcasts to (*lead, own, T).
        lead: the dimensions of queries before positions.
    """
    if mask is None or mask.dim() == 4:
        return mask
    if mask.dim() < 4:
        return mask[(None,) * (4 - mask.dim())]
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.view(1, *mask.shape[-3:])
    return mask.expand(*lead[:-1], *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


def _mask_of_team(asked: Asked, layout: Layout) -> Tensor | None:
    """The mask for the heads and the positions that this rank has after the swap."""
    mask, team = asked.mask, layout.team
    if mask is None:
        return None
    if not asked.has_rows:
        return mask[:, slice(*own_heads(mask.shape[1], team)[team.circle.place])]
    return asked.made.get(("rows", mask.dtype, team.runs), lambda: rows_of_all(mask, team))


def _causal_rows(elements: Elements, device: torch.device) -> Tensor:
    return elements.index(device)[:, None] >= torch.arange(elements.size, device=device)


def _everyone(ranks: Ranks) -> Circle:
    return Circle(ranks.group, tuple(range(ranks.count)))
