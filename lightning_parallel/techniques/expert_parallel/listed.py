"""Experts in a list over ranks: each rank has some of them, and the module around the list calls them as it likes.

Which tokens go to which expert only that module knows, and ranks must meet in as many messages. So it runs twice, see
`two_passes`; in between inputs travel to the ranks of their experts, which compute, and results travel back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.collectives.by_elements import counted, require_first_order
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import parts_of_all, summed
from lightning_parallel.collectives.rows import exchanged
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.expert_parallel.before import Before, Draws
from lightning_parallel.techniques.expert_parallel.calls import Calls
from lightning_parallel.techniques.expert_parallel.capacity import Capacity
from lightning_parallel.techniques.expert_parallel.outside import stored_of
from lightning_parallel.techniques.expert_parallel.two_passes import DIMENSIONS, FirstPass, SecondPass, copied
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.redirect import Forward


class ListedExperts:
    """Leads the calls of the experts in one list over the ranks that hold them.

    Args:
        name: the FQN of the list.
        experts: all of them; this rank has the parameters of its own.
        skeleton: one of them on meta.
        calls: of the ranks that hold different experts.
        alike: ranks that send the same tokens, and have different experts; None: nobody does.
        capacity: how many rows an expert takes.
    """

    def __init__(
        self,
        name: str,
        experts: Sequence[nn.Module],
        skeleton: nn.Module,
        calls: Calls,
        alike: Ranks | None,
        capacity: Capacity,
    ) -> None:
        self._capacity = capacity
        self._name, self._experts, self._skeleton, self._alike = name, experts, skeleton, alike
        self._group, self._calls, self._number = calls.group, calls, calls.number(name)
        self._each = len(experts) // self._group.size()
        self._within = {part for expert in experts for part in expert.modules()}
        self._computing = False

    def lead(self, owner: nn.Module, forward: Forward) -> Forward:
        """The forward of a module that calls the experts: the one around the list, or the list itself."""
        others = [part for part in owner.modules() if part not in self._within and part is not owner]

        def run(*args: Any, **kwargs: Any) -> Any:
            self._calls.refuse_transforms(self._number)
            first = FirstPass(self._experts, others, self._zeros)
            before, random = Before([owner]), Draws.now()
            with first.watching():
                forward(*copied(args), **copied(kwargs))
            before.restore()
            whole = self._whole_parameters()
            results, back = self._results(first, next(owner.parameters()), whole)
            results = [_filled(made, len(rows)) for made, (_, rows) in zip(results, first.inputs, strict=True)]
            random.restore()
            second = SecondPass(self._name, self._experts, first, results)
            with second.watching():
                output = forward(*args, **kwargs)
            second.require_end()
            return _attached(output, [back, *whole.values()])

        return torch.compiler.disable(run)  # type: ignore[no-any-return, no-untyped-call]

    def guard(self, forward: Forward) -> Forward:
        """The forward of an expert, which only those that lead it may call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._computing:
                raise ValueError(
                    f"an expert of {self._name} is called where expert parallel does not lead its tokens: outside of "
                    "the forward of the module around the list, or again by a checkpoint within it; call experts in "
                    "that module's forward, call it as a module, and checkpoint it as a whole"
                )
            return forward(*args, **kwargs)

        return run

    # ---------------------------------------------------------------- between the passes

    def _zeros(self, inputs: Tensor) -> Tensor:
        """What an expert's result looks like."""
        try:
            made = self._skeleton(torch.empty_like(inputs, device="meta"))
        except Exception:  # what does not run on meta mostly gives what it gets
            made = inputs
        self._require_rows(made, inputs)
        under = inputs.device.type
        cast = torch.is_autocast_enabled(under) and made.is_floating_point()
        return inputs.new_zeros(made.shape, dtype=torch.get_autocast_dtype(under) if cast else made.dtype)

    def _require_rows(self, made: Any, inputs: Tensor) -> None:
        if not isinstance(made, Tensor) or made.shape[:1] != inputs.shape[:1]:
            shown = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"an expert of {self._name} makes {shown} of {list(inputs.shape)}, but under expert parallel an expert "
                "of a list returns one tensor with a row for each token; compute the rest in the module around them"
            )

    def _whole_parameters(self) -> dict[Tensor, Tensor]:
        """What stands for parameters that every rank has, as scalars: those who have the expert tell the others."""
        found = [p for expert in self._experts for p in expert.parameters() if not isinstance(stored_of(p), DTensor)]
        if self._alike is None or not found:
            return {}
        wholes = list(dict.fromkeys(found))  # tied ones stand in several experts
        shown = _Shared.apply(self._alike, *wholes)  # type: ignore[no-untyped-call]
        return dict(zip(wholes, shown, strict=True))

    def _taken(self, calls: list[tuple[int, Tensor]], some: Tensor) -> list[tuple[int, Tensor]]:
        """The rows of each call that its expert takes; those behind them add nothing."""
        if self._capacity.factor is None:
            return calls
        counts, taken = torch.zeros(len(self._experts) + 1, dtype=torch.long), []
        for number, inputs in calls:
            counts[number] += len(inputs)
        left = self._capacity.room(counts.to(some.device)).pairs.tolist()
        for number, inputs in calls:
            taken.append((number, inputs[: int(max(left[number], 0))]))
            left[number] -= len(inputs)
        return taken

    def _results(self, first: FirstPass, some: Tensor, whole: Mapping[Tensor, Tensor]) -> tuple[list[Tensor], Tensor]:
        """The results of this rank's calls, and a tensor through which backward reaches what it computed for others."""
        some = first.inputs[0][1] if first.inputs else some
        self._calls.meet(self._number, some.device)
        calls = self._taken(first.inputs, some)
        rows = [[each for number, each in calls if number == expert] for expert in range(len(self._experts))]
        table = self._agreed(first, rows, some)
        first.take_back(int(table[:, 0, -1].amin()))
        counts, called = table[:, :, 0], table.sum(0)[:, 1].tolist()
        width = [int(size) for size in table.amax((0, 1))[3 : 3 + int(table[:, :, 2].amax())].tolist()]
        mine = slice(self._group.rank() * self._each, (self._group.rank() + 1) * self._each)
        sent = counts[self._group.rank()].view(self._group.size(), -1).sum(1).tolist()
        received = counts[:, mine].sum(1).tolist()
        flat = [each for expert in rows for each in expert]
        joined = torch.cat(flat) if flat else torch.zeros(0, *width, dtype=some.dtype, device=some.device)
        if torch.is_grad_enabled() and not joined.requires_grad:
            joined.requires_grad_()  # or ranks would differ in whether they have a backward pass
        arrived = _travelled(joined, sent, received, self._group)
        made = self._computed(arrived, counts[:, mine].tolist(), called[mine], whole)
        lost = [
            leaf_of(stored_of(parameter))
            for number, expert in enumerate(self._experts)
            if called[number] and not mine.start <= number < mine.stop
            for parameter in expert.parameters()
        ]
        if torch.is_grad_enabled():  # before they travel: whoever asks for a gradient comes by the same messages
            made = _Used.apply(made, *lost)  # type: ignore[no-untyped-call]
        back = _travelled(made, received, sent, self._group)
        pieces = deque(torch.split(back, [len(each) for each in flat]))
        of = {id(each): pieces.popleft() for each in flat}
        return [of[id(each)] for _, each in calls], back

    def _agreed(self, first: FirstPass, rows: list[list[Tensor]], some: Tensor) -> Tensor:
        """For each rank and expert: rows, calls, how many dimensions rows have, and these; the same on all ranks.

        And last how many calls of other modules came before experts, so that all ranks repeat the same.
        """
        shapes = {tuple(each.shape[1:]) for _, each in first.inputs}
        own = torch.zeros(len(rows), 3 + DIMENSIONS + 1, dtype=torch.long)
        own[:, -1] = len(first.given) if first.independent is None else first.independent
        for number, inputs in enumerate(rows):
            own[number, 0], own[number, 1] = sum(map(len, inputs)), len(inputs)
            if inputs:
                shape = inputs[0].shape[1:]
                own[number, 2] = len(shape)
                own[number, 3 : 3 + len(shape)] = torch.tensor(shape)
        if len(shapes) > 1:
            own[:, 2] = -1
        table: Tensor = parts_of_all(own.to(some.device), self._group).cpu()
        forms = table[:, :, 2:-1][table[:, :, 1] > 0]
        if len(forms) and ((forms != forms[0]).any() or (forms[:, 0] < 0).any()):
            raise ValueError(
                f"the experts of {self._name} are called with rows of different shapes, on this rank {sorted(shapes)}, "
                "but under expert parallel rows of all ranks are joined; give experts tokens, (tokens, features)"
            )
        return table

    def _computed(
        self, arrived: Tensor, counts: list[list[int]], called: list[int], whole: Mapping[Tensor, Tensor]
    ) -> Tensor:
        """What own experts make of the rows of all ranks, in the order in which they came."""
        pieces = iter(torch.split(arrived, [count for rank in counts for count in rank]))
        inputs = [[next(pieces) for _ in range(self._each)] for _ in counts]
        first = self._group.rank() * self._each
        made: list[list[Tensor]] = [[] for _ in counts]
        for own in range(self._each):
            rows = torch.cat([rank[own] for rank in inputs])
            if called[own]:
                rows = self._of_expert(self._experts[first + own], rows, whole)
            for rank, piece in zip(made, torch.split(rows, [rank[own] for rank in counts]), strict=True):
                rank.append(piece)
        # also without rows: on one device an expert that is called with none has gradients, zeros
        shaped = [each for rank in made for each, count in zip(rank, called, strict=True) if count]
        if not shaped:  # backward must reach what this rank sent all the same
            return _attached(self._zeros(arrived), [arrived])  # type: ignore[no-any-return]
        return torch.cat(shaped)

    def _of_expert(self, expert: nn.Module, rows: Tensor, whole: Mapping[Tensor, Tensor]) -> Tensor:
        slots = [(part._parameters, own) for part in expert.modules() for own in part._parameters]
        before: list[tuple[dict[str, Any], str, Any]] = [(table, own, table[own]) for table, own in slots]
        for table, own, kept in before:
            if kept is not None:
                stored = stored_of(kept)
                leaf = leaf_of(stored) if isinstance(stored, DTensor) else whole.get(kept, kept)
                table[own] = leaf if self._alike is None else counted(leaf, 1 / self._alike.count)
        self._computing = True
        try:
            made: Tensor = expert.forward(rows)
            self._require_rows(made, rows)
        finally:
            self._computing = False
            for table, own, kept in before:
                table[own] = kept
        return made


