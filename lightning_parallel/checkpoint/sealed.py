"""Full checkpoints, single files of `torch.save`, with a hash of their content; they are loaded without running code.

torch writes zip archives. The hash is their comment, which no other program reads.
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
LENGTH = 2  # the last bytes of an archive without a comment: the length of the comment
END, END_SIZE = b"PK\x05\x06", 22  # the record at the end of an archive, without its comment


class SealedFile(HashedFile):
    """A new archive, written sequentially; its hash is appended as its comment.

    Args:
        path: of the file, which must not exist.
    """

    _last = b""  # bytes not written yet, as they may be the last ones of the archive

    def write(self, data: Any) -> int:
        """Append bytes, but hold back the last two: they may be the end of the archive, which `end` replaces."""
        view = memoryview(data).cast("B")
        if len(view) < LENGTH:
            pending = memoryview(self._last + bytes(view))
        else:
            super().write(self._last)
            pending = view
        super().write(pending[:-LENGTH])
        self._last = bytes(pending[-LENGTH:])
        return len(view)

    def end(self) -> None:
        """Write the comment, and its length in place of the last two bytes, which say that there is no comment."""
        super().write(COMMENT.to_bytes(LENGTH, "little"))
        super().write(SEAL + self.content.sha256.encode())


def save(content: Any, path: Path) -> None:
    """Write a new file and flush it to the disk."""
    with SealedFile(path) as file:
        torch.save(content, cast(IO[bytes], file))  # torch only writes to it


def require_unchanged(path: Path) -> None:
    """Raise Damaged if a file was changed after it was written, as far as this can be known.

    Our files carry a hash of all their bytes; other archives carry checksums of their parts.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_archive = file.read(2) == b"PK"
        file.seek(max(0, size - END_SIZE - 2 ** (8 * LENGTH)))
        last = file.read()
        if last[-COMMENT:].startswith(SEAL):
            if sha256_of(file, size - COMMENT).encode() != last[-64:]:
                raise Damaged(f"{path} was changed after it was written: its hash differs; {REMEDY}")
            return
    start = last.rfind(END)
    after = len(last) - start - END_SIZE
    length = int.from_bytes(last[start + END_SIZE - LENGTH : start + END_SIZE], "little")
    if is_archive and start >= 0 and after >= 0 and (length != after or length == COMMENT):
        raise Damaged(f"{path} was changed or cut off after it was written: its end is damaged; {REMEDY}")
    if zipfile.is_zipfile(path) and torch.serialization.get_crc32_options():
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
        except Exception as error:  # a damaged archive raises many classes of errors
            raise _broken(path, error) from None
        if broken is not None:
            raise Damaged(f"{path} was changed after it was written: the checksum of {broken} in it differs; {REMEDY}")


def load(path: Any, device: Any = "cpu", weights_only: bool = True) -> Any:
    """Load a file of `torch.save`, mapped into memory: processes share one copy and read only what they use.

    Raises:
        ValueError: it is no checkpoint, or loading it would run code.
    """
    with _open(path) as file:
        mapped = zipfile.is_zipfile(file)  # files in torch's first format cannot be mapped
    with reading(path):
        try:
            return torch.load(path, device, mmap=mapped, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            if not mapped:
                raise _broken(path, error) from None
            lines = [line.strip() for line in str(error).splitlines()]
            named = next((line for line in lines if "GLOBAL" in line or "global" in line), str(error))
            raise ValueError(
                f"{path} holds objects that only code can restore ({named}). Have its author save plain values, or if "
                "you trust them, pass trust_checkpoint_code=True to the strategy"
            ) from None
        except (RuntimeError, EOFError, KeyError, OSError) as error:
            raise _broken(path, error) from error


def _open(path: Any) -> IO[bytes]:
    """Open a file, following links; a pipe or a device, which can be read without end, is refused."""
    return open_plain(Path(os.path.realpath(path)))


def _broken(path: Any, error: Exception) -> Damaged:
    return Damaged(f"{path} is not a checkpoint, or was cut off; take an earlier one ({error})")
