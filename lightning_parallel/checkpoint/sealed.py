"""Full checkpoints, single files of `torch.save`: they carry their hash, and are loaded without running code.

torch writes zip archives, whose comment nobody else reads: the hash stands there.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_parallel.checkpoint.files import REMEDY, Damaged, HashedFile, open_plain, reading, sha256_of

SEAL = b"lightning_parallel sha256 "
COMMENT = len(SEAL) + 64
LENGTH = 2  # the last bytes of an archive without a comment: the length of that
END, END_SIZE = b"PK\x05\x06", 22  # the record with which an archive ends, but for its comment


class SealedFile(HashedFile):
    """A new archive, written from the first byte to the last; its hash follows as its comment.

    Args:
        path: where there is none yet.
    """

    _last = b""  # what is written later, as it may be the last of all

    def write(self, data: Any) -> int:
        """Append bytes, but keep the last two until it is known whether they are the last of all."""
        view = memoryview(data).cast("B")
        if len(view) < LENGTH:
            following = memoryview(self._last + bytes(view))
        else:
            super().write(self._last)
            following = view
        super().write(following[:-LENGTH])
        self._last = bytes(following[-LENGTH:])
        return len(view)

    def end(self) -> None:
        """Write the length of a comment where the archive says that there is none, and the comment."""
        super().write(COMMENT.to_bytes(LENGTH, "little"))
        super().write(SEAL + self.content.sha256.encode())


def save(content: Any, path: Path) -> None:
    """Write a new file, flushed to the disk."""
    with SealedFile(path) as file:
        torch.save(content, cast(IO[bytes], file))  # torch only writes to it


def require_unchanged(path: Path) -> None:
    """Raise Damaged if a file is not as it was written, as far as that can be known.

    A file of ours carries a hash of all its bytes; another archive, checksums of its parts.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_archive = file.read(2) == b"PK"
        file.seek(max(0, size - END_SIZE - 2 ** (8 * LENGTH)))
        last = file.read()
        if last[-COMMENT:].startswith(SEAL):
            if sha256_of(file, size - COMMENT).encode() != last[-64:]:
                raise Damaged(f"{path} was changed after it was written: its hash is another; {REMEDY}")
            return
    start = last.rfind(END)
    after = len(last) - start - END_SIZE
    length = int.from_bytes(last[start + END_SIZE - LENGTH : start + END_SIZE], "little")
    if is_archive and start >= 0 and after >= 0 and (length != after or length == COMMENT):
        raise Damaged(f"{path} was changed or cut off after it was written: its end is another; {REMEDY}")
    if zipfile.is_zipfile(path) and torch.serialization.get_crc32_options():
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
        except Exception as error:  # a damaged archive leads to many kinds
            raise _broken(path, error) from None
        if broken is not None:
            raise Damaged(f"{path} was changed after it was written: {broken} in it has another checksum; {REMEDY}")


def load(path: Any, device: Any = "cpu", weights_only: bool = True) -> Any:
    """Load a file of torch's, mapped into memory: processes share one copy and read only what they use.

    Raises:
        ValueError: it is no checkpoint, or it would have to run code.
    """
    with _open(path) as file:
        mapped = zipfile.is_zipfile(file)  # files in torch's first format cannot be
    with reading(path):
        try:
            return torch.load(path, device, mmap=mapped, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            if not mapped:
                raise _broken(path, error) from None
            lines = [line.strip() for line in str(error).splitlines()]
            named = next((line for line in lines if "GLOBAL" in line or "global" in line), str(error))
            raise ValueError(
                f"{path} holds what only code could bring back ({named}); have whoever wrote it save plain values, or "
                "if you trust them, pass trust_checkpoint_code=True to the strategy"
            ) from None
        except (RuntimeError, EOFError, KeyError, OSError) as error:
            raise _broken(path, error) from error


def _open(path: Any) -> IO[bytes]:
    """Open a file to which links may lead; a pipe or a device, of which a read has no end, is refused."""
    return open_plain(Path(os.path.realpath(path)))


def _broken(path: Any, error: Exception) -> Damaged:
    return Damaged(f"{path} is no checkpoint, or was cut off; take an earlier one ({error})")
