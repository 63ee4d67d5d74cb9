"""Errors of checkpoints that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REMEDY = "take an earlier checkpoint, or restore this one from a copy"


class Damaged(ValueError):  # noqa: N818
    """A checkpoint that is not as it was written, or is none."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn every exception inside into one that names the file, whatever values the file holds.

    Errors of the file system pass: their class says more, and they are no damage.

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
    """Name the first tensors, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more if names else "no tensors"
