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
    all_gather_stacked,
    broadcast_tensors,
    exchange,
    packed,
    reduce_scatter,
    reduce_scatter_row,
    summed,
    to_group_device,
)
from lightning_parallel.collectives.point_to_point import IN_FLIGHT, Channel, broadcast_object, compute_on_one_rank
from lightning_parallel.collectives.rows import exchange_rows, rows_of_all
from lightning_parallel.strategies.ranks.launchers import backend_for
from tests.ranks import ranks, run_on_ranks

HOST = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16)
OF_BUFFERS = (*DTYPES, torch.complex64, torch.int16, torch.float8_e4m3fn)  # some are known to no backend


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def values(*shape: int, of: int | None = None) -> Tensor:
    """Other ones on each rank, the same in each call."""
    random = torch.Generator().manual_seed(group().rank() if of is None else of)
    return torch.randn(*shape, generator=random)


def collectives(n: int, own: int) -> dict[str, Any]:
    gathered, in_place, reduced = torch.zeros(n * 5), torch.zeros(n, 5), torch.zeros(4)
    all_gather(gathered, values(5), group()).wait()
    in_place[own] = values(5)
    all_gather(in_place.view(-1), in_place[own], group()).wait()
    reduce_scatter(reduced, values(4 * n), group()).wait()
    sent = [(own + rank) % 3 for rank in range(n)]  # to some ranks none
    copies = [values(3).to(dtype) for dtype in OF_BUFFERS] + [values(0, 2)]
    broadcast_tensors(copies, group(), HOST, source=1)
    return {
        "gathered": [gathered, in_place.view(-1)],
        "reduced": reduced,
        "parts of all": [all_gather_stacked(values(2, 3).to(dtype), group()) for dtype in DTYPES],
        "sums": [reduce_scatter_row(values(n, 2, 3), group()), summed(values(3), group())],
        "rows": [
            exchange_rows(values(sum(sent), 2), sent, sent, group()),
            exchange_rows(values(n), [1] * n, [1] * n, group()),
        ],
        "broadcast": copies,
    }


def messages(n: int, own: int) -> dict[str, Any]:
    before, after = (own - 1) % n, (own + 1) % n
    ring, pairs = torch.zeros(3), {rank: torch.zeros(4) for rank in range(n) if rank != own}
    empty = {} if n == 2 else {(own + 2) % n: torch.zeros(0)}  # an empty message does not travel
    exchange({after: values(3), **empty}, {before: ring}, group()).wait()
    Channel(group(), HOST).exchange(values(4), pairs)  # in one message for each pair, in both directions
    lane = Channel(group(), HOST)
    for tag in (1, 2):
        lane.send(values(3) + tag, after, tag)
    tagged = [lane.receive(torch.zeros(3), before, tag).wait() for tag in (2, 1)]  # the second was sent first
    lane.send_object({"rank": own, "tensor": values(2)}, after)
    received = lane.receive_object(before)
    lane.finish()
    objects = [received, broadcast_object(("said", own), 1, group(), HOST)]
    return {"ring": ring, "pairs": pairs, "tagged": tagged, "objects": objects}


def compare_all() -> None:
    n, own = group().size(), group().rank()
    plain = collectives(n, own) | messages(n, own)
    with pytest.MonkeyPatch.context() as patch:  # tensors are taken for those of a device, which gloo does not carry
        patch.setattr(functional, "_is_read", lambda *_: False)
        for module in (functional, rows_module, point_to_point):
            patch.setattr(module, "sendable", lambda tensor, _: tensor.clone())
            patch.setattr(module, "receive_buffer", lambda tensor, _: torch.empty_like(tensor), raising=False)
        through_host = collectives(n, own) | messages(n, own)
    for name, found in plain.items():
        pairs = zip(*map(torch.utils._pytree.tree_leaves, (found, through_host[name])), strict=True)
        for wanted, got in pairs:
            same = torch.equal(got, wanted) if isinstance(wanted, Tensor) else got == wanted
            assert same, f"{name} on rank {own}: {got}, not {wanted}"
    for gathered in plain["gathered"]:
        assert torch.equal(gathered, torch.cat([values(5, of=rank) for rank in range(n)]))
    total = sum(values(4 * n, of=rank) for rank in range(n))
    torch.testing.assert_close(plain["reduced"], total[4 * own : 4 * own + 4])


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_messages_are_the_same_through_the_host(n: int) -> None:
    run_on_ranks(n, compare_all)


