"""Warnings."""

from __future__ import annotations

import logging

from lightning_parallel.mesh import ParallelMesh, rank_in_world

log = logging.getLogger("lightning_parallel")


def warn(message: str) -> None:
    """Logs a warning on rank 0: all ranks see the same."""
    if rank_in_world() == 0:
        log.warning(message)


def warn_of_stage(message: str, mesh: ParallelMesh) -> None:
    """Logs a warning on the first rank of those that hold the same layers: only they see it."""
    if mesh.leads_its_stage:
        log.warning(message)
