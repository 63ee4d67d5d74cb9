"""A folder or a file is read as it was written, or refused by name; nothing in it is trusted."""

import hashlib
import json
import os
import random
import shutil
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_parallel.checkpoint.files import Damaged, TensorsFile
from lightning_parallel.checkpoint.folder import (
    MANIFEST,
    Offer,
    faults,
    file_of,
    plan_writes,
    read_manifest,
    write_manifest,
)
from lightning_parallel.checkpoint.lazy_tensor import LazyTensor, all_of
from lightning_parallel.checkpoint.plain import NotPlain, decoded, encoded
from lightning_parallel.checkpoint.sealed import COMMENT, END_SIZE
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.checkpoint.folders import content, damage, flip, is_step, load, save

VALUE: dict[Any, Any] = {
    "numbers": [1, -0.0, 2.5, float("inf"), 3 + 4j, True, None],
    "texts": ("a", b"\x00b", "\udcff"),
    3: {"3": torch.ones(2), 3: torch.zeros(())},
    "containers": [{1, 2}, frozenset({"x"}), OrderedDict(b=1, a=2), Counter({30: 2}), defaultdict(list, k=[1])],
    "arrays": [np.arange(3), np.float32(2.5), np.bool_(True)],
    "torch": [torch.float32, torch.Size([2]), torch.device("cpu"), torch.ones(2, dtype=torch.bfloat16)],
    "path": Path("a/b"),
    "!": "a dictionary with the mark",
}


def test_plain_values_come_back_as_they_were() -> None:
    tree, tensors = encoded(VALUE)
    got = decoded(json.loads(json.dumps(tree)), tensors.__getitem__)
    assert str(got) == str(VALUE)
    assert list(map(type, got["containers"])) == list(map(type, VALUE["containers"]))
    assert got["containers"][4].default_factory is list


@pytest.mark.parametrize("value", [nn.Linear(1, 1), print, PurePosixPath, object(), np.array(["x"]), slice(1)])
def test_value_that_is_not_plain_is_named_by_its_keys(value: Any) -> None:
    with pytest.raises(NotPlain, match=r"checkpoint\['hyper_parameters'\]\['net'\]\[1\] is a .*, no plain value"):
        encoded({"hyper_parameters": {"net": [0, value]}})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("folder") / "step.ckpt"
    save(target, 7)
    return target


