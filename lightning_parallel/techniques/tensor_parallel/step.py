"""A step under tensor parallel: what each rank has a summand of is summed, what it has a part of is returned whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.techniques.step import Run, Step, WrappedStep
from lightning_parallel.techniques.tensor_parallel.partition import Partition
from lightning_parallel.techniques.tools.shards import local

T = TypeVar("T")


class TensorParallelStep(WrappedStep):
    """Runs a step on divided modules.

    Each rank has a summand of the gradient of parameters that are whole but met divided tensors, such as norms between
    regions while the sequence is split. Summands are added up in one message, after all other reductions.

    Args:
        inner: the step to wrap.
        partition: what is divided.
    """

    def __init__(self, inner: Step, partition: Partition) -> None:
        super().__init__(inner)
        self._partition, self._parameters = partition, partition.parameters()  # as they are kept between steps
        self._set_aside: dict[nn.Parameter, Tensor] = {}
        self._unsummed: set[nn.Parameter] = set()
        self._unsynced = False

    def forward(self, run: Run[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        if not self._unsynced:  # else gradients that nobody has averaged yet are sums already
            self._partition.begin()
        return self.inner.forward(run, *args, **kwargs)

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._put_aside()
        with self._partition.shown():  # for what is recomputed
            self.inner.backward(run)
        self._settle()
        self._unsynced = not self.synced

    @property
    def findings(self) -> frozenset[str]:
        """See `Step.findings`: a summand is added up at once in the first batch that meets it, then once a step."""
        return self.inner.findings | self._partition.met

    def recall(self, findings: frozenset[str]) -> None:
        """See `Step.recall`."""
        self.inner.recall(findings)
        self._partition.meet(findings)

    # ---------------------------------------------------------------- summands

    def _partial(self) -> list[nn.Parameter]:
        return [self._parameters[name] for name in self._partition.partial if name in self._parameters]

    def _put_aside(self) -> None:
        """Gradients that are sums already must not be summed again."""
        for parameter in self._partial():
            if parameter.grad is None:
                self._set_aside.pop(parameter, None)  # it was zeroed
            elif parameter not in self._unsummed:
                self._set_aside[parameter] = parameter.grad.clone()
                parameter.grad = None

    @torch.no_grad()
    def _settle(self) -> None:
        partial = self._partial()
        if not self.synced:
            self._unsummed.update(parameter for parameter in partial if parameter.grad is not None)
            self._restore([parameter for parameter in partial if parameter.grad is None])
            return
        self._sum([parameter for parameter in partial if parameter.requires_grad])
        self._unsummed.clear()
        if self._set_aside:
            self._restore(partial)

    def _restore(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            before = self._set_aside.pop(parameter, None)
            if before is not None and parameter.grad is not None:
                local(parameter.grad).add_(local(before))
            elif before is not None:
                parameter.grad = before

    def _sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """One message: all gradients, and for each whether this rank has it."""
        for pairs in _by_dtype(parameters):
            same, kept = zip(*pairs, strict=True)
            unused = [index for index, parameter in enumerate(same) if parameter.grad is None]
            flags = torch.ones(len(same), dtype=kept[0].dtype, device=kept[0].device)
            if unused:
                flags[unused] = 0
            pieces = [torch.zeros_like(k) if i in unused else k for i, k in enumerate(kept)]
            message = torch.cat([*(piece.reshape(-1) for piece in pieces), flags])
            dist.all_reduce(message, group=self._partition.ranks.group)
            sizes = [piece.numel() for piece in pieces]
            *sums, flags = torch.split(message, [*sizes, len(same)])
            totals = [total.view_as(own) for total, own in zip(sums, kept, strict=True)]
            used = [index for index in range(len(same)) if index not in unused]
            if used:
                torch._foreach_copy_([kept[index] for index in used], [totals[index] for index in used])
            for index in unused:
                if flags[index] != 0:
                    gradient = torch.zeros_like(same[index])
                    local(gradient).copy_(totals[index])
                    same[index].grad = gradient


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[tuple[nn.Parameter, Tensor]]]:
    """Parameters whose gradients one message takes, with what this rank has of these, or something like it."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[nn.Parameter, Tensor]]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        own = local(parameter.detach() if gradient is None else gradient)
        kinds.setdefault((own.dtype, own.device), []).append((parameter, own))
    return list(kinds.values())
