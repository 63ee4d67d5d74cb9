"""A step in microbatches: the schedule runs in `forward`, its gradients reach the parameters in `backward`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.collectives.point_to_point import Lane, share_made
from lightning_parallel.techniques.gradients.old import OldGradients
from lightning_parallel.techniques.observed.draws import GeneratorStates
from lightning_parallel.techniques.pipeline_parallel.cut import Cut
from lightning_parallel.techniques.pipeline_parallel.exchange import Exchange
from lightning_parallel.techniques.pipeline_parallel.executor import Executor, LossStage, Work
from lightning_parallel.techniques.pipeline_parallel.gradients import Final, Gradients, HandOver
from lightning_parallel.techniques.pipeline_parallel.joined import Dims, joined
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import Schedule
from lightning_parallel.techniques.pipeline_parallel.shares import Shares
from lightning_parallel.techniques.pipeline_parallel.stage.changes import Left
from lightning_parallel.techniques.pipeline_parallel.stages import Stages
from lightning_parallel.techniques.pipeline_parallel.ties import Tie, common_buffers, sum_over_holders
from lightning_parallel.techniques.step import Coming, Run, Step, WrappedStep
from lightning_parallel.techniques.tools import microbatches
from lightning_parallel.techniques.tools.leaves import comes_as_it_is, leaf_of
from lightning_parallel.techniques.tools.means import is_among
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import map_tensors, tensors_of

T = TypeVar("T")

LOOKS = 3
"""In so many batches it is seen whether losses have means over other numbers of targets."""


class LastStage(NamedTuple):
    """What the last stage tells all ranks of a batch.

    Attributes:
        output: of the step.
        notes: of what it logged and kept, see `Run.notes`.
        unit: how many targets count as one in gradients; None if these are means.
        draws: where the generators are left, if anything was drawn.
        mixes: whether losses count otherwise than on one device, see `Shares.mixes`.
        left: what the step left changed of the model.
    """

    output: Any
    notes: Any
    unit: float | None
    draws: GeneratorStates | None
    mixes: bool
    left: Left = Left()


class PipelineStep(WrappedStep):
    """Runs every step of the user's as a schedule over the ranks of a pipeline.

    Args:
        inner: the step to wrap.
        model: of which this rank holds its stages' part.
        made: where the model is cut.
        schedule: what each rank does, and when.
        dims: where samples are in what modules return, if what follows the blocks runs once for the batch; else None.
        apart: see `Seen`.
        unit: see `Shares`.
        group: the ranks of this pipeline.
        device: where the model runs.
    """

    def __init__(
        self,
        inner: Step,
        model: nn.Module,
        made: Cut,
        schedule: Schedule,
        dims: Dims | None,
        apart: bool,
        unit: float,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(inner)
        self._schedule, self._dims, self._unit, self._group, self._cut = schedule, dims, unit, group, made
        self._apart = apart
        self._lane = Lane(group, device)
        self._rank = group.rank()
        self._here = schedule.stages_of(self._rank)
        self._stages = Stages(model, made, device)
        self._exchange = Exchange(self._lane, schedule.rank_of, schedule.stages)
        self._parameters = _parameters(model, made, schedule)
        self._turns = self._in_turns()
        self._common = common_buffers(model, made)
        self._coming = Coming()
        self._looks_left = LOOKS
        self._even = False  # whether all tensors of some batch had as many samples

    @property
    def weighs(self) -> bool:
        """See `Step.weighs`."""
        return True

    @property
    def turns(self) -> Mapping[nn.Parameter, int]:
        """See `Step.turns`: those of a stage after its last backward; not what several stages or ranks sum up."""
        return self._turns

    def close(self) -> None:
        """See `Step.close`."""
        self._stages.close()
        self.inner.close()

    def expect(self, coming: Coming) -> None:
        """See `Step.expect`."""
        self._coming = coming

    def forward(self, run: Run[T], *args: Any, **kwargs: Any) -> T:
        """Runs the schedule, and returns on every rank what the step would return for the whole batch.

        Raises:
            TypeError: a batch that cannot be divided.
            ValueError: a step that returns a loss for some microbatches only; as all errors in what it returned or
                logged, on every rank of the pipeline.
        """
        parameters = {name: held.now() for name, held in self._parameters.items()}
        with torch._C.DisableTorchFunctionSubclass():  # rows that arrive are not waited for
            parameters = {name: each for name, each in parameters.items() if _may_learn(each)}
        run.keeps(self._common)
        work = self._work(run, args, kwargs, parameters)
        count = len(work.steps)
        schedule = self._schedule.only(count) if count < self._schedule.microbatches else self._schedule
        self._stages.draws.begin(run.batches_before)
        with work.old:
            Executor(self._stages, self._exchange, work).run(schedule.with_communication()[self._rank])
        last = self._shared(work, run)
        self._looks_left -= self._looks_left > 0 and work.backward
        self._tell(last.mixes)
        self._stages.draws.end(last.draws)
        self._stages.changes.settle(last.left)
        run.replay(last.notes)
        loss = _loss_of(last.output)
        if work.scale is None or loss is None:
            return cast(T, last.output)  # gradients that went early are let go of before the next batch
        with torch._C.DisableTorchFunctionSubclass():
            learning = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        handed = self._handed_over(loss, work, learning, work.scale / (last.unit or 1.0))
        return cast(T, _with_loss(last.output, run.counted(handed, last.unit is not None)))

    # ---------------------------------------------------------------- before

    def _work(
        self, run: Run[Any], args: tuple[Any, ...], kwargs: dict[str, Any], parameters: dict[str, nn.Parameter]
    ) -> Work:
        batch, *rest = args
        layout = self._coming.layout
        size = microbatches.samples_in(batch, layout) or 1
        count = 1 if self._is_uneven(batch) else min(self._schedule.microbatches, self._coming.samples or size)
        parts, sizes = microbatches.split(batch, count, layout), microbatches.part_sizes(size, count)
        training = torch.is_grad_enabled()
        return Work(
            steps=[partial(_named, run, part, *rest, **kwargs) for part in parts],
            whole=self._whole(sizes, run, partial(_named, run, map_tensors(Tensor.clone, batch), *rest, **kwargs)),
            scale_means=run.scale,
            handed_on=run.handed_on,
            received=run.received,
            signatures=[(training, *_signature(part)) for part in parts],
            loss_of=_loss_of,
            scale=self._coming.scale if training else None,
            shares=Shares(
                sizes if self._dims is None else [size],
                self._coming.weight,
                self._unit,
                self._apart or (count == 1 and self._coming.alone),
                self._coming.alone,
                looks=training and self._looks_left > 0,
            ),
            gradients={stage: Gradients(self._of_stage(stage, parameters)) for stage in self._here},
            final=Final(self._coming.early, self._turns, lambda: self._stages.changes.has_toggled),
            old=OldGradients(self._coming.release if training else None),
        )

    def _is_uneven(self, batch: Any) -> bool:
        """Whether tensors have different numbers of samples now, as where one of several loaders comes to its end.

        By how many samples a part of such a batch counts is not known, so it is not divided. Where ranks meet within
        the forward they must divide alike, and what has another number goes to all parts as it is.
        """
        uneven = len({*microbatches.lengths_in(batch, self._coming.layout)}) > 1
        self._even = self._even or not uneven
        return uneven and self._even and self._coming.samples is None

    def _whole(self, sizes: Sequence[int], run: Run[Any], step: Callable[[], Any]) -> LossStage | None:
        if self._dims is None:
            return None
        join = partial(joined, sizes=sizes, dims=self._dims, blocks=self._cut.seen.blocks)
        return LossStage(step, join)

    def _in_turns(self) -> dict[nn.Parameter, int]:
        ends = {action.stage: turn for turn, action in enumerate(self._schedule.computations[self._rank])}
        alone = [held for held in self._parameters.values() if len(held.stages) == len(held.ranks) == 1]
        return {held.now(): ends[min(held.stages)] for held in alone if comes_as_it_is(held.now())}

    def _of_stage(self, stage: int, parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for name, parameter in parameters.items() if stage in self._parameters[name].stages]

    # ---------------------------------------------------------------- after

    def _tell(self, mixes: bool) -> None:
        """Warns once of a loss that microbatches do not count as one device does."""
        self._looks_left = 0 if mixes else self._looks_left
        if mixes:
            warn(
                "The loss of a step has means over other numbers of targets, or something else beside such a mean, and "
                "microbatches have unlike shares of these. A pipeline counts the loss of a microbatch by all its "
                "targets together, which makes another loss than that of the batch; loss_over='batch', an argument of "
                "PipelineParallel, computes it for the batch, and so does microbatches=1, as in LayerParallelStrategy"
            )

    def _shared(self, work: Work, run: Run[Any]) -> LastStage:
        """Gives all ranks what the last stage has."""

        def said() -> LastStage:
            sizes = work.shares.sizes
            outputs = [work.outputs[number] for number in range(len(sizes))]
            _require_all_or_none(outputs, work.backward)
            shares, unit = work.shares.final()
            means = {number: work.means_of(number) for number in work.outputs}
            averaged = [means[number] for number in range(len(sizes))]
            merged = run.merged(outputs, sizes, shares, averaged)
            if work.backward:
                merged = _with_loss_of_parts(merged, outputs, sizes, shares, averaged)
            merged = map_tensors(Tensor.cpu, merged)
            notes = run.notes([shares[number] for number in means], list(means.values()), work.shares.targets)
            draws, changes = self._stages.draws.left, self._stages.changes.left
            return LastStage(merged, notes, unit, draws, work.shares.mixes(), changes)

        last = self._schedule.rank_of(self._schedule.stages - 1)
        told = share_made(
            said, "what a step returned, logged or keeps on the module", last, self._group, self._lane.device
        )
        return told._replace(output=map_tensors(lambda tensor: tensor.to(self._lane.device), told.output))

    def _handed_over(self, loss: Tensor, work: Work, learning: dict[str, nn.Parameter], scale: float) -> Tensor:
        sums: dict[str, Tensor | None] = dict.fromkeys(learning)
        names = {id(parameter): name for name, parameter in learning.items()}
        for gradients in work.gradients.values():
            for parameter, gradient in zip(gradients.parameters, gradients.take(), strict=True):
                if (name := names.get(id(parameter))) is None:
                    continue  # it does not learn
                before = sums[name]
                sums[name] = gradient if before is None or gradient is None else before + gradient
                sums[name] = before if gradient is None else sums[name]
        self._sum_ties(sums, learning)
        always = torch.zeros((), requires_grad=True)  # a stage may have no parameter that learns
        # what has none is left out: autograd would call hooks on it with None
        given = {name: gradient for name, gradient in sums.items() if gradient is not None}
        handed: Tensor = HandOver.apply(  # type: ignore[no-untyped-call]
            loss, list(given.values()), scale, work.final, always, *(leaf_of(learning[name]) for name in given)
        )
        return handed

    def _sum_ties(self, sums: dict[str, Tensor | None], learning: dict[str, nn.Parameter]) -> None:
        shared: dict[Tie, list[Tensor]] = {}
        for name in sorted(sums):
            ranks = self._parameters[name].ranks
            if len(ranks) > 1:
                gradient = sums[name]
                sums[name] = torch.zeros_like(local(learning[name].detach())) if gradient is None else gradient
                shared.setdefault(ranks, []).append(cast(Tensor, sums[name]))
        sum_over_holders(shared, self._lane, self._rank)


class _StageParameter:
    """A parameter on this rank: its place in the model, the stages here that use it, and the ranks that hold it."""

    def __init__(self, owner: nn.Module, key: str, stages: frozenset[int], ranks: Tie) -> None:
        self._owner, self._key = owner, key
        self.stages, self.ranks = stages, ranks

    def now(self) -> nn.Parameter:
        """The parameter at this moment: techniques may put another one in its place for a step."""
        return cast(nn.Parameter, self._owner._parameters[self._key])


def _parameters(model: nn.Module, made: Cut, schedule: Schedule) -> dict[str, _StageParameter]:
    found: dict[str, _StageParameter] = {}
    for name, _ in model.named_parameters():
        owner, _, key = name.rpartition(".")
        stages = made.stages_of(name)
        ranks = tuple(sorted({schedule.rank_of(stage) for stage in stages}))
        found[name] = _StageParameter(model.get_submodule(owner), key, stages, ranks)
    return found


def _may_learn(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _named(run: Run[T], *args: Any, **kwargs: Any) -> T:
    """Runs the step; an evaluation was not observed before, and may take gradients that end at another stage."""
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise RuntimeError(
            "the step takes gradients to a tensor that another stage of the pipeline computes with; take them to what "
            "the last block returned, or use ZeroStrategy, which divides any model"
        ) from error


def _signature(part: Any) -> tuple[Hashable, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(part))


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _with_loss_of_parts(
    output: Any,
    outputs: Sequence[Any],
    sizes: Sequence[int],
    shares: Sequence[float],
    means: Sequence[Sequence[Tensor]],
) -> Any:
    """The output with the loss whose gradient the parts have: it counts by shares, or by samples."""
    losses = [loss for each in outputs if (loss := _loss_of(each)) is not None]
    if len(losses) < len(outputs):
        return output
    by_shares = all(is_among(loss, averaged) for loss, averaged in zip(losses, means, strict=True))
    return _with_loss(output, microbatches.weighted_mean(losses, shares if by_shares else sizes))


def _with_loss(output: Any, loss: Tensor) -> Any:
    return {**output, "loss": loss} if isinstance(output, dict) else loss


def _require_all_or_none(outputs: Sequence[Any], training: bool) -> None:
    without = [number for number, output in enumerate(outputs) if _loss_of(output) is None]
    if training and without and len(without) < len(outputs):
        raise ValueError(
            f"training_step returned no loss for microbatches {without} of {len(outputs)}; in a pipeline a batch is "
            "skipped as a whole, by a loss times zero: Lightning takes no None on several ranks"
        )
