"""Warnings, and what else a run says once."""

from __future__ import annotations

import logging

from lightning_parallel.mesh import ParallelMesh, rank_in_world

log = logging.getLogger("lightning_parallel")


def warn(message: str) -> None:
    """Logs a warning on rank 0: all ranks see the same."""
    _log(logging.WARNING, message)


def warn_of_stage(message: str, mesh: ParallelMesh) -> None:
    """Logs a warning on the first rank of those that hold the same layers: only they see it."""
    if mesh.leads_its_stage:
        log.warning(message)


def inform(message: str) -> None:
    """Logs what a user may want to know, on rank 0: all ranks see the same."""
    _log(logging.INFO, message)


def _log(level: int, message: str) -> None:
    if rank_in_world() == 0:
        log.log(level, message)
