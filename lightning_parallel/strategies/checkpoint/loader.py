"""Reads checkpoints of every form, which run no code unless the user trusts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_parallel.checkpoint import folder
from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.foreign import ForeignFolder, is_foreign
from lightning_parallel.checkpoint.hub.folder import is_hub_folder
from lightning_parallel.checkpoint.hub.folder import read as read_hub
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.strategies.checkpoint import stock
from lightning_parallel.strategies.checkpoint.hub import as_checkpoint
from lightning_parallel.strategies.checkpoint.options import CheckpointOptions
from lightning_parallel.strategies.checkpoint.sharded import is_divided
from lightning_parallel.strategies.lightning_package import CheckpointIO
from lightning_parallel.strategies.ranks.agreement import gather_objects

T = TypeVar("T")

FORCE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load(
    path: Any, options: CheckpointOptions, io: CheckpointIO, weights_only: bool | None, host: Any
) -> dict[str, Any]:
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
    local = None if "://" in str(path) else Path(path)
    if local is not None and folder.is_folder(local):
        found = _read_folder(local, host)
    elif local is not None and is_hub_folder(local):
        found = as_checkpoint(_agreed(local, lambda: read_hub(local), host))
    elif local is not None and is_foreign(local):
        found = _read_foreign(local, host)
    else:
        found = io.load_checkpoint(path, weights_only=safe)
    with reading(path):
        if not isinstance(found, dict):
            raise Damaged(f"it holds a {type(found).__name__}, and a checkpoint is a dictionary; {REMEDY}")
        if "optimizer_states" in found:
            found["optimizer_states"] = [stock.numbered(state) for state in found["optimizer_states"]]
    return found


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
    manifest = _agreed(path, lambda: read_manifest(path), host)
    _require_whole(path, lambda: folder.faults(path, manifest, rank, ranks), host)
    return _agreed(path, lambda: folder.read(path, manifest, is_divided), host)


def _read_foreign(path: Path, host: dist.ProcessGroup | None) -> Any:
    rank, ranks = (0, 1) if host is None else (host.rank(), host.size())
    opened = _agreed(path, lambda: ForeignFolder(path), host)
    _require_whole(path, lambda: opened.faults(rank, ranks), host)
    return _agreed(path, lambda: stock.read_folder(opened), host)


def _agreed(path: Path, read: Callable[[], T], host: dist.ProcessGroup | None) -> T:
    """What is read on all ranks, or on none."""
    said: list[str] = []
    found: list[T] = []

    def look() -> list[str]:
        try:
            with reading(path):
                found.append(read())
        except (Damaged, OSError) as error:
            said.append(str(error))
        return said

    _require_whole(path, look, host)
    return found[0]


def _require_whole(path: Path, look: Callable[[], list[str]], host: dist.ProcessGroup | None) -> None:
    """Raises on all ranks what any of them sees; they look at different files."""
    every = [look()] if host is None else gather_objects(look(), host)
    folder.require_whole(path, list(dict.fromkeys(fault for some in every for fault in some)))
