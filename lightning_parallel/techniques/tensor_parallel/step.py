"""A step under tensor parallel: what each rank has a summand of is summed, what it has a part of is returned whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.collectives.functional import by_kind
from lightning_parallel.techniques.step import Step, StepFn, WrappedStep
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
        self._learned: set[nn.Parameter] = set()
        """Those that learned from a batch since summands were added up: code may have frozen them, on all ranks."""
        self._unsynced = False

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
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
        self._learned.update(parameter for parameter in partial if parameter.requires_grad)
        if not self.synced:
            self._unsummed.update(parameter for parameter in partial if parameter.grad is not None)
            self._restore([parameter for parameter in partial if parameter.grad is None])
            return
        self._sum([parameter for parameter in partial if parameter in self._learned])
        self._unsummed.clear()
        self._learned.clear()
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
        """One message of each dtype: all gradients, and for each whether this rank has it."""
        for same in by_kind(parameters):
            gradients = [parameter.grad for parameter in same]
            unused = [place for place, gradient in enumerate(gradients) if gradient is None]
            for place in unused:
                gradients[place] = torch.zeros_like(same[place])
            own = [local(gradient) for gradient in gradients if gradient is not None]
            flags = own[0].new_ones(len(own))
            if unused:
                flags[unused] = 0
            message = torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in (*own, flags)])
            dist.all_reduce(message, group=self._partition.ranks.group)
            *sums, flags = torch.split(message, [each.numel() for each in (*own, flags)])
            torch._foreach_copy_(
                own, [s if s.shape == o.shape else s.view_as(o) for s, o in zip(sums, own, strict=True)]
            )
            for place in unused:
                if flags[place] != 0:
                    same[place].grad = gradients[place]
