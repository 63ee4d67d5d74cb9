"""Reads checkpoints of every form, which run no code unless the user trusts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_parallel.checkpoint import folder
from lightning_parallel.checkpoint.damage import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.hub.folder import is_hub_folder
from lightning_parallel.checkpoint.hub.folder import read as read_hub
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.checkpoint.torch_folder import is_torch_folder, unsafe
from lightning_parallel.strategies.checkpoint.hub import as_checkpoint
from lightning_parallel.strategies.checkpoint.options import CheckpointOptions
from lightning_parallel.strategies.checkpoint.sharded import is_divided
from lightning_parallel.strategies.lightning_package import CheckpointIO
from lightning_parallel.strategies.ranks.agreement import gather_objects

T = TypeVar("T")

FORCE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load(
    path: Any, options: CheckpointOptions, io: CheckpointIO, weights_only: bool | None, host: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Read a checkpoint, verified before anything of it is used. All ranks call.

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
    rank, ranks = (0, 1) if host is None else (host.rank(), host.size())
    found: Any
    if local is not None and folder.is_folder(local):
        manifest = _agreed(local, lambda: read_manifest(local), host)
        _require_whole(local, folder.faults(local, manifest, rank, ranks), host)
        found = _agreed(local, lambda: folder.read(local, manifest, is_divided), host)
    elif local is not None and is_hub_folder(local):
        found = as_checkpoint(_agreed(local, lambda: read_hub(local), host))
    elif local is not None and is_torch_folder(local):
        raise unsafe(local)
    else:
        found = io.load_checkpoint(path, weights_only=safe)
    with reading(path):
        if not isinstance(found, dict):
            raise Damaged(f"it holds a {type(found).__name__}, and a checkpoint is a dictionary; {REMEDY}")
        if "optimizer_states" in found:
            found["optimizer_states"] = [numbered(state) for state in found["optimizer_states"]]
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


def _agreed(path: Path, read: Callable[[], T], host: dist.ProcessGroup | None) -> T:
    """What is read on all ranks, or on none."""
    found, faults = list[T](), list[str]()
    try:
        with reading(path):
            found.append(read())
    except (Damaged, OSError) as error:
        faults.append(str(error))
    _require_whole(path, faults, host)
    return found[0]


def _require_whole(path: Path, faults: list[str], host: dist.ProcessGroup | None) -> None:
    """Raise on all ranks what any of them has found; they look at different files."""
    every = [faults] if host is None else gather_objects(faults, host)
    folder.require_whole(path, list(dict.fromkeys(fault for some in every for fault in some)))


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer by the numbers of parameters, in the order in which its groups have them.

    `FSDPStrategy` and `ModelParallelStrategy` write names to folders, and to files numbers in the order of the model.
    """
    groups = state.get("param_groups", [])
    names = [name for group in groups for name in group.get("params", ())]
    if names == list(range(len(names))):
        return dict(state)
    numbers = {name: number for number, name in enumerate(names)}
    states: Mapping[Any, Any] = state.get("state", {})
    return {
        **state,
        "state": {numbers.get(name, name): value for name, value in states.items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }
