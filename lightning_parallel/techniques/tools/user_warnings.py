"""Warnings to the user."""

from __future__ import annotations

import logging

from lightning_parallel.mesh import ParallelMesh, rank_in_world

log = logging.getLogger("lightning_parallel")


def warn(message: str) -> None:
    """Log a warning on rank 0 only, for facts that all ranks know."""
    if rank_in_world() == 0:
        log.warning(message)


def warn_of_stage(message: str, mesh: ParallelMesh) -> None:
    """Log a warning on the first rank of each pipeline stage, for facts that only the ranks of the stage know."""
    if mesh.is_first_of_stage:
        log.warning(message)
