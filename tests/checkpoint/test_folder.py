"""A folder is read as it was written, or refused by name; nothing in it is trusted."""

import hashlib
import json
import os
import random
import shutil
from collections import Counter, OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.folder import faults
from lightning_parallel.checkpoint.manifest import MANIFEST, VALUES, file_of, read_manifest, write_manifest
from lightning_parallel.checkpoint.plain import NotPlain, decoded, encoded
from lightning_parallel.checkpoint.shares import Offer, shared_out
from lightning_parallel.checkpoint.tensors_file import TensorsFile
from tests.checkpoint.folders import content, damage, is_step, load, save

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
def test_what_is_not_plain_is_named_by_the_keys_that_lead_to_it(value: Any) -> None:
    with pytest.raises(NotPlain, match=r"checkpoint\['hyper_parameters'\]\['net'\]\[1\] is a .*, no plain value"):
        encoded({"hyper_parameters": {"net": [0, value]}})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("folder") / "step.ckpt"
    save(target, 7)
    return target


@pytest.mark.parametrize("lazy", [False, True])
def test_a_folder_is_read_as_it_was_written(written: Path, lazy: bool) -> None:
    assert is_step(load(written, lazy), 7)


def test_others_read_its_files(written: Path) -> None:
    with safe_open(written / "rank-00001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("state_dict/weight[2:4,0:6]"), content(7)["state_dict"]["weight"][2:])


def test_a_part_is_read_alone(written: Path) -> None:
    weight = load(written, lazy=True)["state_dict"]["weight"]
    reads = []
    weight._pieces = [(o, s, lambda read=read, o=o: (reads.append(o), read())[1]) for o, s, read in weight._pieces]
    assert torch.equal(weight.narrow(0, 2, 2)[:, 1:3].clone(), content(7)["state_dict"]["weight"][2:, 1:3])
    assert reads == [(2, 0)]


def test_a_stored_tensor_is_an_ordinary_one_to_those_who_change_it(written: Path) -> None:
    weight, wanted = load(written, lazy=True)["state_dict"]["weight"], content(7)["state_dict"]["weight"].clone()
    for tensor in (weight, wanted):
        tensor[1:].mul_(2)
        tensor.view(-1)[0] = 5
        tensor.data[0, 1:3] = 6
        tensor.detach().add_(1)
    assert torch.equal(weight, wanted)
    assert weight.tolist() == wanted.tolist()


def damage_often(written: Path, tmp_path: Path, times: int) -> None:
    chance = random.Random(0)
    for number in range(times):
        copy = tmp_path / str(number)
        shutil.copytree(written, copy)
        file = chance.choice(sorted(copy.iterdir()))
        damage(file, chance, ("missing", "link", "folder", "pipe"))
        with pytest.raises(Damaged, match=file.name):
            load(copy)
        shutil.rmtree(copy)


def test_damaged_files_are_named_and_never_loaded(written: Path, tmp_path: Path) -> None:
    damage_often(written, tmp_path, 300)


@pytest.mark.exhaustive
def test_damaged_files_are_named_and_never_loaded_ten_thousand_times(written: Path, tmp_path: Path) -> None:
    damage_often(written, tmp_path, 10_000)


def test_messages_name_file_rank_and_tensors(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, copy := tmp_path / "copy.ckpt")
    (copy / "rank-00001.safetensors").unlink()
    said = (
        r"nothing .* was loaded: .*rank-00001.safetensors is missing; rank 1 wrote .*weight.* to it\. take an earlier"
    )
    with pytest.raises(Damaged, match=said):
        load(copy)


def test_a_file_of_another_size_is_not_hashed(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have terabytes, and take none on the disk."""
    shutil.copytree(written, copy := tmp_path / "copy.ckpt")
    os.truncate(copy / "rank-00001.safetensors", 2**41)
    manifest = read_manifest(copy)
    monkeypatch.setattr(hashlib, "sha256", lambda: pytest.fail("it is hashed"))
    (fault,) = faults(copy, replace(manifest, files={file_of(1): manifest.files[file_of(1)]}))
    assert f"rank-00001.safetensors has {2**41} bytes of" in fault


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / str(step), step)
    shutil.copy(tmp_path / "1" / "rank-00000.safetensors", tmp_path / "2" / "rank-00000.safetensors")
    with pytest.raises(Damaged, match="its hash is another"):
        load(tmp_path / "2")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", ".hidden", "..", ""])
def test_names_outside_the_folder_are_refused(written: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(written, copy := tmp_path / "copy")
    manifest = read_manifest(copy)
    (copy / MANIFEST).unlink()
    write_manifest(
        copy,
        manifest.__class__(
            **{**vars(manifest), "files": {**manifest.files, name: next(iter(manifest.files.values()))}}
        ),
    )
    with pytest.raises(Damaged, match="no plain name of a file"):
        load(copy)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", VALUES])
def test_a_header_that_lies_is_refused(written: Path, tmp_path: Path, name: str) -> None:
    """Whoever makes a hostile folder gives it right hashes: sizes are still bounded by the file."""
    path = tmp_path / "file"
    for header in (
        {"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}},
        {"a": 1},
        [],
        {"a": {"dtype": "X"}},
    ):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(Damaged):
            TensorsFile(path)
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(Damaged, match="fewer than its header announces"):
        TensorsFile(path)


def test_boxes_that_overlap_are_written_in_pieces() -> None:
    """As heads of keys and values do, of which ranks have copies; and wholes beside parts."""

    def offer(*boxes: Any) -> Offer:
        return Offer({"w": ("F32", (6, 2))}, {"w": boxes}, {})

    shares = shared_out([offer(((0, 0), (4, 2))), offer(((2, 0), (4, 2))), offer(((0, 0), (6, 2)))])
    places = shares.tensors["w"].boxes
    assert sorted((place.offset, place.shape) for place in places) == [((n, 0), (2, 2)) for n in (0, 2, 4)]
    assert len({place.rank for place in places}) > 1


def test_holes_and_ranks_that_differ_are_refused_when_they_are_saved() -> None:
    def offer(shape: tuple[int, ...], *boxes: Any) -> Offer:
        return Offer({"w": ("F32", shape)}, {"w": boxes}, {})

    for boxes in ([((0,), (1,)), ((2,), (2,))], [((0,), (2,)), ((1,), (2,))], [(), ()]):
        with pytest.raises(ValueError, match=r"w has 4 elements in the checkpoint of rank 0, and ranks hold [0-3]$"):
            shared_out([offer((4,), *([box] if box else [])) for box in boxes])
    with pytest.raises(ValueError, match=r"not the same tensor on all ranks \(rank 1: .*; rank 0: .*hooks must change"):
        shared_out([offer((4,), ((0,), (4,))), offer((5,), ((0,), (5,)))])
