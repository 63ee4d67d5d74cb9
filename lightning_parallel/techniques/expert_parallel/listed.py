"""Experts in a list over ranks: each rank has some of them, and the module around the list calls them as it likes.

Which tokens go to which expert only that module knows, and ranks must meet in as many messages. So it runs twice:

| pass | an expert that is called | other modules that are called | the lines in between |
|---|---|---|---|
| first | keeps its input, gives zeros | compute | compute on copies of the arguments |
| second | gives its result | give what they gave | compute again, with the same random numbers |

Between the passes inputs travel to the ranks of their experts, which compute, and results travel back. Only the lines
between calls run twice: what they left on the module is taken back before the second pass.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_parallel.collectives.by_elements import counted, require_first_order
from lightning_parallel.collectives.functional import parts_of_all
from lightning_parallel.collectives.rows import exchanged
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.redirect import Forward

DIMENSIONS = 6
"""How many dimensions the rows of an expert's input may have."""


class ListedExperts:
    """Leads the calls of the experts in one list over the ranks that hold them.

    Args:
        name: the FQN of the list.
        owner: the module that calls them: the one around the list, or the list itself where it has a forward.
        experts: all of them; this rank has the parameters of its own.
        skeleton: one of them on meta.
        mesh: of the ranks that hold different experts.
        share: by what the gradients of experts are multiplied, because ranks send the same tokens.
    """

    def __init__(
        self,
        name: str,
        owner: nn.Module,
        experts: Sequence[nn.Module],
        skeleton: nn.Module,
        mesh: DeviceMesh,
        share: float,
    ) -> None:
        self._name, self._owner, self._experts, self._skeleton, self._share = name, owner, experts, skeleton, share
        self._group: dist.ProcessGroup = mesh.get_group()
        self._each = len(experts) // self._group.size()
        within = {part for expert in experts for part in expert.modules()}
        self._others = [part for part in owner.modules() if part not in within and part is not owner]

    def wrap(self, forward: Forward) -> Forward:
        """The forward of the owner."""

        def run(*args: Any, **kwargs: Any) -> Any:
            first = FirstPass(self._experts, self._others, self._zeros)
            with first.watching(), _undone(self._owner, self._others):
                forward(*_copied(args), **_copied(kwargs))
            results, attached = self._results(first.inputs)
            second = SecondPass(self._name, self._experts, first, results)
            with second.watching():
                output = forward(*args, **kwargs)
            second.require_end()
            return _attached(output, attached)

        return torch.compiler.disable(run)  # type: ignore[no-any-return, no-untyped-call]

    # ---------------------------------------------------------------- between the passes

    def _zeros(self, inputs: Tensor) -> Tensor:
        """What an expert's result looks like."""
        try:
            made = self._skeleton(torch.empty_like(inputs, device="meta"))
        except Exception:  # what does not run on meta mostly gives what it gets
            made = inputs
        under = inputs.device.type
        cast = torch.is_autocast_enabled(under) and made.is_floating_point()
        return inputs.new_zeros(made.shape, dtype=torch.get_autocast_dtype(under) if cast else made.dtype)

    def _results(self, calls: Sequence[tuple[int, Tensor]]) -> tuple[list[Tensor], Tensor]:
        """The results of this rank's calls, and a tensor through which backward reaches what it computed for others."""
        rows = [[each for number, each in calls if number == expert] for expert in range(len(self._experts))]
        some = calls[0][1] if calls else next(self._owner.parameters())
        table = self._agreed(calls, rows, some)
        counts, called = table[:, :, 0], table.sum(0)[:, 1].tolist()
        width = [int(size) for size in table.amax((0, 1))[3 : 3 + int(table[:, :, 2].max())].tolist()]
        mine = slice(self._group.rank() * self._each, (self._group.rank() + 1) * self._each)
        sent = counts[self._group.rank()].view(self._group.size(), -1).sum(1).tolist()
        received = counts[:, mine].sum(1).tolist()
        flat = [each for expert in rows for each in expert]
        joined = torch.cat(flat) if flat else some.new_zeros(0, *width)
        if torch.is_grad_enabled() and not joined.requires_grad:
            joined.requires_grad_()  # or ranks would differ in whether they have a backward pass
        arrived = _travelled(joined, sent, received, self._group)
        made = self._computed(arrived, counts[:, mine].tolist(), called[mine])
        back = _travelled(made, received, sent, self._group)
        lost = [
            leaf_of(parameter)
            for number, expert in enumerate(self._experts)
            if called[number] and not mine.start <= number < mine.stop
            for parameter in expert.parameters()
        ]
        back = _Used.apply(back, *lost) if torch.is_grad_enabled() else back  # type: ignore[no-untyped-call]
        pieces = deque(torch.split(back, [len(each) for each in flat]))
        of = {id(each): pieces.popleft() for each in flat}
        return [of[id(each)] for _, each in calls], back

    def _agreed(self, calls: Sequence[tuple[int, Tensor]], rows: list[list[Tensor]], some: Tensor) -> Tensor:
        """For each rank and expert: rows, calls, how many dimensions rows have, and these; the same on all ranks."""
        shapes = {tuple(each.shape[1:]) for _, each in calls}
        own = torch.zeros(len(rows), 3 + DIMENSIONS, dtype=torch.long)
        for number, inputs in enumerate(rows):
            own[number, 0], own[number, 1] = sum(map(len, inputs)), len(inputs)
            if inputs:
                shape = inputs[0].shape[1:]
                own[number, 2] = len(shape)
                own[number, 3 : 3 + len(shape)] = torch.tensor(shape)
        if len(shapes) > 1:
            own[:, 2] = -1
        table: Tensor = parts_of_all(own.to(some.device), self._group).cpu()
        forms = table[:, :, 2:][table[:, :, 1] > 0]
        if len(forms) and ((forms != forms[0]).any() or (forms[:, 0] < 0).any()):
            raise ValueError(
                f"the experts of {self._name} are called with rows of different shapes, on this rank {sorted(shapes)}, "
                "but under expert parallel rows of all ranks are joined; give experts tokens, (tokens, features)"
            )
        return table

    def _computed(self, arrived: Tensor, counts: list[list[int]], called: list[int]) -> Tensor:
        """What own experts make of the rows of all ranks, in the order in which they came."""
        pieces = iter(torch.split(arrived, [count for rank in counts for count in rank]))
        inputs = [[next(pieces) for _ in range(self._each)] for _ in counts]
        first = self._group.rank() * self._each
        made: list[list[Tensor]] = [[] for _ in counts]
        for own in range(self._each):
            rows = torch.cat([rank[own] for rank in inputs])
            if called[own]:
                rows = self._of_expert(self._experts[first + own], rows)
            for rank, piece in zip(made, torch.split(rows, [rank[own] for rank in counts]), strict=True):
                rank.append(piece)
        shaped = [each for rank in made for each in rank if len(each)]
        if not shaped:
            like = self._zeros(arrived[:0])
            return like.requires_grad_(torch.is_grad_enabled())
        return torch.cat(shaped)

    def _of_expert(self, expert: nn.Module, rows: Tensor) -> Tensor:
        tables = [(part._parameters, own) for part in expert.modules() for own in part._parameters]
        before = [(table, own, table[own]) for table, own in tables]
        for table, own, kept in before:
            if kept is not None:
                leaf = leaf_of(kept)
                table[own] = leaf if self._share == 1 else counted(leaf, self._share)  # type: ignore[assignment]
        try:
            made: Tensor = expert.forward(rows)
        finally:
            for table, own, kept in before:
                table[own] = kept
        return made


