"""Collectives and messages between ranks, over memory of the host and of devices."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_parallel.collectives import functional, point_to_point
from lightning_parallel.collectives import rows as rows_module
from lightning_parallel.collectives.functional import (
    all_gather,
    broadcast_tensors,
    exchange,
    packed,
    parts_of_all,
    reduce_scatter,
    scattered,
    summed,
    within_reach,
)
from lightning_parallel.collectives.point_to_point import IN_FLIGHT, Lane, share_object
from lightning_parallel.collectives.rows import exchanged, told
from lightning_parallel.collectives.samples import rows_of_all
from lightning_parallel.strategies.ranks.launchers import backend_for
from tests.ranks import ranks, run_on_ranks

HOST = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16)
OF_BUFFERS = (*DTYPES, torch.complex64, torch.int16, torch.uint16, torch.float8_e4m3fn)
"""Some are known to no backend."""


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def values(*shape: int, of: int | None = None) -> Tensor:
    """Other ones on each rank, the same in each call."""
    random = torch.Generator().manual_seed(group().rank() if of is None else of)
    return torch.randn(*shape, generator=random)


# ---------------------------------------------------------------- everything that goes from rank to rank


def gathered() -> Any:
    output = torch.zeros(group().size() * 5)
    pending = all_gather(output, values(5), group())
    pending.wait()
    return output


def gathered_in_place() -> Any:
    output = torch.zeros(group().size(), 5)
    output[group().rank()] = values(5)
    all_gather(output.view(-1), output[group().rank()], group()).wait()
    return output


def reduced() -> Any:
    output = torch.zeros(4)
    reduce_scatter(output, values(4 * group().size()), group()).wait()
    return output


def of_all_kinds() -> Any:
    return [parts_of_all(values(2, 3).to(dtype), group()) for dtype in DTYPES]


def sums() -> Any:
    return [scattered(values(group().size(), 2, 3), group()), summed(values(3), group())]


def rows() -> Any:
    n, own = group().size(), group().rank()
    sent = [(own + rank) % 3 for rank in range(n)]  # to some ranks none
    return [exchanged(values(sum(sent), 2), sent, sent, group()), told(values(n), group())]


def round_the_ring() -> Any:
    n, own = group().size(), group().rank()
    received, nothing = torch.zeros(3), torch.zeros(0)
    others = {} if n == 2 else {(own + 2) % n: nothing}  # an empty message does not travel
    exchange({(own + 1) % n: values(3), **others}, {(own - 1) % n: received}, group()).wait()
    return received


def to_all_at_once() -> Any:
    """In one message for each pair, in both directions."""
    others = [rank for rank in range(group().size()) if rank != group().rank()]
    received = {rank: torch.zeros(4) for rank in others}
    Lane(group(), HOST).exchange(values(4), received)
    return received


def with_tags() -> Any:
    """The one that is asked for second was sent first."""
    lane, n, own = Lane(group(), HOST), group().size(), group().rank()
    for tag in (1, 2):
        lane.send(values(3) + tag, (own + 1) % n, tag)
    found = [lane.receive(torch.zeros(3), (own - 1) % n, tag).wait() for tag in (2, 1)]
    lane.finish()
    return found


def objects() -> Any:
    lane, n, own = Lane(group(), HOST), group().size(), group().rank()
    lane.send_object({"rank": own, "tensor": values(2)}, (own + 1) % n)
    found = lane.receive_object((own - 1) % n)
    lane.finish()
    return [found, share_object(("said", own), 1, group(), HOST)]


def broadcast() -> Any:
    tensors = [values(3).to(dtype) for dtype in OF_BUFFERS] + [values(0, 2)]
    broadcast_tensors(tensors, group(), HOST, source=1)
    return tensors


ALL = {act.__name__: act for act in (gathered, gathered_in_place, reduced, of_all_kinds, sums, rows,
                                     round_the_ring, to_all_at_once, with_tags, objects, broadcast)}  # fmt: skip


def flat(found: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(found)


class OnDevice:
    """Inside, tensors are taken for those of a device, which messages over gloo bring through the host."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for module in (functional, rows_module, point_to_point):
            self.patch.setattr(module, "sendable", lambda tensor, _: tensor.clone())
            self.patch.setattr(module, "room_for", lambda tensor, _: torch.empty_like(tensor), raising=False)

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()


def compare_all() -> None:
    for name, act in ALL.items():
        plain = act()
        with OnDevice():
            through_host = act()
        for wanted, got in zip(flat(plain), flat(through_host), strict=True):
            same = torch.equal(got, wanted) if isinstance(wanted, Tensor) else got == wanted
            assert same, f"{name} on rank {group().rank()}: {got}, not {wanted}"
    n, own = group().size(), group().rank()
    assert torch.equal(gathered(), torch.cat([values(5, of=rank) for rank in range(n)]))
    torch.testing.assert_close(reduced(), sum(values(4 * n, of=rank) for rank in range(n))[4 * own : 4 * own + 4])


