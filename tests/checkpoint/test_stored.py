"""A tensor that is still on the disk is copied once, into memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_parallel.checkpoint.stored import StoredTensor, all_of


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What is read."""
    found: list[Tensor] = []
    read_it = StoredTensor.read

    def kept(stored: StoredTensor) -> Tensor:
        found.append(read_it(stored))
        return found[-1]

    monkeypatch.setattr(StoredTensor, "read", kept)
    return found


@pytest.mark.parametrize("box", [slice(0, 8), slice(2, 5)])
def test_box_in_one_piece_is_copied_once(read: list[Tensor], box: slice) -> None:
    disk = torch.arange(32.0).view(8, 4)
    stored = StoredTensor(disk.dtype, disk.shape, all_of(disk.shape, lambda: disk))
    made = stored[box].clone()
    assert [each.data_ptr() for each in read] == [made.data_ptr()]
    assert made.equal(disk[box])
    made.zero_()
    assert disk.any()


def test_box_in_several_pieces_is_put_together(read: list[Tensor]) -> None:
    disk = torch.arange(32.0).view(8, 4)
    pieces = [((0, 0), (3, 4), lambda: disk[:3]), ((3, 0), (5, 4), lambda: disk[3:])]
    made = StoredTensor(disk.dtype, disk.shape, pieces)[1:6].clone()
    assert [each.data_ptr() for each in read] == [made.data_ptr()]
    assert made.equal(disk[1:6])


def test_changed_tensor_is_cloned_as_it_is() -> None:
    disk = torch.arange(4.0)
    stored: Tensor = StoredTensor(disk.dtype, disk.shape, all_of(disk.shape, lambda: disk.clone()))
    stored.add_(1.0)
    made = stored.clone()
    stored.add_(1.0)
    assert made.equal(disk + 1)
    assert stored.equal(disk + 2)