# ---------------------------------------------------------------- the passes


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
            self.given.append((part, result, _versions(result), _random_state()))
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
            _set_random_state(random)
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
def _undone(owner: nn.Module, others: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards the random state, the owner's attributes and buffers are as before; buffers of what it called stay."""
    random = _random_state()
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
    _set_random_state(random)


def _copied(value: Any) -> Any:
    """The arguments, which the first pass may change in place."""
    return tree_map_only(Tensor, lambda each: each.clone(), value)


def _versions(value: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _random_state() -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), on_device


def _set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


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


class _Attach(Function):
    """A tensor, whose backward also reaches another one, with zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, attached: Tensor) -> Tensor:
        ctx.like = attached.shape, attached.dtype, attached.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shape, dtype, device = ctx.like
        return gradient, torch.zeros(shape, dtype=dtype, device=device)


def _attached(output: Any, attached: Tensor) -> Any:
    """The output, through which every rank's backward comes by what it computed for others."""
    leaves, form = tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and attached.requires_grad:
            if isinstance(leaf, Divided):
                leaves[place] = Divided(_Attach.apply(leaf.own, attached), leaf.cuts)  # type: ignore[no-untyped-call]
            else:
                leaves[place] = _Attach.apply(leaf, attached)  # type: ignore[no-untyped-call]
            break
    return tree_unflatten(leaves, form)
