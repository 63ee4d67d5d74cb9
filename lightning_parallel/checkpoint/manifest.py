"""The manifest of a checkpoint folder: what it holds, where each box of each tensor lies, the hash of every file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.hashed import Content, HashedFile, open_plain
from lightning_parallel.checkpoint.tensors_file import DTYPES

MANIFEST, VALUES = "manifest.json", "values.json"
FORMAT, VERSION = "lightning_parallel", 1
START, MIDDLE, END = b'{"manifest":', b',"sha256":"', b'"}\n'
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
MAX_BYTES = 2**30


@dataclass(frozen=True)
class Place:
    """One box of a tensor: the rank whose file holds it, its first element in the full tensor, and its shape."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """One tensor: its dtype by the name that files have for it, its full shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """Facts about a checkpoint that are known before its files are read.

    Attributes:
        step: optimizer steps that had been taken.
        layout: the sizes of the mesh's axes.
        versions: of the libraries that wrote it.
        tensors: by their names.
        same: of tensors that are another one, the name of that.
        files: size and hash of every other file.
        holds: the keys at the top of the checkpoint, such as "optimizer_states".
    """

    step: int
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    tensors: Mapping[str, Table]
    same: Mapping[str, str]
    files: Mapping[str, Content]
    holds: tuple[str, ...] = ()


def file_of(rank: int) -> str:
    """Name the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def entry_name(name: str, table: Table, box: Place) -> str:
    """Name a box in its file: "weight", or "weight[0:4,2:6]" where it is not the full tensor."""
    if box.shape == table.shape:
        return name
    spans = (f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
    return f"{name}[{','.join(spans)}]"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest with its own hash."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(manifest),
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
    """Read a manifest.

    Raises:
        Damaged: there is none, it is not as it was written, or it asks for what is outside the folder.
    """
    path = folder / MANIFEST
    with open_plain(path) as file:
        data = file.read(MAX_BYTES + 1)
    body = data[len(START) : -(len(MIDDLE) + 64 + len(END))]
    if data != START + body + MIDDLE + hashlib.sha256(body).hexdigest().encode() + END or len(data) > MAX_BYTES:
        raise Damaged(f"{path} is not as it was written; {REMEDY}")
    with reading(path):
        content = json.loads(body)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise Damaged(f"{path} has the version {content['version']}, and this program reads {VERSION}; update it")
        return _parsed(content)


def _parsed(content: Mapping[str, Any]) -> Manifest:
    files = {name: Content(_size(size), str(sha)) for name, (size, sha) in content["files"].items()}
    tensors = {name: _table(name, *it) for name, it in content["tensors"].items()}
    same = {str(name): str(other) for name, other in content["same"].items()}
    layout = {str(axis): _size(size) for axis, size in content["layout"].items()}
    versions = {str(library): str(version) for library, version in content["versions"].items()}
    if unknown := [name for name, other in same.items() if other not in tensors]:
        raise ValueError(f"{unknown[0]} is said to be a tensor that is not there")
    needed = {file_of(box.rank) for table in tensors.values() for box in table.boxes} | {VALUES}
    if missing := sorted(needed - set(files)):
        raise ValueError(f"{missing[0]} is needed and not listed")
    if outside := [name for name in files if not FILE_NAME.fullmatch(name)]:
        raise ValueError(f"{outside[0]!r} is no plain name of a file in the folder")
    return Manifest(_size(content["step"]), layout, versions, tensors, same, files, tuple(map(str, content["holds"])))


def _table(name: str, dtype: str, shape: list[int], boxes: list[Any]) -> Table:
    table = Table(
        dtype,
        tuple(map(_size, shape)),
        tuple(Place(_size(rank), tuple(map(_size, start)), tuple(map(_size, size))) for rank, start, size in boxes),
    )
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}")
    for box in table.boxes:
        ends = [start + size for start, size in zip(box.offset, box.shape, strict=True)]
        if any(end > size for end, size in zip(ends, table.shape, strict=True)):
            raise ValueError(f"{name} has a box outside its shape")
    if sum(prod(box.shape) for box in table.boxes) != prod(table.shape):
        raise ValueError(f"the boxes of {name} are not the whole of it")
    return table


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
