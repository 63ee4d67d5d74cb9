"""Losses and gradients that are nan or infinite: no optimizer steps by them, and the run stops, unless told otherwise.

Megatron-LM and torchtitan stop before such a step too; Lightning trains on, and saves what comes of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.collectives.functional import by_kind, within_reach
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.ranks.agreement import gather_objects

log = logging.getLogger(__name__)

Policy = Literal["stop", "skip", "continue"]
LOSS = "the loss"
LEAST_SCALE = 1.0
"""At this scale of a loss, or less, it is not the scale that makes gradients overflow; DeepSpeed goes no lower."""


class NonFinite:
    """Looks at losses and gradients before each step of an optimizer, after what the user's hooks did to gradients.

    | policy     | a loss or a gradient is not finite on some rank                          |
    |------------|--------------------------------------------------------------------------|
    | "stop"     | FloatingPointError on all ranks, which names step, rank and parameter    |
    | "skip"     | a warning that names them; gradients are dropped, the optimizer moves on |
    | "continue" | nobody looks                                                             |

    A scaler of gradients (precision="16-mixed") leaves such steps out by itself, and lowers its scale: nobody looks,
    until it scales no more (`LEAST_SCALE`).

    Args:
        policy: one of these.
        module: names parameters.
        divided: whether ranks have different gradients; where all have the same, they decide alike without a message.
        group: all ranks, for small messages of the host.
        world: all ranks, for messages of the device.
    """

    def __init__(
        self,
        policy: Policy,
        module: LightningModule,
        divided: bool,
        group: dist.ProcessGroup,
        world: dist.ProcessGroup,
    ) -> None:
        self._policy, self._module, self._group, self._world = policy, module, group, world
        self._agrees = group.size() > 1 and (divided or policy == "skip")
        self._losses: Tensor | None = None

    def seen(self, loss: Tensor, scaled: Tensor) -> Tensor:
        """What goes backward for a loss: where it is not finite, no gradient of it will be, whatever its graph makes.

        Args:
            loss: as the step returned it.
            scaled: what a plugin made of it.
        """
        if self._policy == "continue" or not loss.requires_grad:
            return scaled
        value = loss.detach()
        self._losses = value if self._losses is None else self._losses + value
        return scaled * (value - value + 1)  # 1 or nan, without a device having to wait, or a hook to be called

    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], scale: float | None) -> None:
        """Looks at the gradients, reduced and clipped, by which the optimizer is about to step.

        Args:
            optimizer: that steps.
            parameters: its, as ranks have them.
            scale: by which a scaler multiplied the loss; it will leave the step out, and lower its scale. None: none.

        Raises:
            FloatingPointError: on all ranks; something is not finite, and the policy is to stop.
        """
        losses, self._losses = self._losses, None
        if self._policy == "continue" or (scale is not None and scale > LEAST_SCALE):
            return
        held = [parameter for parameter in parameters if parameter.grad is not None]
        if self._is_fine(_lengths(_values(held))):
            return
        said = gather_objects(self._finding(losses, held), self._group)
        if any(said):  # else norms were too large for their dtype, and gradients were not
            self._decide(optimizer, said)

    def _is_fine(self, lengths: Tensor) -> bool:
        if not self._agrees:
            return math.isfinite(lengths.item())
        fine = within_reach(lengths.isfinite().int(), self._world)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=self._world)
        return bool(fine)

    def _finding(self, losses: Tensor | None, held: Sequence[Any]) -> str:
        if losses is not None and not losses.isfinite():
            return f"{LOSS} is {losses.item()}"
        bad = [parameter for parameter, value in zip(held, _values(held), strict=True) if not value.isfinite().all()]
        if not bad:
            return ""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        first = names.get(bad[0], f"a parameter of shape {list(bad[0].shape)}")
        others = f", the first of {len(bad)}," if len(bad) > 1 else ""
        return f"the gradient of {first}{others} is not finite"

    def _decide(self, optimizer: Optimizer, said: Sequence[str]) -> None:
        causes = [finding for finding in said if finding.startswith(LOSS)] or [finding for finding in said if finding]
        told = "; ".join(f"rank {rank}: {finding}" for rank, finding in enumerate(said) if finding in causes)
        step = f"in step {self._module.trainer.global_step}, {told}"
        if self._policy == "stop":
            raise FloatingPointError(
                f"{step}. The optimizer has not stepped. Trainer(detect_anomaly=True) names the operation that made "
                "it; nonfinite='skip', an argument of the strategy, leaves such steps out, 'continue' trains on"
            )
        if self._group.rank() == 0:
            log.warning("%s; the step is left out, for nonfinite='skip'", step)
        optimizer.zero_grad(set_to_none=True)


def _lengths(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of norms, (): finite if gradients are, unless a norm is too large for its dtype."""
    totals = [torch.stack(torch._foreach_norm(same)).sum() for same in by_kind(gradients)] or [torch.zeros(())]
    total, *others = totals
    for other in others:
        total = total + other.to(total.device)
    return total


def _values(held: Sequence[Any]) -> list[Tensor]:
    """What a rank has of parameters' gradients, of sparse ones the elements that are there."""
    found = [parameter.grad for parameter in held]
    # not `to_local`, which costs ten calls each, in every step, for a history that gradients do not have
    gradients = [each._local_tensor if isinstance(each, DTensor) else each for each in found]
    return [each.coalesce().values() if each.is_sparse else each for each in gradients]
