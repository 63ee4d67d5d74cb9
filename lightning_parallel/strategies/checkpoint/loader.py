"""Reads checkpoints of every form, which run no code unless the user trusts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO

from lightning_parallel.checkpoint import folder
from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.manifest import Manifest, read_manifest
from lightning_parallel.strategies.checkpoint.options import CheckpointOptions
from lightning_parallel.strategies.checkpoint.sharded import is_divided
from lightning_parallel.strategies.ranks.agreement import gather_objects

FORCE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load(path: Any, options: CheckpointOptions, io: CheckpointIO, weights_only: bool | None, host: Any) -> Any:
    """Reads a checkpoint, verified before anything of it is used. All ranks call.

    Args:
        path: of the checkpoint, the same on all ranks.
        options: the user's.
        io: reads the full form.
        weights_only: see Lightning.
        host: all ranks; None where a file is read outside of a run.

    Raises:
        ValueError: it was changed, cut off, or is none; or it would have to run code.
    """
    safe = _is_safe(options, weights_only)
    if "://" not in str(path) and folder.is_folder(Path(path)):
        return _read_folder(Path(path), host)
    return io.load_checkpoint(path, weights_only=safe)


def _is_safe(options: CheckpointOptions, weights_only: bool | None) -> bool:
    if options.trust_code:
        return bool(weights_only)
    if weights_only is False:
        raise ValueError(
            "weights_only=False would let the checkpoint run any code; if you trust who wrote it, pass "
            "trust_checkpoint_code=True to the strategy"
        )
    if os.environ.get(FORCE, "0") not in ("", "0", "false", "False"):
        raise ValueError(
            f"{FORCE} is set, by which checkpoints may run any code; unset it, or if you trust who wrote this one, "
            "pass trust_checkpoint_code=True to the strategy"
        )
    return True


def _read_folder(path: Path, host: dist.ProcessGroup | None) -> Any:
    rank, ranks = (0, 1) if host is None else (host.rank(), host.size())
    manifest, said = _verified(path, rank, ranks)
    every = [said] if host is None else gather_objects(said, host)
    folder.require_whole(path, list(dict.fromkeys(fault for some in every for fault in some)))
    assert manifest is not None
    return folder.read(path, manifest, is_divided)


def _verified(path: Path, rank: int, ranks: int) -> tuple[Manifest | None, list[str]]:
    """The manifest, and what this rank finds wrong: ranks look at different files."""
    try:
        manifest = read_manifest(path)
        return manifest, folder.faults(path, manifest, rank, ranks)
    except (Damaged, OSError) as error:
        return None, [str(error)]