def check_memory_of_messages() -> None:
    """Memory is released while more is sent: gloo says that a send is over only after somebody has waited for it."""
    lane, storages, other = Channel(group(), HOST), [], 1 - group().rank()
    arriving = [lane.receive(torch.zeros(3), other, tag) for tag in range(12)]
    for tag in range(12):
        tensor = values(3)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        lane.send(tensor, other, tag)
        del tensor
        assert sum(not storage.expired() for storage in storages) <= IN_FLIGHT
    assert all(torch.equal(each.wait(), values(3, of=other)) for each in arriving)
    lane.finish()
    assert all(storage.expired() for storage in storages)


@ranks(2)
def test_memory_and_rows_of_messages() -> None:
    check_memory_of_messages()
    rank, sizes = group().rank(), [2, 0]
    own, factor = values(sizes[rank], 4).requires_grad_(), values(2, 4, of=9)
    found = rows_of_all(own, group())  # ranks have other numbers of samples
    torch.testing.assert_close(found, values(2, 4, of=0)[None])
    (found.flatten(0, 1) * factor * (rank + 1)).sum().backward()
    torch.testing.assert_close(own.grad, 3 * factor.split(sizes)[rank])  # 1 + 2: each rank uses the rows
    for shape in ((0,), (3,), (2, 3)):
        found = rows_of_all(values(*shape), group())
        torch.testing.assert_close(found, torch.stack([values(*shape, of=of) for of in range(2)]))
    assert rows_of_all(torch.tensor(rank), group()).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"float32 of shape \[2, 3\]; torch.float32 of shape \[2, 4\]; pad"):
        rows_of_all(torch.ones(2, 3 + rank), group())
    with pytest.raises(ValueError, match=r"int64 of shape \[2\]; torch.float32 of shape \[2\]; pad"):
        rows_of_all(torch.ones(2, dtype=torch.float32 if rank else torch.int64), group())


GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


def a_group_of(*kinds: str) -> Any:
    return mock.Mock(_device_types=[torch.device(kind) for kind in kinds])


def test_numbers_go_from_the_host_where_the_backend_can() -> None:
    """On a rank without gradients a norm is a number of the host, on another one it is one of the device."""
    for kinds in (("cuda", "cpu"), ("cpu", "cuda"), ("cpu",)):
        found = mock.Mock()
        to_group_device(found, a_group_of(*kinds))
        found.to.assert_called_once_with(HOST)
    on_host, on_device = torch.ones(()), torch.zeros((), device="meta")
    together = packed([on_host, on_device, on_host], a_group_of("meta"))
    assert (together.device.type, together.shape) == ("meta", (3,))
    assert packed([on_host, on_host * 2], a_group_of("cuda", "cpu")).tolist() == [1, 2]


def test_ranks_that_share_a_gpu_use_gloo() -> None:
    for devices, chosen, backend in (
        ([HOST, HOST], None, "gloo"),
        ([GPU, OTHER], None, "nccl"),
        ([GPU, GPU], None, "gloo"),
        ([GPU, OTHER], "gloo", "gloo"),
    ):
        assert backend_for(devices, chosen) == backend
    for chosen in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(ValueError, match=r"nccl' does not work .* 3 ranks share 2; leave it out, or pass 'gloo'"):
            backend_for([GPU, GPU, OTHER], chosen)


class OfTwoError(ValueError):
    """Unpickled from its text alone, it lacks an argument."""

    def __init__(self, what: str, rule: str) -> None:
        super().__init__(f"{what}: {rule}")


def fail_to_make() -> None:
    def make() -> Any:
        raise OfTwoError("the loss", "is nan")

    with pytest.raises((OfTwoError, RuntimeError), match="the loss: is nan"):
        compute_on_one_rank(make, "a loss", 0, group(), HOST)


def test_what_one_rank_raises_is_raised_by_all() -> None:
    run_on_ranks(2, fail_to_make)
