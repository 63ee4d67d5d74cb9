"""Reading of checkpoints in every form; none can run code unless the user trusts it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from lightning_parallel.arguments import one_of, true_or_false
from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.files import REMEDY, Damaged, reading
from lightning_parallel.checkpoint.hub import is_hub_folder
from lightning_parallel.checkpoint.hub import read as read_hub
from lightning_parallel.checkpoint.sealed import load as load_file
from lightning_parallel.checkpoint.sealed import require_unchanged
from lightning_parallel.checkpoint.sealed import save as save_file
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING
from lightning_parallel.strategies.lightning_package import CheckpointIO, ModelCheckpoint, TorchCheckpointIO, Trainer
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all

Form = Literal["full", "sharded"]
Resume = Literal["auto"]
log = logging.getLogger(__name__)
T = TypeVar("T")
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
FORCE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@dataclass(frozen=True)
class CheckpointOptions:
    """Arguments of every strategy about checkpoints, see `RankStrategy`."""

    form: Form = "full"
    async_save: bool = False
    resume: Resume | None = None
    trust_code: bool = False

    @property
    def in_parts(self) -> bool:
        """Whether each rank writes its own shards to a checkpoint."""
        return self.form == "sharded"

    def __post_init__(self) -> None:
        one_of("strategy", "checkpoint", self.form, ("full", "sharded"))
        one_of("strategy", "resume", self.resume, ("auto", None))
        true_or_false("strategy", async_save=self.async_save, trust_checkpoint_code=self.trust_code)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's reader and writer of single files, but a file appears complete or not at all, also on power failure.

    Args:
        warns: whether the first save warns of objects that `torch.load(weights_only=True)` refuses.
    """

    def __init__(self, warns: bool = True) -> None:
        self._warns = warns

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write to a temporary name, flush to disk, then rename. Remote paths are written by Lightning's code."""
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        if storage_options is not None:
            raise TypeError("storage_options are for remote paths; pass a checkpoint_io that understands them")
        target = Path(path)
        with commit.writing(target) as name:
            save_file(checkpoint, name)
            commit.commit(name, target)
        warns, self._warns = self._warns, False
        if warns and (classes := torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            log.warning(  # `weights_only=True` refuses a file with such classes, e.g. `pathlib.PosixPath`
                "%s holds objects that are not plain values (%s), in its hyperparameters or elsewhere: this run and "
                "load_from_checkpoint refuse to read it. Leave them out with save_hyperparameters(ignore=[...]), "
                "save numbers, strings, lists and dictionaries instead, or pass trust_checkpoint_code=True to "
                "the strategy, which lets checkpoints run code",
                path,
                ", ".join(classes),
            )
        return None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Map the file into memory, so that the ranks of a host share one copy and read only what they need.

        Raises:
            FileNotFoundError: there is no file at the path.
            ValueError: the file is no checkpoint, has changed since it was written, or would have to run code.
        """
        safe = True if weights_only is None else weights_only
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, safe)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        require_unchanged(Path(path))
        loaded: dict[str, Any] = load_file(path, map_location or "cpu", safe)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a folder; if this is interrupted, nobody takes the rest for a checkpoint."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            commit.remove(Path(path))


def is_divided(name: str) -> bool:
    """Return whether ranks may hold different shards of a tensor, by its name: those of the model and of optimizers."""
    return name.startswith(f"{MODEL}/") or (name.startswith(f"{OPTIMIZERS}/") and "/state/" in name)


def load(
    path: Any, options: CheckpointOptions, io: CheckpointIO, weights_only: bool | None, host: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Read a checkpoint, and verify it before anything of it is used. Collective over `host`.

    Args:
        path: the checkpoint, the same on all ranks.
        options: the user's options.
        io: reader of the full form.
        weights_only: see Lightning.
        host: group of all ranks; None if a file is read outside of a run.

    Raises:
        ValueError: the checkpoint was changed or truncated, is no checkpoint, or would have to run code.
    """
    if weights_only is False and not options.trust_code:
        raise ValueError(
            "weights_only=False would let the checkpoint run any code; if you trust who wrote it, pass "
            "trust_checkpoint_code=True to the strategy"
        )
    if os.environ.get(FORCE, "0") not in ("", "0", "false", "False") and not options.trust_code:
        raise ValueError(
            f"{FORCE} is set, which lets checkpoints run any code; unset it, or if you trust who wrote this one, "
            "pass trust_checkpoint_code=True to the strategy"
        )
    safe = bool(weights_only) or not options.trust_code
    local = None if "://" in str(path) else Path(path)
    rank, ranks = (0, 1) if host is None else (host.rank(), host.size())
    checkpoint: Any
    if local is not None and folder.is_folder(local):
        manifest = _agreed(host, folder.read_manifest, local)
        _require_whole(local, folder.faults(local, manifest, rank, ranks), host)
        checkpoint = _agreed(host, folder.read, local, manifest, is_divided)
    elif local is not None and is_hub_folder(local):
        weights = _agreed(host, read_hub, local)
        # weights alone, in the form of a checkpoint: a run that loads it begins at its first step
        checkpoint = {MODEL: weights, OPTIMIZERS: [], "lr_schedulers": [], "epoch": 0, "global_step": 0}
        checkpoint["pytorch-lightning_version"] = LIGHTNING
    elif local is not None and folder.is_torch_folder(local):
        raise folder.unsafe(local)
    else:
        checkpoint = io.load_checkpoint(path, weights_only=safe)
    with reading(path):
        if not isinstance(checkpoint, dict):
            raise Damaged(f"it holds a {type(checkpoint).__name__}, but a checkpoint is a dictionary; {REMEDY}")
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [numbered(state) for state in checkpoint["optimizer_states"]]
    return checkpoint


def _agreed(host: dist.ProcessGroup | None, read: Callable[..., T], path: Path, *args: Any) -> T:
    """Read something on all ranks and return it; raise on all if reading fails on any. Collective over `host`."""
    results, faults = list[T](), list[str]()
    try:
        with reading(path):
            results.append(read(path, *args))
    except (Damaged, OSError) as error:
        faults.append(str(error))
    _require_whole(path, faults, host)
    return results[0]


def _require_whole(path: Path, faults: list[str], host: dist.ProcessGroup | None) -> None:
    """Raise on all ranks the faults that any of them has found, as ranks check different files. Collective."""
    gathered = [faults] if host is None else gather_objects(faults, host)
    folder.require_no_faults(path, list(dict.fromkeys(fault for of_rank in gathered for fault in of_rank)))


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer keyed by indices of parameters, in the order of its groups.

    `FSDPStrategy` and `ModelParallelStrategy` write names to folders, and indices in the model's order to files.
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


def newest_checkpoint(trainer: Trainer, host: dist.ProcessGroup) -> str | None:
    """Return the newest valid checkpoint in the folders of the trainer's `ModelCheckpoint`s; None if there is none.

    Rank 0 searches. Collective over `host`.

    Raises:
        ValueError: there are checkpoints, but none is valid; or no `ModelCheckpoint` has a folder.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    folders = [Path(callback.dirpath) for callback in callbacks if callback.dirpath is not None]
    for path in list(folders):
        if path.name == "checkpoints" and path.parent.name.startswith("version_"):  # of a logger that numbers its runs
            folders += sorted(path.parent.parent.glob("version_*/checkpoints"))
    if not folders:
        raise ValueError(
            "resume='auto' looks where a ModelCheckpoint saves, but the trainer has none; add "
            "ModelCheckpoint(dirpath=...), or pass ckpt_path= to fit"
        )

    what = "find a checkpoint to resume from"
    newest = run_or_raise_on_all(_newest, what, host, list(dict.fromkeys(folders)), host.rank())
    return gather_objects(newest, host)[0]


def _newest(folders: Sequence[Path], rank: int) -> str | None:
    if rank != 0:
        return None
    checkpoints: dict[str, Path] = {}  # by real path, so that a checkpoint and a link to it count once; links last
    for directory in filter(Path.is_dir, folders):
        for path in sorted(directory.iterdir(), key=lambda it: (it.is_symlink(), it)):
            is_file = path.suffix == ".ckpt" and not path.name.startswith(".")
            if folder.is_folder(path) or folder.is_torch_folder(path) or is_file:
                checkpoints.setdefault(os.path.realpath(path), path)
    candidates: list[tuple[int, bool, float, Path]] = []  # (step, whether it has its final name, time, path)
    skipped: list[str] = []
    for path in checkpoints.values():
        try:
            with reading(path):
                candidates.append((_step_of(path), not path.name.startswith("."), path.stat().st_mtime, path))
        except (ValueError, OSError) as error:
            skipped += [] if path.name.startswith(".") else [str(error)]
    for step, _, _, path in sorted(candidates, reverse=True):
        try:
            with reading(path):
                folder.verify(path)
        except (Damaged, OSError) as error:
            skipped.append(str(error))
            continue
        final = commit.finish(path)  # a complete one under a temporary name: else the next save would delete it first
        log.info("Resuming from %s, step %d. Skipped: %s", final, step, " | ".join(skipped) or "none")
        return str(final)
    if skipped:
        raise ValueError(
            f"resume='auto' found checkpoints, but this run can resume from none of them: {' | '.join(skipped)}. "
            "Restore one from a copy, or pass resume=None to start from the beginning"
        )
    log.info("There is no checkpoint in %s: starting from the beginning", ", ".join(map(str, folders)))
    return None


def _step_of(path: Path) -> int:
    """Return the step of a checkpoint; raise ValueError if it cannot be opened, or a fit cannot resume from it."""
    if folder.is_folder(path):
        manifest = folder.read_manifest(path)
        step, holds = manifest.step, set(manifest.holds)
    elif folder.is_torch_folder(path):
        raise folder.unsafe(path)
    else:
        content = load_file(path)
        step, holds = int(content.get("global_step", 0)), set(content)
    if "optimizer_states" not in holds:
        raise ValueError(f"{path} holds weights only")
    return step
