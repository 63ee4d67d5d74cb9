"""Replace, remove and link files and folders atomically: at no moment is there neither the old nor the new one.

What is being written or removed has a name that begins with a dot. Its writer holds a lock on a file beside it as long
as it lives: so another process knows what a killed one has left, also where it does not see its pid (in containers).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

UNFINISHED, REMOVED = "unfinished", "removed"
_HOST = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:60]
_TEMPORARY = re.compile(
    rf"\.(?P<name>.*)\.(?P<kind>{UNFINISHED}|{REMOVED})-(?P<host>.+)-\d+-[0-9a-f]{{8}}(?P<lock>\.lock)?"
)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def temporary_name(target: Path, kind: str) -> Path:
    """Return a new hidden name beside `target` that no reader takes for a checkpoint."""
    return target.with_name(f".{target.name}.{kind}-{_HOST}-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """Give a name under which a file or folder is written before it is committed; remove what is left there at the end.

    What killed processes have left in the folder is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    unfinished = temporary_name(target, UNFINISHED)
    lock = _lock_of(unfinished)
    with ExitStack() as stack:
        while True:
            held = stack.enter_context(open(lock, "wb"))
            with suppress(OSError):  # a file system without locks, which `_is_held` sees too
                fcntl.flock(held, fcntl.LOCK_EX)
            if os.fstat(held.fileno()).st_nlink:  # else another process swept it away before it was locked
                break
        try:
            yield unfinished
        finally:
            _delete(unfinished)
            lock.unlink(missing_ok=True)


def commit(written: Path, target: Path) -> None:
    """Give what was written, and is on the disk, the name of the target; remove what had it before."""
    if written.is_dir():  # its names must be on the disk before its own is
        _sync_folder(written)
    old: Path | None = written  # after an exchange the old one has the new one's name
    if not os.path.lexists(target):  # also a link to nothing has the name
        os.rename(written, target)
        old = None
    elif not target.is_dir() and not written.is_dir():
        os.replace(written, target)
        old = None
    else:
        exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # an old libc does not have it
        names = _AT_FDCWD, os.fsencode(written), _AT_FDCWD, os.fsencode(target)
        if exchange is None or exchange(*names, _RENAME_EXCHANGE) != 0:
            # A file system that cannot exchange two names: for a moment the old one has another.
            old = temporary_name(target, REMOVED)
            os.rename(target, old)
            os.rename(written, target)
    _sync_folder(target.parent)
    if old is not None:
        _delete(old)


def remove(target: Path) -> None:
    """Remove a checkpoint; from the first moment on no reader takes what is left of it for one."""
    if os.path.lexists(target):
        removed = temporary_name(target, REMOVED)
        os.rename(target, removed)
        _delete(removed)


def link(target: Path, name: Path) -> None:
    """Make `name` a link to a checkpoint beside it, also where `name` exists."""
    with writing(name) as made:
        os.symlink(os.path.relpath(target, name.parent), made)
        commit(made, name)


def sweep(folder: Path) -> None:
    """Remove from a folder what killed processes of this host were writing or removing."""
    for path in folder.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and (found["kind"] == REMOVED or (found["host"] == _HOST and not _is_held(_lock_of(path)))):
            _delete(path)


def finish(written: Path) -> Path:
    """Give a complete checkpoint its name if its writer was killed before it could.

    Returns:
        Where the checkpoint is now: where it was if its name is taken, or its writer lives.
    """
    found = _TEMPORARY.fullmatch(written.name)
    if not found or found["kind"] != UNFINISHED or found["host"] != _HOST or _is_held(_lock_of(written)):
        return written
    target = written.with_name(found["name"])
    if os.path.lexists(target):  # an older one: a later save replaces it, readers take this one where it lies
        return written
    commit(written, target)
    return target


def _lock_of(path: Path) -> Path:
    return path if path.suffix == ".lock" else path.with_name(f"{path.name}.lock")


def _is_held(lock: Path) -> bool:
    """Return whether the writer of what a lock stands for may live."""
    try:
        with open(lock, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # another process holds it, or the file system has no locks
        return True
    return False


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
