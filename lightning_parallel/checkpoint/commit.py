"""Replace, remove and link files and folders atomically: at every moment the old one or the new one exists.

The name of what is being written or removed begins with a dot. Its writer holds a lock on a file beside it while it
lives: so other processes recognize what a killed one left behind, even if they cannot see its pid (in containers).
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
    """Return a new hidden name beside `target`, which no reader takes for a checkpoint."""
    return target.with_name(f".{target.name}.{kind}-{_HOST}-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """Yield a temporary name for a file or folder to be committed; delete what is left under this name at the end.

    What killed processes left in the folder is deleted first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    unfinished = temporary_name(target, UNFINISHED)
    lock = _lock_of(unfinished)
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(open(lock, "wb"))
            with suppress(OSError):  # a file system without locks: there `_is_held` returns True
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # else another process swept the file before it was locked
                break
        try:
            yield unfinished
        finally:
            _delete(unfinished)
            lock.unlink(missing_ok=True)


def commit(written: Path, target: Path) -> None:
    """Give the name of the target to what was written and flushed to the disk; delete the target's old version."""
    if written.is_dir():  # the names in a folder must be on the disk before the folder's own name
        _sync_folder(written)
    old = written  # after an exchange the old version has the name of the written one, else nothing has it
    if not os.path.lexists(target) or not (target.is_dir() or written.is_dir()):  # a dangling link counts as existing
        os.replace(written, target)
    else:
        exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # missing in an old libc
        names = _AT_FDCWD, os.fsencode(written), _AT_FDCWD, os.fsencode(target)
        if exchange is None or exchange(*names, _RENAME_EXCHANGE) != 0:
            # A file system that cannot exchange two names: for a moment the old version has a temporary name.
            old = temporary_name(target, REMOVED)
            os.rename(target, old)
            os.rename(written, target)
    _sync_folder(target.parent)
    _delete(old)


def remove(target: Path) -> None:
    """Remove a checkpoint; from the first moment on, no reader takes its remains for one."""
    if os.path.lexists(target):
        removed = temporary_name(target, REMOVED)
        os.rename(target, removed)
        _delete(removed)


def link(target: Path, name: Path) -> None:
    """Make `name` a link to the checkpoint `target`; replace what is called `name`."""
    with writing(name) as temporary:
        os.symlink(os.path.relpath(target, name.parent), temporary)
        commit(temporary, name)


def sweep(folder: Path) -> None:
    """Delete from a folder what killed processes of this host were writing or removing."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and (match["kind"] == REMOVED or (match["host"] == _HOST and not _is_held(_lock_of(path)))):
            _delete(path)


def finish(written: Path) -> Path:
    """Commit a complete checkpoint whose writer was killed before it could.

    Returns:
        The path of the checkpoint; `written` if its target exists or its writer lives.
    """
    match = _TEMPORARY.fullmatch(written.name)
    if not match or match["kind"] != UNFINISHED or match["host"] != _HOST or _is_held(_lock_of(written)):
        return written
    target = written.with_name(match["name"])
    if os.path.lexists(target):  # an older version: a later save replaces it; readers use `written` where it is
        return written
    commit(written, target)
    return target


def _lock_of(path: Path) -> Path:
    return path if path.suffix == ".lock" else path.with_name(f"{path.name}.lock")


def _is_held(lock: Path) -> bool:
    """Return whether the writer that a lock file belongs to may be alive."""
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
