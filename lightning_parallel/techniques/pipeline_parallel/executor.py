"""Execution of a schedule: the forwards and backwards of a rank's stages, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import PendingTensor
from lightning_parallel.techniques.pipeline_parallel.batch_work import BatchWork, concatenated
from lightning_parallel.techniques.pipeline_parallel.gradients import ConnectToLeaf, Saved, save
from lightning_parallel.techniques.pipeline_parallel.p2p import P2P, Message, Structure, has_gradients, packed
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind
from lightning_parallel.techniques.pipeline_parallel.stages import Stages
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.values import TensorSpec, map_tensors

Place = tuple[int, int]
"""(stage, microbatch)."""

FORWARD = (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


class Executor:
    """Runs the actions of one rank for one batch."""

    def __init__(self, stages: Stages, p2p: P2P, work: BatchWork) -> None:
        self._stages, self._p2p, self._work = stages, p2p, work
        self._last = stages.layout.stages - 1
        # Backward runs in the dtypes of the forward, not in those that autocast would choose.
        self._without_autocast = torch.autocast(p2p.channel.device.type, enabled=False)
        self._arriving: dict[Place, tuple[Structure, list[PendingTensor]]] = {}  # inputs, being received
        self._arriving_grads: dict[Place, list[PendingTensor]] = {}  # gradients of outputs, being received
        self._returned: dict[Place, Message] = {}  # outputs to be sent, or inputs from the previous stage on this rank
        self._local_grads: dict[Place, list[Tensor | None]] = {}  # of outputs, from the next stage on this rank
        self._input_grads: dict[Place, list[Tensor]] = {}  # to be sent
        self._specs: dict[Place, list[TensorSpec]] = {}  # of the gradients of outputs that will be received
        self._saved: dict[Place, Saved] = {}  # for backward

    def run(self, actions: Sequence[Action]) -> None:
        """Run this rank's actions in order; in evaluation, only the forwards. All ranks of the pipeline call it."""
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
        p2p.channel.finish()

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
                self._specs[place] = list(map(TensorSpec.of, floating))
                self._saved[place] = save(inputs, floating)
            # If this rank also holds the next stage, that stage reads the message from here.
            self._returned[(stage + 1, microbatch) if stage + 1 in work.gradients else place] = message
        elif not work.over_batch:
            self._run_last(place, *self._received(place), work.microbatches[microbatch])
        elif microbatch == len(work.microbatches) - 1:  # all microbatches have arrived
            self._run_on_batch()

    def _received(self, place: Place) -> tuple[list[Tensor], Any]:
        """Return the leaves for gradients of a stage's inputs, and the decoded inputs, which it may change in place.

        A leaf has its input's shape, but no memory: it is an expanded scalar. `ConnectToLeaf` connects it to the input.
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
                tensors[number] = ConnectToLeaf.apply(inputs[-1].requires_grad_(), tensor)  # type: ignore[no-untyped-call]
        return inputs, self._work.decode(structure.filled(tensors))

    def _run_last(self, place: Place, inputs: list[Tensor], received: Any, samples: Any) -> None:
        """Run the last stage on a microbatch, or on the full batch, and store its output and loss."""
        work = self._work
        with Means(elements=work.whole) as means:
            output = self._stages.run(self._last, received, work.run, samples, place[1])
        loss = work.keep_output(place[1], means, output)
        if work.training:
            self._saved[place] = save(inputs, [] if loss is None else [loss])

    def _run_on_batch(self) -> None:
        """Run the loss stage once on the full batch, and its backward; split the input gradients by microbatch."""
        work, count = self._work, len(self._work.microbatches)
        inputs, parts = list[list[Tensor]](), list[Any]()
        for number in range(count):
            structure, tensors = self._returned.pop((self._last, number))
            if work.training:  # they can be leaves: nobody changes them in place, because they are concatenated first
                tensors = [tensor.detach() for tensor in tensors]
            inputs.append([t.requires_grad_() for t in tensors if work.training and has_gradients(t)])
            parts.append(work.decode(structure.filled(tensors)))
        self._run_last(
            (self._last, 0),
            [leaf for leaves in inputs for leaf in leaves],
            concatenated(parts, work.part_sizes, self._stages.layout.trace.blocks[-1]),  # not kept through the backward
            map_tensors(Tensor.clone, work.batch),  # the step may change it in place, and microbatches share its memory
        )
        if count > 1:
            self._stages.draws.warn_of_different_draws()
        if work.training:
            grads = iter(self._gradients_of_inputs((self._last, 0), self._saved.pop((self._last, 0))))
            self._local_grads |= {(self._last - 1, k): [next(grads) for _ in leaves] for k, leaves in enumerate(inputs)}

    def _gradients_of_inputs(self, place: Place, saved: Saved, whole: bool = True) -> list[Tensor | None]:
        """Run a stage's backward on a microbatch (`whole`), or only its input gradients; return the input gradients."""
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

    def _backward(self, place: Place, whole: bool) -> None:
        stage, microbatch = place
        if self._work.over_batch and stage == self._last:
            return  # `_run_on_batch` has computed them
        saved = self._saved.pop(place) if whole else self._saved[place]
        input_grads = self._gradients_of_inputs(place, saved, whole)
        if stage - 1 in self._work.gradients:
            self._local_grads[stage - 1, microbatch] = input_grads
        elif stage:
            self._input_grads[place] = [
                torch.zeros_like(tensor) if gradient is None else gradient
                for tensor, gradient in zip(saved.inputs, input_grads, strict=True)
            ]
