"""Single files: they are loaded without running code, and carry a hash where others read them too.

torch writes zip archives, whose comment nobody else looks at.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.hashed import HashedFile, open_plain, sha256_of

SEAL = b"lightning_parallel sha256 "
COMMENT = len(SEAL) + 64
LENGTH = 2  # the last bytes of an archive without a comment: the length of that
END, END_SIZE = b"PK\x05\x06", 22  # the record with which an archive ends, but for its comment


class SealedFile(HashedFile):
    """A new archive that is written from the first byte to the last; its hash follows as its comment.

    Args:
        path: where there is none yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._last = b""

    def write(self, data: Any) -> int:
        """Appends bytes, but for the last ones, which are kept until it is known that they are the last."""
        view = memoryview(data).cast("B")
        if len(view) >= LENGTH:
            super().write(self._last)
            super().write(view[:-LENGTH])
            self._last = bytes(view[-LENGTH:])
        else:
            kept = self._last + bytes(view)
            super().write(kept[:-LENGTH])
            self._last = kept[-LENGTH:]
        return len(view)

    def end(self) -> None:
        """Says that a comment follows, where the archive says that none does, and writes it."""
        super().write(COMMENT.to_bytes(LENGTH, "little"))
        super().write(SEAL + self.content.sha256.encode())


def require_unchanged(path: Path) -> None:
    """Raises Damaged if a file is not as it was written, as far as that can be known.

    A file of ours carries a hash of all its bytes; other archives, checksums of their parts.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_archive = file.read(len(END)).startswith(b"PK")
        file.seek(max(0, size - END_SIZE - 2 ** (8 * LENGTH)))
        last = file.read()
        comment = last[-COMMENT:]
        sealed = comment.startswith(SEAL)
        if sealed and sha256_of(file, size - COMMENT).encode() != comment[len(SEAL) :]:
            raise Damaged(f"{path} was changed after it was written: its hash is another; {REMEDY}")
    if sealed:
        return
    if is_archive and not _ends_as_it_says(last):
        raise Damaged(f"{path} was changed or cut off after it was written: its end is another; {REMEDY}")
    if zipfile.is_zipfile(path) and torch.serialization.get_crc32_options():
        _require_checksums(path)


def load(path: Any, device: Any = "cpu", weights_only: bool = True) -> Any:
    """What a file of torch's holds, mapped into memory: processes share one copy and read only what they use.

    Raises:
        ValueError: it is no checkpoint, or it would have to run code.
    """
    with _opened(path) as file:
        mapped = zipfile.is_zipfile(file)  # files in torch's first format cannot be
    with reading(path):
        try:
            return torch.load(path, device, mmap=mapped, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            raise ValueError(_refused(path, error) if mapped else _broken(path, error)) from None
        except (RuntimeError, EOFError, KeyError, OSError) as error:
            raise Damaged(_broken(path, error)) from error


def _opened(path: Any) -> IO[bytes]:
    """A file to which links may lead; a pipe or a device, of which a read has no end, is refused."""
    return open(open_plain(Path(os.path.realpath(path))), "rb")


def require_readable(path: Path) -> None:
    """Raises ValueError if a file is no checkpoint, or so much of one that torch cannot read it.

    An archive whose values only code could bring back is one.
    """
    try:
        load(path)
    except ValueError as error:
        if isinstance(error, Damaged) or not zipfile.is_zipfile(path):
            raise


def _broken(path: Any, error: Exception) -> str:
    return f"{path} is no checkpoint, or was cut off; take an earlier one ({error})"


def _refused(path: Any, error: Exception) -> str:
    named = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), str(error))
    return (
        f"{path} holds what only code could bring back ({named}); have whoever wrote it save plain values, or if you "
        "trust them, pass trust_checkpoint_code=True to the strategy"
    )


def _ends_as_it_says(last: bytes) -> bool:
    """Whether an archive that carries no hash has the comment that it tells of, and that is not one of ours."""
    start = last.rfind(END)
    record, comment = last[start : start + END_SIZE], last[start + END_SIZE :]
    told = int.from_bytes(record[-LENGTH:], "little")
    return start < 0 or len(record) < END_SIZE or (told == len(comment) and told != COMMENT)


def _require_checksums(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # a damaged archive leads to many kinds
        raise Damaged(_broken(path, error)) from None
    if broken is not None:
        raise Damaged(f"{path} was changed after it was written: {broken} in it has another checksum; {REMEDY}")
