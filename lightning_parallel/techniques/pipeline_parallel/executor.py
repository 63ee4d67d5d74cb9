"""Works through a schedule: one rank's forwards and backwards of its stages, with messages in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Arriving
from lightning_parallel.techniques.gradients.old import OldGradients
from lightning_parallel.techniques.pipeline_parallel.exchange import (
    Exchange,
    Structure,
    floating,
    has_gradients,
    rebuild,
)
from lightning_parallel.techniques.pipeline_parallel.gradients import Enter, Final, Gradients, Saved, save
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind
from lightning_parallel.techniques.pipeline_parallel.shares import Shares
from lightning_parallel.techniques.pipeline_parallel.stages import HandedOn, Stages
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.values import TensorSpec, map_tensors

Place = tuple[int, int]
"""A stage and a microbatch."""

FINAL = (ActionKind.B, ActionKind.W)
"""Actions after the last of which a stage's gradients are known."""


@dataclass(frozen=True)
class LossStage:
    """What follows the blocks, for the whole batch.

    Attributes:
        step: runs the user's step on the batch.
        join: makes what the last block's stage would hand on for the batch, of what it handed on for microbatches.
    """

    step: Callable[[], Any]
    join: Callable[[Sequence[HandedOn]], HandedOn]


@dataclass
class Work:
    """The work of one rank on one batch.

    Attributes:
        steps: run the user's step on each microbatch.
        whole: runs it on the batch, for a stage that computes the loss of all microbatches; None where there is none.
        scale_means: fills in by what gradients of means are multiplied that count apart, for all ranks that read
            different samples.
        handed_on: makes of what a stage returned a value that can be sent.
        received: the opposite.
        signatures: what the shapes of each microbatch are recognised by.
        loss_of: finds the loss in what a step returned; None for a step without one.
        scale: by what the loss of the batch is multiplied before backward; None for forward only.
        shares: what the loss of each microbatch counts for in that of the batch.
        gradients: per stage, those of the parameters it uses.
        final: to whom they go as they are final.
        old: gradients of the batch before.
    """

    steps: Sequence[Callable[[], Any]]
    whole: LossStage | None
    scale_means: Callable[[Means], None]
    handed_on: Callable[[Any], Any]
    received: Callable[[Any], Any]
    signatures: Sequence[Hashable]
    loss_of: Callable[[Any], Tensor | None]
    scale: float | None
    shares: Shares
    gradients: dict[int, Gradients]
    final: Final
    old: OldGradients
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def backward(self) -> bool:
        """Whether gradients are wanted."""
        return self.scale is not None

    def means_of(self, microbatch: int) -> list[Tensor]:
        """Values that count in the batch by the share of a microbatch: means over targets, and the loss of training."""
        loss = self.loss_of(self.outputs[microbatch]) if self.backward and not self.shares.whole else None
        return [*self.shares.means.get(microbatch, []), *([] if loss is None else [loss])]


