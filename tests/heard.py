"""What the package says while something runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Inside, collects the messages that the package logs from this level on."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("lightning_parallel")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
