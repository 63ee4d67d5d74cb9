"""A checkpoint as a folder.

    manifest.json            what it holds, where each box of each tensor lies, the hash of every file and its own
    values.json              everything that is no tensor, as plain JSON
    rank-00000.safetensors   what one rank wrote: boxes of tensors, each stored once whoever holds copies of it

It is written under another name, flushed, and takes its own in one step (`commit`). It is verified before anything of
it is used, and reading it runs no code of it.
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
from lightning_parallel.checkpoint.plain import decoded
from lightning_parallel.checkpoint.stored import StoredTensor

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
        **asdict(manifest),  # but for what is shorter as a list
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
    # the hash is of the body's bytes, not of what JSON makes of them: any flip is found
    body = data[len(START) : -(len(MIDDLE) + 64 + len(END))]
    if data != START + body + MIDDLE + hashlib.sha256(body).hexdigest().encode() + END or len(data) > MAX_BYTES:
        raise Damaged(f"{path} is not as it was written; {REMEDY}")
    with reading(path):
        content = json.loads(body)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise Damaged(f"{path} has the version {content['version']}, and this program reads {VERSION}; update it")
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
        holds = tuple(map(str, content["holds"]))
        return Manifest(_size(content["step"]), layout, versions, tensors, same, files, holds)


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


# ---------------------------------------------------------------- who writes what


Span = tuple[tuple[int, ...], tuple[int, ...]]
"""One box that a rank holds of a tensor: its first element in the full tensor, and its shape."""


@dataclass(frozen=True)
class Offer:
    """The tensors that one rank could write.

    Attributes:
        shapes: dtype and full shape of each tensor that it knows of, also where another rank holds it.
        boxes: of each tensor what it holds of it.
        same: of tensors that are another one, the name of that; it counts where all ranks say so.
    """

    shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    boxes: Mapping[str, Sequence[Span]]
    same: Mapping[str, str]


@dataclass(frozen=True)
class Shares:
    """The boxes that the ranks write together."""

    tensors: dict[str, Table]
    same: dict[str, str]


def shared_out(offers: Sequence[Offer]) -> Shares:
    """Divide what ranks hold among them; the names are those of the first rank.

    Raises:
        ValueError: ranks hold different things under one name, or together not the whole of it.
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
        found = {offer.shapes[name]: rank for rank, offer in reversed([*enumerate(offers)]) if name in offer.shapes}
        if len(found) > 1:
            told = "; ".join(f"rank {rank}: {dtype} of {shape}" for (dtype, shape), rank in found.items())
            raise ValueError(f"{name} is not the same tensor on all ranks ({told}); hooks must change it on all alike")
        holders = _disjoint([offer.boxes.get(name, ()) for offer in offers])
        held = sum(prod(size) for _, size in holders)
        if held != prod(shape):
            raise ValueError(f"{name} has {prod(shape)} elements in the checkpoint of rank 0, and ranks hold {held}")
        places = []
        for (offset, size), ranks in holders.items():
            rank = min(ranks, key=written.__getitem__)  # of those that hold it, who has least to write so far
            written[rank] += prod(size) * DTYPES[dtype].itemsize
            places.append(Place(rank, offset, size))
        tensors[name] = Table(dtype, shape, tuple(places))
    return Shares(tensors, same)


def _disjoint(spans: Sequence[Sequence[Span]]) -> dict[Span, list[int]]:
    """Return boxes of which no two overlap, with the ranks that hold each.

    Where any overlap, as the full tensor of one rank and the half of another, all are cut wherever a box ends.
    """
    known = {span for some in spans for span in some}
    cuts = [  # of each dimension, where any box begins or ends
        sorted({end for first, length in sides for end in (first, first + length)})
        for sides in zip(*(list(zip(*span, strict=True)) for span in known), strict=True)
    ]
    # [0:4] and [0:2] become [0:2] and [2:4]; where nothing overlaps the boxes stay as large as they are
    pieces: dict[Span, list[Span]] = {}
    for span in known:
        sides = []
        for start, size, ends in zip(*span, cuts, strict=True):
            inside = ends[bisect_left(ends, start) : bisect_right(ends, start + size)]
            sides.append([(first, last - first) for first, last in pairwise(inside)])
        pieces[span] = [(tuple(first for first, _ in it), tuple(size for _, size in it)) for it in product(*sides)]
    overlap = len(set(chain.from_iterable(pieces.values()))) < sum(map(len, pieces.values()))
    holders: dict[Span, list[int]] = {}
    for rank, some in enumerate(spans):
        for span in some:
            for piece in pieces[span] if overlap else [span]:
                holders.setdefault(piece, []).append(rank)
    return holders


# ---------------------------------------------------------------- writing and reading


Box = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Finds a box that this rank holds, by the tensor's name, its first element and its shape."""


def is_folder(path: Path) -> bool:
    """Return whether a path is meant to be such a checkpoint, complete or not."""
    return path.is_dir() and any((path / name).exists() for name in (MANIFEST, VALUES))