@pytest.mark.parametrize("n", [2, 4])
def test_all_that_goes_from_rank_to_rank_is_the_same_through_the_host(n: int) -> None:
    run_on_ranks(n, compare_all)


# ---------------------------------------------------------------- when


@ranks(2)
def test_what_was_sent_is_let_go_while_more_is_sent() -> None:
    """Gloo says that a send is over only after somebody has waited for it."""
    lane, storages = Lane(group(), HOST), []
    arriving = [lane.receive(torch.zeros(3), 1 - group().rank(), tag) for tag in range(12)]
    for tag in range(12):
        tensor = values(3)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        lane.send(tensor, 1 - group().rank(), tag)
        del tensor
        assert sum(not storage.expired() for storage in storages) <= IN_FLIGHT
    assert all(torch.equal(each.wait(), values(3, of=1 - group().rank())) for each in arriving)
    lane.finish()
    assert all(storage.expired() for storage in storages)


# ---------------------------------------------------------------- where numbers are sent from


def a_group_of(*kinds: str) -> Any:
    return mock.Mock(_device_types=[torch.device(kind) for kind in kinds])


@pytest.mark.parametrize("kinds", [("cuda", "cpu"), ("cpu", "cuda"), ("cpu",)])
def test_numbers_of_any_rank_are_sent_from_the_host_if_the_backend_carries_it(kinds: tuple[str, ...]) -> None:
    """On a rank without gradients a norm is a number of the host, on another one it is one of the device."""
    found = mock.Mock()
    within_reach(found, a_group_of(*kinds))
    found.to.assert_called_once_with(HOST)


def test_numbers_of_host_and_device_go_in_one_message() -> None:
    on_host, on_device = torch.ones(()), torch.zeros((), device="meta")
    together = packed([on_host, on_device, on_host], a_group_of("meta"))
    assert (together.device.type, together.shape) == ("meta", (3,))
    assert packed([on_host, on_host * 2], a_group_of("cuda", "cpu")).tolist() == [1, 2]


# ---------------------------------------------------------------- who talks by what

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("devices", "chosen", "backend"),
    [
        ([HOST, HOST], None, "gloo"),
        ([GPU, OTHER], None, "nccl"),
        ([GPU], None, "nccl"),
        ([GPU, GPU], None, "gloo"),
        ([GPU, GPU], "gloo", "gloo"),
        ([GPU, OTHER], "gloo", "gloo"),
    ],
)
def test_ranks_that_share_a_gpu_talk_through_the_host(
    devices: list[torch.device], chosen: str | None, backend: str
) -> None:
    assert backend_for(devices, chosen) == backend


@pytest.mark.parametrize("chosen", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_does_not_talk_between_ranks_that_share_a_gpu(chosen: str) -> None:
    with pytest.raises(ValueError, match=r"nccl' does not work .* 3 ranks have 2; leave it out, or pass 'gloo'"):
        backend_for([GPU, GPU, OTHER], chosen)


# ---------------------------------------------------------------- samples of all ranks


@ranks(3)
def test_unlike_numbers_of_rows_are_gathered_with_their_gradients():
    sizes = [2, 0, 3]
    rank = group().rank()
    own = values(sizes[rank], 4).requires_grad_()
    factor = values(sum(sizes), 4, of=9)
    found = rows_of_all(own, group())
    assert found.shape == (1, 5, 4)
    torch.testing.assert_close(found[0], torch.cat([values(size, 4, of=of) for of, size in enumerate(sizes)]))
    (found.flatten(0, 1) * factor * (rank + 1)).sum().backward()
    torch.testing.assert_close(own.grad, 6 * factor.split(sizes)[rank])  # 1 + 2 + 3: each rank uses the rows


@ranks(2)
def test_like_tensors_are_gathered_as_rows_of_ranks():
    for shape in ((0,), (3,), (2, 3)):
        found = rows_of_all(values(*shape), group())
        torch.testing.assert_close(found, torch.stack([values(*shape, of=rank) for rank in range(2)]))
    assert rows_of_all(torch.tensor(group().rank()), group()).tolist() == [0, 1]


@ranks(2)
def test_tensors_that_are_unlike_in_more_than_rows_are_refused():
    said = r"float32 of shape \[2, 3\]; torch.float32 of shape \[2, 4\]; pad"
    with pytest.raises(ValueError, match=said):
        rows_of_all(torch.ones(2, 3 + group().rank()), group())
    with pytest.raises(ValueError, match=r"int64 of shape \[2\]; torch.float32 of shape \[2\]; pad"):
        rows_of_all(torch.ones(2, dtype=torch.float32 if group().rank() else torch.int64), group())
