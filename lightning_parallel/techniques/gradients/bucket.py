"""A bucket: some parameters whose gradients travel in one message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.tools.holders import Holders
from lightning_parallel.techniques.tools.shards import local

TOGETHER, SMALL_BYTES = 16, 2**16
"""So many gradients of at most this size are moved into a message at once: alone, each costs more calls than bytes."""


class Bucket(ABC):
    """Some parameters whose gradients travel in one message, which is made anew in every backward pass.

    With the gradients travels one flag per parameter that says whether this rank had a gradient for it: a parameter
    that no rank used must end with `grad = None`, as it does on one device, or weight decay would move it.

    | call      | in a backward                   |
    | --------- | ------------------------------- |
    | `begin`   | all gradients are missing       |
    | `receive` | a gradient arrived as `grad`    |
    | `put`     | what arrived is in the message  |
    | `send`    | what is missing goes as it was  |
    | `settle`  | some buckets later              |
    | `finish`  | all have what was reduced       |

    Args:
        parameters: of one dtype and device, held by the same ranks.
        holders: of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], holders: Holders) -> None:
        self.parameters, self.dtype = list(parameters), parameters[0].dtype
        self._computed, self._given = holders.scale, 1 / holders.all.size()
        self.scale = self._computed
        """By what each rank's gradients are multiplied before they are summed."""
        self.missing: set[int] = set()
        self.active = False
        self.synced = True
        self._small = [local(parameter.detach()).nbytes <= SMALL_BYTES for parameter in self.parameters]
        self._arrived: list[int] = []  # small ones that lie where they arrived

    def begin(self, synced: bool, given: bool = False) -> None:
        """Before the first gradient; a bucket of frozen parameters stays out of it.

        Args:
            synced: whether gradients are those of the global batch after it; else a later pass will see to that.
            given: whether the step gave them, so that they become means over the ranks that hold the parameters: where
                they are such already, they stay the same.
        """
        self.scale = self._given if given else self._computed
        self.synced = synced
        self.missing = {index for index, parameter in enumerate(self.parameters) if parameter.requires_grad}
        self._arrived = []
        self.active = bool(self.missing)

    def receive(self, index: int) -> None:
        """The gradient of one parameter is complete."""
        if index not in self.missing:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.parameters[index].shape)} got a second gradient in one "
                "backward pass; functions of autograd do this that run another one within their own: for activation "
                "checkpointing, call checkpoint(..., use_reentrant=False); in a reversible layer, return what "
                "torch.autograd.grad gives for its parameters, which are inputs of the function"
            )
        self.missing.discard(index)
        if not self._small[index]:
            self.put([index])
            return
        self._arrived.append(index)
        if len(self._arrived) == TOGETHER:
            self._put_arrived()

    def _put_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        if arrived:
            self.put(arrived)

    def send(self) -> None:
        """Starts the reduction; parameters without a new gradient take part with the one they have, or with zeros."""
        late = [i for i, parameter in enumerate(self.parameters) if i in self.missing or not parameter.requires_grad]
        unused = [index for index in late if self.parameters[index].grad is None]
        self._put_arrived()
        for index in late:
            self.put([index])
        self.start(unused)

    def reopen(self) -> None:  # noqa: B027
        """Before gradients grow in any pass: those that are reduced stay the same when they are reduced once more."""

    def put(self, indices: Sequence[int]) -> None:
        """Moves what parameters have for `grad` into the message, zeros for those that have none."""
        rooms, arrived = [], []
        for index, room in zip(indices, self.rooms(indices), strict=True):
            gradient = self.parameters[index].grad
            if gradient is None or room is None or len(indices) == 1:
                self.fill(index, None if gradient is None else dense(gradient))
            else:
                rooms.append(room)
                arrived.append(dense(gradient).reshape(room.shape))
        if rooms:
            copy_scaled(rooms, arrived, self.scale)
        self.moved(indices)

    @abstractmethod
    def rooms(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        """Where all elements of gradients lie in the message, in their order; None for one with padding in it."""

    @abstractmethod
    def moved(self, indices: Sequence[int]) -> None:
        """What parameters had for `grad` is in the message."""

    @abstractmethod
    def fill(self, index: int, gradient: Tensor | None) -> None:
        """Copies a gradient of what this rank keeps of a parameter into the message, or zeros."""

    @abstractmethod
    def start(self, unused: list[int]) -> None:
        """Starts the collective; `unused` are the parameters for which this rank has no gradient."""

    def settle(self) -> None:  # noqa: B027
        """Some buckets later: waits for the collective, frees the message and starts what must follow, if anything."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for the collective and gives every parameter its reduced gradient."""


def dense(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient.

    Raises:
        TypeError: the gradient is sparse.
    """
    if gradient.is_sparse:
        raise TypeError("sparse gradients (Embedding(sparse=True)) cannot be reduced in buckets; use sparse=False")
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def copy_scaled(targets: list[Tensor], sources: list[Tensor], scale: float) -> None:
    """Copies tensors into others, which have one dtype, and multiplies them there."""
    torch._foreach_copy_(targets, sources)
    kind, lies_on_host = targets[0].dtype, targets[0].is_cpu
    if lies_on_host and kind.itemsize >= 4:  # a number becomes a tensor there each time; half precision would round it
        torch._foreach_mul_(targets, torch.tensor(scale, dtype=kind))
    else:
        torch._foreach_mul_(targets, scale)