def test_folder_is_read_as_it_was_written_and_by_others(written: Path) -> None:
    assert is_step(load(written), 7)
    assert is_step(load(written, lazy=True), 7)
    with safe_open(written / "rank-00001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("state_dict/weight[2:4,0:6]"), content(7)["state_dict"]["weight"][2:])


def test_stored_tensor_is_an_ordinary_one_to_who_changes_it(written: Path) -> None:
    weight, wanted = load(written, lazy=True)["state_dict"]["weight"], content(7)["state_dict"]["weight"].clone()
    for tensor in (weight, wanted):
        tensor[1:].mul_(2)
        tensor.view(-1)[0] = 5
        tensor.data[0, 1:3] = 6
        tensor.detach().add_(1)
    assert torch.equal(weight, wanted)
    assert weight.tolist() == wanted.tolist()


def damaged_often(times: int, tmp_path: Path, whole: Path, others: tuple[str, ...]) -> Iterator[tuple[Path, Path]]:
    """Copies of a checkpoint, and the file of each that is damaged."""
    chance = random.Random(0)
    for number in range(times):
        copy = tmp_path / str(number) / whole.name
        shutil.copytree(whole.parent, copy.parent)
        file = chance.choice(sorted(copy.iterdir())) if copy.is_dir() else copy
        damage(file, chance, others)
        yield copy, file
        shutil.rmtree(copy.parent)


TIMES = [300, pytest.param(10_000, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("times", TIMES)
def test_damaged_files_are_named_and_never_loaded(written: Path, tmp_path: Path, times: int) -> None:
    for copy, file in damaged_often(times, tmp_path, written, ("missing", "link", "folder", "pipe")):
        with pytest.raises(Damaged, match=file.name):
            load(copy)


def test_messages_name_file_rank_and_tensors(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, copy := tmp_path / "copy.ckpt")
    (copy / "rank-00001.safetensors").unlink()
    said = r"nothing .* was loaded: .*rank-00001.safetensors is missing; rank 1 wrote .*weight.* to it; take an earl"
    with pytest.raises(Damaged, match=said):
        load(copy)


def test_file_of_another_size_is_not_hashed(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have terabytes, and take none on the disk."""
    shutil.copytree(written, copy := tmp_path / "copy.ckpt")
    os.truncate(copy / "rank-00001.safetensors", 2**41)
    manifest = read_manifest(copy)
    monkeypatch.setattr(hashlib, "sha256", lambda: pytest.fail("it is hashed"))
    (fault,) = faults(copy, replace(manifest, files={file_of(1): manifest.files[file_of(1)]}))
    assert f"rank-00001.safetensors has {2**41} bytes, not" in fault


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / str(step), step)
    shutil.copy(tmp_path / "1" / "rank-00000.safetensors", tmp_path / "2" / "rank-00000.safetensors")
    with pytest.raises(Damaged, match="its hash differs"):
        load(tmp_path / "2")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", ".hidden", "..", ""])
def test_names_outside_the_folder_are_refused(written: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(written, copy := tmp_path / "copy")
    manifest = read_manifest(copy)
    (copy / MANIFEST).unlink()
    write_manifest(copy, replace(manifest, files={**manifest.files, name: next(iter(manifest.files.values()))}))
    with pytest.raises(Damaged, match="not a plain file name"):
        load(copy)


def test_header_that_lies_is_refused(tmp_path: Path) -> None:
    """Whoever makes a hostile folder gives it right hashes: sizes are still bounded by the file."""
    path, far = tmp_path / "file", {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}
    for header in ({"a": far}, {"a": 1}, [], {"a": {"dtype": "X"}}):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(Damaged):
            TensorsFile(path)
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(Damaged, match="fewer than its header announces"):
        TensorsFile(path)


def test_holes_and_ranks_that_differ_are_refused_at_the_save() -> None:
    def offer(shape: tuple[int, ...], *boxes: Any) -> Offer:
        return Offer({"w": ("F32", shape)}, {"w": boxes}, {})

    for boxes in ([((0,), (1,)), ((2,), (2,))], [((0,), (2,)), ((1,), (2,))], [(), ()]):
        with pytest.raises(ValueError, match=r"w has 4 elements in rank 0's checkpoint, but its shards have [0-3]$"):
            plan_writes([offer((4,), *([box] if box else [])) for box in boxes])
    with pytest.raises(ValueError, match=r"w differs between ranks \(rank 1: .*; rank 0: .*hooks must change"):
        plan_writes([offer((4,), ((0,), (4,))), offer((5,), ((0,), (5,)))])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full") / "step.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(7), path)
    assert is_step(AtomicCheckpointIO().load_checkpoint(path), 7)
    return path


def require_refused(path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=str(path)):
        AtomicCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("times", TIMES)
def test_damaged_full_files_are_named_and_never_loaded(file: Path, tmp_path: Path, times: int) -> None:
    for copy, _ in damaged_often(times, tmp_path, file, ("missing", "folder", "pipe")):
        require_refused(copy)


def test_file_whose_end_is_not_whole_is_refused(file: Path, tmp_path: Path) -> None:
    """The end has the hash; a file of others has none."""
    written, path = file.read_bytes(), tmp_path / "step.ckpt"
    for place in range(1, COMMENT + END_SIZE + 1):
        path.write_bytes(written)
        flip(path, len(written) - place, place % 8)
        require_refused(path)
    cut = [written[:-cut] for cut in range(1, COMMENT + END_SIZE + 3)]
    longer = [written + more for more in (b" ", written[-COMMENT:], bytes(2**17))]
    torch.save(content(7), path)
    data = path.read_bytes()
    assert is_step(AtomicCheckpointIO().load_checkpoint(path), 7)
    for changed in (*cut, *longer, data[:-1], data[:-30], data + b" ", data + bytes(2**17)):
        path.write_bytes(changed)
        require_refused(path)


def test_stored_tensor_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into memory of its own, of one piece or of several."""
    found: list[Tensor] = []
    read_it = LazyTensor.read
    monkeypatch.setattr(LazyTensor, "read", lambda stored: found.append(read_it(stored)) or found[-1])
    disk = torch.arange(32.0).view(8, 4)
    pieces = [((0, 0), (3, 4), lambda: disk[:3]), ((3, 0), (5, 4), lambda: disk[3:])]
    for parts in (all_of(disk.shape, lambda: disk), pieces):
        for box in (slice(0, 8), slice(2, 5)):
            found.clear()
            made = LazyTensor(disk.dtype, disk.shape, parts)[box].clone()
            assert [each.data_ptr() for each in found] == [made.data_ptr()]
            assert made.equal(disk[box])
            made.zero_()
            assert disk.any()


def test_stored_tensor_that_was_changed_is_cloned_as_it_is() -> None:
    disk = torch.arange(4.0)
    stored: Tensor = LazyTensor(disk.dtype, disk.shape, all_of(disk.shape, lambda: disk.clone()))
    stored.add_(1.0)
    made = stored.clone()
    stored.add_(1.0)
    assert made.equal(disk + 1)
    assert stored.equal(disk + 2)
