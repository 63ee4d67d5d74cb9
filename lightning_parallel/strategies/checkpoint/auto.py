"""Finds the checkpoint from which a run goes on by itself: the newest that is valid."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.damage import Damaged, reading
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.checkpoint.sealed import require_unchanged
from lightning_parallel.checkpoint.torch_folder import is_torch_folder, unsafe
from lightning_parallel.strategies.checkpoint.files import AtomicCheckpointIO
from lightning_parallel.strategies.lightning_package import ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all

log = logging.getLogger(__name__)


def newest_checkpoint(trainer: Trainer, host: dist.ProcessGroup) -> str | None:
    """The newest valid checkpoint beside those that the trainer will write; None where there are none. Collective.

    Raises:
        ValueError: there are some, and none is valid; or nobody says where they would be.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    folders = [Path(callback.dirpath) for callback in callbacks if callback.dirpath is not None]
    for each in list(folders):
        if each.name == "checkpoints" and each.parent.name.startswith("version_"):  # of a logger that counts its runs
            folders += sorted(each.parent.parent.glob("version_*/checkpoints"))
    if not folders:
        raise ValueError(
            "resume='auto' looks where a ModelCheckpoint saves, and the trainer has none; add "
            "ModelCheckpoint(dirpath=...), or pass ckpt_path= to fit"
        )

    def find() -> str | None:
        return _newest(list(dict.fromkeys(folders))) if host.rank() == 0 else None

    return gather_objects(run_or_raise_on_all(find, "find a checkpoint to go on from", host), host)[0]


def _newest(folders: Sequence[Path]) -> str | None:
    found: list[tuple[int, bool, float, Path]] = []  # step, whether under its final name, time, path
    skipped: list[str] = []
    for path in _checkpoints_in(folders):
        try:
            with reading(path):
                found.append((_step_of(path), not commit.is_temporary(path), path.stat().st_mtime, path))
        except (ValueError, OSError) as error:
            skipped += [] if path.name.startswith(".") else [str(error)]
    for step, _, _, path in sorted(found, reverse=True):
        try:
            with reading(path):
                if folder.is_folder(path):
                    folder.require_whole(path, folder.faults(path, read_manifest(path)))
                else:
                    require_unchanged(path)
        except (Damaged, OSError) as error:
            skipped.append(str(error))
            continue
        final = commit.finish(path)  # else the next save would sweep the newest one away before it is there
        log.info("Going on from %s, step %d. Skipped: %s", final, step, " | ".join(skipped) or "none")
        return str(final)
    if skipped:
        raise ValueError(
            f"resume='auto' found checkpoints, and none from which this run can go on: {' | '.join(skipped)}. "
            "Restore one from a copy, or pass resume=None to start from the beginning"
        )
    log.info("There is no checkpoint in %s: starting from the beginning", ", ".join(map(str, folders)))
    return None


def _checkpoints_in(folders: Sequence[Path]) -> list[Path]:
    """All checkpoints there, each once, by its own name rather than that of a link to it."""
    found: dict[str, Path] = {}
    for each in folders:
        for path in sorted(each.iterdir(), key=lambda it: (it.is_symlink(), it)) if each.is_dir() else ():
            is_file = path.suffix == ".ckpt" and not path.name.startswith(".")
            if folder.is_folder(path) or is_torch_folder(path) or is_file:
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _step_of(path: Path) -> int:
    """The step of a checkpoint; a ValueError where it cannot be opened, or a fit cannot go on from it."""
    if folder.is_folder(path):
        manifest = read_manifest(path)
        step, holds = manifest.step, set(manifest.holds)
    elif is_torch_folder(path):
        raise unsafe(path)
    else:
        content = AtomicCheckpointIO(verifies=False).load_checkpoint(path)
        step, holds = int(content.get("global_step", 0)), set(content)
    if "optimizer_states" not in holds:
        raise ValueError(f"{path} holds weights only")
    return step
