"""Warnings to the user."""

from __future__ import annotations

import logging

from lightning_parallel.mesh import rank_in_world

log = logging.getLogger("lightning_parallel")


def warn(message: str) -> None:
    """Log a warning on rank 0 only, for facts that all ranks know."""
    if rank_in_world() == 0:
        log.warning(message)
