"""A sharded checkpoint as a folder.

    manifest.json            what it holds, the place of each box of each tensor, the hash of each file and its own
    values.json              everything but tensors, as plain JSON
    rank-00000.safetensors   what one rank wrote: boxes of tensors, each stored once even if several ranks hold it

The folder is written under a temporary name, flushed, and renamed in one step (`commit`). It is verified before any of
it is used, and reading it runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain, pairwise, product
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_parallel.checkpoint import sealed
from lightning_parallel.checkpoint.files import (
    DTYPES,
    REMEDY,
    Content,
    Damaged,
    HashedFile,
    TensorsFile,
    open_plain,
    reading,
    sha256_of,
    shortened,
    write_tensors,
)
from lightning_parallel.checkpoint.lazy_tensor import LazyTensor
from lightning_parallel.checkpoint.plain import decoded

MANIFEST, VALUES = "manifest.json", "values.json"
FORMAT, VERSION = "lightning_parallel", 1
START, MIDDLE, END = b'{"manifest":', b',"sha256":"', b'"}\n'
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
MAX_BYTES = 2**30
TORCH_INDEX = ".metadata"


@dataclass(frozen=True)
class Place:
    """One box of a tensor: the rank whose file holds it, its first element in the full tensor, and its shape."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """One tensor: its dtype by its name in safetensors, its full shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint, available before its files are read.

    Attributes:
        step: number of optimizer steps taken.
        layout: the sizes of the mesh's axes.
        versions: of the libraries that wrote it.
        tensors: the tables of tensors by name.
        same: names of tensors that are identical to another one -> the name of that one, as for tied weights.
        files: size and hash of every other file.
        holds: the keys at the top level of the checkpoint, such as "optimizer_states".
    """

    step: int
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    tensors: Mapping[str, Table]
    same: Mapping[str, str]
    files: Mapping[str, Content]
    holds: tuple[str, ...] = ()


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def entry_name(name: str, table: Table, box: Place) -> str:
    """Return the name of a box in its file: "weight", or "weight[0:4,2:6]" if it is not the full tensor."""
    if box.shape == table.shape:
        return name
    spans = (f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
    return f"{name}[{','.join(spans)}]"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest with its own hash."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(manifest),  # except for the fields below, which are shorter as lists
        "files": {name: [item.size, item.sha256] for name, item in manifest.files.items()},
        "tensors": {
            name: [item.dtype, item.shape, [[box.rank, box.offset, box.shape] for box in item.boxes]]
            for name, item in manifest.tensors.items()
        },
    }
    body = json.dumps(content, separators=(",", ":")).encode()
    with HashedFile(folder / MANIFEST) as file:
        file.write(START + body + MIDDLE + hashlib.sha256(body).hexdigest().encode() + END)


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest.

    Raises:
        Damaged: it is missing, was changed after it was written, or names a file outside the folder.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise Damaged(f"{folder} is not a sharded checkpoint: it has no {MANIFEST}")
    with open_plain(path) as file:
        data = file.read(MAX_BYTES + 1)
    # the hash is of the body's bytes, not of the parsed JSON: so every changed bit is found
    body = data[len(START) : -(len(MIDDLE) + 64 + len(END))]
    if data != START + body + MIDDLE + hashlib.sha256(body).hexdigest().encode() + END or len(data) > MAX_BYTES:
        raise Damaged(f"{path} was changed or cut off; {REMEDY}")
    with reading(path):
        content = json.loads(body)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise Damaged(f"{path} has version {content['version']}, but lightning_parallel reads {VERSION}; update it")
        files = {name: Content(_size(size), str(sha)) for name, (size, sha) in content["files"].items()}
        tensors = {name: _table(name, *entry) for name, entry in content["tensors"].items()}
        same = {str(name): str(other) for name, other in content["same"].items()}
        layout = {str(axis): _size(size) for axis, size in content["layout"].items()}
        versions = {str(library): str(version) for library, version in content["versions"].items()}
        if unknown := [name for name, other in same.items() if other not in tensors]:
            raise ValueError(f"{unknown[0]} refers to a tensor that is missing")
        needed = {file_of(box.rank) for table in tensors.values() for box in table.boxes} | {VALUES}
        if missing := sorted(needed - set(files)):
            raise ValueError(f"{missing[0]} is needed, but not listed")
        if outside := [name for name in files if not FILE_NAME.fullmatch(name)]:
            raise ValueError(f"{outside[0]!r} is not a plain file name")
        holds = tuple(map(str, content["holds"]))
        return Manifest(_size(content["step"]), layout, versions, tensors, same, files, holds)


def _table(name: str, dtype: str, shape: list[int], boxes: list[Any]) -> Table:
    table = Table(
        dtype,
        tuple(map(_size, shape)),
        tuple(Place(_size(rank), tuple(map(_size, start)), tuple(map(_size, size))) for rank, start, size in boxes),
    )
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    for box in table.boxes:
        ends = [start + size for start, size in zip(box.offset, box.shape, strict=True)]
        if any(end > size for end, size in zip(ends, table.shape, strict=True)):
            raise ValueError(f"{name} has a shard outside its shape")
    if sum(prod(box.shape) for box in table.boxes) != prod(table.shape):
        raise ValueError(f"the shards of {name} do not cover it")
    return table


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


# ---------------------------------------------------------------- which rank writes what


Span = tuple[tuple[int, ...], tuple[int, ...]]
"""One box that a rank holds of a tensor: its first element in the full tensor, and its shape."""


@dataclass(frozen=True)
class Offer:
    """The tensors that one rank could write.

    Attributes:
        shapes: dtype and full shape of each tensor that the rank knows, even if it holds no box of it.
        boxes: by tensor, the boxes that the rank holds.
        same: names of tensors that are identical to another one -> the name of that one; used if all ranks agree.
    """

    shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    boxes: Mapping[str, Sequence[Span]]
    same: Mapping[str, str]


def plan_writes(offers: Sequence[Offer]) -> tuple[dict[str, Table], dict[str, str]]:
    """Assign each box to one rank that holds it, balanced by bytes; the names are those of rank 0. Rank 0 only.

    Returns:
        The fields `tensors` and `same` of the manifest.

    Raises:
        ValueError: ranks hold different tensors under one name, or together not all elements of a tensor.
    """
    first = offers[0]
    same = {
        name: other
        for name, other in first.same.items()
        if other in first.shapes and all(offer.same.get(name) == other for offer in offers)
    }
    tensors: dict[str, Table] = {}
    written = [0] * len(offers)  # bytes that each rank writes
    for name, (dtype, shape) in first.shapes.items():
        if name in same:
            continue
        specs = {offer.shapes[name]: rank for rank, offer in reversed([*enumerate(offers)]) if name in offer.shapes}
        if len(specs) > 1:
            text = "; ".join(f"rank {rank}: {dtype} of {shape}" for (dtype, shape), rank in specs.items())
            raise ValueError(f"{name} differs between ranks ({text}); hooks must change it the same way on all ranks")
        holders = _disjoint([offer.boxes.get(name, ()) for offer in offers])
        count = sum(prod(size) for _, size in holders)
        if count != prod(shape):
            raise ValueError(f"{name} has {prod(shape)} elements in rank 0's checkpoint, but its shards have {count}")
        places = []
        for (offset, size), ranks in holders.items():
            rank = min(ranks, key=written.__getitem__)  # the holder with the fewest bytes to write so far
            written[rank] += prod(size) * DTYPES[dtype].itemsize
            places.append(Place(rank, offset, size))
        tensors[name] = Table(dtype, shape, tuple(places))
    return tensors, same


def _disjoint(spans: Sequence[Sequence[Span]]) -> dict[Span, list[int]]:
    """Return boxes that do not overlap, each with the ranks that hold it.

    If any boxes overlap, such as the full tensor on one rank and its half on another, all are cut where any box ends.
    """
    distinct = {span for rank_spans in spans for span in rank_spans}
    cuts = [  # [dimensions]: the sorted starts and ends of all boxes
        sorted({end for first, length in sides for end in (first, first + length)})
        for sides in zip(*(list(zip(*span, strict=True)) for span in distinct), strict=True)
    ]
    # [0:4] and [0:2] become [0:2] and [2:4]; without an overlap, boxes stay as large as they are
    pieces: dict[Span, list[Span]] = {}
    for span in distinct:
        sides = []
        for start, size, ends in zip(*span, cuts, strict=True):
            inside = ends[bisect_left(ends, start) : bisect_right(ends, start + size)]
            sides.append([(first, last - first) for first, last in pairwise(inside)])
        pieces[span] = [(tuple(first for first, _ in box), tuple(size for _, size in box)) for box in product(*sides)]
    overlap = len(set(chain.from_iterable(pieces.values()))) < sum(map(len, pieces.values()))
    holders: dict[Span, list[int]] = {}
    for rank, rank_spans in enumerate(spans):
        for span in rank_spans:
            for piece in pieces[span] if overlap else [span]:
                holders.setdefault(piece, []).append(rank)
    return holders


# ---------------------------------------------------------------- writing and reading


Box = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Returns a box that this rank holds, by the tensor's name, its first element and its shape."""


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder of this format, complete or not."""
    return path.is_dir() and any((path / name).exists() for name in (MANIFEST, VALUES))


def is_torch_folder(path: Path) -> bool:
    """Return whether a path is a folder of `torch.distributed.checkpoint`, as Lightning's FSDPStrategy writes them."""
    return path.is_dir() and (path / TORCH_INDEX).exists()


