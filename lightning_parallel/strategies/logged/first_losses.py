"""The losses of the first step: whether ranks that read different samples train by them as one device does."""

from __future__ import annotations

import logging

from torch import Tensor

from lightning_parallel.mesh import rank_in_world
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.techniques.tools.meeting import Uses, meeting_of, uses_of
from lightning_parallel.techniques.tools.reach import adds_mean_of_selection
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import batch_size

log = logging.getLogger(__name__)


class FirstLosses:
    """Looks at each loss of the first step on rank 0, before its backward, and says once what is not as on one device.

    Args:
        ranks: how many read different samples.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._seen = self._over = self._told_uses = self._told_meeting = self._told_unnoted = False
        #: whether the step added up what it had multiplied by weights that add up to one
        self.weighs = False

    def look(self, loss: Tensor, means: Means) -> None:
        """At a loss of a step; the gradients of its means are scaled by now. That of a pipeline has no graph to see."""
        if self._over or rank_in_world() or means.batch is None:
            return
        self._seen = True
        try:
            self._tell(loss, means, batch_size(means.batch) or 1)
            self._tell_unnoted(loss, means)
        except Exception as error:  # a graph may hold anything, and a run must not end for a warning
            log.debug("The graph of the loss was not looked at: %r", error)

    def end(self) -> None:
        """The step is over."""
        self._over = self._seen

    def _tell(self, loss: Tensor, means: Means, samples: int) -> None:
        meeting = None if self._told_meeting else meeting_of(loss, samples)
        if meeting is not None:
            self._told_meeting = True
            warn(
                f"Samples of a batch meet each other in the step: {meeting.name} makes a tensor of shape "
                f"{meeting.shape} of {samples} samples, as a contrastive loss does. On {self._ranks} ranks that read "
                f"different samples each one's meet only its own, where one device would compare all. Compare them in "
                f"a module that the plan names, ParallelPlan(whole_batch='contrast'), which gets those of all ranks; "
                f"or gather them, z = self.all_gather(z, sync_grads=True).flatten(0, 1)"
            )
        if self._told_uses or meeting is not None:
            return
        what = _said_of(uses_of(loss, [mean.edge for mean in means.all], samples), means)
        if what is not None:
            self._told_uses = True
            log.info(
                "The loss is no sum of means over samples: %s. Its gradient is the mean of those on %d ranks, each of "
                "means over its own samples; one device would compute it from the means over all of them. A module "
                "that the plan names, ParallelPlan(whole_batch='balance_loss'), gets the samples of all ranks",
                what,
                self._ranks,
            )

    def _tell_unnoted(self, loss: Tensor, means: Means) -> None:
        unnoted = adds_mean_of_selection(loss.grad_fn, means.edges)
        if self._told_unnoted or not (unnoted or self.weighs):
            return
        self._told_unnoted = True
        what = (
            "torch.mean, or a mean along a dimension, of what is selected; write values[mask].mean()"
            if unnoted
            else "weights that are divided by their sum; write (losses * weights).sum() / weights.sum()"
        )
        warn(
            f"The loss has a mean that counts by samples, and not by what it is over, as that of one device would: "
            f"{what}. Until then its gradient is the mean of those on {self._ranks} ranks"
        )


def _said_of(uses: Uses, means: Means) -> str | None:
    """The use that a loss makes of means; learned weights make no difference while ranks count alike."""
    if uses.bent is not None:
        return f"there is {uses.bent} of a mean in it, as in the balance loss of a router or in exp() of a loss"
    factors = [means.all[number].scale.factor for number in uses.weighed]
    if any(factor is not None and abs(float(factor) - 1) > 1e-6 for factor in factors):
        return "weights of losses are learned in it, and ranks have different numbers of targets"
    return None
