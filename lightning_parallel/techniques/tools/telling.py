"""Warnings that a run gives once."""

from __future__ import annotations

import logging

import torch.distributed as dist

log = logging.getLogger("lightning_parallel")


def warn(message: str) -> None:
    """Logs a warning on rank 0: all ranks see the same."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning(message)
