"""Messages from one rank to another: how the stages of a pipeline hand on activations and gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import Pending, exchange, filled, is_gloo, room_for, sendable

T = TypeVar("T")

IN_FLIGHT = 4
"""Of how many tags what was sent is kept over gloo, without asking whether it has arrived."""


class Lane:
    """Point-to-point messages within a group. Ranks are those of the group.

    NCCL knows no tags: there a message meets the next one that the other rank starts, so all ranks must start theirs in
    one order. Gloo finds them by their tags.

    Args:
        group: the ranks that talk.
        device: where the tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._sending: dict[tuple[int, int], list[tuple[dist.Work, Tensor]]] = {}

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        """Starts to send a tensor, which must not change until `finish`.

        It is kept until it was sent. Gloo does not tell before it is asked to wait: there the tensors of the oldest tag
        are waited for, once those of more than `IN_FLIGHT` tags are kept. So ranks must meet their messages in an order
        that allows every send to wait for its receiver.
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
        left = {key: [each for each in sent if not each[0].is_completed()] for key, sent in self._sending.items()}
        self._sending = {key: sent for key, sent in left.items() if sent}

    def _wait_for_oldest(self) -> None:
        for work, _ in self._sending.pop(next(iter(self._sending))):
            work.wait()

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Arriving:
        """Starts to fill a tensor with what a rank sends."""
        if not tensor.numel():
            return Arriving(Pending(None), tensor)
        room = room_for(tensor, self.group)
        work = dist.irecv(room, group=self.group, group_src=source, tag=tag)
        assert work is not None  # this rank is in the group
        return Arriving(filled(work, [(room, tensor)]), tensor)

    def send_object(self, value: Any, to: int, tag: int = 0) -> None:
        """Starts to send anything that can be pickled."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        self.send(torch.tensor([payload.numel()], device=self.device), to, tag)
        self.send(payload, to, tag)

    def receive_object(self, source: int, tag: int = 0) -> Any:
        """Waits for an object."""
        size = self.receive(torch.empty(1, dtype=torch.long, device=self.device), source, tag).wait()
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        return pickle.loads(self.receive(payload, source, tag).wait().cpu().numpy().tobytes())

    def exchange(self, sent: Tensor, received: Mapping[int, Tensor]) -> None:
        """Sends a tensor to each of some ranks and fills a tensor with what it sends, in whatever order they meet.

        One after the other, each of two ranks that send to each other could wait for the other to receive.
        """
        if sent.numel():
            exchange(dict.fromkeys(received, sent.detach().contiguous()), received, self.group).wait()

    def finish(self) -> None:
        """Waits until everything was sent."""
        while self._sending:
            self._wait_for_oldest()


class Arriving:
    """A tensor under way, which is filled when it is waited for."""

    def __init__(self, pending: Pending, tensor: Tensor) -> None:
        self._pending, self._tensor = pending, tensor

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        self._pending.wait()
        return self._tensor


def share_object(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """The value that the rank `source` of the group has, on all its ranks."""
    values = [value]
    dist.broadcast_object_list(values, group_src=source, group=group, device=device)
    return values[0]


def share_made(make: Callable[[], T], what: str, source: int, group: dist.ProcessGroup, device: torch.device) -> T:
    """Returns on all ranks of the group what one of them makes.

    Args:
        make: makes it, on the rank `source` alone.
        what: names it in errors.
        source: a rank of the group.
        group: all of whose ranks call.
        device: through which it is sent.

    Raises:
        TypeError: it cannot be sent.
        Exception: what was raised while it was made. On every rank, as all errors here.
    """
    if group.rank() != source:
        theirs, raised = share_object(None, source, group, device)
        if raised and theirs is None:
            raise RuntimeError(raised)
        if raised:
            raise pickle.loads(theirs)
        return pickle.loads(theirs)  # type: ignore[no-any-return]
    try:
        made = make()
        try:
            sent = pickle.dumps(made)
        except Exception as error:
            raise TypeError(f"{what} cannot go to other ranks ({error}); use tensors and plain values") from error
    except Exception as error:
        pickled = None  # the error itself where it can be sent, and is the same there; else its text
        with suppress(Exception):
            known = pickle.dumps(error)
            pickled = known if str(pickle.loads(known)) == str(error) else None
        share_object((pickled, f"{type(error).__name__}: {error}"), source, group, device)
        raise
    share_object((sent, ""), source, group, device)
    return made
