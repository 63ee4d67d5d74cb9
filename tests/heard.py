"""What the package says while something runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(level: int = logging.WARNING, name: str = "lightning_parallel") -> Iterator[list[str]]:
    """Inside, collects the messages that a package logs from this level on, e.g. "lightning.pytorch"."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