def unsafe(path: Path) -> Damaged:
    """Return the error for a run that is given a folder of `torch.distributed.checkpoint`."""
    return Damaged(
        f"{path} is a folder of torch.distributed.checkpoint. Reading its index may run any code; if you trust who "
        f"wrote it, convert it: python -m lightning_parallel.checkpoint import {path} FILE.ckpt"
    )


def share_of(rank: int, tensors: Mapping[str, Table], box: Box) -> dict[str, Tensor]:
    """Return the boxes that a rank writes, by their names in its file."""
    places = [(name, table, it) for name, table in tensors.items() for it in table.boxes if it.rank == rank]
    return {entry_name(name, table, it): box(name, it.offset, it.shape) for name, table, it in places}


def write_share(folder: Path, rank: int, own: Mapping[str, Tensor]) -> dict[str, Content]:
    """Write the boxes of one rank; return size and hash of its file, or nothing if it has nothing to write."""
    return {file_of(rank): write_tensors(folder / file_of(rank), own)} if own else {}


def finish(folder: Path, values: Any, head: Manifest, files: Mapping[str, Content]) -> None:
    """Write the values that are no tensors, and the manifest: `head` with all files. Rank 0 only."""
    with HashedFile(folder / VALUES) as file:
        file.write(json.dumps(values, separators=(",", ":")).encode())
    write_manifest(folder, replace(head, files={**files, VALUES: file.content}))


