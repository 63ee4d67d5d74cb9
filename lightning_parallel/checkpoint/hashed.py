"""Files that are hashed while they are written, and flushed to the disk before anybody hears of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from typing_extensions import Self

from lightning_parallel.checkpoint.damage import Damaged

CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Content:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


class HashedFile:
    """A new file; its bytes are hashed by another thread while they go to the disk.

    Args:
        path: where there is none yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failure: OSError | None = None
        self._file = open(path, "xb")  # noqa: SIM115
        self._digest, self._size = hashlib.sha256(), 0
        self._hasher = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        """Append bytes, or a buffer of them."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            hashing = self._hasher.submit(self._digest.update, chunk) if len(chunk) >= 2**16 else None
            try:
                self._file.write(chunk)
            except OSError as error:
                self._failure = error
                raise
            finally:
                if hashing is not None:
                    hashing.result()
            if hashing is None:  # another thread would take longer
                self._digest.update(chunk)
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing; all is flushed at the end."""

    def end(self) -> None:
        """Write what comes last."""

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
            with suppress(OSError):  # of what could not be written before
                self._file.close()
        if (failed := self._failure) is not None:  # torch's writer of archives hides it behind an error of its own
            free = shutil.disk_usage(self._path.parent).free
            raise OSError(
                failed.errno,
                f"{failed.strerror}, after {self._size:,} bytes of {self._path}, where {free:,} are free; make room "
                "there, or pass another dirpath to ModelCheckpoint",
            ) from None


def open_plain(path: Path) -> IO[bytes]:
    """Open a regular file that is no link, to read.

    Raises:
        Damaged: it is something else, or is not there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be opened ({error.strerror}); a link is never followed") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def sha256_of(file: IO[bytes], size: int) -> str:
    """Hash the first `size` bytes of an open file."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(min(CHUNK, size)):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()
