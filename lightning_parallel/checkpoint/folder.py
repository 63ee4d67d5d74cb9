"""A checkpoint as a folder.

    manifest.json            what it holds, where each box of each tensor lies, the hash of every file and its own
    values.json              everything that is no tensor, as plain JSON
    rank-00000.safetensors   what one rank wrote: boxes of tensors, each stored once whoever holds copies of it

It is written under another name, flushed, and takes its own in one step (`commit`). It is verified before anything of
it is used, and reading it runs no code of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_parallel.checkpoint import manifest as m
from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading, shortened
from lightning_parallel.checkpoint.hashed import Content, HashedFile, open_plain, sha256_of
from lightning_parallel.checkpoint.manifest import Manifest, Table
from lightning_parallel.checkpoint.plain import decoded
from lightning_parallel.checkpoint.shares import Shares
from lightning_parallel.checkpoint.stored import StoredTensor
from lightning_parallel.checkpoint.tensors_file import DTYPES, TensorsFile, write_tensors

Box = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Finds a box that this rank holds, by the tensor's name, its first element and its shape."""


def is_folder(path: Path) -> bool:
    """Return whether a path is meant to be such a checkpoint, complete or not."""
    return path.is_dir() and any((path / name).exists() for name in (m.MANIFEST, m.VALUES))


def share_of(rank: int, shares: Shares, box: Box) -> dict[str, Tensor]:
    """Return the boxes that a rank writes, under the names that they have in its file."""
    return {
        m.entry_name(name, table, place): box(name, place.offset, place.shape)
        for name, table in shares.tensors.items()
        for place in table.boxes
        if place.rank == rank
    }


def write_share(folder: Path, rank: int, own: Mapping[str, Tensor]) -> dict[str, Content]:
    """Write a rank's share; return size and hash of its file, and nothing where it has nothing to write."""
    file = m.file_of(rank)
    return {file: write_tensors(folder / file, own)} if own else {}


def finish(folder: Path, values: Any, head: Manifest, files: Mapping[str, Content]) -> None:
    """Write what is no tensor, and the manifest: the head, completed by the files that ranks wrote."""
    with HashedFile(folder / m.VALUES) as file:
        file.write(json.dumps(values, separators=(",", ":")).encode())
    m.write_manifest(folder, replace(head, files={**files, m.VALUES: file.content}))


def faults(folder: Path, manifest: Manifest, part: int = 0, of: int = 1) -> list[str]:
    """Compare files with their hashes, and describe each fault in one line; ranks may take a part of the files each."""
    found = []
    for name, content in sorted(manifest.files.items())[part::of]:
        if (fault := _fault_in(folder / name, content)) is not None:
            held = [own for own, it in manifest.tensors.items() if any(m.file_of(box.rank) == name for box in it.boxes)]
            rank = int(name.split("-")[1].split(".")[0]) if held else 0
            found.append(f"{fault}; rank {rank} wrote {shortened(held) if held else 'everything but tensors'} to it")
    return found


def _fault_in(path: Path, content: Content) -> str | None:
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != content.size:  # a file that is too long is not hashed: a sparse one may have terabytes
                return f"{path} has {size} bytes of {content.size}"
            same = sha256_of(file, size) == content.sha256
    except (Damaged, OSError) as error:
        return str(error)
    return None if same else f"{path} was changed after it was written: its hash is another"


def require_whole(folder: Path, faults: list[str]) -> None:
    """Raise Damaged if something is wrong with the files of a checkpoint."""
    if faults:
        said = " | ".join(faults[:5]).removesuffix(f"; {REMEDY}")
        raise Damaged(f"nothing of the checkpoint {folder} was loaded: {said}. {REMEDY}")


def read(folder: Path, manifest: Manifest, is_lazy: Callable[[str], bool]) -> Any:
    """Return what was saved, from files that have been verified.

    Args:
        folder: of the checkpoint.
        manifest: its own.
        is_lazy: whether a tensor of a name stays on the disk until it is used.
    """
    with open_plain(folder / m.VALUES) as file:
        text = file.read()
    opened = lru_cache(None)(lambda rank: TensorsFile(folder / m.file_of(rank)))

    def box(name: str, table: Table, place: m.Place) -> Tensor:
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
        pieces = [(it.offset, it.shape, partial(box, m.entry_name(own, table, it), table, it)) for it in table.boxes]
        found = StoredTensor(DTYPES[table.dtype], table.shape, pieces)
        return found if is_lazy(name) else found.read()

    with reading(folder / m.VALUES):
        return decoded(json.loads(text), tensor)
