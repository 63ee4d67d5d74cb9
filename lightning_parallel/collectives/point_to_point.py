"""Messages between two ranks: the stages of a pipeline send activations and gradients with them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import Pending, exchange, filled, is_gloo, receive_buffer, sendable

T = TypeVar("T")

IN_FLIGHT = 4
"""Over gloo: the number of tags whose tensors are kept without waiting for their sends."""


class Channel:
    """Point-to-point messages within a group. Ranks are those of the group.

    NCCL has no tags: a message matches the next one that the other rank starts, so all ranks must start their messages
    in one order. Gloo matches messages by their tags.

    Args:
        group: the ranks that communicate.
        device: where the tensors lie.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._sending: dict[tuple[int, int], list[tuple[dist.Work, Tensor]]] = {}

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        """Start sending a tensor, which must not change until `finish`.

        The tensor is kept alive until it is sent. Gloo reports completion only in `wait`: once tensors of more than
        `IN_FLIGHT` tags are kept, this waits for those of the oldest tag. So the order of messages must allow every
        send to wait for its receiver.
        """
        if not tensor.numel():
            return
        tensor = sendable(tensor.detach().contiguous(), self.group)
        work = dist.isend(tensor, group=self.group, group_dst=to, tag=tag)
        assert work is not None  # this rank is in the group
        self._sending.setdefault((to, tag), []).append((work, tensor))
        if is_gloo(self.group):
            while len(self._sending) > IN_FLIGHT:
                self._wait_for_oldest()
            return
        pending = {key: [item for item in sent if not item[0].is_completed()] for key, sent in self._sending.items()}
        self._sending = {key: sent for key, sent in pending.items() if sent}

    def _wait_for_oldest(self) -> None:
        for work, _ in self._sending.pop(next(iter(self._sending))):
            work.wait()

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> PendingTensor:
        """Start receiving a tensor from a rank."""
        if not tensor.numel():
            return PendingTensor(Pending(None), tensor)
        room = receive_buffer(tensor, self.group)
        work = dist.irecv(room, group=self.group, group_src=source, tag=tag)
        assert work is not None  # this rank is in the group
        return PendingTensor(filled(work, [(room, tensor)]), tensor)

    def send_object(self, value: Any, to: int, tag: int = 0) -> None:
        """Start sending an object that can be pickled."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        self.send(torch.tensor([payload.numel()], device=self.device), to, tag)
        self.send(payload, to, tag)

    def receive_object(self, source: int, tag: int = 0) -> Any:
        """Wait for an object from a rank, and return it."""
        size = self.receive(torch.empty(1, dtype=torch.long, device=self.device), source, tag).wait()
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        return pickle.loads(self.receive(payload, source, tag).wait().cpu().numpy().tobytes())

    def exchange(self, sent: Tensor, received: Mapping[int, Tensor]) -> None:
        """Send a tensor to each rank in `received`, and fill the tensors with what these ranks send, in any order.

        With one message after the other, two ranks that send to each other could each wait for the other to receive.
        """
        if sent.numel():
            exchange(dict.fromkeys(received, sent.detach().contiguous()), received, self.group).wait()

    def finish(self) -> None:
        """Wait until all tensors are sent."""
        while self._sending:
            self._wait_for_oldest()


class PendingTensor:
    """Handle of a tensor that is being received."""

    def __init__(self, pending: Pending, tensor: Tensor) -> None:
        self._pending, self._tensor = pending, tensor

    def wait(self) -> Tensor:
        """Return the tensor once it is received."""
        self._pending.wait()
        return self._tensor


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return, on all ranks of the group, the value that its rank `source` passes. Collective over `group`."""
    values = [value]
    dist.broadcast_object_list(values, group_src=source, group=group, device=device)
    return values[0]


def compute_on_one_rank(
    make: Callable[[], T], what: str, source: int, group: dist.ProcessGroup, device: torch.device
) -> T:
    """Compute a value on one rank of the group, and return it on all. Collective over `group`.

    Args:
        make: returns the value; called on the rank `source` only.
        what: names the value in errors.
        source: a rank of the group.
        group: all of its ranks call this function.
        device: through which the value is sent.

    Raises:
        TypeError: the value cannot be pickled.
        Exception: the one that `make` raised; on other ranks a RuntimeError with its text if it cannot be pickled. All
            errors are raised on every rank.
    """
    if group.rank() != source:
        payload, raised = broadcast_object(None, source, group, device)
        if raised and payload is None:
            raise RuntimeError(raised)
        if raised:
            raise pickle.loads(payload)
        return pickle.loads(payload)  # type: ignore[no-any-return]
    try:
        value = make()
        try:
            pickled_value = pickle.dumps(value)
        except Exception as error:
            raise TypeError(f"{what} cannot be sent to other ranks ({error}); use tensors and plain values") from error
    except Exception as error:
        pickled = None  # the error itself if it can be pickled, and is the same when loaded; else its text is sent
        with suppress(Exception):
            dumped = pickle.dumps(error)
            pickled = dumped if str(pickle.loads(dumped)) == str(error) else None
        broadcast_object((pickled, f"{type(error).__name__}: {error}"), source, group, device)
        raise
    broadcast_object((pickled_value, ""), source, group, device)
    return value
