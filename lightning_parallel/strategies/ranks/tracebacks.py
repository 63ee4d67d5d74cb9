"""Tracebacks: of one failure the script's own frames, on the rank that failed first; one line on the others.

Exceptions stay what they are: only what Python prints when nobody catches them is changed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from lightning_parallel.strategies.lightning_package import lightning, lightning_fabric

PACKAGE = Path(__file__).parents[2]
LIBRARIES = (
    *(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (lightning, lightning_fabric, torch)),
    f"{PACKAGE}{os.sep}",
    contextlib.__file__,
)
LINE, SHORT = "_lightning_parallel_line", "_lightning_parallel_short"


def show_in_one_line(exception: BaseException, line: str) -> None:
    """Should nobody catch the exception, Python shows this line instead of its traceback."""
    _show(exception, LINE, line)


def show_own_frames(exception: BaseException) -> None:
    """Should nobody catch the exception, Python leaves out what libraries did between two frames of the script."""
    if not sys.flags.dev_mode:
        _show(exception, SHORT, "")


def note(exception: BaseException, *texts: str) -> None:
    """Adds to an exception what Python, torchrun and torch's own launcher show below its traceback."""
    if any(texts):
        vars(exception).setdefault("__notes__", []).extend(filter(None, texts))  # `add_note` came with Python 3.11


def tell_torchrun(exception: BaseException) -> None:
    """Leaves the traceback where torchrun looks for the one that it shows at the end."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(exception, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # torchrun's processes have it

        with _short(exception):
            get_error_handler().record_exception(exception)


def own_frames(trace: TracebackType | None) -> tuple[TracebackType | None, int]:
    """A traceback without what libraries did between two frames of the script, and how many frames that leaves out.

    What libraries did after the last frame of the script stays: it failed there.
    """
    steps = list(_steps(trace))
    last = max((number for number, step in enumerate(steps) if not _is_of_library(step)), default=0)
    kept = [step for number, step in enumerate(steps) if number >= last or not _is_of_library(step)]
    shown = None
    for step in reversed(kept):
        shown = TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return shown, len(steps) - len(kept)


def _show(exception: BaseException, how: str, line: str) -> None:
    shown = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        noted = vars(value)
        if LINE in noted:
            print(noted[LINE], file=sys.stderr, flush=True)
        elif SHORT in noted:
            with _short(value) as left_out:
                if left_out:
                    print(f"{left_out} frames of libraries are not shown; PYTHONDEVMODE=1 shows them", file=sys.stderr)
                shown(kind, value, value.__traceback__)
        else:
            shown(kind, value, trace)

    if LINE not in vars(exception) and SHORT not in vars(exception):
        vars(exception)[how] = line
        sys.excepthook = show


@contextlib.contextmanager
def _short(exception: BaseException) -> Iterator[int]:
    """Inside, the exception has the shorter traceback; yields how many frames that leaves out."""
    whole = exception.__traceback__
    exception.__traceback__, left_out = (whole, 0) if sys.flags.dev_mode else own_frames(whole)
    try:
        yield left_out
    finally:
        exception.__traceback__ = whole


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_of_library(step: TracebackType) -> bool:
    return step.tb_frame.f_code.co_filename.startswith(LIBRARIES)
