"""Tensors that live on several stages.

Parameters, as tied embeddings: their gradients are those of all uses together. Buffers: the copies must stay alike. One
that lies in no block and no part every stage has, and may change: what it is after the last stage counts. One of a
block or a part, that another stage reads, nobody may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.point_to_point import Lane
from lightning_parallel.techniques.observed.refusals import UNDIVIDED
from lightning_parallel.techniques.pipeline_parallel.cut import Cut

Tie = tuple[int, ...]
"""The ranks of a pipeline that hold one parameter, ascending."""

Versions = dict[str, tuple[Tensor, int]]
"""Buffers by FQN: which tensor each is, and how often it was changed."""

SMALL = 2**16  # elements; larger ones are looked after if the observed step changed them


def sum_over_holders(gradients: Mapping[Tie, Sequence[Tensor]], lane: Lane, rank: int) -> None:
    """Sums gradients in place over the ranks that hold their parameters, in one order, so that all get equal sums.

    Args:
        gradients: by the ranks that hold them, this one among them; the same tensors in the same order on each.
        lane: the ranks of the pipeline.
        rank: this rank in it.
    """
    for holders, tensors in sorted(gradients.items()):
        own = torch.cat([tensor.reshape(-1) for tensor in tensors])
        others = {holder: torch.empty_like(own) for holder in holders if holder != rank}
        lane.exchange(own, others)
        parts = others | {rank: own}
        total = sum((parts[holder] for holder in holders[1:]), parts[holders[0]])
        for tensor, values in zip(tensors, torch.split(total, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))


def common_buffers(model: nn.Module, made: Cut) -> list[str]:
    """The FQN of buffers that all stages have, and that a step may change."""
    common = [(name, buffer) for name, buffer in model.named_buffers() if made.is_common(name)]
    return [name for name, buffer in common if name in made.seen.buffers.written or buffer.numel() <= SMALL]


class CopiedBuffers:
    """The copies that one rank has.

    Args:
        model: of which this rank holds its stages' part.
        made: where the model is cut.
    """

    def __init__(self, model: nn.Module, made: Cut) -> None:
        self._copied = made.copied_buffers
        owners = {name: name.rpartition(".")[::2] for name in self._copied}
        self._places = {name: (model.get_submodule(owner)._buffers, key) for name, (owner, key) in owners.items()}

    def now(self) -> Versions:
        """The copies as they are."""
        tensors = {name: table.get(key) for name, (table, key) in self._places.items()}
        return {name: (tensor, tensor._version) for name, tensor in tensors.items() if tensor is not None}

    def require_unchanged(self, before: Versions, stage: int) -> None:
        """Code between the steps runs on all ranks, and may change copies; a stage must not.

        Raises:
            RuntimeError: the stage that has just run changed one; the others would go on with what they have.
        """
        now = self.now()
        for name, (tensor, version) in before.items():
            if name not in now or now[name][0] is not tensor or now[name][1] != version:
                raise RuntimeError(
                    f"{name} was changed in a step, on stage {stage}, but stages {sorted(self._copied[name])} have "
                    "copies of it: the step that was looked at before the run only read this buffer. Change it between "
                    f"the steps, as in on_train_batch_end, or {UNDIVIDED}"
                )
