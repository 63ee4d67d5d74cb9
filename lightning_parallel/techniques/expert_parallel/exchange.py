"""Stacked experts over ranks: tokens are sent to the ranks of the experts that they chose, and results are sent back.

A call `experts(tokens, indices, weights)` becomes one row per pair of a token and an expert, sorted by expert. Example:
two experts on two ranks, where rank 0 has three tokens, which choose experts 1, 0 and 1:

    rank 0 sends      t1 | t0, t2                one row to itself, two to rank 1
    rank 1 computes   e1(t0), e1(t2)             with the user's module and the weights of its local expert
    rank 0 receives   e0(t1) | e1(t0), e1(t2)    and adds them up by token

Each direction is one all_to_all, whose backward is the other. No rank ever has the weights of all experts.

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

from lightning_parallel.collectives.conjugate_collectives import counted, entered, joined, part
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.rows import all_to_all
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, local_elements_of, write_back_changes
from lightning_parallel.techniques.expert_parallel.local_experts import LocalExperts
from lightning_parallel.techniques.tools.leaves import autograd_leaf
from lightning_parallel.techniques.tools.redirect import Forward

MAX_DIFFERENCE = 0.02
"""Largest difference of equal results, relative to the largest value; rounding errors are far below it."""

CHECKED_ROWS = 16
"""Number of rows with which the first call tests whether the result of a row depends on other rows."""

FORM = (
    "is not called as experts(tokens, indices, weights), of shapes (tokens, features), (tokens, k) and (tokens, k), "
    "with a result of shape (tokens, features)"
)
REMEDY = "write it that way, or leave out ExpertParallel and shard its weights with Zero"


class Exchange:
    """Replaces the forward of one module of stacked experts by one that exchanges tokens between ranks.

    Args:
        module: the module, whose stacked parameters have the rows of this rank's experts.
        number: index of this module in `names`.
        names: FQNs of all modules of experts, for error messages; the same on all ranks.
        count: the number of experts on all ranks.
        ranks: the ranks that hold different experts.
        alike: the tensor-parallel ranks, among which tokens that are replicated on them are split; None without them.
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
        """Return the forward that replaces the module's `forward`."""
        signature = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    f"{self._name} is called in a transform of torch.func, such as torch.func.grad, but transforms "
                    "cannot follow tokens that ranks exchange; use torch.autograd.grad, with "
                    "torch.func.functional_call to pass weights, or leave out ExpertParallel"
                )
            bound = signature.bind(*args, **kwargs).arguments
            hidden, index, weights = self._names_of(bound)
            leading = bound[hidden].dim() - 2  # the module gets rows with as many leading dimensions, each of size 1

            def experts(rows: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
                arguments = {hidden: rows, index: chosen, weights: weight}
                arguments = {key: value[(None,) * leading] for key, value in arguments.items()}
                output: Tensor = forward(**bound | arguments)
                if output.shape[:-1] != arguments[hidden].shape[:-1]:
                    raise ValueError(f"{self._name} {FORM}; {REMEDY}")
                return output.reshape(-1, output.shape[-1])

            return self._with_local_tokens(experts, bound[hidden], bound[index], bound[weights])

        return cast(Any, torch.compiler.disable)(run)  # type: ignore[no-any-return]  # message sizes depend on data

    def _names_of(self, bound: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the names of the arguments that are tokens, indices and weights, found by dtypes and shapes."""
        tensors = {key: value for key, value in bound.items() if isinstance(value, Tensor) and value.dim() > 1}
        numbers = [key for key, value in tensors.items() if not value.is_floating_point() and value.dtype != torch.bool]
        if len(tensors) == 3 and len(numbers) == 1:
            hidden, weights = (key for key in tensors if key not in numbers)
            chosen = tensors[numbers[0]].shape
            if tensors[weights].shape == chosen and tensors[hidden].shape[:-1] == chosen[:-1]:
                return hidden, numbers[0], weights
        raise ValueError(f"{self._name} {FORM}; {REMEDY}")

    def _with_local_tokens(
        self, experts: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Exchange local tokens: all of a plain tensor, a local shard, or a chunk of what tp ranks have replicated.

        Args:
            experts: see `_exchange_tokens`.
            hidden: (..., features), plain or `Divided`.
            index: (..., k).
            weights: (..., k).
        """
        cuts = hidden.cuts if is_divided(hidden) and hidden.dim() - 1 not in hidden.cuts else {}
        hidden, index, weights = (local_elements_of(each, cuts) for each in (hidden, index, weights))
        leading = hidden.shape[:-1]
        hidden, index, weights = (each.reshape(-1, each.shape[-1]) for each in (hidden, index, weights))
        ranks = {id(elements.ranks): elements.ranks for elements in cuts.values()}.values()
        shares = None
        if self._alike is not None and not any(each.name == self._alike.name for each in ranks):
            shares = self._alike.chunks(len(hidden))
            hidden, index, weights = (part(each, 0, shares) for each in (hidden, index, weights))
        # Where ranks shard the tokens and average gradients (cp), a partial gradient must count `summands` times.
        summands = prod(each.count for each in ranks if each.averages)
        output = self._exchange_tokens(experts, hidden, index, weights, summands)
        output = output if shares is None else joined(output, 0, shares)
        output = output.reshape(*leading, output.shape[-1])
        return Divided(output, cuts) if cuts else output

    def _exchange_tokens(
        self, experts: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor, summands: int
    ) -> Tensor:
        """Return for each local token the sum of its experts' results, (tokens, features). Collective over the group.

        Args:
            experts: computes the local experts: (rows, features), (rows, 1), (rows, 1) -> (rows, features).
            hidden: local tokens, (tokens, features).
            index: the experts that each token chose, (tokens, k).
            weights: weights of these experts, (tokens, k).
            summands: number of ranks that shard the tokens and whose gradients are averaged.

        Raises:
            RuntimeError: on all ranks, if they call different modules.
        """
        k, ranks, flat = index.shape[1], self._group.size(), index.detach().reshape(-1)
        chosen = flat.masked_fill((flat < 0) | (flat >= self._count), self._count)  # "no expert" of some routers
        order = chosen.argsort(stable=True)  # (tokens * k,): pairs of a token and an expert, sorted by expert
        # Number of rows for each expert, (ranks, experts per rank).
        counts = torch.bincount(chosen, minlength=self._count + 1)[: self._count].view(ranks, self._own)
        order = order[: int(counts.sum())]  # without the pairs that have no expert
        # Exchange the counts, with this module's number beside them, (ranks, experts per rank + 1).
        received_counts = all_to_all(F.pad(counts, (0, 1), value=self._number), [1] * ranks, [1] * ranks, self._group)
        incoming, numbers = received_counts[:, :-1], received_counts[:, -1].tolist()
        if len(set(numbers)) > 1:
            calls = zip(dist.get_process_group_ranks(self._group), numbers, strict=True)
            raise RuntimeError(
                "; ".join(f"rank {rank} calls {self._names[number]}" for rank, number in calls)
                + ": under expert parallel, ranks exchange tokens in each call, so all ranks must call the same "
                "experts equally often; call them on every rank, with zero tokens if it has none"
            )
        sent, received = counts.sum(1).tolist(), incoming.sum(1).tolist()
        rows = all_to_all(hidden[order // k], sent, received, self._group)  # (rows, features), by source rank, expert
        weight = all_to_all(weights.reshape(-1, 1)[order], sent, received, self._group)  # (rows, 1)
        # The expert of each received row, counted on this rank and on all ranks.
        local_expert = torch.arange(self._own, device=flat.device).repeat(ranks).repeat_interleave(incoming.reshape(-1))
        expert = (local_expert + self._first)[:, None]
        with self._local_weights(summands):
            if not self._checked:
                self._checked = True
                self._require_independent(experts, rows, expert, weight)
            if len(rows):
                output = experts(rows, expert, weight)
            else:  # compute one row of zeros, so that every parameter gets a gradient
                zeros, weight = (F.pad(each, (0, 0, 0, 1)) for each in (rows, weight))
                output = experts(zeros, expert.new_full((1, 1), self._first), weight)[:0]
        results = all_to_all(output, received, sent, self._group)
        return results.new_zeros(len(hidden), results.shape[1]).index_add(0, order // k, results)

    @contextmanager
    def _local_weights(self, summands: int) -> Iterator[None]:
        """Inside, the module has the weights of the local experts, and the parameters that all experts share.

        Args:
            summands: see `_exchange_tokens`.
        """
        write_back_changes(self._ranks.viewed)
        before = [(table, key, table[key]) for table, key in self._slots]
        for table, key, stored in before:
            if isinstance(stored, DTensor):
                leaf = autograd_leaf(stored)
                table[key] = LocalExperts(leaf if summands == 1 else counted(leaf, summands), self._first, self._count)
            else:
                full = stored if self._alike is None else entered(stored, self._alike)
                table[key] = full if summands == 1 else counted(full, summands)
        try:
            yield
        finally:
            for table, key, stored in before:
                table[key] = stored

    # ---------------------------------------------------------------- the first call

    @torch.no_grad()
    def _require_independent(self, experts: Callable[..., Tensor], rows: Tensor, index: Tensor, weight: Tensor) -> None:
        """Check that each pair of a token and an expert is computed independently. Collective over the group.

        Raises:
            ValueError: on all ranks, if on one of them the result of a pair depends on other pairs of the call.
        """
        # Add rows if too few were received for a check.
        missing, width = max(0, CHECKED_ROWS - len(rows)), rows.shape[1]
        extra = torch.arange(missing * width, device=rows.device).view(missing, width)
        chosen = torch.arange(missing, device=rows.device)[:, None]
        rows = torch.cat([rows, extra.to(rows.dtype).sin()])
        index = torch.cat([index, chosen % self._own + self._first])
        weight = torch.cat([weight, (chosen.to(weight.dtype).cos() + 2) / 3])
        halves = slice(0, len(rows) // 2), slice(len(rows) // 2, None)
        training = [each for each in self._module.modules() if each.training]
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        for each in training:  # dropout would draw different numbers in batches of different sizes
            each.training = False
        try:
            with torch.random.fork_rng([rows.device] if rows.is_cuda else []):
                output = experts(rows, index, weight)
                is_independent = _close(output, torch.cat([experts(rows[k], index[k], weight[k]) for k in halves]))
                if is_independent and self._own > 1:  # also with two experts per row (k = 2)
                    others = (index - self._first + 1) % self._own + self._first
                    both = experts(rows, torch.cat([index, others], 1), torch.cat([weight, weight / 2], 1))
                    is_independent = _close(both, output + experts(rows, others, weight / 2))
            reason = ""
        except Exception as error:  # it expects arguments of another form, such as a mask
            is_independent, reason = False, f" ({type(error).__name__}: {error})"
        finally:
            for each in training:
                each.training = True
            for buffer, value in buffers:
                buffer.copy_(value)
        failures = torch.tensor(float(not is_independent), device=rows.device)
        dist.all_reduce(failures, group=self._group)
        if failures.item():
            raise ValueError(
                f"the output of {self._name} for a token is not the sum of its experts' outputs for this token alone, "
                f"or it {FORM}{reason}; expert parallel sends tokens to several ranks: {REMEDY}"
            )


def _close(expected: Tensor, found: Tensor) -> bool:
    return bool((found - expected).abs().max() <= MAX_DIFFERENCE * expected.abs().max())