class Executor:
    """Runs the actions of one rank for one batch.

    Args:
        stages: the model.
        exchange: the messages.
        work: the batch.
    """

    def __init__(self, stages: Stages, exchange: Exchange, work: Work) -> None:
        self._stages, self._exchange, self._work = stages, exchange, work
        self._last = stages.cut.stages - 1
        self._arriving: dict[Place, tuple[Structure, list[Arriving]]] = {}
        self._arriving_back: dict[Place, list[Arriving]] = {}
        self._handed: dict[Place, Any] = {}  # from a stage on this rank to the next one, as it is
        self._handed_back: dict[Place, list[Tensor | None]] = {}
        self._returned: dict[Place, Any] = {}
        self._shapes: dict[Place, list[TensorSpec]] = {}  # of what gradients will come back for
        self._made_back: dict[Place, list[Tensor]] = {}
        self._saved: dict[Place, Saved] = {}
        self._left: Counter[int] = Counter()  # backwards of each stage that are yet to come

    def run(self, actions: Sequence[Action]) -> None:
        """Works through this rank's actions; forward only where the work has no seeds."""
        forward = (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)
        do = self._by_kind()
        self._left.update(action.stage for action in actions if action.kind in FINAL)
        for action in actions:
            if self._work.backward or action.kind in forward:
                do[action.kind]((action.stage, action.microbatch))
                if action.kind in FINAL:
                    self._ended(action.stage)
        self._exchange.lane.finish()

    def _ended(self, stage: int) -> None:
        """After one backward of a stage; after the last one its gradients do not grow any more."""
        self._left[stage] -= 1
        if not self._left[stage]:
            self._work.gradients[stage].give(self._work.final)

    def _final(self, stage: int) -> Final | None:
        """To whom gradients of the backward go that runs, if it is the stage's last one."""
        whole = self._work.whole is not None and stage == self._last
        return self._work.final if whole or self._left[stage] == 1 else None

    def _by_kind(self) -> dict[ActionKind, Callable[[Place], None]]:
        """Not kept: a circle through bound methods would hold the batch and its gradients until it is collected."""
        return {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._backward_of_inputs,
            ActionKind.W: self._backward_of_weights,
            ActionKind.SEND_F: self._send_forward,
            ActionKind.RECV_F: self._receive_forward,
            ActionKind.SEND_B: self._send_backward,
            ActionKind.RECV_B: self._receive_backward,
        }

    # ---------------------------------------------------------------- forward

    def _forward(self, place: Place) -> None:
        stage, microbatch = place
        if self._work.whole is not None and stage == self._last:
            self._forward_of_whole(self._work.whole, microbatch)
            return
        inputs: list[Tensor] = []
        received = self._received(place)
        if self._work.backward:
            received = map_tensors(lambda tensor: _entering(tensor, inputs), received)
        means = Means(elements=self._work.shares.whole) if stage == self._last else None
        received = self._work.received(received)
        output = self._stages.run(stage, received, self._work.steps[microbatch], means, microbatch)
        if stage < self._last:
            self._keep_returned(place, inputs, self._work.handed_on(output))
        else:
            self._keep_result(place, inputs, output)
        if means is not None:
            self._add_share(microbatch, means, output)

    def _forward_of_whole(self, whole: LossStage, microbatch: int) -> None:
        """With the last microbatch all are there: the loss is computed, and its gradients go back to each of them."""
        count = len(self._work.steps)
        if microbatch < count - 1:
            return
        handed = [self._handed.pop((self._last, number)) for number in range(count)]
        inputs: list[list[Tensor]] = [[] for _ in handed]
        if self._work.backward:
            handed = [map_tensors(partial(_leaf, inputs=own), one) for own, one in zip(inputs, handed, strict=True)]
        means = Means()
        received = whole.join([self._work.received(one) for one in handed])
        output = self._stages.run(self._last, received, whole.step, means)
        if count > 1:
            self._stages.draws.tell_of_whole()
        self._keep_result((self._last, 0), [leaf for own in inputs for leaf in own], output)
        self._add_share(0, means, output)
        if self._work.backward:
            made = iter(self._gradients_of((self._last, 0), self._saved.pop((self._last, 0))))
            self._handed_back |= {(self._last - 1, k): [next(made) for _ in own] for k, own in enumerate(inputs)}

    def _add_share(self, microbatch: int, means: Means, output: Any) -> None:
        loss = self._work.loss_of(output)
        if loss is not None:
            means.rest_within(loss, together=not self._work.shares.whole)
        self._work.shares.add(microbatch, means, loss)
        if self._work.shares.whole and self._work.backward:
            self._work.scale_means(means)

    def _received(self, place: Place) -> Any:
        stage, _ = place
        if place in self._handed:
            return map_tensors(_copied, self._handed.pop(place))
        if stage == 0:
            return None
        structure, arriving = self._arriving.pop(place)
        return rebuild(structure, [tensor.wait() for tensor in arriving])

    def _keep_returned(self, place: Place, inputs: list[Tensor], value: HandedOn) -> None:
        stage, microbatch = place
        outputs = floating(value)
        if self._work.backward:
            self._shapes[place] = [TensorSpec.of(tensor) for tensor in outputs]
            self._saved[place] = save(inputs, outputs)
        if self._is_here(stage + 1):
            self._handed[stage + 1, microbatch] = value
        else:
            self._returned[place] = value

    def _keep_result(self, place: Place, inputs: list[Tensor], output: Any) -> None:
        _, microbatch = place
        self._work.outputs[microbatch] = _detached(output)
        if self._work.backward:
            loss = self._work.loss_of(output)
            self._saved[place] = save(inputs, [] if loss is None else [loss])

    def _is_here(self, stage: int) -> bool:
        return stage in self._work.gradients

    # ---------------------------------------------------------------- backward

    def _backward(self, place: Place) -> None:
        if self._work.whole is not None and place[0] == self._last:
            return  # its gradients were handed back when the loss was known
        saved = self._saved.pop(place)
        self._hand_back(place, saved, self._gradients_of(place, saved))

    def _gradients_of(self, place: Place, saved: Saved) -> list[Tensor | None]:
        self._work.old.release()
        with _without_autocast(self._exchange.lane.device):
            return self._work.gradients[place[0]].full(saved, self._seeds(place, saved), self._final(place[0]))

    def _backward_of_inputs(self, place: Place) -> None:
        saved = self._saved[place]
        self._work.old.release()
        with _without_autocast(self._exchange.lane.device):
            made = self._work.gradients[place[0]].of_inputs(saved, self._seeds(place, saved))
        self._hand_back(place, saved, made)

    def _backward_of_weights(self, place: Place) -> None:
        with _without_autocast(self._exchange.lane.device):
            self._work.gradients[place[0]].of_weights(self._saved.pop(place), self._final(place[0]))

    def _seeds(self, place: Place, saved: Saved) -> list[Tensor | None]:
        stage, microbatch = place
        if stage == self._last:
            seed = _seed_of(self._work, microbatch, self._exchange.lane.device)
            return [seed for _ in saved.outputs]
        if place in self._handed_back:
            return self._handed_back.pop(place)
        return [arriving.wait() for arriving in self._arriving_back.pop(place)]

    def _hand_back(self, place: Place, saved: Saved, made: list[Tensor | None]) -> None:
        stage, microbatch = place
        if stage == 0:
            return
        if self._is_here(stage - 1):
            self._handed_back[stage - 1, microbatch] = made
            return
        inputs = saved.inputs
        self._made_back[place] = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(inputs, made, strict=True)
        ]

    # ---------------------------------------------------------------- messages

    def _send_forward(self, place: Place) -> None:
        stage, microbatch = place
        signature = self._work.signatures[microbatch]
        self._exchange.send_forward(stage, microbatch, signature, self._returned.pop(place))

    def _receive_forward(self, place: Place) -> None:
        stage, microbatch = place
        self._arriving[place] = self._exchange.receive_forward(stage, microbatch, self._work.signatures[microbatch])

    def _send_backward(self, place: Place) -> None:
        stage, microbatch = place
        self._exchange.send_backward(stage, microbatch, self._made_back.pop(place))

    def _receive_backward(self, place: Place) -> None:
        stage, microbatch = place
        self._arriving_back[place] = self._exchange.receive_backward(stage, microbatch, self._shapes.pop(place))


