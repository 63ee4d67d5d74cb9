"""What is said of a checkpoint that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence

REMEDY = "take an earlier checkpoint, or restore this one from a copy"


class Damaged(ValueError):  # noqa: N818
    """A checkpoint that is not as it was written, or is none."""


def shortened(names: Sequence[str]) -> str:
    """Tells which tensors are meant: the first of them, and how many more."""
    if not names:
        return "no tensors"
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
