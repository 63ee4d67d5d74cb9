"""A full checkpoint that is not as it was written is named, and nothing of it is loaded."""

import random
from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint.sealed import COMMENT, END_SIZE
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.checkpoint.folders import content, damage, flip, is_step


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("full") / "step.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(7), path)
    assert is_step(AtomicCheckpointIO().load_checkpoint(path), 7)
    return path.read_bytes()


def require_refused(path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=str(path)):
        AtomicCheckpointIO().load_checkpoint(path)


def damage_often(written: bytes, folder: Path, times: int) -> None:
    chance = random.Random(0)
    for number in range(times):
        copy = folder / f"{number}" / "step.ckpt"
        copy.parent.mkdir()
        copy.write_bytes(written)
        damage(copy, chance, ("missing", "folder", "pipe"))
        require_refused(copy)


def test_damaged_files_are_named_and_never_loaded(written: bytes, tmp_path: Path) -> None:
    damage_often(written, tmp_path, 300)


@pytest.mark.exhaustive
def test_damaged_files_are_named_and_never_loaded_ten_thousand_times(written: bytes, tmp_path: Path) -> None:
    damage_often(written, tmp_path, 10_000)


def test_so_is_one_whose_end_with_the_hash_is_not_whole(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step.ckpt"
    for cut in range(1, COMMENT + END_SIZE + 3):
        path.write_bytes(written[:-cut])
        require_refused(path)
    for place in range(1, COMMENT + END_SIZE + 1):
        path.write_bytes(written)
        flip(path, len(written) - place, place % 8)
        require_refused(path)
    for more in (b" ", written[-COMMENT:], bytes(2**17)):
        path.write_bytes(written + more)
        require_refused(path)


def test_so_is_one_of_others_that_was_cut_off_or_added_to(tmp_path: Path) -> None:
    path = tmp_path / "step.ckpt"
    torch.save(content(7), path)
    data = path.read_bytes()
    assert is_step(AtomicCheckpointIO().load_checkpoint(path), 7)
    for changed in (data[:-1], data[:-30], data + b" ", data + bytes(2**17)):
        path.write_bytes(changed)
        require_refused(path)
