r"""Ring attention: the keys and values of each rank are sent to every other rank, whose queries attend to them.

In step k a rank attends to the keys and values of the rank k places before it, while those of step k + 1 travel. They
are sent directly from their rank, and only those keys to which the receiver's queries attend: if there are none, no
message is sent. In backward keys and values are sent again, and their gradients go back to the rank that has the keys.

The output out_k over the keys of step k is merged with the others by the log-sum-exp l_k of its scores:

    out = \sum_k exp(l_k - l) out_k      l = log \sum_k exp(l_k)

Source: H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.functional import Pending, exchange
from lightning_parallel.collectives.spans import Runs, Span, length_of
from lightning_parallel.techniques.context_parallel.blocks import Block, Piece, Relation, Table, block_of
from lightning_parallel.techniques.context_parallel.kernels import KernelInputs, attend, attend_backward


@dataclass(frozen=True)
class RingSchedule:
    """What one rank computes and sends in each step of a ring.

    Args:
        members: ranks of the group, in the order of the ring.
        place: index of this rank in `members`.
        blocks: for each step, this rank's queries and the keys that it receives.
        sent: for each step k, the keys of this rank that the rank k places after it needs.
    """

    members: tuple[int, ...]
    place: int
    blocks: tuple[Block, ...]
    sent: tuple[Runs, ...]

    @classmethod
    def of(
        cls, members: tuple[int, ...], place: int, runs: Sequence[Runs], table: Callable[[int, int], Table]
    ) -> RingSchedule:
        """Return the schedule of the member at `place`, from the positions of all and the relations of two members."""

        def block(one: int, other: int) -> Block:
            return block_of(runs[one], runs[other], table(one, other))

        n = len(members)
        blocks = tuple(block(place, (place - step) % n) for step in range(n))
        return cls(members, place, blocks, tuple(block((place + step) % n, place).spans for step in range(n)))

    def run(self, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Block, Tensor, Tensor]]:
        """Yield each step, its block, and the block's keys and values, [B, Hkv, keys, D]. Collective over `members`."""
        packed: dict[Runs, Tensor] = {}  # most steps send the same positions

        def start(step: int) -> tuple[Pending, Tensor]:
            spans = self.sent[step]
            if spans not in packed:
                packed[spans] = torch.cat([take(each, spans).reshape(-1) for each in (key, value)])
            message = room_for((key, value), self.blocks[step].length)
            return self.exchange(step, packed[spans], message, group), message

        arriving = start(1) if len(self.blocks) > 1 else None
        for step, block in enumerate(self.blocks):
            if step == 0:
                keys, values = (take(each, block.spans) for each in (key, value))
            else:
                assert arriving is not None
                pending, message = arriving
                pending.wait()
                keys, values = unpack(message, (key, value), block.length)
                arriving = start(step + 1) if step + 1 < len(self.blocks) else None
            yield step, block, keys, values

    def exchange(self, distance: int, sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> Pending:
        """Start to send to the rank `distance` places after this one and to receive from the one as far before it."""
        to, source = (self.members[(self.place + each) % len(self.members)] for each in (distance, -distance))
        return exchange({to: sent}, {source: received}, group)


class RingAttention(Function):
    """Attention of this rank's t queries to the keys of all ranks of a ring, [B, H, t, Dv].

    Collective over the members of the schedule, in forward and in backward.

    Args:
        query: [B, H, t, D].
        key: [B, Hkv, t, D].
        value: [B, Hkv, t, Dv].
        mask: this rank's rows with all columns, broadcasts to [B, H, t, T]; gets no gradient.
        schedule: of this rank.
        group: the process group in which the members are ranks.
        numbers: the scale of scores, None for 1 / sqrt(D); and the dropout probability.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        schedule: RingSchedule,
        group: dist.ProcessGroup,
        *numbers: Any,
    ) -> Tensor:
        """Attend to the keys and values of one rank after the other."""
        b, h, t, _ = query.shape
        # Memory order [B, t, H, Dv], as torch's attention returns it: models merge the heads next, without a copy.
        out = query.new_zeros((b, t, h, value.shape[-1]), dtype=accumulation_dtype(query.dtype)).transpose(1, 2)
        total = query.new_full((b, h, t), -math.inf, dtype=accumulation_dtype(query.dtype))  # log-sum-exp so far
        ctx.states = []
        for _, block, keys, values in schedule.run(key, value, group):
            for piece in block.pieces:
                inputs, part_of_mask = kernel_inputs(piece, query, keys, values, mask, *numbers)
                piece_out, piece_total, state = attend(inputs, part_of_mask)
                ctx.states.append(state)
                rows = slice(*piece.rows)
                # weights of the output so far, exp(before - after), and of the piece, exp(piece_total - after): sum 1
                before = total[:, :, rows]
                after = torch.logaddexp(before, piece_total)
                base = after.masked_fill(after == -math.inf, 0.0)
                out[:, :, rows].mul_((before - base).exp_()[..., None]).add_(
                    piece_out * (piece_total - base).exp_()[..., None]
                )
                before.copy_(after)
        out = out.to(query.dtype)
        total.masked_fill_(total == -math.inf, 0.0)  # queries without keys, whose output is zero
        ctx.schedule, ctx.group, ctx.numbers = schedule, group, numbers
        ctx.save_for_backward(query, key, value, mask, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Send keys and values round again, and send the gradients of received ones back to their ranks."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) reached ring attention, but its messages between ranks cannot be "
                "differentiated twice; use ContextParallel(method='ulysses'), or leave out the loss that needs it, "
                "such as a gradient penalty"
            )
        query, key, value, mask, out, total = ctx.saved_tensors
        schedule, group = ctx.schedule, ctx.group
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        grad_query, *grads_local = (
            torch.zeros_like(each, dtype=accumulation_dtype(each.dtype)) for each in (query, key, value)
        )
        states = iter(ctx.states)
        returning: tuple[Pending, Tensor, Runs] | None = None
        for step, block, keys, values in schedule.run(key, value, group):
            grads_received = [torch.zeros_like(each, dtype=accumulation_dtype(each.dtype)) for each in (keys, values)]
            for piece in block.pieces:
                rows, columns = slice(*piece.rows), slice(*piece.keys)
                inputs, part_of_mask = kernel_inputs(piece, query, keys, values, mask, *ctx.numbers)
                of_out, of_rows, of_total = (each[:, :, rows] for each in (gradient, out, total))
                grads = attend_backward(of_out, of_rows, of_total, inputs, part_of_mask, next(states))
                grad_query[:, :, rows] += grads[0]
                for sums, each in zip(grads_received, grads[1:], strict=True):
                    sums[:, :, columns] += each
            if step == 0:
                add(grads_local, block.spans, grads_received)
                continue
            # Send these gradients to the rank that has the keys; receive those of this rank's keys from another rank.
            message = room_for((key, value), length_of(schedule.sent[step]))
            pending = schedule.exchange(
                -step, torch.cat([each.to(key.dtype).reshape(-1) for each in grads_received]), message, group
            )
            last, returning = returning, (pending, message, schedule.sent[step])
            if last is not None:  # gradients of a step travel while those of the next step are computed
                receive_gradients(grads_local, *last)
        if returning is not None:
            receive_gradients(grads_local, *returning)
        gradients = [each.to(query.dtype) for each in (grad_query, *grads_local)]
        return *gradients, *[None] * (3 + len(ctx.numbers))


def kernel_inputs(
    piece: Piece, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, dropout: float
) -> tuple[KernelInputs, Tensor | None]:
    """Return the arguments of a kernel for a piece, and the piece's part of the mask, which may still broadcast."""
    rows, at = slice(*piece.rows), slice(*piece.keys)
    is_causal = piece.relation == Relation.DIAGONAL
    inputs = KernelInputs(query[:, :, rows], keys[:, :, at], values[:, :, at], None, is_causal, scale, dropout)
    if mask is None or piece.relation != Relation.MASKED:
        return inputs, None
    columns = slice(None) if mask.shape[-1] == 1 else slice(*piece.columns)
    return inputs, mask[..., slice(None) if mask.shape[-2] == 1 else rows, columns]


def receive_gradients(sums: Sequence[Tensor], pending: Pending, message: Tensor, spans: Runs) -> None:
    """Wait for gradients of this rank's keys and values, and add them to `sums`."""
    pending.wait()
    add(sums, spans, unpack(message, sums, length_of(spans)))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results are accumulated: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# ---------------------------------------------------------------- messages of several tensors, [B, heads, positions, D]


def take(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the positions of these spans, concatenated."""
    parts = [tensor[:, :, start:stop] for start, stop in spans] or [tensor[:, :, :0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def add(sums: Sequence[Tensor], spans: Sequence[Span], parts: Sequence[Tensor]) -> None:
    """Add gradients of the positions that `take` returned to `sums`, in place."""
    for total, part in zip(sums, parts, strict=True):
        first = 0
        for start, stop in spans:
            total[:, :, start:stop] += part[:, :, first : first + stop - start]
            first += stop - start


def room_for(like: Sequence[Tensor], length: int) -> Tensor:
    """Allocate a flat message for tensors like these with `length` positions."""
    return like[0].new_empty(sum(b * h * length * d for b, h, _, d in (tensor.shape for tensor in like)))


def unpack(message: Tensor, like: Sequence[Tensor], length: int) -> list[Tensor]:
    """Return views of the tensors in a message."""
    shapes = [(*tensor.shape[:2], length, tensor.shape[3]) for tensor in like]
    parts = torch.split(message, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
