"""A checkpoint as a folder.

    manifest.json            what it holds, where each box of each tensor lies, the hash of every file and its own
    values.json              everything that is no tensor, as plain JSON
    rank-00000.safetensors   what one rank wrote: boxes of tensors, each stored once whoever holds copies of it

It is written under another name, flushed, and takes its own in one step (`commit`). It is verified before anything of
it is used, and reading it runs no code of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint import manifest as m
from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading, shortened
from lightning_parallel.checkpoint.hashed import Content, HashedFile, open_plain
from lightning_parallel.checkpoint.manifest import Manifest, Table
from lightning_parallel.checkpoint.plain import decoded
from lightning_parallel.checkpoint.shares import Shares
from lightning_parallel.checkpoint.stored import StoredTensor
from lightning_parallel.checkpoint.tensors_file import DTYPES, TensorsFile, write_tensors

Box = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Finds a box that this rank holds, by the tensor's name, its first element and its shape."""


def is_folder(path: Path) -> bool:
    """Whether a path is meant to be such a checkpoint, whole or not."""
    return path.is_dir() and any((path / name).exists() for name in (m.MANIFEST, m.VALUES))


# ---------------------------------------------------------------- writing


def share_of(rank: int, shares: Shares, box: Box) -> dict[str, Tensor]:
    """The boxes that a rank writes, under the names that they have in its file."""
    own: dict[str, Tensor] = {}
    for name, table in shares.tensors.items():
        for place in table.boxes:
            if place.rank == rank:
                own[m.entry_name(name, table, place)] = box(name, place.offset, place.shape)
    return own


def write_share(folder: Path, rank: int, own: Mapping[str, Tensor]) -> dict[str, Content]:
    """Writes a rank's share; returns what its file holds, and nothing where it has nothing to write."""
    file = m.file_of(rank)
    return {file: write_tensors(folder / file, own)} if own else {}


def finish(folder: Path, values: Any, head: Manifest, files: Mapping[str, Content]) -> None:
    """Writes what is no tensor, and the manifest, of which the files that ranks wrote complete the head."""
    with HashedFile(folder / m.VALUES) as file:
        file.write(json.dumps(values, separators=(",", ":")).encode())
    m.write_manifest(folder, replace(head, files={**files, m.VALUES: file.content}))


def bytes_of(shares: Shares) -> int:
    """The bytes of all tensors."""
    return sum(prod(table.shape) * DTYPES[table.dtype].itemsize for table in shares.tensors.values())


# ---------------------------------------------------------------- reading


def faults(folder: Path, manifest: Manifest, part: int = 0, of: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, in one line each; every reader may look at a part of them."""
    found = []
    for name, content in sorted(manifest.files.items())[part::of]:
        if (fault := m.fault_in(folder, name, content)) is not None:
            rank = m.rank_of(name)
            holds = "everything but tensors" if rank is None else shortened(manifest.tensors_of(rank))
            found.append(f"{fault}; {f'rank {0 if rank is None else rank}'} wrote {holds} to it")
    return found


def require_whole(folder: Path, said: list[str]) -> None:
    """Raises Damaged if something is wrong with the files of a checkpoint."""
    if said:
        faults = " | ".join(said[:5]).removesuffix(f"; {REMEDY}")
        raise Damaged(f"nothing of the checkpoint {folder} was loaded: {faults}. {REMEDY}")


def read(folder: Path, manifest: Manifest, is_lazy: Callable[[str], bool]) -> Any:
    """What was saved, from files that have been verified.

    Args:
        folder: of the checkpoint.
        manifest: its own.
        is_lazy: whether a tensor of a name stays on the disk until it is used.
    """
    with open(open_plain(folder / m.VALUES), "rb") as file:
        text = file.read()
    opened = lru_cache(None)(lambda rank: TensorsFile(folder / m.file_of(rank)))

    def tensor(name: str) -> Tensor:
        found = _stored(manifest.same.get(name, name), manifest.tensors, opened)
        return found if is_lazy(name) else found.read()

    with reading(folder / m.VALUES):
        return decoded(json.loads(text), tensor)


def _stored(name: str, tensors: Mapping[str, Table], opened: Callable[[int], TensorsFile]) -> StoredTensor:
    if name not in tensors:
        raise Damaged(f"{name} is named among the values, and there is no such tensor; {REMEDY}")
    table = tensors[name]
    pieces = [
        (place.offset, place.shape, partial(_box_of, opened, m.entry_name(name, table, place), table, place))
        for place in table.boxes
    ]
    return StoredTensor(DTYPES[table.dtype], table.shape, pieces)


def _box_of(opened: Callable[[int], TensorsFile], name: str, table: Table, place: m.Place) -> Tensor:
    file = opened(place.rank)
    entry = file.entries.get(name)
    if entry is None or entry.shape != place.shape or entry.dtype != DTYPES[table.dtype]:
        raise Damaged(f"{name} is not as the manifest says in the file of rank {place.rank}; {REMEDY}")
    return file.tensor(name)


def versions(**more: str) -> dict[str, str]:
    """The versions of the libraries that write."""
    return {"torch": str(torch.__version__), **more}