def is_torch_folder(path: Path) -> bool:
    """Return whether a path is a folder of `torch.distributed.checkpoint`, as Lightning's FSDPStrategy writes them."""
    return path.is_dir() and (path / TORCH_INDEX).exists()


def unsafe(path: Path) -> Damaged:
    """Return the error of a run that is given such a folder."""
    return Damaged(
        f"{path} is a folder of torch.distributed.checkpoint, whose index may run any code while it is read; if you "
        f"trust who wrote it, convert it: python -m lightning_parallel.checkpoint import {path} FILE.ckpt"
    )


def share_of(rank: int, shares: Shares, box: Box) -> dict[str, Tensor]:
    """Return the boxes that a rank writes, under the names that they have in its file."""
    places = [(name, table, it) for name, table in shares.tensors.items() for it in table.boxes if it.rank == rank]
    return {entry_name(name, table, it): box(name, it.offset, it.shape) for name, table, it in places}


def write_share(folder: Path, rank: int, own: Mapping[str, Tensor]) -> dict[str, Content]:
    """Write a rank's share; return size and hash of its file, and nothing where it has nothing to write."""
    return {file_of(rank): write_tensors(folder / file_of(rank), own)} if own else {}


def finish(folder: Path, values: Any, head: Manifest, files: Mapping[str, Content]) -> None:
    """Write what is no tensor, and the manifest: the head, completed by the files that ranks wrote."""
    with HashedFile(folder / VALUES) as file:
        file.write(json.dumps(values, separators=(",", ":")).encode())
    write_manifest(folder, replace(head, files={**files, VALUES: file.content}))


def faults(folder: Path, manifest: Manifest, part: int = 0, of: int = 1) -> list[str]:
    """Compare files with their hashes, and describe each fault in one line; ranks may take a part of the files each."""
    found = []
    for name, content in sorted(manifest.files.items())[part::of]:
        path = folder / name
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != content.size:  # a file that is too long is not hashed: a sparse one may have terabytes
                    fault = f"{path} has {size} bytes of {content.size}"
                elif sha256_of(file, size) != content.sha256:
                    fault = f"{path} was changed after it was written: its hash is another"
                else:
                    continue
        except (Damaged, OSError) as error:
            fault = str(error)
        held = [own for own, it in manifest.tensors.items() if any(file_of(box.rank) == name for box in it.boxes)]
        rank = int(name.split("-")[1].split(".")[0]) if held else 0
        found.append(f"{fault}; rank {rank} wrote {shortened(held) if held else 'everything but tensors'} to it")
    return found


def require_whole(folder: Path, faults: list[str]) -> None:
    """Raise Damaged if something is wrong with the files of a checkpoint."""
    if faults:
        said = " | ".join(faults[:5]).removesuffix(f"; {REMEDY}")
        raise Damaged(f"nothing of the checkpoint {folder} was loaded: {said}. {REMEDY}")


def verify(path: Path) -> None:
    """Raise Damaged unless a checkpoint, a folder or a file, is as it was written."""
    if is_folder(path):
        require_whole(path, faults(path, read_manifest(path)))
    elif is_torch_folder(path):
        raise unsafe(path)
    elif path.is_dir():
        raise Damaged(f"{path} is no sharded checkpoint: it has no {MANIFEST}")
    else:
        sealed.require_unchanged(path)


def content_of(path: Path) -> dict[str, Any]:
    """Return what a checkpoint of either form holds, verified; its tensors stay on the disk.

    Raises:
        ValueError: it is not as it was written, or is none; or it would have to run code.
    """
    verify(path)
    found: Any = read(path, read_manifest(path), lambda name: True) if path.is_dir() else sealed.load(path)
    return found if isinstance(found, dict) else {}


def read(folder: Path, manifest: Manifest, is_lazy: Callable[[str], bool]) -> Any:
    """Return what was saved, from files that have been verified.

    Args:
        folder: of the checkpoint.
        manifest: its own.
        is_lazy: whether a tensor of a name stays on the disk until it is used.
    """
    with open_plain(folder / VALUES) as file:
        text = file.read()
    # each file is mapped once, when the first tensor of it is read
    opened = lru_cache(None)(lambda rank: TensorsFile(folder / file_of(rank)))

    def box(name: str, table: Table, place: Place) -> Tensor:
        file = opened(place.rank)
        entry = file.entries.get(name)
        if entry is None or entry.shape != place.shape or entry.dtype != DTYPES[table.dtype]:
            raise Damaged(f"{name} is not as the manifest says in the file of rank {place.rank}; {REMEDY}")
        return file.tensor(name)

    def tensor(name: str) -> Tensor:
        own = manifest.same.get(name, name)
        if own not in manifest.tensors:
            raise Damaged(f"{own} is named among the values, and there is no such tensor; {REMEDY}")
        table = manifest.tensors[own]
        pieces = [(it.offset, it.shape, partial(box, entry_name(own, table, it), table, it)) for it in table.boxes]
        found = StoredTensor(DTYPES[table.dtype], table.shape, pieces)
        return found if is_lazy(name) else found.read()

    with reading(folder / VALUES):
        return decoded(json.loads(text), tensor)
