"""The manifest of a checkpoint folder: what it holds, where each box of each tensor lies, every file's hash."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.hashed import Content, HashedFile, open_plain, sha256_of
from lightning_parallel.checkpoint.tensors_file import DTYPES

MANIFEST, VALUES = "manifest.json", "values.json"
FORMAT, VERSION = "lightning_parallel", 1
START, MIDDLE, END = b'{"manifest":', b',"sha256":"', b'"}\n'
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
MAX_BYTES = 2**30


@dataclass(frozen=True)
class Place:
    """One box of a tensor: the rank whose file holds it, its first element in the whole, and its shape."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """One tensor: its dtype by the name that files have for it, its whole shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Place, ...]


@dataclass(frozen=True)
class Manifest:
    """All that is to be known of a checkpoint before it is read.

    Attributes:
        step: how many steps of optimizers had been taken.
        layout: the sizes of the mesh's axes.
        versions: of the libraries that wrote it.
        tensors: by their names.
        same: of tensors that are another one, the name of that.
        files: what every other file holds.
        holds: the names of what the checkpoint has at its top, such as "optimizer_states".
    """

    step: int
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    tensors: Mapping[str, Table]
    same: Mapping[str, str]
    files: Mapping[str, Content]
    holds: tuple[str, ...] = field(default=())

    def tensors_of(self, rank: int) -> list[str]:
        """The names of the tensors that a rank wrote, wholly or in part."""
        return [name for name, table in self.tensors.items() if any(box.rank == rank for box in table.boxes)]


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(file: str) -> int | None:
    """The rank that wrote a file of tensors; None for other files."""
    found = re.fullmatch(r"rank-(\d+)\.safetensors", file)
    return int(found[1]) if found else None


def entry_name(name: str, table: Table, box: Place) -> str:
    """What a box is called in its file: by the tensor's name, and which elements it has if these are not all."""
    if box.shape == table.shape:
        return name
    spans = (f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
    return f"{name}[{','.join(spans)}]"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with its own hash."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "layout": dict(manifest.layout),
        "versions": dict(manifest.versions),
        "holds": list(manifest.holds),
        "same": dict(manifest.same),
        "files": {name: [it.size, it.sha256] for name, it in manifest.files.items()},
        "tensors": {
            name: [it.dtype, it.shape, [[box.rank, box.offset, box.shape] for box in it.boxes]]
            for name, it in manifest.tensors.items()
        },
    }
    body = json.dumps(content, separators=(",", ":")).encode()
    with HashedFile(folder / MANIFEST) as file:
        file.write(START + body + MIDDLE + hashlib.sha256(body).hexdigest().encode() + END)


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        Damaged: there is none, it is not as it was written, or it asks for what is outside the folder.
    """
    path = folder / MANIFEST
    with open(open_plain(path), "rb") as file:
        data = file.read(MAX_BYTES + 1)
    tail = len(MIDDLE) + 64 + len(END)
    body, said = data[len(START) : -tail], data[-tail:]
    whole = START + body + MIDDLE + hashlib.sha256(body).hexdigest().encode() + END
    if data[: len(START)] != START or whole[-tail:] != said or len(data) > MAX_BYTES:
        raise Damaged(f"{path} is not as it was written; {REMEDY}")
    with reading(path):
        content = json.loads(body)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise Damaged(f"{path} has the version {content['version']}, and this program reads {VERSION}; update it")
        return _parsed(content)


def _parsed(content: Mapping[str, Any]) -> Manifest:
    files = {_file_name(name): Content(_number(size), str(sha)) for name, (size, sha) in content["files"].items()}
    tensors = {name: _table(name, *it) for name, it in content["tensors"].items()}
    same = {str(name): str(other) for name, other in content["same"].items()}
    if unknown := [name for name, other in same.items() if other not in tensors]:
        raise ValueError(f"{unknown[0]} is said to be a tensor that is not there")
    needed = {file_of(box.rank) for table in tensors.values() for box in table.boxes} | {VALUES}
    if missing := sorted(needed - set(files)):
        raise ValueError(f"{missing[0]} is needed and not listed")
    layout = {str(axis): _number(size) for axis, size in content["layout"].items()}
    versions = {str(library): str(version) for library, version in content["versions"].items()}
    return Manifest(_number(content["step"]), layout, versions, tensors, same, files, tuple(map(str, content["holds"])))


def _table(name: str, dtype: str, shape: list[int], boxes: list[Any]) -> Table:
    sizes = tuple(map(_number, shape))
    places = tuple(Place(_number(r), tuple(map(_number, o)), tuple(map(_number, s))) for r, o, s in boxes)
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}")
    for box in places:
        within = len(box.offset) == len(box.shape) == len(sizes)
        if not within or any(o + s > size for o, s, size in zip(box.offset, box.shape, sizes, strict=True)):
            raise ValueError(f"{name} has a box outside its shape")
    if sum(prod(box.shape) for box in places) != prod(sizes):
        raise ValueError(f"the boxes of {name} are not the whole of it")
    return Table(dtype, sizes, places)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _file_name(name: str) -> str:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no plain name of a file in the folder")
    return name


def fault_in(folder: Path, name: str, content: Content) -> str | None:
    """What is wrong with a file; None where it is as it was written."""
    try:
        with open(open_plain(folder / name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != content.size:  # a file that is too long is not hashed: a sparse one may have terabytes
                return f"{folder / name} has {size} bytes of {content.size}"
            same = sha256_of(file, size) == content.sha256
    except (Damaged, OSError) as error:
        return str(error)
    return None if same else f"{folder / name} was changed after it was written: its hash is another"
