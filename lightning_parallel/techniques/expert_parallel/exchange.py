"""Stacked experts over ranks: each token is sent to the ranks of the experts that it chose, and the results come back.

Of `experts(tokens, indices, weights)` there is one row per pair of a token and an expert, sorted by expert. Two experts
on two ranks, where rank 0 has three tokens that choose experts 1, 0 and 1:

    rank 0 sends   t1 | t0, t2        one row to itself, two to rank 1
    rank 1 makes   e1(t0), e1(t2)     by the user's module, with the weights of its own expert
    rank 0 gets    e0(t1) | e1(t0), e1(t2)   and adds them up by token

Both ways are one all_to_all, each the gradient of the other. No rank ever has the weights of all experts.

Source: D. Lepikhin et al., GShard, ICLR 2021.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.by_elements import counted, entered, joined, part
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.rows import all_to_all
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, own_of, settle
from lightning_parallel.techniques.expert_parallel.own_experts import OwnExperts
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.redirect import Forward

EQUAL = 0.02
"""How far results may differ where both ways compute the same, as a part of the largest: rounding is far below."""

ENOUGH = 16
"""How many rows show whether the result of one depends on others."""

FORM = (
    "is not called as experts(tokens, indices, weights), of shapes (tokens, features), (tokens, k) and (tokens, k), "
    "with a result of shape (tokens, features)"
)
REMEDY = "write it so, or leave ExpertParallel out and shard its weights with Zero"


class Exchange:
    """Replaces the forward of one module of stacked experts.

    Args:
        module: this rank keeps the rows of its own experts of each stacked parameter.
        number: of this module among `names`.
        names: the FQN of all modules of experts, for errors; the same on all ranks.
        count: the number of experts on all ranks.
        ranks: those that hold different experts.
        alike: tensor-parallel ranks, which share out tokens that they have alike; None where there are none.
    """

    def __init__(
        self, module: nn.Module, number: int, names: Sequence[str], count: int, ranks: Ranks, alike: Ranks | None
    ) -> None:
        self._module, self._number, self._names, self._name = module, number, names, names[number]
        self._count, self._ranks, self._alike = count, ranks, alike
        group = self._group = ranks.group
        self._own, self._first = count // group.size(), group.rank() * (count // group.size())
        tables: list[dict[str, Any]] = [vars(each)["_parameters"] for each in module.modules()]
        self._slots = [(table, key) for table in tables for key, parameter in table.items() if parameter is not None]
        self._checked = False

    def wrap(self, forward: Forward) -> Forward:
        """Returns the forward that replaces the module's own."""
        signature = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    f"a transform of torch.func, such as torch.func.grad, calls {self._name}, of which each rank has "
                    "some experts; transforms know nothing of what ranks send each other: use torch.autograd.grad, "
                    "with torch.func.functional_call where weights are given, or leave out ExpertParallel"
                )
            bound = signature.bind(*args, **kwargs).arguments
            hidden, index, weights = self._names_of(bound)
            leading = bound[hidden].dim() - 2  # dimensions of the batch beside that of rows, each of size 1 here

            def experts(rows: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
                given = {hidden: rows, index: chosen, weights: weight}
                given = {key: value[(None,) * leading] for key, value in given.items()}
                made: Tensor = forward(**bound | given)
                if made.shape[:-1] != given[hidden].shape[:-1]:
                    raise ValueError(f"{self._name} {FORM}; {REMEDY}")
                return made.reshape(-1, made.shape[-1])

            return self._with_own_tokens(experts, bound[hidden], bound[index], bound[weights])

        return cast(Any, torch.compiler.disable)(run)  # type: ignore[no-any-return]  # data decide how much is sent

    def _names_of(self, bound: Mapping[str, Any]) -> tuple[str, str, str]:
        """The names of the arguments that are tokens, indices and weights."""
        tensors = {key: value for key, value in bound.items() if isinstance(value, Tensor) and value.dim() > 1}
        numbers = [key for key, value in tensors.items() if not value.is_floating_point() and value.dtype != torch.bool]
        if len(tensors) == 3 and len(numbers) == 1:
            hidden, weights = (key for key in tensors if key not in numbers)
            chosen = tensors[numbers[0]].shape
            if tensors[weights].shape == chosen and tensors[hidden].shape[:-1] == chosen[:-1]:
                return hidden, numbers[0], weights
        raise ValueError(f"{self._name} {FORM}; {REMEDY}")

    def _with_own_tokens(
        self, experts: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """What a call returns: a rank's own tokens travel, its part of what is divided, its share of what is alike.

        Args:
            experts: see `_travel`.
            hidden: (..., features), plain or divided.
            index: (..., k).
            weights: (..., k).
        """
        by_tokens = is_divided(hidden) and all(dim < hidden.dim() - 1 for dim in hidden.cuts)
        cuts = hidden.cuts if is_divided(hidden) and by_tokens else {}
        hidden, index, weights = (own_of(each, cuts) for each in (hidden, index, weights))
        leading = hidden.shape[:-1]
        hidden, index, weights = (each.reshape(-1, each.shape[-1]) for each in (hidden, index, weights))
        ranks = {id(elements.ranks): elements.ranks for elements in cuts.values()}.values()
        shares = None
        if self._alike is not None and not any(each.name == self._alike.name for each in ranks):
            shares = self._alike.chunks(len(hidden))
            hidden, index, weights = (part(each, 0, shares) for each in (hidden, index, weights))
        # Of the ranks that divide the tokens, those whose gradients are averaged: each computes a summand.
        summands = prod(each.count for each in ranks if each.averages)
        made = self._travel(experts, hidden, index, weights, summands)
        made = made if shares is None else joined(made, 0, shares)
        made = made.reshape(*leading, made.shape[-1])
        return Divided(made, cuts) if cuts else made

    def _travel(
        self, experts: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor, summands: int
    ) -> Tensor:
        """Sums for each own token what its experts made of it, (tokens, features). Collective over the group.

        Args:
            experts: own experts, of rows: (rows, features), (rows, 1), (rows, 1) -> (rows, features).
            hidden: own tokens, (tokens, features).
            index: the experts that each chose, (tokens, k).
            weights: of these, (tokens, k).
            summands: over how many ranks of those whose gradients are averaged the tokens are divided.

        Raises:
            RuntimeError: another rank calls another module; on both.
        """
        k, ranks, flat = index.shape[1], self._group.size(), index.detach().reshape(-1)
        chosen = flat.masked_fill((flat < 0) | (flat >= self._count), self._count)  # some routers say "none" so
        order = chosen.argsort(stable=True)  # (tokens * k,): pairs of a token and an expert, by expert
        # Rows that go to each expert, (ranks, experts there).
        counts = torch.bincount(chosen, minlength=self._count + 1)[: self._count].view(ranks, self._own)
        order = order[: int(counts.sum())]  # without those of no expert
        # They are told with this module's number, and so are those that come, (ranks, own experts).
        said = all_to_all(F.pad(counts, (0, 1), value=self._number), [1] * ranks, [1] * ranks, self._group)
        coming, numbers = said[:, :-1], said[:, -1].tolist()
        if len(set(numbers)) > 1:
            calls = zip(dist.get_process_group_ranks(self._group), numbers, strict=True)
            raise RuntimeError(
                "; ".join(f"rank {rank} calls {self._names[number]}" for rank, number in calls)
                + ": under expert parallel tokens travel in each call, so all ranks call the same experts equally "
                "often; call them whatever a rank's own samples are, with no tokens if it has none"
            )
        sent, received = counts.sum(1).tolist(), coming.sum(1).tolist()
        rows = all_to_all(hidden[order // k], sent, received, self._group)  # (rows, features), by rank and expert
        weight = all_to_all(weights.reshape(-1, 1)[order], sent, received, self._group)
        # The expert of each row that came.
        expert = torch.arange(self._own, device=flat.device).repeat(ranks).repeat_interleave(coming.reshape(-1))
        own = (expert + self._first)[:, None]
        with self._own_weights(summands):
            if not self._checked:
                self._checked = True
                self._require_independent(experts, rows, own, weight)
            if len(rows):
                made = experts(rows, own, weight)
            else:  # of one row of zeros, so that every parameter has a gradient
                none, weight = (F.pad(each, (0, 0, 0, 1)) for each in (rows, weight))
                made = experts(none, own.new_full((1, 1), self._first), weight)[:0]
        back = all_to_all(made, received, sent, self._group)
        return back.new_zeros(len(hidden), back.shape[1]).index_add(0, order // k, back)

    @contextmanager
    def _own_weights(self, summands: int) -> Iterator[None]:
        """Inside, the module has the weights of own experts, and what all experts share.

        Args:
            summands: see `_travel`.
        """
        settle(self._ranks.viewed)
        before = [(table, key, table[key]) for table, key in self._slots]
        for table, key, kept in before:
            if isinstance(kept, DTensor):
                own = leaf_of(kept)
                table[key] = OwnExperts(own if summands == 1 else counted(own, summands), self._first, self._count)
            else:
                whole = kept if self._alike is None else entered(kept, self._alike)
                table[key] = whole if summands == 1 else counted(whole, summands)
        try:
            yield
        finally:
            for table, key, kept in before:
                table[key] = kept

    # ---------------------------------------------------------------- the first call

    @torch.no_grad()
    def _require_independent(self, experts: Callable[..., Tensor], rows: Tensor, index: Tensor, weight: Tensor) -> None:
        """Measures whether each pair of a token and an expert is computed by itself. Collective over the group.

        Raises:
            ValueError: on every rank, where one found another result for some rows of a call than for all of them.
        """
        # Further rows, where those that came are too few to show anything.
        missing, width = max(0, ENOUGH - len(rows)), rows.shape[1]
        further = torch.arange(missing * width, device=rows.device).view(missing, width)
        chosen = torch.arange(missing, device=rows.device)[:, None]
        rows = torch.cat([rows, further.to(rows.dtype).sin()])
        index = torch.cat([index, chosen % self._own + self._first])
        weight = torch.cat([weight, (chosen.to(weight.dtype).cos() + 2) / 3])
        halves = slice(0, len(rows) // 2), slice(len(rows) // 2, None)
        training = [each for each in self._module.modules() if each.training]
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        for each in training:  # dropout would draw other numbers for some rows than for all
            each.training = False
        try:
            with torch.random.fork_rng([rows.device] if rows.is_cuda else []):
                made = experts(rows, index, weight)
                alone = _close(made, torch.cat([experts(rows[k], index[k], weight[k]) for k in halves]))
                if alone and self._own > 1:  # and two experts at once
                    others = (index - self._first + 1) % self._own + self._first
                    both = experts(rows, torch.cat([index, others], 1), torch.cat([weight, weight / 2], 1))
                    alone = _close(both, made + experts(rows, others, weight / 2))
            reason = ""
        except Exception as error:  # a form that it does not take, as where it takes a mask
            alone, reason = False, f" ({type(error).__name__}: {error})"
        finally:
            for each in training:
                each.training = True
            for buffer, value in buffers:
                buffer.copy_(value)
        failures = torch.tensor(float(not alone), device=rows.device)
        dist.all_reduce(failures, group=self._group)
        if failures.item():
            raise ValueError(
                f"what {self._name} returns is not, for each token, the sum of what its experts make of this token "
                f"alone, or it {FORM}{reason}; its tokens are on several ranks under expert parallel: {REMEDY}"
            )


def _close(expected: Tensor, found: Tensor) -> bool:
    return bool((found - expected).abs().max() <= EQUAL * expected.abs().max())
