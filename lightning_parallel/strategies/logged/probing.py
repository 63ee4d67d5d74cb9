"""Measures in the first batch whether ranks that read different samples train with the loss of one device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.logged.step_log import StepLog, weighted_loss_value
from lightning_parallel.strategies.side_effects import restore_submodules, without_side_effects
from lightning_parallel.techniques.pipeline_parallel.probe import MOST, ConstantDraws, LossComparison, tolerance
from lightning_parallel.techniques.step import Silent, Step, StepFn
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.techniques.tools.microbatches import Dims, select
from lightning_parallel.techniques.tools.undone_writes import UndoneWrites
from lightning_parallel.techniques.tools.user_warnings import warn
from lightning_parallel.values import map_tensors

T = TypeVar("T")

log = logging.getLogger(__name__)


@contextmanager
def silent(module: LightningModule, run: Any, step: Step, device: torch.device) -> Iterator[UndoneWrites]:
    """Inside, calls of the user's step leave no side effects in logs, metrics, attributes, tensors and random states.

    Args:
        module: the user's.
        run: its `ObservedStep` or `MicrobatchStep`, which inside records nothing and undoes each call's writes.
        step: the techniques' step around it.
        device: the module's.

    Yields:
        The step's writes into tensors that existed before it.
    """
    tables = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    # `UndoneWrites` does not see BatchNorm's kernels write statistics: they do not tell PyTorch's dispatcher
    values = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    writes = UndoneWrites()

    def restore() -> None:
        writes.undo(step.gathered())
        for table, buffers in tables:
            table.update(buffers)
        for buffer, value in values:
            buffer.data.copy_(value)

    with restore_submodules(module), without_side_effects(module, device, reads=False):
        run.after_silent_call = restore
        try:
            with writes.entered():
                yield writes
        finally:
            run.after_silent_call = None


@dataclass(eq=False)
class MeasuredStep(Generic[T]):
    """Measures the loss of a few samples as one batch and as two, and warns if they differ. Runs for one batch.

    Before the batch each rank runs the step on its first samples. Collective over all ranks, as the step may be.

    Attributes:
        inner: the user's step, as wrapped by techniques.
        model: its dtypes determine the tolerance.
        samples: the lowest number of samples of any rank; at least 2.
        dims: batch dimensions of the batch's tensors, see `ParallelPlan.batch_dims`.
        silent: see `BatchContext`.
        step: the techniques' step around the user's.
        strategy: the `RankStrategy`; its `has_gathered` is whether the step gathers values of other ranks.
        log: weights the losses of all later training steps.
    """

    inner: StepFn[T]
    model: nn.Module
    samples: int
    dims: Dims
    silent: Silent
    step: Step
    strategy: Any
    log: StepLog

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Measure, warn on rank 0 if necessary, and run the step."""
        try:
            measured = self._measure(*args, **kwargs)
        except Exception as error:  # the step may be unable to compute a loss of so few samples
            log.debug("The loss of a few samples was not measured: %r", error)
            measured = None
        if measured is not None and not measured.fits and not self.strategy.has_gathered:
            warn(
                f"On rank 0 {measured}. Ranks are weighted by samples, as in DDP, so the loss is not that of one "
                "device: samples interact (a contrastive loss, BatchNorm), or a mean is not over samples or targets. "
                "Write a mean over a mask as lightning_parallel.mean(total, count). Compare samples in a module named "
                "in ParallelPlan(whole_batch='contrast'), or after self.all_gather(z, sync_grads=True). For BatchNorm, "
                "use Trainer(sync_batchnorm=True)"
            )
        return self.inner(*args, **kwargs)

    def _measure(self, batch: Any, *rest: Any, **kwargs: Any) -> LossComparison | None:
        first = slice(0, min(self.samples // 2, MOST[0]))
        second = slice(first.stop, min(self.samples, first.stop + MOST[1]))
        losses, means, draws = list[Tensor](), list[Means](), RandomState.now()
        with self.silent(), torch.compiler.set_stance("force_eager"), ConstantDraws():  # type: ignore[no-untyped-call]
            for rows in ([first, second], [first], [second]):
                part, recorded = map_tensors(Tensor.clone, select(batch, rows, self.dims)), Means()
                draws.restore()  # of Python and NumPy: a block skipped at random is skipped in all three calls
                try:
                    with recorded:
                        output: Any = self.inner(part, *rest, **kwargs)
                finally:
                    self.step.regather_parameters()
                loss = output.get("loss") if isinstance(output, dict) else output
                if not isinstance(loss, Tensor) or loss.dim():
                    return None
                losses.append(loss)
                means.append(recorded)
        # call 0 was on both parts as one batch, calls 1 and 2 on one part each
        sizes = (first.stop, second.stop - second.start)
        shares = [size / sum(sizes) for size in sizes]
        # as `StepLog._agree` compares ranks: the numbers of losses without gradients may differ
        by_call = [recorded.all for recorded in means]
        learning = [[mean for mean in losses if mean.edge is not None] for losses in by_call]
        matching = [losses for losses in (by_call, learning) if len({len(of_call) for of_call in losses}) == 1]
        if not matching:
            # The number of losses depends on the samples, as in a loop over them: such a loss is a mean over the
            # targets of its sample, not over those of the batch.
            self.log.counts_by_samples = True
        # as over ranks: by targets if the parts have equally many losses, else by samples
        for parts in zip(*matching[0][1:], strict=True) if matching else ():
            total = sum(mean.count for mean in parts)
            for mean, share in zip(parts, shares, strict=True):
                mean.scale.factor = torch.where(total == 0, 0.0, mean.count / total / share)
        counted = [
            float(weighted_loss_value(loss, recorded)) for recorded, loss in zip(means[1:], losses[1:], strict=True)
        ]
        together = sum(loss * share for loss, share in zip(counted, shares, strict=True))
        return LossComparison(
            sizes, float(losses[0].detach()), together, tolerance=tolerance(self.model, losses[0].device)
        )
