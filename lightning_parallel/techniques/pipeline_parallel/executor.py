"""Works through a schedule: one rank's forwards and backwards of its stages, with messages in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Arriving
from lightning_parallel.techniques.pipeline_parallel.batch_work import BatchWork, LossStage
from lightning_parallel.techniques.pipeline_parallel.gradients import Enter, Saved, save
from lightning_parallel.techniques.pipeline_parallel.p2p import (
    P2P,
    Message,
    Spec,
    Structure,
    has_gradients,
    packed,
)
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind
from lightning_parallel.techniques.pipeline_parallel.stages import Stages
from lightning_parallel.techniques.tools.means import Means

Place = tuple[int, int]
"""A stage and a microbatch."""

FORWARD = (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


class Executor:
    """Runs the actions of one rank for one batch."""

    def __init__(self, stages: Stages, p2p: P2P, work: BatchWork) -> None:
        self._stages, self._p2p, self._work = stages, p2p, work
        self._last = stages.layout.stages - 1
        # Backward runs in the types of the forward, not in those that autocast would choose.
        self._without_autocast = torch.autocast(p2p.lane.device.type, enabled=False)
        self._arriving: dict[Place, tuple[Structure, list[Arriving]]] = {}
        self._arriving_grads: dict[Place, list[Arriving]] = {}
        self._returned: dict[Place, Message] = {}  # what a stage returned; by the next stage if that is on this rank
        self._local_grads: dict[Place, list[Tensor | None]] = {}  # of outputs, from the next stage on this rank
        self._input_grads: dict[Place, list[Tensor]] = {}  # to be sent
        self._specs: dict[Place, list[Spec]] = {}  # of the gradients that will come back
        self._saved: dict[Place, Saved] = {}

    def run(self, actions: Sequence[Action]) -> None:
        """Works through this rank's actions; in evaluation, through the forwards only."""
        # Not kept: a circle through bound methods would hold the batch and its gradients until it is collected.
        do: dict[ActionKind, Callable[[Place], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: partial(self._backward, whole=False),
            ActionKind.W: self._backward_of_weights,
            ActionKind.SEND_F: self._send_forward,
            ActionKind.RECV_F: self._receive_forward,
            ActionKind.SEND_B: self._send_backward,
            ActionKind.RECV_B: self._receive_backward,
        }
        for action in actions:
            if self._work.training or action.kind in FORWARD:
                do[action.kind]((action.stage, action.microbatch))
        self._p2p.lane.finish()

    def _forward(self, place: Place) -> None:
        stage, microbatch = place
        if stage == self._last and self._work.loss_stage is not None:
            if microbatch == len(self._work.microbatches) - 1:
                self._forward_of_batch(self._work.loss_stage)
            return
        inputs: list[Tensor] = []
        received = self._work.decode(self._received(place, inputs)) if stage else None
        step = self._work.step(microbatch)
        if stage == self._last:
            means = Means(elements=self._work.shares.whole)
            output = self._stages.run(stage, received, partial(_recorded, means, step), microbatch)
            self._keep_loss(place, inputs, means, output)
            return
        message = packed(self._work.encode(self._stages.run(stage, received, step, microbatch)))
        if self._work.training:
            floating = [tensor for tensor in message.tensors if has_gradients(tensor)]
            self._specs[place] = [(tensor.shape, tensor.dtype) for tensor in floating]
            self._saved[place] = save(inputs, floating)
        self._returned[(stage + 1, microbatch) if stage + 1 in self._work.gradients else place] = message

    def _forward_of_batch(self, loss_stage: LossStage) -> None:
        """All microbatches are there: the loss is computed, and its gradients go back to each of them."""
        count = len(self._work.microbatches)
        inputs: list[list[Tensor]] = [[] for _ in range(count)]
        handed = []
        for number, own in enumerate(inputs):
            structure, tensors = self._returned.pop((self._last, number))
            leaves = [_leaf(tensor, own) for tensor in tensors] if self._work.training else tensors
            handed.append(self._work.decode(structure.filled(leaves)))
        means, place = Means(), (self._last, 0)
        output = self._stages.run(self._last, loss_stage.join(handed), partial(_recorded, means, self._work.step(None)))
        if count > 1:
            self._stages.draws.tell_of_whole()
        self._keep_loss(place, [leaf for own in inputs for leaf in own], means, output)
        if self._work.training:
            made = iter(self._gradients_of_inputs(place, self._saved.pop(place)))
            self._local_grads |= {(self._last - 1, k): [next(made) for _ in own] for k, own in enumerate(inputs)}

    def _received(self, place: Place, inputs: list[Tensor]) -> Any:
        """What the stage before returned; its tensors belong to this stage, which may change them."""
        if place in self._returned:
            structure, returned = self._returned.pop(place)
            tensors = [tensor.detach().clone() for tensor in returned]
        else:
            structure, arriving = self._arriving.pop(place)
            tensors = [tensor.wait() for tensor in arriving]
        if self._work.training:
            tensors = [_entering(tensor, inputs) if has_gradients(tensor) else tensor for tensor in tensors]
        return structure.filled(tensors)

    def _keep_loss(self, place: Place, inputs: list[Tensor], means: Means, output: Any) -> None:
        loss = self._work.keep_output(place[1], means, output)
        if self._work.training:
            self._saved[place] = save(inputs, [] if loss is None else [loss])

    def _gradients_of_inputs(self, place: Place, saved: Saved, whole: bool = True) -> list[Tensor | None]:
        """Runs the backward, or its first half, of a stage on a microbatch."""
        stage, microbatch = place
        seeds: list[Tensor | None]
        if stage == self._last:
            seeds = [self._work.seed(microbatch) for _ in saved.outputs]
        elif place in self._local_grads:
            seeds = self._local_grads.pop(place)
        else:
            seeds = [arriving.wait() for arriving in self._arriving_grads.pop(place)]
        gradients = self._work.gradients[stage]
        with self._without_autocast:
            return gradients.full(saved, seeds) if whole else gradients.of_inputs(saved, seeds)

    def _backward_of_weights(self, place: Place) -> None:
        with self._without_autocast:
            self._work.gradients[place[0]].of_weights(self._saved.pop(place))

    def _backward(self, place: Place, whole: bool = True) -> None:
        stage, microbatch = place
        if self._work.loss_stage is not None and stage == self._last:
            return  # its gradients went back when the loss was known
        saved = self._saved.pop(place) if whole else self._saved[place]
        made = self._gradients_of_inputs(place, saved, whole)
        if stage - 1 in self._work.gradients:
            self._local_grads[stage - 1, microbatch] = made
        elif stage:
            self._input_grads[place] = [
                torch.zeros_like(tensor) if gradient is None else gradient
                for tensor, gradient in zip(saved.inputs, made, strict=True)
            ]

    def _send_forward(self, place: Place) -> None:
        shapes, varies = self._work.shapes(place[1]), not self._work.training
        self._p2p.send_forward(*place, shapes, self._returned.pop(place), varies)

    def _receive_forward(self, place: Place) -> None:
        shapes, varies = self._work.shapes(place[1]), not self._work.training
        self._arriving[place] = self._p2p.receive_forward(*place, shapes, varies)

    def _send_backward(self, place: Place) -> None:
        self._p2p.send_backward(*place, self._input_grads.pop(place))

    def _receive_backward(self, place: Place) -> None:
        self._arriving_grads[place] = self._p2p.receive_backward(*place, self._specs.pop(place))


def _recorded(means: Means, step: Callable[[], Any]) -> Any:
    with means:
        return step()


def _entering(tensor: Tensor, inputs: list[Tensor]) -> Tensor:
    """A received tensor, made to depend on a leaf without memory of its own."""
    inputs.append(torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).requires_grad_())
    entered: Tensor = Enter.apply(inputs[-1], tensor)  # type: ignore[no-untyped-call]
    return entered


def _leaf(tensor: Tensor, inputs: list[Tensor]) -> Tensor:
    """A tensor as one to which gradients can be taken; nobody changes it in place, for it is joined with others."""
    tensor = tensor.detach()
    if has_gradients(tensor):
        inputs.append(tensor.requires_grad_())
    return tensor
