"""Buffers of which several stages have a copy, because they read them: the copies must stay alike."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_parallel.techniques.observed.refusals import UNDIVIDED
from lightning_parallel.techniques.pipeline_parallel.cut import Cut

Versions = dict[str, tuple[Tensor, int]]
"""Buffers by FQN: which tensor each is, and how often it was changed."""


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