def _filled(made: Tensor, rows: int) -> Tensor:
    """The rows that were taken, and zeros for the others."""
    missing = rows - len(made)
    return torch.cat((made, made.new_zeros(missing, *made.shape[1:]))) if missing else made


# ---------------------------------------------------------------- in autograd


def _travelled(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Travel.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _Travel(Function):
    """Rows that go to other ranks; their gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        ctx.save_for_backward(rows[:0])  # a recomputation that stops early stops behind this, on all ranks
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class _Used(Function):
    """The rows, with gradients for what is here of the experts of other ranks: empty ones, like the parameters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *elsewhere: Tensor) -> Tensor:
        ctx.save_for_backward(*elsewhere)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros_like(each) for each in ctx.saved_tensors)


class _Shared(Function):
    """Parameters of which one rank computes the gradient, and all need it; one message for all of them."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *parameters: Tensor) -> Any:
        ctx.ranks = ranks
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        require_first_order()
        total = summed(torch.cat([each.flatten() for each in gradients]), ctx.ranks.group)
        pieces = torch.split(total, [each.numel() for each in gradients])
        return None, *(piece.view_as(each) for piece, each in zip(pieces, gradients, strict=True))


class _Attach(Function):
    """A tensor, whose backward also reaches others, with zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *attached: Tensor) -> Tensor:
        ctx.like = [(each.shape, each.dtype, each.device) for each in attached]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _attached(output: Any, attached: Sequence[Tensor]) -> Any:
    """The output, through which every rank's backward comes by what it computed for others."""
    leaves, form = tree_flatten(output)
    learning = [each for each in attached if each.requires_grad]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and learning:
            own = _Attach.apply(leaf.own if isinstance(leaf, Divided) else leaf, *learning)  # type: ignore[no-untyped-call]
            leaves[place] = Divided(own, leaf.cuts) if isinstance(leaf, Divided) else own
            break
    return tree_unflatten(leaves, form)
