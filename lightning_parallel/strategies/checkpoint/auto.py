"""Finds the checkpoint from which a run goes on by itself: the newest that is valid."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.damage import Damaged, reading
from lightning_parallel.checkpoint.foreign import ForeignFolder, is_foreign
from lightning_parallel.checkpoint.hub.folder import is_hub_folder
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.checkpoint.sealed import require_unchanged
from lightning_parallel.strategies.checkpoint import stock
from lightning_parallel.strategies.checkpoint.files import AtomicCheckpointIO
from lightning_parallel.strategies.checkpoint.options import CheckpointOptions
from lightning_parallel.strategies.lightning_package import ModelCheckpoint, Trainer, TrainerFn
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all
from lightning_parallel.strategies.trainer import lightnings

log = logging.getLogger(__name__)


def offer(options: CheckpointOptions, trainer: Trainer, host: dist.ProcessGroup) -> None:
    """A run is about to begin: if the user wants it, it goes on from the newest valid checkpoint.

    A checkpoint that the user names comes first; weights of the hub only where there is no checkpoint yet, so that a
    run which begins with them and is started again goes on.
    """

    def choose(named: Any) -> Any:
        is_checkpoint = named is not None and ("://" in str(named) or not is_hub_folder(Path(named)))
        return named if is_checkpoint else chosen(trainer, host) or named

    if options.resume == "auto" and trainer.state.fn == TrainerFn.FITTING:
        lightnings.choose_checkpoint(trainer, choose)


def chosen(trainer: Trainer, host: dist.ProcessGroup) -> str | None:
    """The newest valid checkpoint beside those that the trainer will write; None where there are none at all.

    Raises:
        ValueError: there are some, and none is valid; or nobody says where they would be.
    """
    folders = _folders_of(trainer)
    if not folders:
        raise ValueError(
            "resume='auto' looks where a ModelCheckpoint saves, and the trainer has none; add "
            "ModelCheckpoint(dirpath=...), or pass ckpt_path= to fit"
        )

    newest = run_or_raise_on_all(
        lambda: _newest(folders) if host.rank() == 0 else None, "find a checkpoint to go on from", host
    )
    return gather_objects(newest, host)[0]


def _folders_of(trainer: Trainer) -> list[Path]:
    """The folders of the trainer's checkpoints; of a logger that counts its runs, those of all of them."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    folders = [Path(callback.dirpath) for callback in callbacks if callback.dirpath is not None]
    for each in list(folders):
        if each.name == "checkpoints" and each.parent.name.startswith("version_"):
            folders += sorted(each.parent.parent.glob("version_*/checkpoints"))
    return list(dict.fromkeys(folders))


def _newest(folders: Sequence[Path]) -> str | None:
    found: list[tuple[int, bool, float, Path]] = []  # step, whether under its final name, time, path
    skipped: list[str] = []
    for path in _checkpoints_in(folders):
        try:
            with reading(path):
                found.append((_step_of(path), not commit.is_passing(path), path.stat().st_mtime, path))
        except (ValueError, OSError) as error:
            skipped += [] if path.name.startswith(".") else [str(error)]
    for step, _, _, path in sorted(found, reverse=True):
        try:
            with reading(path):
                _verify(path)
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


def _checkpoints_in(folders: Sequence[Path]) -> Iterator[Path]:
    """All checkpoints there, each once, by its own name rather than that of a link to it."""
    seen: set[str] = set()
    for each in folders:
        for path in sorted(each.iterdir(), key=lambda it: (it.is_symlink(), it)) if each.is_dir() else ():
            is_file = path.suffix == ".ckpt" and not path.name.startswith(".")
            if (folder.is_folder(path) or is_foreign(path) or is_file) and (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield path


def _step_of(path: Path) -> int:
    """The step of a checkpoint; a ValueError where it cannot be opened, or a fit cannot go on from it."""
    if folder.is_folder(path):
        manifest = read_manifest(path)
        step, holds = manifest.step, set(manifest.holds)
    elif is_foreign(path):
        step, holds = int(stock.read_rest(path)["global_step"]), {"optimizer_states"}
        ForeignFolder(path)
    else:
        content = AtomicCheckpointIO(verifies=False).load_checkpoint(path)
        step, holds = int(content.get("global_step", 0)), set(content)
    if "optimizer_states" not in holds:
        raise ValueError(f"{path} holds weights only")
    return step


def _verify(path: Path) -> None:
    if folder.is_folder(path):
        folder.require_whole(path, folder.faults(path, read_manifest(path)))
    elif is_foreign(path):
        folder.require_whole(path, ForeignFolder(path).faults())
    else:
        require_unchanged(path)
