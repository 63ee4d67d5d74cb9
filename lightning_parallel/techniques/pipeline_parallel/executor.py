"""Works through a schedule: one rank's forwards and backwards of its stages, with messages in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Arriving
from lightning_parallel.techniques.pipeline_parallel.batch_work import BatchWork, joined
from lightning_parallel.techniques.pipeline_parallel.gradients import Enter, Saved, save
from lightning_parallel.techniques.pipeline_parallel.p2p import P2P, Message, Spec, Structure, has_gradients, packed
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind
from lightning_parallel.techniques.pipeline_parallel.stages import Stages
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.values import map_tensors

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
        self._returned: dict[Place, Message] = {}
        self._local_grads: dict[Place, list[Tensor | None]] = {}  # of outputs, from the next stage on this rank
        self._input_grads: dict[Place, list[Tensor]] = {}  # to be sent
        self._specs: dict[Place, list[Spec]] = {}  # of the gradients that will come back
        self._saved: dict[Place, Saved] = {}

    def run(self, actions: Sequence[Action]) -> None:
        """Works through this rank's actions; in evaluation, through the forwards only."""
        p2p, work = self._p2p, self._work
        for action in actions:
            place, kind = (action.stage, action.microbatch), action.kind
            if not work.training and kind not in FORWARD:
                continue
            match kind:
                case ActionKind.F:
                    self._forward(place)
                case ActionKind.SEND_F:
                    p2p.send_forward(*place, work.shapes(place[1]), self._returned.pop(place), varies=not work.training)
                case ActionKind.RECV_F:
                    self._arriving[place] = p2p.receive_forward(*place, work.shapes(place[1]), varies=not work.training)
                case ActionKind.B | ActionKind.I:
                    self._backward(place, kind is ActionKind.B)
                case ActionKind.SEND_B:
                    p2p.send_backward(*place, self._input_grads.pop(place))
                case ActionKind.RECV_B:
                    self._arriving_grads[place] = p2p.receive_backward(*place, self._specs.pop(place))
                case ActionKind.W:
                    with self._without_autocast:
                        work.gradients[action.stage].of_weights(self._saved.pop(place))
        p2p.lane.finish()

    def _forward(self, place: Place) -> None:
        work, (stage, microbatch) = self._work, place
        if stage < self._last:
            inputs, received = self._received(place) if stage else ([], None)
            output = self._stages.run(stage, received, work.run, work.microbatches[microbatch], microbatch)
            for division in work.divisions:
                output = division.encode_activation(output)
            message = packed(output)
            if work.training:
                floating = [tensor for tensor in message.tensors if has_gradients(tensor)]
                self._specs[place] = [(tensor.shape, tensor.dtype) for tensor in floating]
                self._saved[place] = save(inputs, floating)
            # the next stage takes it from here, if it is on this rank
            self._returned[(stage + 1, microbatch) if stage + 1 in work.gradients else place] = message
        elif not work.over_batch:
            self._run_last(place, *self._received(place), work.microbatches[microbatch])
        elif microbatch == len(work.microbatches) - 1:  # all microbatches are there
            self._run_on_batch()

    def _received(self, place: Place) -> tuple[list[Tensor], Any]:
        """What the stage before returned, of which this stage may change tensors, and the leaves that these come from.

        Each tensor depends on a leaf without memory of its own.
        """
        inputs: list[Tensor] = []
        if place in self._returned:
            structure, returned = self._returned.pop(place)
            tensors = [tensor.detach().clone() for tensor in returned]
        else:
            structure, arriving = self._arriving.pop(place)
            tensors = [tensor.wait() for tensor in arriving]
        for number, tensor in enumerate(tensors) if self._work.training else ():
            if has_gradients(tensor):
                inputs.append(torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape))
                tensors[number] = Enter.apply(inputs[-1].requires_grad_(), tensor)  # type: ignore[no-untyped-call]
        return inputs, self._work.decode(structure.filled(tensors))

    def _run_last(self, place: Place, inputs: list[Tensor], received: Any, samples: Any) -> None:
        """Runs the last stage on a microbatch, or on the batch, and keeps its loss."""
        work = self._work
        with Means(elements=work.whole) as means:
            output = self._stages.run(self._last, received, work.run, samples, place[1])
        loss = work.keep_output(place[1], means, output)
        if work.training:
            self._saved[place] = save(inputs, [] if loss is None else [loss])

    def _run_on_batch(self) -> None:
        """Runs what follows the blocks for the whole batch; its gradients go back to each microbatch."""
        work, count = self._work, len(self._work.microbatches)
        inputs, handed = list[list[Tensor]](), list[Any]()
        for number in range(count):
            structure, tensors = self._returned.pop((self._last, number))
            if work.training:  # leaves, which nobody changes in place, for they are joined with others
                tensors = [tensor.detach() for tensor in tensors]
            inputs.append([each.requires_grad_() for each in tensors if work.training and has_gradients(each)])
            handed.append(work.decode(structure.filled(tensors)))
        self._run_last(
            (self._last, 0),
            [leaf for own in inputs for leaf in own],
            joined(handed, work.part_sizes, self._stages.layout.trace.blocks[-1]),  # not kept through the backward
            map_tensors(Tensor.clone, work.batch),  # the step may change its tensors, which are the microbatches' too
        )
        if count > 1:
            self._stages.draws.tell_of_whole()
        if work.training:
            made = iter(self._gradients_of_inputs((self._last, 0), self._saved.pop((self._last, 0))))
            self._local_grads |= {(self._last - 1, k): [next(made) for _ in own] for k, own in enumerate(inputs)}

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

    def _backward(self, place: Place, whole: bool = True) -> None:
        stage, microbatch = place
        if self._work.over_batch and stage == self._last:
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