def faults(folder: Path, manifest: Manifest, part: int = 0, of: int = 1) -> list[str]:
    """Compare files with their hashes, and describe each fault in one line; of `of` ranks, each may check a part."""
    lines = []
    for name, content in sorted(manifest.files.items())[part::of]:
        path = folder / name
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != content.size:  # a file that is too long is not hashed: a sparse file may have terabytes
                    fault = f"{path} has {size} bytes, not {content.size}"
                elif sha256_of(file, size) != content.sha256:
                    fault = f"{path} was changed after it was written: its hash differs"
                else:
                    continue
        except (Damaged, OSError) as error:
            fault = str(error)
        held = [key for key, it in manifest.tensors.items() if any(file_of(box.rank) == name for box in it.boxes)]
        rank = int(name.split("-")[1].split(".")[0]) if held else 0
        lines.append(f"{fault}; rank {rank} wrote {shortened(held) if held else 'everything but tensors'} to it")
    return lines


def require_no_faults(folder: Path, faults: list[str]) -> None:
    """Raise Damaged if the files of a checkpoint have faults."""
    if faults:
        said = " | ".join(faults[:5]).removesuffix(f"; {REMEDY}")
        raise Damaged(f"nothing of the checkpoint {folder} was loaded: {said}; {REMEDY}")


def verify(path: Path) -> None:
    """Raise Damaged if a checkpoint, a folder or a file, was changed after it was written."""
    if not path.is_dir():
        sealed.require_unchanged(path)
    elif is_torch_folder(path) and not is_folder(path):
        raise unsafe(path)
    else:
        require_no_faults(path, faults(path, read_manifest(path)))


def content_of(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of either form, verified; its tensors stay on the disk.

    Raises:
        ValueError: it was changed after it was written, is no checkpoint, or loading it would run code.
    """
    verify(path)
    content: Any = read(path, read_manifest(path), lambda name: True) if path.is_dir() else sealed.load(path)
    return content if isinstance(content, dict) else {}


def read(folder: Path, manifest: Manifest, is_lazy: Callable[[str], bool]) -> Any:
    """Return what was saved, from files that have been verified.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        is_lazy: returns for a tensor's name whether it stays on the disk until it is used.
    """
    with open_plain(folder / VALUES) as file:
        text = file.read()
    # each file is mapped once, when its first tensor is read
    opened = lru_cache(None)(lambda rank: TensorsFile(folder / file_of(rank)))

    def box(name: str, table: Table, place: Place) -> Tensor:
        file = opened(place.rank)
        entry = file.entries.get(name)
        if entry is None or entry.shape != place.shape or entry.dtype != DTYPES[table.dtype]:
            raise Damaged(f"{name} in the file of rank {place.rank} differs from the manifest; {REMEDY}")
        return file.tensor(name)

    def tensor(name: str) -> Tensor:
        key = manifest.same.get(name, name)
        if key not in manifest.tensors:
            raise Damaged(f"the values refer to the tensor {key}, which is missing; {REMEDY}")
        table = manifest.tensors[key]
        pieces = [(it.offset, it.shape, partial(box, entry_name(key, table, it), table, it)) for it in table.boxes]
        stored = LazyTensor(DTYPES[table.dtype], table.shape, pieces)
        return stored if is_lazy(name) else stored.read()

    with reading(folder / VALUES):
        return decoded(json.loads(text), tensor)
