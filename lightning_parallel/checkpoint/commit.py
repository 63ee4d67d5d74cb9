"""A folder or a file takes its name in one step, whatever had the name before: at no moment is there neither.

Whatever is being made or removed has a name that begins with a dot and says by whom; what a process left that died is
swept away by the next one that saves beside it.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path

UNFINISHED, REMOVED = "unfinished", "removed"
_MADE_BY = re.compile(rf"\.(?P<name>.*)\.(?P<what>{UNFINISHED}|{REMOVED})-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{{8}}")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def beside(target: Path, what: str) -> Path:
    """A new name beside the target, for a part of its life in which nobody may take it for a checkpoint."""
    return target.with_name(f".{target.name}.{what}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def is_passing(path: Path) -> bool:
    """Whether a path has a name of `beside`."""
    return _MADE_BY.fullmatch(path.name) is not None


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:60]


def begin(target: Path) -> Path:
    """Makes the folder in which a checkpoint is written, and sweeps away what the dead have left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    made = beside(target, UNFINISHED)
    made.mkdir()
    return made


def commit(made: Path, target: Path) -> None:
    """Gives what was made, and is on the disk, the name of the target; removes what had it before."""
    if made.is_dir():
        sync_folder(made)
    if not os.path.lexists(target):
        os.rename(made, target)
        sync_folder(target.parent)
        return
    old = _exchanged(made, target)
    sync_folder(target.parent)
    _delete(old)


def _exchanged(made: Path, target: Path) -> Path:
    """Puts one in the place of the other; returns where the old one is now."""
    if not target.is_dir() and not made.is_dir():
        os.replace(made, target)
        return made
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
    with suppress(AttributeError):  # an old libc
        if libc.renameat2(*arguments) == 0:
            return made
    old = beside(target, REMOVED)  # a file system that cannot exchange: for a moment the old one has another name
    os.rename(target, old)
    os.rename(made, target)
    return old


def remove(target: Path) -> None:
    """Removes a checkpoint: from the first moment on nobody takes what is left of it for one."""
    if os.path.lexists(target):
        gone = beside(target, REMOVED)
        os.rename(target, gone)
        _delete(gone)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link(target: Path, name: Path) -> None:
    """Makes `name` a link to a checkpoint beside it, in one step."""
    made = beside(name, UNFINISHED)
    os.symlink(os.path.relpath(target, name.parent), made)
    commit(made, name)


def sweep(folder: Path) -> None:
    """Removes what processes of this host that have died left in a folder."""
    for path in folder.iterdir():
        if _left_by_the_dead(path) is not None:
            _delete(path)


def finish(made: Path) -> Path:
    """Gives a checkpoint that is whole its name, if the process that made it died before it could.

    Returns:
        Where it is now: where it was, if there is something under its name, or the process may be alive.
    """
    left = _left_by_the_dead(made)
    if left is None or left["what"] != UNFINISHED or os.path.lexists(target := made.with_name(left["name"])):
        return made
    commit(made, target)
    return target


def _left_by_the_dead(path: Path) -> re.Match[str] | None:
    """What a name of `beside` says, if a process of this host gave it that has died."""
    made_by = _MADE_BY.fullmatch(path.name)
    return made_by if made_by and made_by["host"] == _host() and not _lives(int(made_by["process"])) else None


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def sync_folder(folder: Path) -> None:
    """Has the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
