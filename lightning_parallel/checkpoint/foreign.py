"""Folders of `torch.distributed.checkpoint`, as Lightning's own strategies write them, read without running their code.

Their index is a pickle, and so is every entry in their files. Here an index may name the few classes of which one is
made and nothing else, and entries are read by torch's reader of weights. They carry no hash, but each entry is a zip
archive, whose checksums are looked at before anything is used.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.hashed import open_plain
from lightning_parallel.checkpoint.manifest import FILE_NAME, MAX_BYTES
from lightning_parallel.checkpoint.stored import StoredTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

INDEX, REST = ".metadata", "meta.pt"
CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "collections": {"OrderedDict"},
}


def is_foreign(path: Path) -> bool:
    """Whether a path is such a folder."""
    return path.is_dir() and (path / INDEX).exists()


def _member(kind: Any, name: str) -> Any:
    """A member of the one enumeration in an index: Python 3.11.0 to 3.11.3 pickle it as `getattr(kind, name)`."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # not before such a folder is read

    if kind is not _MEM_FORMAT_ENCODING:
        raise Damaged(f"the index asks {kind} for its {name}, which no checkpoint needs; it may be made to run code")
    return kind[name]


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in CLASSES.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise Damaged(f"the index names {module}.{name}, which no checkpoint needs; it may be made to run code")


class ForeignFolder:
    """A folder of torch's.

    Args:
        path: of the folder.

    Raises:
        Damaged: its index is malformed, or asks for code, or for what is outside the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(open_plain(path / INDEX), "rb") as file:
            data = file.read(MAX_BYTES)
        with reading(path / INDEX):
            self._index = self._checked(_Restricted(io.BytesIO(data)).load())

    def _checked(self, index: Any) -> Metadata:
        from torch.distributed.checkpoint.metadata import Metadata

        if not isinstance(index, Metadata):
            raise Damaged(f"it is a {type(index).__name__}, no index")
        sizes: dict[str, int] = {}
        for entry, place in index.storage_data.items():
            name = str(place.relative_path)
            if not FILE_NAME.fullmatch(name):
                raise Damaged(f"{entry.fqn} lies in {name!r}, which is no plain name of a file in the folder")
            if name not in sizes:
                sizes[name] = os.path.getsize(self.path / name) if (self.path / name).is_file() else -1
            if sizes[name] < 0:
                raise Damaged(f"{name} is missing, which holds {entry.fqn} and more; {REMEDY}")
            if not 0 <= place.offset <= place.offset + place.length <= sizes[name]:
                raise Damaged(f"{name} has {sizes[name]} bytes, and {entry.fqn} lies behind them; {REMEDY}")
        return index

    def faults(self, part: int = 0, of: int = 1) -> list[str]:
        """What is wrong with the entries of which this reader looks at a part."""
        found = []
        for entry, place in list(self._index.storage_data.items())[part::of]:
            try:
                with zipfile.ZipFile(io.BytesIO(self._bytes(place))) as archive:
                    broken = archive.testzip() is not None
            except Exception:  # a damaged archive leads to many kinds
                broken = True
            if broken:
                found.append(
                    f"{self.path / place.relative_path} was changed after it was written: {entry.fqn} is broken"
                )
        return found

    def read(self) -> dict[str, Any]:
        """What was saved, nested as it was; tensors stay on the disk until they are used."""
        paths: Mapping[str, tuple[Any, ...]] = self._index.planner_data or {}
        whole: dict[Any, Any] = {}
        for name, known in self._index.state_dict_metadata.items():
            *above, last = paths.get(name, (name,))
            inner = whole
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = self._entry(name, known)
        read: dict[str, Any] = _with_lists(whole)
        return read

    def _entry(self, name: str, known: TensorStorageMetadata | BytesStorageMetadata) -> Any:
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        if isinstance(known, BytesStorageMetadata):
            return self._loaded(self._index.storage_data[MetadataIndex(name)])
        places: list[tuple[Any, Any]] = [
            (chunk, self._index.storage_data[MetadataIndex(name, chunk.offsets)]) for chunk in known.chunks
        ]
        pieces = [
            (tuple(chunk.offsets), tuple(chunk.sizes), partial(self._tensor, place, tuple(chunk.sizes)))
            for chunk, place in places
        ]
        return StoredTensor(known.properties.dtype, known.size, pieces)

    def _tensor(self, place: _StorageInfo, shape: tuple[int, ...]) -> Tensor:
        found = self._loaded(place)
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            raise Damaged(f"an entry of {place.relative_path} is not what the index says; {REMEDY}")
        return found

    def _loaded(self, place: _StorageInfo) -> Any:
        return torch.load(io.BytesIO(self._bytes(place)), map_location="cpu", weights_only=True)

    def _bytes(self, place: _StorageInfo) -> bytes:
        with open(open_plain(self.path / place.relative_path), "rb") as file:
            file.seek(place.offset)
            return file.read(place.length)


def _with_lists(tree: Any) -> Any:
    """Containers whose keys are numbers were lists: names of dictionaries are texts there."""
    if type(tree) is not dict:
        return tree
    inner = {key: _with_lists(value) for key, value in tree.items()}
    return [inner[key] for key in sorted(inner)] if inner and all(type(key) is int for key in inner) else inner