def _entering(tensor: Tensor, inputs: list[Tensor]) -> Tensor:
    """A received tensor, made to depend on a leaf without memory of its own."""
    if not has_gradients(tensor):
        return tensor
    inputs.append(torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).requires_grad_())
    entered: Tensor = Enter.apply(inputs[-1], tensor)  # type: ignore[no-untyped-call]
    return entered


def _leaf(tensor: Tensor, inputs: list[Tensor]) -> Tensor:
    """A tensor as one to which gradients can be taken; nobody changes it in place, for it is joined with others."""
    tensor = tensor.detach()
    if has_gradients(tensor):
        inputs.append(tensor.requires_grad_())
    return tensor


def _seed_of(work: Work, microbatch: int, device: torch.device) -> Tensor | None:
    loss, share = work.loss_of(work.outputs[microbatch]), work.shares.seed(microbatch)
    assert work.scale is not None
    return None if loss is None else torch.ones_like(loss, device=device) * torch.as_tensor(share * work.scale).to(loss)


def _detached(value: Any) -> Any:
    return map_tensors(Tensor.detach, value)


def _copied(tensor: Tensor) -> Tensor:
    """Memory of its own: a stage may change what it received, and the one before may need what it returned."""
    return tensor.detach().clone()


def _without_autocast(device: torch.device) -> torch.autocast:
    """Backward runs in the types of the forward, not in those that autocast would choose."""
    return torch.autocast(device.type, enabled=False)
