"""Files of checkpoints: written with their hash, opened without trust in their content; and files of tensors.

Files of tensors have the format of safetensors: the length of a header, a JSON header, the bytes of the tensors.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor
from typing_extensions import Self

REMEDY = "take an earlier checkpoint, or restore this one from a copy"
CHUNK = 16 * 2**20  # bytes hashed while they are written

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
MAX_HEADER = 100 * 2**20  # as safetensors itself


class Damaged(ValueError):  # noqa: N818
    """A checkpoint that was changed after it was written, or is no checkpoint."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn every exception inside into one that names the file, whatever values the file holds.

    Errors of the file system are passed on: their class says more, and they are no damage.

    Raises:
        Damaged: the code inside raised an exception; its class and text are part of the message.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        text = " ".join(str(error).split())[:500]
        if isinstance(error, Damaged):
            raise Damaged(f"{path}: {text}") from error
        raise Damaged(f"{path} cannot be read as a checkpoint ({type(error).__name__}: {text}); {REMEDY}") from error


def shortened(names: Sequence[str]) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more if names else "no tensors"


# ---------------------------------------------------------------- any file


@dataclass(frozen=True)
class Content:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


class HashedFile:
    """A new file; another thread hashes its bytes while they are written to the disk.

    Args:
        path: of the file, which must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failure: OSError | None = None
        self._file = open(path, "xb")  # noqa: SIM115
        self._digest, self._size = hashlib.sha256(), 0
        self._hasher = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        """Append bytes or a buffer of bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]  # hashed while it is written; both release the GIL
            hashing = self._hasher.submit(self._digest.update, chunk) if len(chunk) >= 2**16 else None
            try:
                self._file.write(chunk)
            except OSError as error:
                self._failure = error
                raise
            finally:
                if hashing is not None:
                    hashing.result()
            if hashing is None:  # for a small chunk another thread would take longer
                self._digest.update(chunk)
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing; everything is flushed at the end."""

    def end(self) -> None:
        """Write the end of the file; subclasses override this."""

    @property
    def content(self) -> Content:
        """Size and hash of what has been written so far."""
        return Content(self._size, self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self.end()
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as failure:
            self._failure = failure
        finally:
            self._hasher.shutdown()
            with suppress(OSError):  # the same failure again, when buffered bytes are flushed
                self._file.close()
        if (failed := self._failure) is not None:  # torch's archive writer replaces it by an error of its own
            free = shutil.disk_usage(self._path.parent).free
            raise OSError(
                failed.errno,
                f"{failed.strerror} after {self._size:,} bytes of {self._path} ({free:,} bytes are free); make room "
                "there, or pass another dirpath to ModelCheckpoint",
            ) from None


def open_plain(path: Path) -> IO[bytes]:
    """Open a regular file for reading; a link is not followed.

    Raises:
        Damaged: it is no regular file, or is missing.
    """
    try:
        # NONBLOCK: otherwise opening a pipe without a writer would wait forever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be opened ({error.strerror}); links are not followed") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def sha256_of(file: IO[bytes], size: int) -> str:
    """Return the hash of the first `size` bytes of an open file."""
    digest = hashlib.sha256()
    file.seek(0)  # in chunks, as a file may be larger than the memory
    while chunk := file.read(min(CHUNK, size)):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------- files of tensors


def name_of(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in safetensors; None if it has none."""
    return next((name for name, known in DTYPES.items() if known == dtype), None)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Content:
    """Write tensors from any device, one at a time, those with the largest elements first: so all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": name_of(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return file.content


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its bytes are those from `start` to before `stop`, counted after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorsFile:
    """A file of tensors, mapped into memory: only what is used is read.

    Args:
        path: of any file, verified or not.

    Raises:
        Damaged: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise Damaged(f"{path} has {size} bytes, fewer than its header announces")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)  # writes stay in this process
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)[8 + length :]
        self.entries: dict[str, Entry] = {}
        with reading(path):
            header = {name: info for name, info in json.loads(mapped[8 : 8 + length]).items() if name != "__metadata__"}
            for name, info in header.items():
                (start, stop), shape, dtype = info["data_offsets"], tuple(info["shape"]), DTYPES[info["dtype"]]
                if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
                    raise ValueError(f"{name} has sizes that are not numbers")
                if not start <= stop <= self._bytes.numel() or stop - start != prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name} lies outside the file, or its size does not match its shape")
                self.entries[name] = Entry(dtype, shape, start, stop)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that maps the file's memory; writes to the tensor do not reach the file."""
        entry = self.entries[name]
        values = self._bytes[entry.start : entry.stop]
        if not values.numel():
            return torch.empty(entry.shape, dtype=entry.dtype)
        if values.data_ptr() % entry.dtype.itemsize:  # files of other programs may be unaligned
            values = values.clone()
        return values.view(entry.dtype).view(entry.shape)
