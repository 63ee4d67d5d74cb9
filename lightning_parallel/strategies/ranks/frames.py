"""Where a thread stands, seen from another one."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
from typing import IO, NamedTuple

THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


class Frame(NamedTuple):
    """A call that has not returned."""

    file: str
    line: int
    function: str


NOWHERE = Frame("an unknown place", 0, "unknown code")


def frames_of(thread: int) -> list[Frame]:
    """The frames of a thread, the outermost first, at most the innermost 100.

    They are those that `faulthandler` writes, in one go. Of what `sys._current_frames` gives each frame has to be asked
    for the next, and meanwhile the thread may go on: in Python 3.11 a frame then was memory of something else.

    Args:
        thread: as `threading.get_ident` says.
    """
    with _file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return _read(file.read(), thread)


def _file() -> IO[str]:
    """In memory where that can be: a disk may be full, or gone."""
    if sys.platform == "linux":
        return open(os.memfd_create("frames"), "w+")
    return tempfile.TemporaryFile("w+")


def _read(written: str, thread: int) -> list[Frame]:
    found: list[Frame] = []
    here = False
    for line in written.splitlines():
        if begins := THREAD.match(line):
            here = int(begins[1], 16) == thread
        elif here and (frame := LINE.fullmatch(line)):
            found.append(Frame(_plain(frame[1]), int(frame[2]) if frame[2].isdigit() else 0, _plain(frame[3])))
    return found[::-1] or [NOWHERE]


def _plain(name: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), name)
